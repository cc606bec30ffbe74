"""Attention with random masks, scales, lengths, dtypes and special numbers against a softmax in
float64 that is written from its definition."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch
from op_cases import attention_factors, run_seeded
from plan_calls import plan_op
from torch import Tensor

import transformer_ops as tops

ISOLATED = False

DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
SCALES = (None, None, None, 1.0, 0.3, -1.0, -0.2, 0.0, 1e-6, 1e-50, 40.0, -500.0, 1e5, 1e12, 1e60)
MAGNITUDES = (1.0, 1.0, 1.0, 4.0, 0.01, 30.0, 300.0, 1e4)
LENGTHS = (63, 64, 65, 100, 130, 257)
SPECIAL = (math.nan, math.nan, math.inf, -math.inf, 1e4, -3e4, 1e19, -1e30)
MASKS = "none none bool empty added lowest infinite padded offset slope".split()
LOW = (*(torch.finfo(dtype).min for dtype in DTYPES), -1e9, -1e4, -1e20)
CODES = {"int8": "int8 1x128", "fp8": "e4m3 1x128"}


def random_mask(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """A mask of `shape`, in float64 unless it is boolean: `dtype` has all its numbers."""
    kind = rng.choice(MASKS)
    rows, columns = shape[-2:]
    if kind == "none":
        return None
    if kind in ("bool", "empty"):
        found = torch.rand(shape) > rng.choice([0.2, 0.7])
        if kind == "bool":
            found[..., rng.randrange(columns)] = True
        return found
    mask = torch.randn(shape).double() * rng.choice([0.3, 3.0, 50.0])
    low = max(rng.choice(LOW), torch.finfo(dtype).min)
    lowest = torch.rand(shape) < rng.choice([0.3, 0.9])
    if kind == "lowest":
        mask = torch.where(lowest, low, mask * rng.choice([0, 1]))
        mask[torch.rand(shape[:-1]) < 0.4] = low
    elif kind == "infinite":
        mask[lowest] = -math.inf
        mask[torch.rand(shape[:-1]) < 0.3] = rng.choice([low, -math.inf])
        mask[torch.rand(shape) < 0.1] = low
    elif kind == "padded":
        # Padding on the left, as eager attention of transformers gets it.
        first = rng.randrange(columns)
        later = torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1)
        is_low = later | (torch.arange(columns) < first)
        mask = torch.zeros(shape).double().masked_fill(is_low, low)
    elif kind == "offset":
        mask += rng.choice([low, -low, 100.0, -3000.0])
    elif kind == "slope":
        mask = -(torch.arange(rows)[:, None] - torch.arange(columns)).abs().double().expand(shape)
        mask = mask * rng.choice([0.1, 3.0, 1e3])
    least = -math.inf if kind == "infinite" else torch.finfo(dtype).min
    return mask.clamp(least, torch.finfo(dtype).max).to(dtype).double()


class Case:
    """A call of attention."""

    def __init__(self, rng: random.Random) -> None:
        self.dtype = rng.choice(DTYPES)
        self.kv_heads, groups = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3])
        self.heads = self.kv_heads * groups
        self.head_dim = rng.choice([1, 2, 3, 4, 8, 8, 16, 17, 32, 64])
        self.rows = rng.randint(1, 40) if rng.random() < 0.93 else rng.choice(LENGTHS)
        self.batches = rng.choice([(), (1,), (2,), (2, 2)])
        self.options: dict[str, Any] = {
            "by_head": groups == 1 and rng.random() < 0.2,
            "causal": rng.random() < 0.4,
            "scale": rng.choice(SCALES),
            "p": rng.choice([0.0, 0.0, 0.0, 0.3]),
        }
        self.saved = rng.choice(["exact", "exact", "exact", "int8", "fp8"])
        self.differentiable = self.saved == "exact" and rng.random() < 0.15
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        # By parts, so that special numbers come to all three.
        parts = torch.randn(*self.batches, self.rows, width) * rng.choice(MAGNITUDES)
        self.grad = torch.randn(*self.batches, self.rows, self.heads * self.head_dim)
        one = (self.heads, self.rows, self.rows)
        full = (*self.batches, *one)
        shape = rng.choice(
            [one[1:], full, (*(1 for _ in full[:-2]), *one[1:]), (*full[:-3], 1, *one[1:])]
        )
        if rng.random() < 0.2:
            shape = (*shape[:-2], 1, self.rows)
        mask_dtype = rng.choice(
            [self.dtype, self.dtype, torch.float32, torch.bfloat16, torch.float64]
        )
        self.mask = random_mask(rng, shape, mask_dtype)
        self.special = self.rows <= 40 and rng.random() < 0.25
        if self.special:
            tensors = [parts, parts, self.grad]
            if self.mask is not None and self.mask.dtype != torch.bool:
                tensors.append(self.mask)
            for _ in range(rng.choice([1, 1, 2])):
                tensor = rng.choice(tensors)
                tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice(SPECIAL)
        self.x, self.grad = parts.to(self.dtype), self.grad.to(self.dtype)
        if self.mask is not None and self.mask.dtype != torch.bool:
            self.mask = self.mask.to(mask_dtype)

    def __str__(self) -> str:
        mask = None if self.mask is None else (tuple(self.mask.shape), self.mask.dtype, self.mask)
        return (
            f"{self.dtype} x {tuple(self.x.shape)} heads {self.heads}/{self.kv_heads} "
            f"{self.options} saved {self.saved} differentiable {self.differentiable}\n"
            f"x {self.x}\nmask {mask}"
        )

    def module(self) -> tops.Sequential:
        """The op, which saves its input in the format."""
        op = tops.Attention(
            self.heads,
            self.kv_heads,
            head_dim=self.head_dim,
            mask=self.mask is not None,
            **self.options,
        )
        return tops.Sequential(op, saved=self.saved, saved_inputs=self.saved != "exact")

    def run(self) -> tuple[Tensor, Tensor]:
        x = self.x.clone().requires_grad_()
        inputs = (x,) if self.mask is None else (x, self.mask)
        output = run_seeded(self.module(), *inputs)
        (grad,) = torch.autograd.grad(output, x, self.grad, create_graph=self.differentiable)
        return output.detach(), grad.detach()

    def factors(self) -> Tensor | float:
        """What dropout multiplies the probabilities by."""
        p = self.options["p"]
        return attention_factors(p, self.heads, self.kv_heads, self.x.shape[:-1]) if p else 1.0

    def decoded(self) -> Tensor:
        """The input that backward reads."""
        if self.saved == "exact":
            return self.x
        codes, scale = torch.ops.transformer_ops.quantize(self.x, CODES[self.saved])
        dtype = str(self.dtype).removeprefix("torch.")
        return plan_op("dequantize.saved")(self.x, codes, scale, CODES[self.saved], dtype, None)


class Reference(NamedTuple):
    """Results in float64, and the sizes of what they are sums of."""

    output: Tensor
    grad: Tensor
    output_size: Tensor
    grad_size: Tensor
    score_grad_size: float  # the largest one
    rounding: float  # of a score


def rows_of(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows of queries, keys and values, of heads."""
    groups = case.heads // case.kv_heads
    k, v = (t.unflatten(-3, (case.kv_heads, groups)).sum(-3) for t in (k, v))
    parts = [t.transpose(-2, -3) for t in (q, k, v)]
    if case.options["by_head"]:
        return torch.stack(parts, -2).flatten(-3)
    return torch.cat([t.flatten(-2) for t in parts], -1)


def heads_of(case: Case, x: Tensor) -> list[Tensor]:
    """The inverse; keys and values are repeated."""
    d, groups = case.head_dim, case.heads // case.kv_heads
    if case.options["by_head"]:
        parts = list(x.unflatten(-1, (case.heads, 3, d)).unbind(-2))
    else:
        widths = [n * d for n in (case.heads, case.kv_heads, case.kv_heads)]
        parts = [t.unflatten(-1, (-1, d)) for t in x.split(widths, -1)]
    q, k, v = (t.transpose(-2, -3) for t in parts)
    return [q, k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)]


def product(a: Tensor, b: Tensor, reads: Tensor | None) -> Tensor:
    """a[..., i, j] b[..., j, n] summed over j; only where `reads`, if given."""
    if reads is None:
        return a @ b
    terms = a.unsqueeze(-1) * b.unsqueeze(-3)
    return torch.where(reads.unsqueeze(-1), terms, 0.0).sum(-2)


def rounding_of(
    case: Case, scores: Tensor, sizes: Tensor, mask: Tensor | None, reads: Tensor
) -> float:
    """What scores are off by: the rounding of their products, unless they are so large that they
    are computed in float64, and that of the reference behind numbers which do not round scores
    away."""
    sums = torch.logsumexp(scores, -1)
    least = sums.abs()
    largest = sizes[sizes.isfinite()].max().item() if sizes.isfinite().any() else 0.0
    error = 0.0
    if mask is not None:
        numbers = mask[mask.isfinite()].abs()
        least = torch.minimum(least, (sums - torch.where(reads, mask, -math.inf).amax(-1)).abs())
        error = 2e-15 * max([largest, *numbers[numbers < 1e16 * max(largest, 1)].tolist()])
        largest += max(numbers.clamp(max=1000).tolist(), default=0)
    is_exact = (least[sums != -math.inf] > 1100).any()
    unit = torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps
    return error + (0 if is_exact else 16 * unit * largest)


def reference(
    case: Case, x: Tensor, factors: Tensor | float, unit: float, strict: bool
) -> Reference:
    """With `strict`, what a row does not read is no part of a sum, so that NaN stays out of it."""
    q, k, v = heads_of(case, x.double())
    g = case.grad.double().unflatten(-1, (case.heads, case.head_dim)).transpose(-2, -3)
    scale = case.options["scale"]
    scale = case.head_dim**-0.5 if scale is None else scale
    scores = q @ k.mT * scale
    sizes = q.abs() @ k.mT.abs() * abs(scale)
    reads = torch.ones(case.rows, case.rows, dtype=torch.bool)
    if case.options["causal"]:
        reads = reads.tril()
    added = None
    if case.mask is not None and case.mask.dtype == torch.bool:
        reads = reads & case.mask
    elif case.mask is not None:
        reads, added = reads & (case.mask != -math.inf), case.mask.double()
        scores = scores + added
    reads = reads.expand(scores.shape)
    scores = scores + torch.where(reads, 0.0, -math.inf)
    if strict:
        scores = torch.where(reads, scores, -math.inf)
    # A row that reads nothing is zeros; a NaN that it does not read may come through.
    p = torch.softmax(scores, -1)
    p = p.masked_fill((scores == -math.inf).all(-1, True) & ~reads.any(-1, True), 0)
    only, back = (reads, reads.mT) if strict else (None, None)

    def read(t: Tensor) -> Tensor:
        return torch.where(reads, t, 0.0) if strict else t

    def keep(t: Tensor) -> Tensor:
        return torch.where(torch.as_tensor(factors) == 0, 0.0, t) if strict else t

    p = read(p)
    grad_p, size_p = keep(read(g @ v.mT) * factors), keep(read(g.abs() @ v.mT.abs()) * factors)
    along, size = (p * grad_p).sum(-1, keepdim=True), (p * size_p).sum(-1, keepdim=True)
    grad_s, size_s = p * (grad_p - along), (p + unit) * (size_p + size) + unit
    kept = keep(p * factors)
    floor = kept + unit
    grads = (
        product(grad_s, k, only) * scale,
        product(grad_s.mT, q, back) * scale,
        product(kept.mT, g, back),
    )
    grad_sizes = (
        (product(size_s, k.abs(), only) + unit) * abs(scale),
        (product(size_s.mT, q.abs(), back) + unit) * abs(scale),
        product(floor.mT, g.abs(), back),
    )
    return Reference(
        product(kept, v, only).transpose(-2, -3).flatten(-2),
        rows_of(case, *grads),
        product(floor, v.abs(), only).transpose(-2, -3).flatten(-2),
        rows_of(case, *grad_sizes),
        size_s.max().item(),
        rounding_of(case, scores, sizes, added, reads),
    )


def compare(what: str, found: Tensor, want: Tensor, strict: Tensor, limit: Tensor) -> None:
    """`strict` has NaN and infinity where they must be, and `want` where they may be."""
    got, largest = found.double(), torch.finfo(found.dtype).max
    is_lost = got.isfinite() & ~strict.isfinite()
    is_near = ((got - want).abs() <= limit) | ((got - strict).abs() <= limit)
    may_be_any = (~got.isfinite() & ~want.isfinite()) | (strict.abs() + limit > 0.9 * largest)
    wrong = is_lost | ~(is_near | may_be_any)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}{list(at)} must be {strict[at]} within {limit[at]:.3g}, got {got[at]}; "
            f"{int(wrong.sum())} of {wrong.numel()} are wrong"
        )


def overflows(found: Reference) -> bool:
    """Whether gradients may lie beyond float16, which the kernels store those of scores in."""
    return max(found.grad_size.max().item(), found.score_grad_size) > 1e4


def check(case: Case) -> int:
    output, grad = case.run()
    factors = case.factors()
    info = torch.finfo(case.dtype)
    is_narrow = case.dtype in (torch.bfloat16, torch.float16)
    eps = 4 * info.eps if is_narrow else max(100 * info.eps, 1e-10)
    # Products may flush what is below the smallest normal number, but not of float16.
    unit = info.tiny * (info.eps if case.dtype == torch.float16 else 8) / eps
    for what, found, x in (("output", output, case.x), ("grad", grad, case.decoded())):
        want = reference(case, x, factors, unit, strict=False)
        strict = reference(case, x, factors, unit, strict=True) if case.special else want
        tolerance = eps + want.rounding
        if what == "output":
            limit = tolerance * strict.output_size + 100 * info.tiny
            compare(what, found, want.output, strict.output, limit)
        elif not (case.dtype == torch.float16 and overflows(strict)):
            limit = tolerance * strict.grad_size + 100 * info.tiny
            compare(what, found, want.grad, strict.grad, limit)
    return 2


def run_seed(seed: int) -> int:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    case = Case(rng)
    try:
        return check(case)
    except Exception as error:
        raise AssertionError(f"{error}\n{case}") from error
