"""Layers of experts against the same in plain torch: time, splits that change, bytes, host time.

    python benchmarks/experts.py [--quick] [--check] [--out FILE.json] [--record]

What stands between a router and the residual: SwiGLU experts on ids and probabilities that are
given. The others are a layer on torch.nn.functional.grouped_mm and Hugging Face's loop over
experts, both in plain torch. Then a compiled product with a parameter for each expert, against one
that stacks them and one with a single parameter. All ways of a row take turns, round after round; a
ratio is the median of the rounds'.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from suite.measure import saved_bytes
from suite.rows import Row, run, timed
from suite.timing import Call, Clock, interleave
from torch import Tensor, nn

import transformer_ops as tops

OURS, GROUPED_MM, LOOP = WAYS = ("ours", "grouped_mm", "loop")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
# Sets of splits that take turns where they change: more than a run of rounds goes through.
ROUTINGS = 64


class Size(NamedTuple):
    """T tokens of width h, k of E experts each, of width f."""

    tokens: int
    experts: int
    top_k: int
    width: int
    hidden: int

    def __str__(self) -> str:
        return f"E{self.experts} K{self.top_k} h{self.width} f{self.hidden} T{self.tokens}"


FEW = Size(512, 8, 2, 256, 512)
MANY = Size(512, 64, 8, 256, 128)
TINY = Size(4, 64, 8, 16, 16)


def experts(size: Size) -> tops.Sequential:
    """Ours: takes x, ids and probabilities."""
    dispatch = tops.Dispatch(size.experts)
    for k, name in enumerate(("splits", "probs", "positions")):
        dispatch.set_extra_output_channel(k, name, output_to_caller=False)
    e, h, f = size.experts, size.width, size.hidden
    up = tops.GroupedLinear(e, h, 2 * f, bias=False, single_grouped_weight=True)
    down = tops.GroupedLinear(e, f, h, bias=False, single_grouped_weight=True)
    return tops.Sequential(
        dispatch,
        up.set_extra_input_channel(0, "splits"),
        tops.ScaledSwiGLU().set_extra_input_channel(0, "probs"),
        down.set_extra_input_channel(0, "splits"),
        tops.Combine().set_extra_input_channel(0, "positions"),
    )


class Weights(nn.Module):
    """Both weights of all experts, as ours have them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        e, h, f = size.experts, size.width, size.hidden
        self.up = nn.Parameter(torch.empty(e, 2 * f, h))
        self.down = nn.Parameter(torch.empty(e, h, f))


class GroupedMM(Weights):
    """Sorted rows, two grouped products, rows back: as torchtitan and transformers have it."""

    def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """[T, h], [T, k], [T, k] to [T, h]."""
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        token = order // ids.shape[1]
        offsets = torch.bincount(flat, minlength=len(self.up)).cumsum(0, dtype=torch.int32)
        rows = F.grouped_mm(x[token], self.up.transpose(1, 2), offs=offsets)
        gate, linear = rows.chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * linear, self.down.transpose(1, 2), offs=offsets)
        y = (y.float() * probs.flatten()[order].unsqueeze(-1)).to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, y)


class Loop(Weights):
    """A loop over experts: Hugging Face's default for a long time."""

    def forward(self, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        """[T, h], [T, k], [T, k] to [T, h]."""
        found = torch.zeros_like(x)
        mask = F.one_hot(ids, len(self.up)).permute(2, 1, 0)
        for expert in (mask.sum((-1, -2)) > 0).nonzero().flatten().tolist():
            k, token = torch.where(mask[expert])
            gate, linear = F.linear(x[token], self.up[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * linear, self.down[expert])
            y = (y.float() * probs[token, k, None]).to(x.dtype)
            found = found.index_add(0, token, y)
        return found


def modules(size: Size, dtype: str) -> dict[str, nn.Module]:
    """Every way, with the same weights."""
    torch.manual_seed(0)
    ours = experts(size)
    found: dict[str, nn.Module] = {OURS: ours}
    for name, make in ((GROUPED_MM, GroupedMM), (LOOP, Loop)):
        found[name] = make(size)
        with torch.no_grad():
            for mine, given in zip(found[name].parameters(), ours.parameters(), strict=True):
                mine.copy_(given)
    return {name: module.to(DTYPES[dtype]) for name, module in found.items()}


def routings(size: Size, count: int) -> list[tuple[Tensor, Tensor]]:
    """Ids and probabilities, as a router that has not learned to balance gives them."""
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        scores = torch.randn(size.tokens, size.experts) + 0.5 * torch.randn(size.experts)
        probs, ids = scores.softmax(-1).topk(size.top_k)
        found.append((ids, probs.requires_grad_()))
    return found


def make_calls(
    module: nn.Module, size: Size, dtype: str, count: int = 1
) -> tuple[Call, Call, list[Tensor]]:
    """Forward; forward and backward, on one routing or on several in turn; what it is given."""
    given = cycle(routings(size, count))
    x = torch.randn(size.tokens, size.width, dtype=DTYPES[dtype], requires_grad=True)
    grad = torch.randn_like(x)
    parameters = list(module.parameters())

    def forward() -> object:
        return module(x, *next(given))

    def training() -> object:
        ids, probs = next(given)
        return torch.autograd.grad(module(x, ids, probs), [x, probs, *parameters], grad)

    return forward, training, [x, *next(given)]


def agree(size: Size, dtype: str) -> None:
    """RuntimeError where the ways do not compute the same."""
    found = {}
    for name, module in modules(size, dtype).items():
        torch.manual_seed(2)
        found[name] = make_calls(module, size, dtype)[1]()
    for name in (GROUPED_MM, LOOP):
        for mine, theirs in zip(found[OURS], found[name], strict=True):  # type: ignore[call-overload]
            error = float((mine - theirs).norm() / theirs.norm())
            if error > 0.02:
                raise RuntimeError(f"[experts] {name} must agree with ours, got error {error:.3f}")


def step_rows(size: Size, dtype: str, limits: dict[str, float], seconds: float) -> Iterator[Row]:
    """Forward and backward against other layers."""
    agree(size, dtype)
    calls = {
        name: make_calls(module, size, dtype)[1]
        for name, module in modules(size, dtype).items()
        if name == OURS or name in limits
    }
    times = interleave(calls, seconds, Clock(CPU))
    for name, limit in limits.items():
        yield timed(f"{size}, {dtype}", name, limit, times, OURS, name)


def changing_row(size: Size, dtype: str, way: str, limit: float, seconds: float) -> Row:
    """Forward and backward on splits that are new each time, against the same each time."""
    module = modules(size, dtype)[way]
    calls = {
        "new": make_calls(module, size, dtype, ROUTINGS)[1],
        "repeated": make_calls(module, size, dtype)[1],
    }
    times = interleave(calls, seconds, Clock(CPU))
    return timed(f"{size}, {dtype}, {way}: new splits", "repeated", limit, times, "new", "repeated")


class Stacked(nn.Module):
    """A product of groups with a parameter for each, which it stacks at each call."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.product = product(size, single=True)
        weights = self.product.weight.detach()
        self.parts = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])
        self.product.weight.requires_grad_(False)

    def forward(self, x: Tensor, splits: Tensor) -> Tensor:
        """The rows of each group by its weight."""
        weights = {"weight": torch.stack(list(self.parts))}
        found: Tensor = torch.func.functional_call(self.product, weights, (x, splits))
        return found


def product(size: Size, single: bool) -> tops.GroupedLinear:
    """The first product of a layer."""
    torch.manual_seed(0)
    return tops.GroupedLinear(
        size.experts, size.width, 2 * size.hidden, bias=False, single_grouped_weight=single
    )


def layout_rows(size: Size, limits: dict[str, float], seconds: float) -> Iterator[Row]:
    """A compiled product with a parameter for each expert, forward and backward."""
    rows = size.tokens * size.top_k
    splits = torch.full((size.experts,), rows // size.experts)
    ways: dict[str, nn.Module] = {
        OURS: product(size, single=False),
        "one": product(size, single=True),
        "stacked": Stacked(size),
    }
    calls = {}
    for name, module in ways.items():
        compiled = torch.compile(module, fullgraph=True)
        x = torch.randn(rows, size.width, requires_grad=True)
        grad = torch.randn(rows, 2 * size.hidden)
        wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
        calls[name] = partial(_training, compiled, (x, splits), wanted, grad)
    times = interleave(calls, seconds, Clock(CPU))
    for name, limit in limits.items():
        yield timed(f"{size}, a weight each, compiled", name, limit, times, OURS, name)


def _training(module: Any, inputs: tuple[Tensor, ...], wanted: list[Tensor], grad: Tensor) -> Any:
    return torch.autograd.grad(module(*inputs), wanted, grad)


def bytes_row(size: Size, limit: int) -> Row:
    """What is kept for backward, bytes a token in bf16."""
    kept = {}
    for name, module in modules(size, "bf16").items():
        if name == LOOP:
            continue
        x, ids, probs = make_calls(module, size, "bf16")[2]
        kept[name] = saved_bytes(module, [x, ids, probs], list(module.parameters()))
    splits = 8 * size.experts  # once, not for each token
    mine, theirs = (kept[OURS] - splits) / size.tokens, kept[GROUPED_MM] / size.tokens
    what = f"{size}, bf16: bytes a token"
    return Row(what, GROUPED_MM, limit, mine, f"{mine:.0f}", f"{theirs:.0f}")


def host_rows(limits: tuple[float, float], rounds: int) -> Iterator[Row]:
    """Time of this thread alone, where rows are too few to matter."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {n: make_calls(m, TINY, "fp32")[:2] for n, m in modules(TINY, "fp32").items()}
    for index, name in enumerate(("forward", "forward+backward")):
        times: dict[str, list[float]] = {OURS: [], GROUPED_MM: []}
        for _ in range(rounds):
            for way, spent in times.items():
                call = found[way][index]
                call()
                begin = time.thread_time()
                for _ in range(5):
                    call()
                spent.append(200 * (time.thread_time() - begin))
        yield timed(f"{TINY}: host, {name}", GROUPED_MM, limits[index], times, OURS, GROUPED_MM)
    torch.set_num_threads(threads)


def rows(quick: bool) -> Iterator[Row]:
    """All rows, in the order in which they are measured."""
    seconds = 1.0 if quick else 8.0
    for dtype in DTYPES:
        yield from step_rows(FEW, dtype, {GROUPED_MM: 0.70, LOOP: 0.45}, seconds)
        yield from step_rows(MANY, dtype, {GROUPED_MM: 0.80}, seconds)
    for size, dtype in ((FEW, "fp32"), (FEW, "bf16"), (MANY, "bf16")):
        yield changing_row(size, dtype, OURS, 1.15, seconds)
    for size in (FEW, MANY):
        yield from layout_rows(size, {"stacked": 1.0, "one": 1.1}, seconds)
    yield bytes_row(FEW, 4624)
    yield bytes_row(MANY, 4672)
    yield from host_rows((1.0, 0.8), 15 if quick else 60)


if __name__ == "__main__":
    sys.exit(run("experts", __doc__ or "", rows))
