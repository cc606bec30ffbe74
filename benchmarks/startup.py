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
from torch import nn

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


def block_ops(length: int) -> Iterator[nn.Module]:
    """Linear, GELU, Linear, GELU, ..."""
    for _ in range(length // 2):
        yield tops.Linear(4, 4)
        yield tops.GELU()


def first_calls(count: int, length: int) -> float:
    """Milliseconds of the first calls of `count` Sequentials, for a thousand of their ops."""
    modules = [tops.Sequential(*block_ops(length)) for _ in range(count)]
    x = torch.randn(2, 4, requires_grad=True)
    begin = time.process_time()
    for module in modules:
        module(x)
    return 1e6 * (time.process_time() - begin) / (count * length)


def least_first_calls(rounds: int) -> dict[str, list[float]]:
    """The least times of a long Sequential and of short ones with as many ops.

    Both touch the same number of modules that no cache holds, and take equally long: what others do
    on the machine slows both, and the least of several rounds is the one that it slowed least.
    """
    first_calls(1, SHORT)
    gc.collect()
    gc.disable()  # it looks at all objects that there are
    counts = {"short": (LONG // SHORT, SHORT), "long": (1, LONG)}
    times = [{name: first_calls(*count) for name, count in counts.items()} for _ in range(rounds)]
    gc.enable()
    return {name: [min(found[name] for found in times)] for name in counts}


def rows(quick: bool) -> Iterator[Row]:
    """The import, and planning."""
    rounds = 3 if quick else 11
    times = measure(rounds)
    yield timed("import transformer_ops, after torch", "import torch", 0.15, times, OURS, TORCH)
    what, against = f"first call of {LONG} ops, 1000 of them", f"{LONG // SHORT} of {SHORT}"
    # 1.16 to 1.22 on idle and on loaded machines, because a large plan misses more caches. Planning
    # in quadratic time would take up to 8 times as long.
    yield timed(what, against, 1.3, least_first_calls(rounds), "long", "short")


if __name__ == "__main__":
    sys.exit(run("startup", __doc__ or "", rows))
