"""What recipes cost, and how far they take a model: time, host time, error of gradients.

    python benchmarks/recipes.py [--quick] [--check]

A Llama block in bfloat16 under each recipe against the same block without one: the time of forward
and backward, and the same of tiny tensors, where only host time counts (medians over interleaved
rounds); then that of four microbatches in a region of the recipe, within frozen_weights() against
without it; then the relative error of the loss's gradients of the example GPT. --check holds the
errors, which repeat exactly, to their limits.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import blocks
import torch
from suite.measure import make_calls
from suite.timing import Call, Clock, interleave, ratio
from torch import Tensor

import transformer_ops as tops
from transformer_ops.recipe import DelayedScaling

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from lm.model import GPT, initialize
from lm.training import RECIPES

CPU = torch.device("cpu")
# The limits for the error of all gradients together, relative to the exact ones.
ERRORS = {
    "mxfp8": 0.09,
    "delayed": 0.09,
    "float8-current": 0.09,
    "float8-block": 0.09,
    "nvfp4": 0.36,
}


def region(name: str) -> contextlib.AbstractContextManager[object]:
    """The region of a recipe, or of none."""
    return tops.autocast(name in RECIPES, RECIPES.get(name))


def within(name: str, call: Call) -> Call:
    """The call in a region of its recipe."""

    def run() -> None:
        with region(name):
            call()

    return run


def step_ratios(tokens: int, hidden: int, ffn: int, seconds: float) -> dict[str, float]:
    """Forward and backward of the block, against none."""
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    calls: dict[str, Call] = {}
    for name in ("none", *RECIPES):
        torch.manual_seed(0)
        module = blocks.LLAMA_BLOCK.ours(hidden, ffn).to(torch.bfloat16)
        calls[name] = within(name, make_calls(module, [x], list(module.parameters()))[1])
    times = interleave(calls, seconds, Clock(CPU))
    return {name: ratio(times[name], times["none"]) for name in RECIPES}


def frozen_ratios(tokens: int, hidden: int, ffn: int, seconds: float) -> dict[str, float]:
    """Forward and backward of four microbatches within frozen_weights(), against none."""
    found = {}
    for name in RECIPES:
        torch.manual_seed(0)
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        module = blocks.LLAMA_BLOCK.ours(hidden, ffn).to(torch.bfloat16)
        call = make_calls(module, [x], list(module.parameters()))[1]
        plain = within(name, four(call))
        times = interleave({"plain": plain, "frozen": frozen(plain)}, seconds, Clock(CPU))
        found[name] = ratio(times["frozen"], times["plain"])
    return found


def four(call: Call) -> Call:
    def run() -> None:
        for _ in range(4):
            call()

    return run


def frozen(call: Call) -> Call:
    def run() -> None:
        with tops.frozen_weights():
            call()

    return run


def gradients(name: str) -> Tensor:
    """All gradients of the example GPT in float32, in one vector."""
    model = GPT("tops", context=128, layers=4, width=128, dropout=0.0)
    initialize(model, seed=0)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    inputs, targets = (text[i : i + 8 * 128].view(8, 128) for i in (0, 1))
    # Delayed scales are those of the step before.
    for _ in range(2 if isinstance(RECIPES.get(name), DelayedScaling) else 1):
        model.zero_grad()
        with region(name):
            loss = model(inputs, targets)
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def show(ratios: dict[str, float]) -> None:
    for name, found in ratios.items():
        print(f"  {name:<16}{found:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints what recipes cost.")
    parser.add_argument("--quick", action="store_true", help="a smaller block, fewer rounds")
    parser.add_argument("--check", action="store_true", help="fail where an error is too large")
    options = parser.parse_args()
    seconds = 4.0 if options.quick else 30.0
    size = (256, 256, 768) if options.quick else (2048, 768, 2048)
    for title, (tokens, hidden, ffn) in (
        (f"a block of {size[0]} tokens, h = {size[1]}, f = {size[2]}", size),
        ("a block of 2 tokens, h = 32, f = 64: host time", (2, 32, 64)),
    ):
        print(f"{title}: time of forward and backward against none, in bfloat16")
        show(step_ratios(tokens, hidden, ffn, seconds))
    size = (256, *size[1:])
    print(f"four microbatches of {size[0]} tokens, h = {size[1]}, f = {size[2]}: frozen_weights()")
    show(frozen_ratios(*size, seconds / len(RECIPES)))
    print("example GPT: relative error of all gradients")
    exact, failed = gradients("none"), False
    for name in RECIPES:
        error = float((gradients(name) - exact).norm() / exact.norm())
        print(f"  {name:<16}{error:.2%}")
        if options.check and error > ERRORS[name]:
            print(
                f"[recipes] {name}: the error must be at most {ERRORS[name]:.0%}", file=sys.stderr
            )
            failed = True
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
