"""L2 normalization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import Attribute, BasicOperation, Check
from ..op.checks import check_not_negative

__all__ = ["L2Normalization"]


class L2Normalization(BasicOperation):
    """`x * rsqrt(sum(x^2) + eps)` over the last dimension.

    `x[..., h]` → the shape and dtype of `x`, computed in float32 (float64 for float64). No
    parameters. ValueError for eps negative or not finite.
    """

    _kind: ClassVar[str | None] = "L2Normalization"
    _checks: ClassVar[Mapping[str, Check]] = {"eps": check_not_negative}

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def _attributes(self) -> dict[str, Attribute]:
        return {"eps": self.eps}

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
