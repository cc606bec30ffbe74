"""What a compiled call of a small block costs between Dynamo and the ops of the block.

    python benchmarks/compiled_call.py [--tokens 16] [--rounds 60]

Each way is the Llama block (h = 64, f = 256, float32, one thread), forward and backward: plain
PyTorch compiled by Inductor; ours compiled by Inductor; ours where a few lines of Python take the
place of Inductor's code and call the two passes of the plan as ops, or through pybind11 without
torch's dispatcher; and ours in eager mode. Ratios are medians over interleaved rounds, of CPU time.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import blocks
import torch
from call_cost import Call, seconds
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from transformer_ops import _C

HIDDEN, FFN = 64, 256
PLAIN, INDUCTOR, AS_OPS, PYBIND, EAGER = (
    "plain, Inductor",
    "ours, Inductor",
    "ours, calls of ops",
    "ours, pybind11",
    "ours, eager",
)
WITHOUT_DISPATCHER = {"plan_forward": _C.plan_forward, "plan_backward": _C.plan_backward}


def compiler(dispatches: bool) -> Callable[[fx.GraphModule, Any], Callable[[list[Any]], Any]]:
    """A compiler for graphs of one pass: the least Python that runs them."""

    def compile_graph(graph: fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        nodes = list(graph.graph.nodes)
        taken = "".join(f"{node}, " for node in nodes if node.op == "placeholder")
        lines = ["def call(args):", f"    {taken} = args", "    args.clear()"]
        names: dict[str, Any] = {}
        for node in nodes:
            if node.op == "output":
                lines.append(f"    return {node.args[0]!r}")
            elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                name = node.target.overloadpacket.__name__
                names["op"] = node.target if dispatches else WITHOUT_DISPATCHER[name]
                names["plan"] = node.args[0]
                lines.append(f"    {node} = op(plan, {', '.join(map(repr, node.args[1:]))})")
            elif node.op == "call_function":
                lines.append(f"    {node} = {node.args[0]}[{node.args[1]}]")
        exec("\n".join(lines), names)
        call: Callable[[list[Any]], Any] = names["call"]
        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return compile_graph


def make_call(module: nn.Module, run: Callable[[Tensor], Tensor], tokens: int) -> Call:
    """Forward and backward with gradients of all parameters."""
    x, grad = torch.randn(tokens, HIDDEN, requires_grad=True), torch.randn(tokens, HIDDEN)
    wanted = [x, *module.parameters()]
    return lambda: torch.autograd.grad(run(x), wanted, grad)


def make_calls(tokens: int) -> dict[str, Call]:
    """Every way."""
    plain = blocks.LLAMA_BLOCK.eager(HIDDEN, FFN)
    calls = {PLAIN: make_call(plain, torch.compile(plain, fullgraph=True), tokens)}
    backends: dict[str, Any] = {
        INDUCTOR: "inductor",
        AS_OPS: aot_autograd(fw_compiler=compiler(True), bw_compiler=compiler(True)),
        PYBIND: aot_autograd(fw_compiler=compiler(False), bw_compiler=compiler(False)),
        EAGER: None,
    }
    for way, backend in backends.items():
        ours = blocks.LLAMA_BLOCK.ours(HIDDEN, FFN)
        run = torch.compile(ours, fullgraph=True, backend=backend) if backend else ours
        calls[way] = make_call(ours, run, tokens)
    return calls


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls = make_calls(options.tokens)
    for call in calls.values():
        seconds(call, 50)
    times: dict[str, list[float]] = {way: [] for way in calls}
    gc.disable()
    for _ in range(options.rounds):
        for way, call in calls.items():
            times[way].append(1e6 * seconds(call, 30))
    for way, found in times.items():
        ratios = [a / b for a, b in zip(found, times[PLAIN], strict=True)]
        print(f"{way:<20}{statistics.median(found):8.1f} us {statistics.median(ratios):6.2f}")


if __name__ == "__main__":
    main()
