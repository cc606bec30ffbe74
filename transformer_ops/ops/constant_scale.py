"""Multiplication by a constant."""

from __future__ import annotations

from ..op.base import BasicOperation

__all__ = ["ConstantScale"]


class ConstantScale(BasicOperation, kind="ConstantScale"):
    """`x * scale`, `x[...]` → `[...]` in the input's dtype; backward also scales the gradient.

    Raises ValueError unless `scale` is a finite number; a call raises RuntimeError unless the input
    is of floating numbers.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
