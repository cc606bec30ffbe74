"""Elementwise activations: any shape, the input's dtype, computed in float32 (or float64).

With `cache_quantized_input` the input is kept for backward as E4M3 codes with one scale for the
tensor: one byte an element. The output is exact; the gradient, and what backward computes again
from the input, is that of the rounded input. Not where another op keeps the tensor anyway.
Second derivatives are a NotImplementedError then. `ReLU` saves exact bits in any case.
`Sequential(..., saved="fp8")` keeps all tensors so, with a scale for 128 elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_approximate, check_bool

__all__ = ["GELU", "QGELU", "ReLU", "SReLU", "SiLU"]


class _Activation(BasicOperation):
    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.cache_quantized_input = cache_quantized_input


class _InPlaceActivation(_Activation):
    """An activation that has nn's argument `inplace`."""

    _checks: ClassVar[Mapping[str, Check]] = {"inplace": check_bool}

    def __init__(self, inplace: bool = False, *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)
        self.inplace = inplace

    def extra_repr(self) -> str:
        return ", ".join(filter(None, ("inplace=True" * self.inplace, super().extra_repr())))


class TwoForms(BasicOperation):
    """A GELU or a unit gated by one, in the tanh form or the exact one."""

    # The kinds of the two forms.
    _kinds: ClassVar[tuple[str, str]]
    _checks: ClassVar[Mapping[str, Check]] = {"approximate": check_approximate}

    # The class has a default, too, for modules that were pickled without it.
    approximate: str = "tanh"

    def __init__(self, approximate: str = "tanh", *, cache_quantized_input: bool = False) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input)  # type: ignore[call-arg]
        self.approximate = approximate

    @property
    def _kind(self) -> str:  # type: ignore[override]
        return self._kinds[int(self.approximate == "none")]  # Dynamo of torch 2.11 takes no bool

    def extra_repr(self) -> str:
        """The form if it is not the tanh one, and the flag if it is set."""
        form = "approximate='none'" if self.approximate == "none" else ""
        return ", ".join(filter(None, (form, super().extra_repr())))


class _TanhGELU(_Activation, kind="GELU"):
    """The declaration of a GELU; that of the exact form is the same."""


class GELU(TwoForms, _TanhGELU):
    """The tanh form of GELU unless `approximate="none"`, while `torch.nn.GELU()` is exact.

    "tanh" is `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`; "none" is the exact `x/2 * (1 +
    erf(x / sqrt(2)))` (Hendrycks and Gimpel 2016). `x[...]` → `[...]`, of the input's dtype. With
    `cache_quantized_input` the input is saved for backward in 8 bits (E4M3, one scale). Raises
    ValueError for another `approximate`, or if `cache_quantized_input` is no bool. A call raises
    RuntimeError unless the input is of floating numbers.
    """

    _kinds = ("GELU", "ExactGELU")


class QGELU(_Activation, kind="QGELU"):
    """`x * sigmoid(1.702 x)`, the sigmoid form of GELU (Hendrycks and Gimpel 2016).

    It is the "quick GELU" of CLIP. Shapes, `cache_quantized_input` and errors are as in `GELU`.
    """


class ReLU(_InPlaceActivation, kind="ReLU"):
    """`max(x, 0)` (Nair and Hinton 2010), `x[...]` → `[...]`, of the input's dtype. One exact bit
    for each element is saved for backward.

    `cache_quantized_input` changes nothing, because a bit is less than a byte: the same is saved,
    and the gradient stays exact. `inplace=True`, as in `torch.nn.ReLU`, is accepted after an op
    that computes the input, whose memory is reused anyway. If it would overwrite the caller's
    tensor, the call raises ValueError. Raises ValueError unless both are bools, and a call
    RuntimeError unless the input is of floating numbers.
    """


class SReLU(_Activation, kind="SReLU"):
    """`max(x, 0)^2` (So et al. 2021, Primer). Shapes, `cache_quantized_input` and errors are as in
    `GELU`."""


class SiLU(_InPlaceActivation, kind="SiLU"):
    """`x * sigmoid(x)` (Elfwing et al. 2017). Shapes, `cache_quantized_input` and errors are as in
    `GELU`, `inplace` is as in `ReLU`.
    """
