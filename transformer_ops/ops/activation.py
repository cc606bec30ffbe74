"""Elementwise activations: any shape, the input's dtype, computed in float32 (or float64)."""

from __future__ import annotations

from typing import ClassVar

from ..op.base import BasicOperation

__all__ = ["GELU", "QGELU", "ReLU", "SReLU", "SiLU"]


class _Activation(BasicOperation):
    def __init__(self) -> None:
        super().__init__()


class GELU(_Activation):
    """`x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`, the tanh form.

    Hendrycks and Gimpel 2016; `torch.nn.GELU(approximate="tanh")`.
    """

    _kind: ClassVar[str | None] = "GELU"


class QGELU(_Activation):
    """`x * sigmoid(1.702 x)`, the sigmoid form of GELU (Hendrycks and Gimpel 2016)."""

    _kind: ClassVar[str | None] = "QGELU"


class ReLU(_Activation):
    """`max(x, 0)`. Backward keeps one bit an element."""

    _kind: ClassVar[str | None] = "ReLU"


class SReLU(_Activation):
    """`max(x, 0)^2` (So et al. 2021, Primer)."""

    _kind: ClassVar[str | None] = "SReLU"


class SiLU(_Activation):
    """`x * sigmoid(x)` (Elfwing et al. 2017)."""

    _kind: ClassVar[str | None] = "SiLU"
