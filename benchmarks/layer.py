"""A decoder layer in one plan: time and saved bytes, against its parts with torch between them.

    python benchmarks/layer.py [--quick] [--check] [--out FILE.json] [--record]

The layer has the shape of SmolLM-135M's. In parts it is three Sequentials: norm and q|k|v; the
product of the output and the residual connection; the feed-forward. Rotation and attention are
written in torch between them, as transformers has them. The parameters are the same ones. A step is
forward and backward of the input and of all parameters; both ways take turns, round after round.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from suite.cases import PRODUCTS
from suite.measure import saved_bytes
from suite.rows import Row, run, timed
from suite.timing import Call, Clock, interleave
from torch import Tensor, nn

import transformer_ops as tops

PLAN, PARTS = "one plan", "parts"
WIDTH, HEADS, KV_HEADS, HIDDEN, HEAD_DIM = 576, 9, 3, 1536, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The most that one plan may take against the parts, and one that recomputes products.
STEP, SAVED = 0.97, 0.75
STEP_PRODUCTS, SAVED_PRODUCTS = 1.2, 0.35


def one_plan() -> tops.Sequential:
    """The whole layer."""
    kv = KV_HEADS * HEAD_DIM
    return tops.Sequential(
        tops.Residual(
            tops.RMSNorm(WIDTH),
            tops.PackedLinear(WIDTH, (WIDTH, kv, kv), bias=False),
            tops.RoPE(HEAD_DIM, HEADS + KV_HEADS),
            tops.Attention(HEADS, KV_HEADS, head_dim=HEAD_DIM, causal=True),
            tops.Linear(WIDTH, WIDTH, bias=False),
        ),
        tops.Residual(
            tops.RMSNorm(WIDTH),
            tops.PackedLinear(WIDTH, (HIDDEN, HIDDEN), bias=False),
            tops.SwiGLU(),
            tops.Linear(HIDDEN, WIDTH, bias=False),
        ),
    )


class Parts(nn.Module):
    """The same layer, with torch between its parts."""

    def __init__(self, layer: tops.Sequential) -> None:
        super().__init__()
        attention, feed_forward = layer.children()
        norm, packed, _, _, linear = attention.children()
        add = tops.AddExtraInput()
        self.before = tops.Sequential(norm, packed)
        self.after = tops.Sequential(linear, add)
        self.feed_forward = tops.Sequential(feed_forward)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x[batch, t, width]` and the tables `[t, head_dim / 2]` to the shape of x."""
        shape = (*x.shape[:-1], -1, HEAD_DIM)
        q, k, v = self.before(x).split((WIDTH, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), dim=-1)
        q, k, v = (each.view(shape).transpose(1, 2) for each in (q, k, v))
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = self.after(y.transpose(1, 2).reshape(x.shape), x)
        found: Tensor = self.feed_forward(y)
        return found


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of each head rotated by tables `[t, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def tables(length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, `[t, head_dim / 2]`."""
    frequencies = 10000 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(length), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def step(layer: nn.Module, x: Tensor, given: tuple[Tensor, Tensor]) -> Call:
    """Forward and backward."""
    parameters, grad = list(layer.parameters()), torch.ones_like(x)

    def call() -> object:
        return torch.autograd.grad(layer(x, *given), [x, *parameters], grad)

    return call


def rows_of(length: int, name: str, quick: bool) -> Iterator[Row]:
    """The rows of one length and dtype."""
    torch.manual_seed(0)
    dtype = DTYPES[name]
    plan = one_plan().to(dtype)
    parts = Parts(plan)
    x = torch.randn(1, length, WIDTH).to(dtype).requires_grad_()
    given = tables(length, dtype)
    products = tops.Sequential(*plan.children(), recompute="products")
    ways = {PLAN: plan, PRODUCTS: products, PARTS: parts}
    calls = {way: step(layer, x, given) for way, layer in ways.items()}
    saved = {}
    for way, layer in ways.items():
        calls[way]()
        saved[way] = saved_bytes(layer, (x, *given), plan.parameters())
    times = interleave(calls, 3.0 if quick else 20.0, Clock(torch.device("cpu")))
    what = f"decoder layer h{WIDTH}, {length} tokens, {name}"
    yield timed(f"{what}: step", PARTS, STEP, times, PLAN, PARTS)
    texts = {way: f"{saved[way] / 2**20:.2f} MiB" for way in ways}
    yield Row(f"{what}: saved", PARTS, SAVED, saved[PLAN] / saved[PARTS], texts[PLAN], texts[PARTS])
    recomputes = f"{what}, {PRODUCTS}"
    yield timed(f"{recomputes}: step", PARTS, STEP_PRODUCTS, times, PRODUCTS, PARTS)
    ratio = saved[PRODUCTS] / saved[PARTS]
    row = (f"{recomputes}: saved", PARTS, SAVED_PRODUCTS, ratio, texts[PRODUCTS], texts[PARTS])
    yield Row(*row)


def rows(quick: bool) -> Iterator[Row]:
    """All rows, in the order in which they are measured."""
    for length in (512,) if quick else (128, 512, 2048):
        for name in DTYPES:
            yield from rows_of(length, name, quick)


if __name__ == "__main__":
    sys.exit(run("layer", __doc__ or "", rows))
