"""Rounding of main tensors to the format of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool
from ..quantization.model_init import hold_scales

__all__ = ["Quantize"]


class Quantize(BasicOperation, kind="Quantize"):
    """Rounds its input to the format of the `autocast` recipe for inputs, and its output's gradient
    to that for gradients; `x[...]` → `[...]`, of the input's dtype. Outside of `autocast` it passes
    both through. docs/quantization.md says what each recipe computes.

    Args:
        forward: whether the input is rounded.
        backward: whether the gradient is rounded.

    Raises ValueError unless both are bools.
    """

    _takes_scales: ClassVar[bool] = True
    _checks: ClassVar[Mapping[str, Check]] = {
        "rounds_input": check_bool,
        "rounds_grad_output": check_bool,
    }

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.rounds_input = forward
        self.rounds_grad_output = backward
        hold_scales(self)
