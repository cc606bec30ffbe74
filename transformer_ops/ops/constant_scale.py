"""Multiplication by a constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import Attribute, BasicOperation, Check
from ..op.checks import check_float

__all__ = ["ConstantScale"]


class ConstantScale(BasicOperation):
    """`x * scale`, elementwise, in the input's dtype; backward scales the gradient too.

    ValueError unless `scale` is a finite number.
    """

    _kind: ClassVar[str | None] = "ConstantScale"
    _checks: ClassVar[Mapping[str, Check]] = {"scale": check_float}

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def _attributes(self) -> dict[str, Attribute]:
        return {"scale": self.scale}

    def extra_repr(self) -> str:
        return f"scale={self.scale}"
