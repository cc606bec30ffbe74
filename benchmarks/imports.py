"""How long `import transformer_ops` takes beside `import torch`, with its limit.

    python benchmarks/imports.py [--quick] [--check] [--out FILE.json] [--record]

Both are timed in one process, and each process is a round of its own. Bytecode is compiled before
the first round, as an installer does it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from suite.machine import ROOT
from suite.rows import Row, run, timed

OURS, TORCH = "transformer_ops", "torch"
TIMED = f"""
import json, time
times = [time.perf_counter()]
import {TORCH}
times.append(time.perf_counter())
import {OURS}
times.append(time.perf_counter())
print(json.dumps([1e3 * (after - before) for before, after in zip(times, times[1:])]))
"""


def round_of(environment: dict[str, str]) -> list[float]:
    """Milliseconds of both imports in a fresh process, torch first."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED], env=environment, capture_output=True, text=True, check=True
    )
    found: list[float] = json.loads(done.stdout)
    return found


def measure(rounds: int) -> dict[str, list[float]]:
    """The times of each round by what is imported."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        round_of(environment)
        found = [round_of(environment) for _ in range(rounds)]
    torch, ours = zip(*found, strict=True)
    return {TORCH: list(torch), OURS: list(ours)}


def rows(quick: bool) -> Iterator[Row]:
    """The only row."""
    times = measure(3 if quick else 11)
    yield timed("import transformer_ops, after torch", "import torch", 0.15, times, OURS, TORCH)


if __name__ == "__main__":
    sys.exit(run("imports", __doc__ or "", rows))
