"""Activations whose rows are scaled, as the outputs of experts are by their probabilities.

`x[..., n]` and the extra input `scales[...]`, a number for each row, → `scales * act(x)` in the
dtype of `x`, computed in float32 (float64 for float64) and rounded once. The scales keep their own
dtype and get a gradient.
"""

from __future__ import annotations

from ..op.base import BasicOperation
from .glu import _ClampedGLU, _InterleavedGLU, _SiTUGLU

__all__ = ["ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU"]


class ScaledSwiGLU(_InterleavedGLU, kind="ScaledSwiGLU"):
    """`SwiGLU` times `scales`, an extra input with a number for each row.

    Argument and error are those of `SwiGLU`.
    """

    def __init__(self, *, glu_interleave_size: int | None = None) -> None:
        super().__init__(glu_interleave_size)


class ScaledSiTUGLU(_SiTUGLU, kind="ScaledSiTUGLU"):
    """`SiTUGLU` times `scales`, an extra input with a number for each row.

    Arguments and errors are those of `SiTUGLU`.
    """


class ScaledClampedQGeGLU(_ClampedGLU, kind="ScaledClampedQGeGLU"):
    """`ClampedSwiGLU` times `scales`, an extra input with a number for each row.

    Arguments and errors are those of `ClampedSwiGLU`.
    """


class ScaledSReLU(BasicOperation, kind="ScaledSReLU"):
    """`max(x, 0)^2` times `scales`, an extra input with a number for each row."""

    def __init__(self) -> None:
        super().__init__()
