"""Weight gradients accumulated into `weight.main_grad` instead of being returned."""

from __future__ import annotations

import torch
from torch import Tensor


def check(weight: Tensor) -> None:
    """RuntimeError where a weight that accumulates has no `main_grad`."""
    if getattr(weight, "main_grad", None) is None:
        raise RuntimeError(
            "[BasicLinear] weight must have a main_grad to accumulate into, got none"
        )


def accumulate(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Adds `grad` into `weight.main_grad`, or writes it where the weight has
    `overwrite_main_grad`. Returns what autograd gets: None, or an empty-cost dummy for a weight
    with `grad_added_to_main_grad`, which is set True.
    """
    check(weight)
    buffer: Tensor = weight.main_grad  # type: ignore[attr-defined]
    with torch.no_grad():
        if getattr(weight, "overwrite_main_grad", False):
            buffer.copy_(grad)
        else:
            buffer.add_(grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # Hooks that wait for a gradient get one of the right shape without memory behind it.
    return grad.new_zeros(()).expand_as(weight)
