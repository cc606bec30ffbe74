"""Weight gradients accumulated into `weight.main_grad` instead of being returned."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


class Buffer(NamedTuple):
    """Where the gradient of a weight goes, and whether it takes the place of what is there."""

    tensor: Tensor
    overwrites: bool


def check(weight: Tensor) -> None:
    """RuntimeError where a weight that accumulates has no `main_grad`."""
    if weight.requires_grad and getattr(weight, "main_grad", None) is None:
        raise RuntimeError(
            "[BasicLinear] weight must have a main_grad to accumulate into, got none"
        )


def buffer_of(weight: Tensor) -> Buffer:
    """`weight.main_grad`, which has to be there; written where `overwrite_main_grad` is set."""
    check(weight)
    overwrites = bool(getattr(weight, "overwrite_main_grad", False))
    return Buffer(weight.main_grad, overwrites)  # type: ignore[attr-defined]


def takes_products(buffer: Tensor, weight: Tensor) -> bool:
    """Whether a product may add the gradient of the weight to the buffer itself."""
    return (
        type(buffer) in _PLAIN
        and type(weight) in _PLAIN
        and buffer.layout == torch.strided
        and buffer.shape == weight.shape
        and buffer.device == weight.device
        and buffer.is_floating_point()
    )


def accumulate(buffer: Buffer, grad: Tensor) -> None:
    """Adds `grad` to the buffer, or writes it there."""
    with torch.no_grad():
        if buffer.overwrites:
            buffer.tensor.copy_(grad)
        else:
            buffer.tensor.add_(grad)


def is_marked(weight: Tensor) -> bool:
    """Whether the weight has `grad_added_to_main_grad`, which a backward sets to True."""
    return hasattr(weight, "grad_added_to_main_grad")


def for_autograd(weight: Tensor) -> Tensor | None:
    """None, or an empty-cost dummy for a marked weight, whose mark is now True."""
    if not is_marked(weight):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Hooks that wait for a gradient get one of the right shape without memory behind it.
    return weight.new_zeros(()).expand_as(weight)
