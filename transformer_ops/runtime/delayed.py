"""Weight gradients that backward leaves for later: what is kept, and how autograd gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..op.tensor_parallel import is_dtensor
from .main_grad import is_made_of_parts, parts_of


class Product(Protocol):
    """What gives the gradient of a weight: a `_C.DelayedCall`."""

    def run(self) -> Tensor:
        """The gradient."""

    def run_into(self, buffer: Tensor, overwrite: bool) -> bool:
        """Adds it to the buffer, or writes it there; False where that cannot be done."""


class Finished:
    """A gradient that a Python step has given."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad

    def run(self) -> Tensor:
        return self.grad

    def run_into(self, buffer: Tensor, overwrite: bool) -> bool:
        return False


def check(weight: Tensor) -> None:
    """RuntimeError where a weight is no parameter, to which a gradient could be given later."""
    for part in parts_of(weight):
        if not part.is_leaf:
            raise RuntimeError(
                "[GroupedLinear] weight must be a parameter where its gradient is delayed, "
                "got a tensor that is computed of others"
            )


def give_to_autograd(weight: Tensor, compute: Callable[[], Tensor]) -> None:
    """Has autograd add a gradient to `.grad`, as it would have done in backward: with hooks."""
    parts = parts_of(weight)
    if any(part.requires_grad for part in parts):
        with torch.enable_grad():
            _Later.apply(compute, is_made_of_parts(weight), *parts).backward()


class _Later(torch.autograd.Function):
    """Nothing, made of parameters; its backward computes their gradients."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Tensor], split: bool, *parts: Tensor) -> Tensor:
        ctx.compute, ctx.split, ctx.parts = compute, split, parts
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        grad = ctx.compute()
        grads = grad.unbind(0) if ctx.split else [grad]
        found = [_gradient_for(p, g) for p, g in zip(ctx.parts, grads, strict=True)]
        return None, None, *found


def _gradient_for(part: Tensor, grad: Tensor) -> Tensor:
    own: Any = part
    shape = own.to_local().shape if is_dtensor(part) else part.shape
    if shape != grad.shape:
        raise RuntimeError(
            f"[GroupedLinear] weight must have the shape {list(grad.shape)} that it had in "
            f"forward, got {list(shape)} at backward_dw() (FSDP2 shards it after backward)"
        )
    if not is_dtensor(part):
        return grad
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        grad,
        own.device_mesh,
        own.placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )
    return whole
