"""The blocks that the benchmarks time: in plain torch and as a Sequential of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import transformer_ops as tops


class Residual(nn.Module):
    """x + body(x) in plain torch."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in, same shape out."""
        return x + self.body(x)


class SwiGLU(nn.Module):
    """silu(a) * b of the halves of the last dimension, in plain torch."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., 2f] in, [..., f] out."""
        a, b = x.chunk(2, dim=-1)
        return nn.functional.silu(a) * b


class Block(NamedTuple):
    """A block for hidden size h and feed-forward size f, twice."""

    name: str
    eager: Callable[[int, int], nn.Module]
    ours: Callable[[int, int], nn.Module]


def residual(*body: tops.FusibleOperation) -> tops.Sequential:
    """x + body(x): a named channel carries x past the body."""
    fork = tops.MakeExtraOutput()
    fork.set_extra_output_channel(0, "residual", output_to_caller=False)
    join = tops.AddExtraInput()
    join.set_extra_input_channel(0, "residual")
    return tops.Sequential(fork, *body, join)


def _eager_mlp(h: int, f: int) -> list[nn.Module]:
    return [nn.LayerNorm(h), nn.Linear(h, f), nn.GELU(approximate="tanh"), nn.Linear(f, h)]


def _our_mlp(h: int, f: int) -> list[tops.FusibleOperation]:
    return [tops.LayerNorm(h), tops.Linear(h, f), tops.GELU(), tops.Linear(f, h)]


def _eager_llama(h: int, f: int) -> list[nn.Module]:
    up, down = nn.Linear(h, 2 * f, bias=False), nn.Linear(f, h, bias=False)
    return [nn.RMSNorm(h, eps=1e-5), up, SwiGLU(), down]


def _our_llama(h: int, f: int) -> list[tops.FusibleOperation]:
    up, down = tops.Linear(h, 2 * f, bias=False), tops.Linear(f, h, bias=False)
    return [tops.RMSNorm(h), up, tops.SwiGLU(), down]


MLP = Block(
    "LayerNorm-Linear-GELU-Linear",
    lambda h, f: nn.Sequential(*_eager_mlp(h, f)),
    lambda h, f: tops.Sequential(*_our_mlp(h, f)),
)
GELU_BLOCK = Block(
    "GELU block",
    lambda h, f: Residual(*_eager_mlp(h, f), nn.Dropout(0.1)),
    lambda h, f: residual(*_our_mlp(h, f), tops.Dropout(0.1)),
)
LLAMA_BLOCK = Block(
    "Llama block",
    lambda h, f: Residual(*_eager_llama(h, f)),
    lambda h, f: residual(*_our_llama(h, f)),
)
# As small as what a user's first fusion replaces.
LINEAR_GELU = Block(
    "Linear-GELU",
    lambda h, f: nn.Sequential(nn.Linear(h, h), nn.GELU(approximate="tanh")),
    lambda h, f: tops.Sequential(tops.Linear(h, h), tops.GELU()),
)
BLOCKS = [MLP, GELU_BLOCK, LLAMA_BLOCK]


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copies parameters by position: both orders follow the forward."""
    with torch.no_grad():
        for mine, given in zip(target.parameters(), source.parameters(), strict=True):
            mine.copy_(given)
