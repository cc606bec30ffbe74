"""Weight gradients accumulated into `weight.main_grad` instead of being returned."""

from __future__ import annotations

import torch
from torch import Tensor

from . import instructions
from .plan import Instruction

_PLAIN = (Tensor, torch.nn.Parameter)


def check(weight: Tensor) -> None:
    """RuntimeError where a weight that accumulates has no `main_grad`."""
    if getattr(weight, "main_grad", None) is None:
        raise RuntimeError(
            "[BasicLinear] weight must have a main_grad to accumulate into, got none"
        )


def run(instruction: Instruction, values: instructions.Values, name: str, weight: Tensor) -> None:
    """Runs an instruction that gives the gradient `name` of a weight: the product itself adds to
    `main_grad` where it can.
    """
    check(weight)
    buffer: Tensor = weight.main_grad  # type: ignore[attr-defined]
    if instructions.has_into(instruction.target) and _takes_products(buffer, weight):
        instructions.run_into(instruction, values, name, buffer, _overwrites(weight))
        values[name] = _for_autograd(weight)
    else:
        instructions.run(instruction, values)
        values[name] = accumulate(weight, values[name])


def accumulate(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Adds `grad` into `weight.main_grad`, or writes it where the weight has
    `overwrite_main_grad`. Returns what autograd gets, see `_for_autograd`.
    """
    check(weight)
    buffer: Tensor = weight.main_grad  # type: ignore[attr-defined]
    with torch.no_grad():
        if _overwrites(weight):
            buffer.copy_(grad)
        else:
            buffer.add_(grad)
    return _for_autograd(weight)


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


def _for_autograd(weight: Tensor) -> Tensor | None:
    """None, or an empty-cost dummy for a weight with `grad_added_to_main_grad`, now True."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # Hooks that wait for a gradient get one of the right shape without memory behind it.
    return weight.new_zeros(()).expand_as(weight)
