"""Gated linear units (Shazeer 2020): `x[..., 2h]` → `act(a) * b`, `[..., h]`.

    halves        x = [ a a a a | b b b b ]
    interleaved   x = [ a a | b b | a a | b b ]     glu_interleave_size = 2

The **first** half is activated; torch's GLU gates with the second. The output has the input's
dtype, computed in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import Attribute, BasicOperation, Check
from ..op.checks import check_float, check_optional_size, check_positive

__all__ = [
    "GEGLU",
    "GLU",
    "QGEGLU",
    "ClampedSwiGLU",
    "ReGLU",
    "SReGLU",
    "SiTUGLU",
    "SwiGLU",
]


class _GLU(BasicOperation):
    def __init__(self) -> None:
        super().__init__()


class GLU(_GLU):
    """`sigmoid(a) * b` with `a, b` the halves of the last dimension."""

    _kind: ClassVar[str | None] = "GLU"


class GEGLU(_GLU):
    """`GELU(a) * b`, tanh form, with `a, b` the halves of the last dimension."""

    _kind: ClassVar[str | None] = "GEGLU"


class QGEGLU(_GLU):
    """`a * sigmoid(1.702 a) * b` with `a, b` the halves of the last dimension."""

    _kind: ClassVar[str | None] = "QGEGLU"


class ReGLU(_GLU):
    """`max(a, 0) * b` with `a, b` the halves of the last dimension."""

    _kind: ClassVar[str | None] = "ReGLU"


class SReGLU(_GLU):
    """`max(a, 0)^2 * b` with `a, b` the halves of the last dimension."""

    _kind: ClassVar[str | None] = "SReGLU"


class _InterleavedGLU(BasicOperation):
    """A GLU whose two inputs may alternate along the last dimension."""

    _checks: ClassVar[Mapping[str, Check]] = {"glu_interleave_size": check_optional_size}

    def __init__(self, glu_interleave_size: int | None) -> None:
        super().__init__()
        self.glu_interleave_size = glu_interleave_size

    def _numbers(self) -> dict[str, float]:
        return {}

    def _attributes(self) -> dict[str, Attribute]:
        return {"glu_interleave_size": self.glu_interleave_size or 0, **self._numbers()}

    def extra_repr(self) -> str:
        parts = [f"{name}={value}" for name, value in self._numbers().items()]
        if self.glu_interleave_size is not None:
            parts.append(f"glu_interleave_size={self.glu_interleave_size}")
        return ", ".join(parts)


class SwiGLU(_InterleavedGLU):
    """`SiLU(a) * b`.

    `glu_interleave_size`: blocks of that many elements of `a` and `b` alternate along the last
    dimension; None: halves. ValueError unless it is None or >= 1.
    """

    _kind: ClassVar[str | None] = "SwiGLU"

    def __init__(self, *, glu_interleave_size: int | None = None) -> None:
        super().__init__(glu_interleave_size)


class SiTUGLU(_InterleavedGLU):
    """`beta1 tanh(a/beta1) * sigmoid(a) * beta2 tanh(b/beta2)`.

    ValueError unless both betas are finite and > 0; `glu_interleave_size` as in `SwiGLU`.
    """

    _kind: ClassVar[str | None] = "SiTUGLU"
    _checks: ClassVar[Mapping[str, Check]] = {"beta1": check_positive, "beta2": check_positive}

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(glu_interleave_size)
        self.beta1 = beta1
        self.beta2 = beta2

    def _numbers(self) -> dict[str, float]:
        return {"beta1": self.beta1, "beta2": self.beta2}


class ClampedSwiGLU(_InterleavedGLU):
    """`g * sigmoid(alpha g) * (l + glu_linear_offset)` of two clamped inputs.

    `g = min(a, limit)`, `l = clamp(b, -limit, limit)`: the activation of gpt-oss (OpenAI 2025).
    ValueError unless `limit` is finite and > 0, `alpha` and `glu_linear_offset` finite;
    `glu_interleave_size` as in `SwiGLU`.
    """

    _kind: ClassVar[str | None] = "ClampedSwiGLU"
    _checks: ClassVar[Mapping[str, Check]] = {
        "limit": check_positive,
        "alpha": check_float,
        "glu_linear_offset": check_float,
    }

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(glu_interleave_size)
        self.limit = limit
        self.alpha = alpha
        self.glu_linear_offset = glu_linear_offset

    def _numbers(self) -> dict[str, float]:
        return {
            "limit": self.limit,
            "alpha": self.alpha,
            "glu_linear_offset": self.glu_linear_offset,
        }
