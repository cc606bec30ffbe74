"""Microseconds a call on tiny tensors, where nothing but the cost of calling counts.

    python benchmarks/call_cost.py [--quick] [--no-compile] [--out FILE.json] [--check]

Every way of a block is timed in turn, round after round, in this one process on one thread; a
ratio is the median over the rounds of way / eager. Guards are what Dynamo checks before a compiled
call: the lines of their tree, and the microseconds that they take. A graph without work has as many
parameters as the block: what is left is what torch.compile itself costs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import blocks
import torch
import ways
from suite.guards import Guards, look_at_guards
from suite.machine import describe
from suite.rows import WORSE
from torch import Tensor, nn

import transformer_ops as tops

Call = Callable[[], object]
PASSES = ["forward", "forward+backward", "forward no grad"]
EAGER, EAGER_COMPILED = "eager", "eager, compiled"
OURS, OURS_COMPILED = "ours", "ours, compiled"
OURS_IN_PYTHON, FUNCTION = "ours, a fusion in Python", "Python autograd.Function"
JOINT = "ours, a joint fusion in Python"
NO_WORK = "no work, compiled"
GUARDS, GUARDS_US = "guards", "guards us"
# What --check lets pass, by way and the way that it is compared to; the aims are 0.6, 0.7, 2.5, 1.2
# and 0.9, and machines that others use are noisy.
LIMITS = {
    (OURS, EAGER): {"forward": 0.8, "forward+backward": 0.85},
    (OURS_IN_PYTHON, EAGER): {"forward": 3.0},
    (JOINT, FUNCTION): {"forward+backward": 5.0},
    (OURS_COMPILED, EAGER_COMPILED): {"forward+backward": 1.4},
}
BATCH_SECONDS = 0.002


class Way(NamedTuple):
    """One way to run a block, and its calls by pass."""

    name: str
    calls: dict[str, Call]
    guards: Guards | None = None  # where it is compiled


def make_calls(module: nn.Module, tokens: int, hidden: int) -> dict[str, Call]:
    """The passes of a module on one input."""
    x = torch.randn(tokens, hidden, requires_grad=True)
    wanted = [x, *module.parameters()]
    grad = torch.randn(tokens, hidden)

    def forward() -> Tensor:
        out: Tensor = module(x)
        return out

    def forward_backward() -> object:
        # A weight that accumulates gets none.
        return torch.autograd.grad(module(x), wanted, grad, allow_unused=True)

    def no_grad() -> object:
        with torch.no_grad():
            return module(x)

    return dict(zip(PASSES, [forward, forward_backward, no_grad], strict=True))


def make_ways(block: blocks.Block, tokens: int, hidden: int, ffn: int, compiled: bool) -> list[Way]:
    """Every way of a block, with the same parameter values."""
    eager, ours = block.eager(hidden, ffn), block.ours(hidden, ffn)
    blocks.copy_parameters(eager, ours)
    modules: dict[str, Any] = {EAGER: eager, OURS: ours}
    guards: dict[str, Guards] = {}
    if compiled:
        x = torch.randn(tokens, hidden, requires_grad=True)
        to_compile = {
            EAGER_COMPILED: block.eager,
            OURS_COMPILED: block.ours,
            NO_WORK: lambda h, f: ways.NoWork(block.eager(h, f)),
        }
        guards = {name: look_at_guards(make(hidden, ffn), x) for name, make in to_compile.items()}
        # Dynamo would check the graphs that were counted too.
        torch._dynamo.reset()
        for name, make in to_compile.items():
            modules[name] = torch.compile(make(hidden, ffn), fullgraph=True)
        alone = torch.compile(block.ours(hidden, ffn), fullgraph=True, backend="eager")
        modules["ours, Dynamo alone"] = alone
    if block is blocks.LINEAR_GELU:
        modules[FUNCTION] = ways.FunctionOfLinearGELU(eager)
        modules[JOINT] = block.ours(hidden, ffn)
        ways.fuse_in_python(modules[JOINT], is_joint=True)
    if block is blocks.MLP:
        modules["typed ops, register_autograd"] = ways.TypedOps(eager)
        modules[FUNCTION] = ways.PythonFunction(eager)
        modules[OURS_IN_PYTHON] = block.ours(hidden, ffn)
        ways.fuse_in_python(modules[OURS_IN_PYTHON])
        modules["ours, main_grad"] = block.ours(hidden, ffn)
        ways.accumulate_into_main_grad(modules["ours, main_grad"])
    return [
        Way(name, make_calls(module, tokens, hidden), guards.get(name))
        for name, module in modules.items()
    ]


def seconds(call: Call, count: int) -> float:
    """Time of `count` calls, a call."""
    # This is the CPU time of this thread, which does all of the work, so other programs disturb it
    # least.
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count


def measure(found: list[Way], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds by way and pass, one number a round."""
    times: dict[str, dict[str, list[float]]] = {w.name: {p: [] for p in PASSES} for w in found}
    counts = {}
    for way in found:
        for name, call in way.calls.items():
            seconds(call, 30)
            counts[way.name, name] = max(5, int(BATCH_SECONDS / seconds(call, 30)))
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in PASSES:
                for way in found:
                    spent = seconds(way.calls[name], counts[way.name, name])
                    times[way.name][name].append(1e6 * spent)
            gc.collect()
    finally:
        gc.enable()
    return times


def summarize(
    found: list[Way], times: dict[str, dict[str, list[float]]]
) -> list[dict[str, object]]:
    """A row for each way: medians, medians of the ratios to eager, guards."""
    rows = []
    for way in found:
        row: dict[str, object] = {"way": way.name}
        for name, values in times[way.name].items():
            ratios = [a / b for a, b in zip(values, times[EAGER][name], strict=True)]
            row[name] = {"us": statistics.median(values), "ratio": statistics.median(ratios)}
        if way.guards is not None:
            row[GUARDS], row[GUARDS_US] = way.guards.lines, way.guards.us
        rows.append(row)
    return rows


def table(block: str, rows: list[dict[str, object]]) -> str:
    """Rows as aligned text."""
    lines = [f"{block:<32}" + "".join(f"{name:>22}" for name in PASSES) + f"{GUARDS:>16}"]
    for row in rows:
        cells = [f"{row[p]['us']:8.1f} us {row[p]['ratio']:6.2f}x" for p in PASSES]  # type: ignore[index]
        guards = f"{row[GUARDS]} {row[GUARDS_US]:6.1f} us" if GUARDS in row else "-"
        lines.append(
            f"  {row['way']:<30}" + "".join(f"{cell:>22}" for cell in cells) + f"{guards:>16}"
        )
    return "\n".join(lines)


def too_slow(block: str, rows: list[dict[str, object]]) -> list[str]:
    """One line for each of our ratios beyond its limit."""
    lines = []
    by_way = {str(row["way"]): row for row in rows}
    for (way, other), limits in LIMITS.items():
        # Not every block is timed in every way.
        if way not in by_way or other not in by_way:
            continue
        for name, limit in limits.items():
            ratio = by_way[way][name]["ratio"] / by_way[other][name]["ratio"]  # type: ignore[index]
            if ratio > limit:
                lines.append(
                    f"[call_cost] {block}, {way}: {name} must be at most {limit}x of {other}, "
                    f"got {ratio:.2f}x"
                )
    return lines


def us_of_guards() -> float:
    """Microseconds that the guards of a fused decoder layer take at each call."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = transformers.LlamaForCausalLM(config)
    tops.fuse(model)
    model(torch.zeros(1, 4, dtype=torch.long))
    layer: Any = model.model.layers[0]
    region = max(layer.fused.regions, key=lambda one: len(one.inside))
    return 1e6 * statistics.median(seconds(region.state.guards.hold, 500) for _ in range(30))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--ffn", type=int, default=64)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--quick", action="store_true", help="15 rounds, no torch.compile")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--check", action="store_true", help=f"exit 1 beyond {LIMITS}")
    return parser.parse_args()


def main() -> int:
    """Times all blocks, prints a table each."""
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rounds = 15 if options.quick else options.rounds
    compiled = not (options.quick or options.no_compile)
    sizes = {"tokens": options.tokens, "hidden": options.hidden, "ffn": options.ffn}
    results, slow = {}, []
    for block in (*blocks.BLOCKS, blocks.LINEAR_GELU):
        found = make_ways(block, **sizes, compiled=compiled)
        for _ in range(2 if options.check else 1):
            rows = summarize(found, measure(found, rounds))
            print(table(block.name, rows), flush=True)
            beyond = too_slow(block.name, rows) if options.check else []
            # A neighbour on a shared machine spoils one measurement, hardly two in a row.
            if not beyond:
                break
        results[block.name] = rows
        slow += beyond
    guards = us_of_guards()
    print(f"{'guards of a fused layer':<32}{guards:10.2f} us")
    if options.out:
        about = {
            "about": describe(torch.device("cpu"), 1, dict(os.environ)),
            "rounds": rounds,
            **sizes,
        }
        content = {**about, "blocks": results, "fused layer guards us": guards, WORSE: slow}
        options.out.write_text(json.dumps(content, indent=2) + "\n")
    for line in slow:
        print(line, file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
