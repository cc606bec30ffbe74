"""What happens once: the import beside torch's, and the first call of a long Sequential.

    python benchmarks/startup.py [--quick] [--check] [--out FILE.json] [--record]

Both imports are timed in one process, and each process is a round of its own. Bytecode is compiled
before the first round, as an installer does it. A first call makes the plan: its time for each op
should not depend on the number of ops.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from suite.machine import ROOT
from suite.rows import Row, run, timed

import transformer_ops as tops

SHORT, LONG = 800, 6400
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


def first_call(length: int) -> float:
    """Milliseconds of the first call of a Sequential, for a thousand of its ops."""
    ops = [op for _ in range(length // 2) for op in (tops.Linear(4, 4), tops.GELU())]
    module, x = tops.Sequential(*ops), torch.randn(2, 4, requires_grad=True)
    begin = time.process_time()
    module(x)
    return 1e6 * (time.process_time() - begin) / length


def first_calls(rounds: int) -> dict[str, list[float]]:
    """The times of the first calls of a short and of a long Sequential."""
    first_call(SHORT)
    gc.collect()
    gc.disable()  # it looks at all objects that there are
    times: dict[str, list[float]] = {"short": [], "long": []}
    for _ in range(rounds):
        times["short"].append(first_call(SHORT))
        times["long"].append(first_call(LONG))
    gc.enable()
    return times


def rows(quick: bool) -> Iterator[Row]:
    """The import, and planning."""
    rounds = 3 if quick else 11
    times = measure(rounds)
    yield timed("import transformer_ops, after torch", "import torch", 0.15, times, OURS, TORCH)
    what = f"first call of {LONG} ops, 1000 of them"
    yield timed(what, f"{SHORT} ops", 1.3, first_calls(rounds), "long", "short")


if __name__ == "__main__":
    sys.exit(run("startup", __doc__ or "", rows))
