"""Weight gradients accumulated into `weight.main_grad` instead of being returned."""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def check(weight: Tensor) -> None:
    """RuntimeError where a weight that accumulates has no `main_grad`."""
    if getattr(weight, "main_grad", None) is None:
        raise RuntimeError(
            "[BasicLinear] weight must have a main_grad to accumulate into, got none"
        )


def target(weight: Tensor) -> tuple[Tensor, bool] | None:
    """The buffer of a weight, if a product may add to it, and whether it overwrites instead."""
    check(weight)
    buffer: Tensor = weight.main_grad  # type: ignore[attr-defined]
    return (buffer, _overwrites(weight)) if _takes_products(buffer, weight) else None


def accumulate(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Adds `grad` into `weight.main_grad`, or writes it where the weight has
    `overwrite_main_grad`. Returns what autograd gets, see `for_autograd`.
    """
    check(weight)
    buffer: Tensor = weight.main_grad  # type: ignore[attr-defined]
    with torch.no_grad():
        if _overwrites(weight):
            buffer.copy_(grad)
        else:
            buffer.add_(grad)
    return for_autograd(weight)


def _takes_products(buffer: Tensor, weight: Tensor) -> bool:
    return (
        type(buffer) in _PLAIN
        and type(weight) in _PLAIN
        and buffer.layout == torch.strided
        and buffer.shape == weight.shape
        and buffer.device == weight.device
        and buffer.is_floating_point()
    )


def _overwrites(weight: Tensor) -> bool:
    return bool(getattr(weight, "overwrite_main_grad", False))


def for_autograd(weight: Tensor) -> Tensor | None:
    """None, or an empty-cost dummy for a weight with `grad_added_to_main_grad`, now True."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # Hooks that wait for a gradient get one of the right shape without memory behind it.
    return weight.new_zeros(()).expand_as(weight)
