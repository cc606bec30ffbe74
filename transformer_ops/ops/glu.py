"""Gated linear units (Shazeer 2020): `x[..., 2h]` → `act(a) * b`, `[..., h]`.

    halves        x = [ a a a a | b b b b ]
    interleaved   x = [ a a | b b | a a | b b ]     glu_interleave_size = 2

The **first** half is activated; torch's GLU gates with the second. The output has the input's
dtype, computed in float32 (float64 for float64).

With `cache_quantized_input` the input is saved for backward as E4M3 codes with one scale for the
tensor, as in `GELU`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import Attribute, BasicOperation, Check
from ..op.checks import check_optional_size, check_positive
from .activation import TwoForms

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
    _is_gated = True

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input


class GLU(_GLU, kind="GLU"):
    """`sigmoid(a) * b` (Dauphin et al. 2017) with `a, b` the halves of the last dimension:
    `x[..., 2h]` → `[..., h]`, of the input's dtype.

    `torch.nn.GLU` gates with the second half instead. With `cache_quantized_input` the input is
    saved for backward in 8 bits, as in `GELU`. Raises ValueError if that is no bool. A call raises
    RuntimeError unless the input is of floating numbers and its last dimension is even.
    """


class _TanhGEGLU(_GLU, kind="GEGLU"):
    """The declaration of a GEGLU; that of the exact form is the same."""


class GEGLU(TwoForms, _TanhGEGLU):
    """`GELU(a) * b` (Shazeer 2020) in the tanh form, or the exact one with `approximate="none"`.

    `a, b` are the halves of the last dimension; `approximate` is that of `GELU`. Raises ValueError
    for another `approximate`. Shapes, `cache_quantized_input` and other errors are as in `GLU`.
    """

    _kinds = ("GEGLU", "ExactGEGLU")


class QGEGLU(_GLU, kind="QGEGLU"):
    """`a * sigmoid(1.702 a) * b` (Shazeer 2020, with `QGELU` for GELU) with `a, b` the halves of
    the last dimension. Shapes, `cache_quantized_input` and errors are as in `GLU`."""


class ReGLU(_GLU, kind="ReGLU"):
    """`max(a, 0) * b` (Shazeer 2020) with `a, b` the halves of the last dimension. Shapes,
    `cache_quantized_input` and errors are as in `GLU`."""


class SReGLU(_GLU, kind="SReGLU"):
    """`max(a, 0)^2 * b` (Shazeer 2020, with the ReLU of So et al. 2021 squared) with `a, b` the
    halves of the last dimension. Shapes, `cache_quantized_input` and errors are as in `GLU`."""


class _InterleavedGLU(BasicOperation):
    """A GLU whose two inputs may alternate along the last dimension."""

    _is_gated = True
    _checks: ClassVar[Mapping[str, Check]] = {"glu_interleave_size": check_optional_size}

    def __init__(self, glu_interleave_size: int | None, cache_quantized_input: bool) -> None:
        super().__init__()
        self.glu_interleave_size = glu_interleave_size
        self.cache_quantized_input = cache_quantized_input

    def _attributes(self) -> dict[str, Attribute]:
        return {**super()._attributes(), "glu_interleave_size": self.glu_interleave_size or 0}


class SwiGLU(_InterleavedGLU, kind="SwiGLU"):
    """`SiLU(a) * b` (Shazeer 2020), `x[..., 2h]` → `[..., h]`.

    `glu_interleave_size`: blocks of that many elements of `a` and `b` alternate along the last
    dimension; None: halves. Raises ValueError unless it is None or >= 1. `cache_quantized_input`
    and other errors are as in `GLU`.
    """

    def __init__(
        self, *, glu_interleave_size: int | None = None, cache_quantized_input: bool = False
    ) -> None:
        super().__init__(glu_interleave_size, cache_quantized_input)


class _SiTUGLU(_InterleavedGLU):
    """A GLU with the numbers of SiTUGLU."""

    _checks: ClassVar[Mapping[str, Check]] = {"beta1": check_positive, "beta2": check_positive}

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        glu_interleave_size: int | None = None,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(glu_interleave_size, cache_quantized_input)
        self.beta1 = beta1
        self.beta2 = beta2


class SiTUGLU(_SiTUGLU, kind="SiTUGLU"):
    """`beta1 tanh(a/beta1) * sigmoid(a) * beta2 tanh(b/beta2)`, `x[..., 2h]` → `[..., h]`.

    Raises ValueError unless both betas are finite and > 0. `glu_interleave_size` is as in `SwiGLU`,
    `cache_quantized_input` and other errors are as in `GLU`.
    """


class _ClampedGLU(_InterleavedGLU):
    """A GLU with the numbers of ClampedSwiGLU."""

    _checks: ClassVar[Mapping[str, Check]] = {
        "limit": check_positive,
    }

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        glu_interleave_size: int | None = None,
        cache_quantized_input: bool = False,
    ) -> None:
        super().__init__(glu_interleave_size, cache_quantized_input)
        self.limit = limit
        self.alpha = alpha
        self.glu_linear_offset = glu_linear_offset


class ClampedSwiGLU(_ClampedGLU, kind="ClampedSwiGLU"):
    """`g * sigmoid(alpha g) * (l + glu_linear_offset)` of two clamped inputs.

    `g = min(a, limit)`, `l = clamp(b, -limit, limit)`: the activation of gpt-oss (OpenAI 2025).
    Raises ValueError unless `limit` is finite and > 0, and `alpha` and `glu_linear_offset` are
    finite. Shapes, `glu_interleave_size` and other errors are as in `SwiGLU`.
    """
