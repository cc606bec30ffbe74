"""Microseconds that parameters which are DTensors add to a call on tiny tensors.

    python benchmarks/dtensor_cost.py [--rounds N]

One process, a mesh of one: no collective. Blocks with plain parameters and with DTensors, and
`to_local()` of the same DTensors alone, are timed in turn, round after round; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import transformer_ops as tops
from transformer_ops import parallel

CALLS = 200


def make() -> tops.Sequential:
    """A block of four parameters that can be split."""
    return tops.Sequential(tops.RMSNorm(16), tops.Linear(16, 64), tops.GELU(), tops.Linear(64, 16))


def microseconds(call: Callable[[], object]) -> float:
    """The time of one call."""
    call()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        plain, split = make(), make()
        styles: dict[str, ParallelStyle] = {
            "1": parallel.ColwiseParallel(),
            "3": parallel.RowwiseParallel(),
        }
        parallelize_module(split, init_device_mesh("cpu", (1,)), styles)
        shared = [p for p in split.parameters() if isinstance(p, DTensor)]
        x = torch.randn(4, 16)

        def take_local() -> None:
            for parameter in shared:
                parameter.to_local()

        ways = {"plain": lambda: plain(x), "DTensors": lambda: split(x), "to_local": take_local}
        print(f"{len(shared)} parameters, microseconds a call")
        for wants_grad in (True, False):
            found: dict[str, list[float]] = {name: [] for name in ways}
            with torch.set_grad_enabled(wants_grad):
                for _ in range(rounds):
                    for name, call in ways.items():
                        found[name].append(microseconds(call))
            middle = {name: statistics.median(times) for name, times in found.items()}
            more = (middle["DTensors"] - middle["plain"]) / middle["to_local"]
            text = ", ".join(f"{name} {value:.1f}" for name, value in middle.items())
            mode = "grad" if wants_grad else "no grad"
            print(f"{mode}: {text}; what DTensors add / to_local alone: {more:.2f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
