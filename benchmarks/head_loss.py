"""The head of a language model and its loss: time, saved bytes and peak, against plain torch.

    python benchmarks/head_loss.py [--quick] [--check] [--out FILE.json] [--record]

Forward and backward of LinearCrossEntropy against the product, the upcast to float32 and
F.cross_entropy, as transformers has them, and against Inductor. Bytes are exact: what is saved
beside the parameters, and the most that tensors take at a time beyond the input, the parameters and
their gradients of the step before. All ways of a row take turns, round after round; a ratio is the
median of the rounds'. The rows that compute the logits again save less and take longer.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from suite.measure import saved_bytes
from suite.rows import Row, run, timed
from suite.timing import Call, Clock, interleave
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.base.cpu import processor

EAGER, INDUCTOR, OURS, AGAIN = "eager", "Inductor", "ours", "ours, logits again"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Size(NamedTuple):
    """N rows of width h, V classes."""

    rows: int
    width: int
    classes: int

    def __str__(self) -> str:
        return f"head + loss N{self.rows} h{self.width} V{self.classes}"


class Limits(NamedTuple):
    """The most that it may take against eager."""

    step: float
    saved: float
    peak: float


SMOLLM = Size(1024, 576, 49152)
# In fp32 the gradient of the weight, which forward makes, is 0.57 of what eager saves.
LIMITS = {"fp32": Limits(0.85, 0.60, 0.35), "bf16": Limits(0.90, 0.30, 0.35)}


class HeadAndLoss(nn.Module):
    """The head and the loss in the way that transformers computes them."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The mean loss of all rows."""
        return F.cross_entropy(F.linear(x, self.weight).float(), target)


def modules(size: Size, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Every way, with one weight."""
    ours = tops.LinearCrossEntropy(size.width, size.classes, dtype=dtype)
    again = tops.LinearCrossEntropy(size.width, size.classes, dtype=dtype, gradients_in="backward")
    again.weight = ours.weight
    return {EAGER: HeadAndLoss(ours.weight), OURS: ours, AGAIN: again}


def step(module: Any, x: Tensor, target: Tensor, weight: nn.Parameter) -> Call:
    """Forward and backward; no gradient is there before."""

    def call() -> None:
        x.grad = weight.grad = None
        module(x, target).backward()

    return call


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that tensors take at a time in a call, beyond those before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes))


def in_bytes(what: str, limit: float, found: dict[str, int], way: str) -> Row:
    """A row of bytes."""
    texts = [f"{found[name] / 2**20:.1f} MiB" for name in (way, EAGER)]
    return Row(what, EAGER, limit, found[way] / found[EAGER], *texts)


def rows_of(size: Size, name: str, quick: bool) -> Iterator[Row]:
    """All rows of one dtype."""
    torch.manual_seed(0)
    dtype, limits = DTYPES[name], LIMITS[name]
    ways = modules(size, dtype)
    (weight,) = ways[OURS].parameters()
    assert isinstance(weight, nn.Parameter)
    x = torch.randn(size.rows, size.width).to(dtype).requires_grad_()
    target = torch.randint(0, size.classes, (size.rows,))
    calls = {way: step(module, x, target, weight) for way, module in ways.items()}
    saved, peak = {}, {}
    for way, module in ways.items():
        calls[way]()  # what later calls reuse
        saved[way] = saved_bytes(module, (x, target), [weight])
        x.grad = weight.grad = None
        peak[way] = peak_bytes(calls[way])
    if not quick:
        torch._dynamo.reset()
        calls[INDUCTOR] = step(torch.compile(ways[EAGER]), x, target, weight)
        calls[INDUCTOR]()
    times = interleave(calls, 10.0 if quick else 60.0, Clock(torch.device("cpu")))
    what = f"{size}, {name}"
    yield timed(f"{what}: step", EAGER, limits.step, times, OURS, EAGER)
    if not quick:
        yield timed(f"{what}: step", INDUCTOR, 1.0, times, OURS, INDUCTOR)
    yield in_bytes(f"{what}: saved", limits.saved, saved, OURS)
    yield in_bytes(f"{what}: peak", limits.peak, peak, OURS)
    yield timed(f"{what}: step, logits again", EAGER, 1.0, times, AGAIN, EAGER)
    yield in_bytes(f"{what}: saved, logits again", 0.05, saved, AGAIN)
    yield in_bytes(f"{what}: peak, logits again", limits.peak, peak, AGAIN)


def rows(quick: bool) -> Iterator[Row]:
    """All rows, in the order in which they are measured."""
    for name in DTYPES:
        # Without instructions for it, torch's product in bfloat16 alone takes minutes.
        if name == "fp32" or not quick or processor().multiplies_bfloat16:
            yield from rows_of(SMOLLM, name, quick)


if __name__ == "__main__":
    sys.exit(run("head_loss", __doc__ or "", rows))
