"""Runs a command as on every smaller x86 processor that this machine can be taken for.

python tools/run_on_processors.py COMMAND...
python tools/run_on_processors.py --sample COMMAND...    as on one of them, each day another

TRANSFORMER_OPS_ISA has the library behave as on one; PyTorch, oneDNN and MKL have variables of
their own. Kernels for all of them are in a build with TRANSFORMER_OPS_NATIVE=OFF.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import date
from pathlib import Path

from run_parts import main

from transformer_ops import _C

# What the others of a level are set to. MKL and PyTorch's own loops know nothing between AVX2 and
# what this machine has.
VARIABLES = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "default": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
}


def parts(command: list[str]) -> list[str]:
    own, *lower = _C.processor_levels()
    found: list[str] = []
    levels = [level for level in lower if level in VARIABLES]
    if command[0] == "--sample" and levels:
        command, levels = command[1:], [levels[date.today().toordinal() % len(levels)]]
        print(f"Today as on a processor with {levels[0]}; `make test-processors` does all.")
    for level in levels:
        # Inductor would take code from its cache that was made for wider vectors.
        cache = Path(tempfile.gettempdir()) / f"torchinductor-as-on-{level}"
        variables = {"TRANSFORMER_OPS_ISA": level, "TORCHINDUCTOR_CACHE_DIR": cache}
        variables |= VARIABLES[level]
        settings = [f"{name}={value}" for name, value in variables.items()]
        found += ["--part", f"as on a processor with {level}", "env", *settings, *command]
    missing = ", ".join(level for level in VARIABLES if level not in (own, *lower))
    print(f"This machine: {own}." + (f" Not here or not built: {missing}." if missing else ""))
    return found


if __name__ == "__main__":
    commands = parts(sys.argv[1:])
    raise SystemExit(main(commands) if commands else 0)
