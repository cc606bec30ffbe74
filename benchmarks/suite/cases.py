"""What is measured: the ops and blocks, their sizes, and where each is measured."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import blocks
import torch
from torch import Tensor, nn

import transformer_ops as tops

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EAGER, COMPILED, OURS, OURS_COMPILED = WAYS = ("eager", "compiled", "ours", "ours compiled")
REFERENCES = (EAGER, COMPILED)
COMPILED_WAYS = (COMPILED, OURS_COMPILED)
PRODUCTS = "products recomputed"  # in rows of layers and whole models: recompute="products"
FORWARD, TRAINING = PASSES = ("forward", "forward+backward")
DEFAULT, WARM = ALLOCATORS = ("default", "warm")

OP_SIZE = (8192, 2048)
OTHER_OP_SIZES = ((64, 2048), (1024, 2048), (8192, 512))
BLOCK_SIZE, SMALL_BLOCK_SIZE = (1024, 768, 2048), (64, 256, 1024)
OTHER_BLOCK_SIZES = ((256, 768, 2048), (4096, 768, 2048), (1024, 256, 2048), (1024, 768, 4096))
QUICK_OP_SIZE = OTHER_OP_SIZES[1]
STACK = 6


class Op(NamedTuple):
    """An op for hidden size h, twice; and what has to move, in sizes of its input."""

    eager: Callable[[int], nn.Module]
    ours: Callable[[int], nn.Module]
    forward_moves: float  # reads and writes of x or y
    training_moves: float  # the same, and those of dy, x and dx
    inputs: int = 1


class AddNorm(nn.Module):
    """rms_norm(x + residual) in plain torch."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(h, eps=1e-5)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Shape in, same shape out."""
        out: Tensor = self.norm(x + residual)
        return out


def _our_add_norm(h: int) -> nn.Module:
    return tops.Sequential(tops.AddExtraInput(), tops.RMSNorm(h))


# Moves as in the roofs of the issue that set the limits: statistics, masks and parameters are left
# out, and so is the sum of add+rms_norm, which one of the passes has to write or form again.
OPS = {
    "rms_norm": Op(lambda h: nn.RMSNorm(h, eps=1e-5), tops.RMSNorm, 2, 5),
    "add+rms_norm": Op(AddNorm, _our_add_norm, 3, 6, inputs=2),
    "layer_norm": Op(nn.LayerNorm, tops.LayerNorm, 2, 5),
    "gelu": Op(lambda h: nn.GELU(approximate="tanh"), lambda h: tops.GELU(), 2, 5),
    "silu": Op(lambda h: nn.SiLU(), lambda h: tops.SiLU(), 2, 5),
    "relu": Op(lambda h: nn.ReLU(), lambda h: tops.ReLU(), 2, 4),
    "swiglu": Op(lambda h: blocks.SwiGLU(), lambda h: tops.SwiGLU(), 1.5, 4),
    "dropout": Op(lambda h: nn.Dropout(0.1), lambda h: tops.Dropout(0.1), 2, 4),
}
BLOCKS = {block.name: block for block in (blocks.GELU_BLOCK, blocks.LLAMA_BLOCK)}


@dataclass(frozen=True)
class Case:
    """An op or a block at one size (T, h) or (T, h, f), in one dtype, under one allocator."""

    name: str
    dtype: str
    size: tuple[int, ...]
    allocator: str
    ways: tuple[str, ...] = WAYS
    seconds: float = 1.0

    @property
    def id(self) -> str:
        """rms_norm/fp32/8192x2048/default"""
        return f"{self.name}/{self.dtype}/{'x'.join(map(str, self.size))}/{self.allocator}"

    def as_json(self) -> dict[str, Any]:
        """The way back is `Case.parse`."""
        return asdict(self)

    @staticmethod
    def parse(row: dict[str, Any]) -> Case:
        """A case from what JSON made of it."""
        return Case(**{**row, "size": tuple(row["size"]), "ways": tuple(row["ways"])})


@dataclass(frozen=True)
class Stack:
    """A stack of one block in training, for its peak memory."""

    name: str
    dtype: str
    size: tuple[int, ...]
    way: str

    @property
    def id(self) -> str:
        """peak/GELU block/fp32/1024x768x2048/eager"""
        return f"peak/{self.name}/{self.dtype}/{'x'.join(map(str, self.size))}/{self.way}"


def timed_cases(quick: bool, cuda: bool = False) -> list[Case]:
    """All cases, in the order in which they run."""
    # At these sizes the default allocator gives memory back or keeps it as its heap happens to lie,
    # which doubles or halves a ratio: no ground for a check.
    steady = DEFAULT if cuda else WARM
    plain = (EAGER, OURS)
    quick_ops = [Case(n, d, QUICK_OP_SIZE, steady, plain, 0.4) for n in OPS for d in DTYPES]
    if quick:
        ways = (*plain, OURS_COMPILED)
        return quick_ops + [
            Case(n, d, SMALL_BLOCK_SIZE, steady, ways, 0.8) for n in BLOCKS for d in DTYPES
        ]
    # On CUDA these sizes come again below, with more ways.
    found = [] if cuda else quick_ops
    # The caching allocator of CUDA is always warm.
    for allocator in (DEFAULT,) if cuda else ALLOCATORS:
        for dtype in DTYPES:
            for name in OPS:
                found.append(Case(name, dtype, OP_SIZE, allocator, seconds=1.5))
            for name in BLOCKS:
                found.append(Case(name, dtype, SMALL_BLOCK_SIZE, allocator, seconds=1.0))
                # Their limits are near, and a round takes half a second.
                seconds = 8.0 if allocator == DEFAULT else 3.0
                found.append(Case(name, dtype, BLOCK_SIZE, allocator, seconds=seconds))
    # To compile ours changes the kernels of no op: left out of the sweep, for time.
    three = (EAGER, COMPILED, OURS)
    for dtype in DTYPES:
        for op_size in OTHER_OP_SIZES:
            found += [Case(name, dtype, op_size, DEFAULT, three, 0.5) for name in OPS]
        for size in OTHER_BLOCK_SIZES:
            found += [Case(name, dtype, size, DEFAULT, seconds=1.5) for name in BLOCKS]
    return found


def stacks(quick: bool) -> list[Stack]:
    """The stacks whose peak memory is measured."""
    if quick:
        return []
    return [Stack(n, d, BLOCK_SIZE, w) for n in BLOCKS for d in DTYPES for w in WAYS]


def selected(ids: Iterable[str], patterns: list[str]) -> set[str]:
    """The ids that contain a pattern, or match it with * and ?; all without patterns."""
    return {
        name
        for name in ids
        if not patterns or any(fnmatch.fnmatchcase(name, f"*{p}*") for p in patterns)
    }


def make_module(name: str, way: str, size: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
    """The module of an op or a block in one way, not yet compiled."""
    table: dict[str, Any] = OPS if name in OPS else BLOCKS
    torch.manual_seed(0)
    make = table[name].ours if way in (OURS, OURS_COMPILED) else table[name].eager
    module: nn.Module = make(*size[1:])
    return module.to(dtype)


def make_inputs(
    name: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Inputs that require a gradient, [T, h] each."""
    count = OPS[name].inputs if name in OPS else 1
    shape = size[:2]
    return [
        torch.randn(shape, dtype=dtype, device=device).requires_grad_(True) for _ in range(count)
    ]
