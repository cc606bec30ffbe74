"""Weight gradients accumulated into `weight.main_grad` instead of being returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


class Buffer(NamedTuple):
    """Where the gradient of a weight goes, and whether it takes the place of what is there."""

    tensor: Tensor
    overwrites: bool


def parts_of(weight: Tensor) -> Sequence[Tensor]:
    """The parameters that a weight stands for: those of groups that are taken as one, or itself."""
    return getattr(weight, "parts", None) or [weight]


def is_made_of_parts(weight: Tensor) -> bool:
    """Whether a weight stands for the parameters of groups, however many."""
    return hasattr(weight, "parts")


def check(weight: Tensor) -> None:
    """RuntimeError where a weight that accumulates has no `main_grad`."""
    for part in parts_of(weight):
        if part.requires_grad and getattr(part, "main_grad", None) is None:
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


def accumulate_parts(weight: Tensor, grad: Tensor) -> None:
    """Adds the gradient of each parameter that the weight stands for to its own `main_grad`."""
    for part, own in zip(parts_of(weight), grad, strict=True):
        if part.requires_grad:
            accumulate(buffer_of(part), own)


def accumulate(buffer: Buffer, grad: Tensor) -> None:
    """Adds `grad` to the buffer, or writes it there."""
    with torch.no_grad():
        if buffer.overwrites:
            buffer.tensor.copy_(grad)
        else:
            buffer.tensor.add_(grad)


def is_marked(weight: Tensor) -> bool:
    """Whether the weight has `grad_added_to_main_grad`, which a backward sets to True."""
    return any(hasattr(part, "grad_added_to_main_grad") for part in parts_of(weight))


def for_autograd(weight: Tensor) -> Tensor | None:
    """None, or an empty-cost dummy for a marked weight, whose mark is now True."""
    if not is_marked(weight):
        return None
    for part in parts_of(weight):
        part.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Hooks that wait for a gradient get one of the right shape without memory behind it.
    return weight.new_zeros(()).expand_as(weight)
