"""Elementwise activations: any shape, the input's dtype, computed in float32 (or float64)."""

from __future__ import annotations

from ..op.base import BasicOperation

__all__ = ["GELU", "QGELU", "ReLU", "SReLU", "SiLU"]


class _Activation(BasicOperation):
    def __init__(self) -> None:
        super().__init__()


class GELU(_Activation, kind="GELU"):
    """`x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`, the tanh form.

    Hendrycks and Gimpel 2016; `torch.nn.GELU(approximate="tanh")`.
    """


class QGELU(_Activation, kind="QGELU"):
    """`x * sigmoid(1.702 x)`, the sigmoid form of GELU (Hendrycks and Gimpel 2016)."""


class ReLU(_Activation, kind="ReLU"):
    """`max(x, 0)`. Backward keeps one bit an element."""


class SReLU(_Activation, kind="SReLU"):
    """`max(x, 0)^2` (So et al. 2021, Primer)."""


class SiLU(_Activation, kind="SiLU"):
    """`x * sigmoid(x)` (Elfwing et al. 2017)."""
