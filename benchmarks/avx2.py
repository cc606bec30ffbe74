"""A model in bfloat16 on a processor that has nothing newer than AVX2: plain, and with `tops.fuse`.

    python benchmarks/avx2.py [--check] [--out FILE.json] [--record]

Torch, oneDNN and the kernels of this library run as on such a processor, in a process of their own.
Torch's products in bfloat16 take ten times as long there as those in float32, so a step has a
quarter of the sequences that models.py gives the model. The kernels must have been built for other
processors than this one: TRANSFORMER_OPS_NATIVE=OFF.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from suite.rows import Row, run, timed
from suite.timing import Clock, interleave

import transformer_ops as tops
from transformer_ops import _C

HERE = Path(__file__).parent
MODEL = "MiniLM shape, 16 x 128 tokens, dropout 0.1"
# The most that it may take against eager.
STEP, SAVED = 0.10, 0.60


def measure() -> Iterator[Row]:
    """The rows of the model on this processor."""
    from models import CPU, EAGER, FUSED, MODELS, in_bytes, step

    case = MODELS[MODEL]
    torch.manual_seed(0)
    plain = case.make().bfloat16()
    model = copy.deepcopy(plain)
    report = tops.fuse(model, strict=True)
    given = case.inputs(case.batch // 4)
    before, after = report.saved_bytes(**given)
    what = f"{MODEL.replace('16 x', '4 x')}, bfloat16"
    calls = {EAGER: step(plain, plain, given), FUSED: step(model, model, given)}
    times = interleave(calls, 30.0, Clock(CPU))
    yield timed(f"{what}: step", EAGER, STEP, times, FUSED, EAGER)
    yield in_bytes(f"{what}: saved for backward", EAGER, SAVED, after, before)


def variables() -> dict[str, str]:
    """What makes libraries take the machine for a smaller one."""
    tools = str(HERE.parent / "tools")
    sys.path.append(tools)
    try:
        from run_on_processors import VARIABLES
    finally:
        sys.path.remove(tools)
    return {**VARIABLES["avx2"], "TRANSFORMER_OPS_ISA": "avx2"}


def rows(quick: bool) -> Iterator[Row]:
    """All rows; none with `quick`, because torch alone takes minutes, or without the kernels."""
    if quick:
        return
    if "avx2" not in _C.processor_levels():
        levels = ", ".join(_C.processor_levels())
        print(f"[avx2] left out: the kernels are for {levels} alone", file=sys.stderr)
        return
    threads = str(torch.get_num_threads())
    done = subprocess.run(
        [sys.executable, "-c", "import json, avx2; print(json.dumps(list(avx2.measure())))"],
        cwd=HERE,
        env=os.environ | variables() | {"OMP_NUM_THREADS": threads},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    yield from (Row(*row) for row in json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(run("avx2", __doc__ or "", rows))
