"""Where the time of a block goes: torch.profiler over forward and backward, way by way.

    python benchmarks/profile_block.py "Llama block" --dtype bf16 [--ways ours "ours compiled"]

Milliseconds a call that an op spends outside of the ops that it calls, largest first. The ways take
turns, in another order each round. "in Inductor's code" has its kernels and the Python that calls
ops.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from random import Random

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from suite.cases import BLOCK_SIZE, BLOCKS, DEFAULT, DTYPES, WAYS, Case
from suite.measure import make_calls, make_way, prepare
from torch.profiler import ProfilerActivity, profile

ROUNDS, CALLS = 8, 5
LEAST_SHARE = 0.001
KINDS = {
    "## Call CompiledFxGraph": "in Inductor's code",
    "TorchDynamo Cache Lookup": "Dynamo's guards",
    "Torch-Compiled Region": "AOTAutograd and Dynamo",
    "CompiledFunction": "AOTAutograd and Dynamo",
    "AOTDispatcher": "AOTAutograd and Dynamo",
    "autograd::engine": "autograd",
    "torch::autograd": "autograd",
}


def kind(name: str) -> str:
    return next((k for start, k in KINDS.items() if name.startswith(start)), name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("block", choices=BLOCKS)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--size", type=int, nargs=3, default=BLOCK_SIZE, metavar=("T", "H", "F"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ways = tuple(args.ways)
    case = Case(args.block, args.dtype, tuple(args.size), DEFAULT, ways)
    device = torch.device("cpu")
    inputs = prepare(case, device)
    calls = {}
    for way in ways:
        module, parameters = make_way(case, way, device)
        calls[way] = make_calls(module, inputs, parameters)[1]
    milliseconds: dict[str, dict[str, float]] = {way: defaultdict(float) for way in ways}
    order, random = list(ways), Random(0)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for way in order:
            call = calls[way]
            call()
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                for _ in range(CALLS):
                    call()
            for row in profiler.key_averages():
                milliseconds[way][kind(row.key)] += row.self_cpu_time_total / 1e3 / ROUNDS / CALLS
    for way, rows in milliseconds.items():
        total = sum(rows.values())
        print(f"{way}: {total:.2f} ms")
        for name, spent in sorted(rows.items(), key=lambda row: -row[1]):
            if spent >= LEAST_SHARE * total:
                print(f"  {spent:8.2f}  {spent / total:6.1%}  {name}")


if __name__ == "__main__":
    main()
