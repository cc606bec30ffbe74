"""Weight gradients that are computed after backward: what is stored, and how autograd gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..op.tensor_parallel import is_dtensor


class Product(Protocol):
    """Computes the gradients of a weight, or of its tensors: a `_C.DeferredCall`."""

    def run(self) -> list[Tensor | None]:
        """Returns the gradients."""

    def run_into(self, buffers: list[Tensor], overwrite: bool) -> bool:
        """Adds them to the buffers, or overwrites these; returns False if that is not possible."""


class Finished:
    """Gradients that a Python step has computed, by the index of the tensor among `count`."""

    def __init__(self, count: int) -> None:
        self.grads: list[Tensor | None] = [None] * count

    def run(self) -> list[Tensor | None]:
        return self.grads

    def run_into(self, buffers: list[Tensor], overwrite: bool) -> bool:
        return False


def check(weights: Sequence[Tensor]) -> None:
    """Raises RuntimeError if a weight is no parameter, because it could not get a gradient
    later."""
    if not all(weight.is_leaf for weight in weights):
        raise RuntimeError(
            "[GroupedLinear] weight must be a parameter where its gradient is delayed, "
            "got a tensor that is computed of others"
        )


def give_to_autograd(
    weights: Sequence[Tensor], compute: Callable[[], Sequence[Tensor | None]]
) -> None:
    """Makes autograd add gradients to `.grad` as it would in backward, with hooks."""
    if any(weight.requires_grad for weight in weights):
        with torch.enable_grad():
            _Later.apply(compute, *weights).backward()


class _Later(torch.autograd.Function):
    """Returns an empty result from parameters; its backward computes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], Sequence[Tensor | None]], *weights: Tensor
    ) -> Tensor:
        ctx.compute, ctx.weights = compute, weights
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        grads = ctx.compute()
        return None, *(_gradient_for(p, g) for p, g in zip(ctx.weights, grads, strict=True))


def _gradient_for(part: Tensor, grad: Tensor | None) -> Tensor | None:
    if grad is None or not part.requires_grad:
        return None
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
