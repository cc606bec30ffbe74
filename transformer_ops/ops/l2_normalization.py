"""L2 normalization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_not_negative

__all__ = ["L2Normalization"]


class L2Normalization(BasicOperation, kind="L2Normalization"):
    """`x * rsqrt(sum(x^2) + eps)` over the last dimension, as for queries and keys in Henry et al.
    (2020).

    `x[..., h]` → the shape and dtype of `x`, computed in float32 (float64 for float64). It has no
    parameters. Raises ValueError if eps is negative or not finite.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"eps": check_not_negative}

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
