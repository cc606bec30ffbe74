"""LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import nn

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool, check_not_negative, check_optional_not_negative, check_sizes
from ..op.parameters import new_parameter

__all__ = ["LayerNorm", "RMSNorm"]


class _Norm(BasicOperation):
    """The common part of the two norms: a scale over the trailing dimensions, which may be
    absent."""

    _checks: ClassVar[Mapping[str, Check]] = {
        "normalized_shape": check_sizes,
        "eps": check_not_negative,
    }

    normalized_shape: tuple[int, ...]
    weight: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        eps: float | None,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        zero_centered_gamma: bool,
        present: Mapping[str, bool],
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.normalized_shape = normalized_shape  # type: ignore[assignment]
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        if zero_centered_gamma and not present["weight"]:
            raise ValueError(
                f"[{op}] zero_centered_gamma must be False where there is no weight, got True"
            )
        for name in self._parameter_names:
            made = new_parameter(op, self.normalized_shape, device, dtype)
            self.register_parameter(name, made if present[name] else None)
        self.reset_parameters()

    @property
    def elementwise_affine(self) -> bool:
        """Whether there is a weight."""
        return self.weight is not None

    def reset_parameters(self) -> None:
        """Sets the scale to one (a zero-centred `weight` to zero), and a bias to zero."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}"
        text += ", elementwise_affine=False" * (not self.elementwise_affine)
        return text + (", zero_centered_gamma=True" * self.zero_centered_gamma)


class LayerNorm(_Norm, kind="LayerNorm"):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the trailing dimensions.

    Ba et al. 2016; var is without Bessel's correction. `x[..., *normalized_shape]`, `weight` and
    `bias` `[*normalized_shape]` → the shape and dtype of `x`, computed in float32 (float64 for
    float64). With `zero_centered_gamma` the scale is `1 + weight` and `weight` starts at zero.
    `bias=False` omits the bias, and `elementwise_affine=False` also the weight, as in
    `torch.nn.LayerNorm`. Raises ValueError if sizes are below 1, if eps is negative or not finite,
    if a flag is no bool, and for `zero_centered_gamma` without a weight.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        op = type(self).__name__
        check_bool(op, "elementwise_affine", elementwise_affine)
        check_bool(op, "bias", bias)
        present = {"weight": elementwise_affine, "bias": elementwise_affine and bias}
        super().__init__(normalized_shape, eps, device, dtype, zero_centered_gamma, present)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        lacks_bias = self.elementwise_affine and self.bias is None
        return super().extra_repr() + ", bias=False" * lacks_bias


class RMSNorm(_Norm, kind="RMSNorm"):
    """`x / sqrt(mean(x^2) + eps) * weight` over the trailing dimensions (Zhang and Sennrich 2019).

    `x[..., *normalized_shape]`, `weight[*normalized_shape]` → the shape and dtype of `x`, computed
    in float32 (float64 for float64). The default `eps` is 1e-5. That of `torch.nn.RMSNorm` is None,
    the machine epsilon of the dtype that it computes in. With `zero_centered_gamma` the scale is
    `1 + weight` and `weight` starts at zero; `elementwise_affine=False` omits the weight. Errors
    are those of `LayerNorm`.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"eps": check_optional_not_negative}

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        eps: float | None = 1e-5,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        check_bool(type(self).__name__, "elementwise_affine", elementwise_affine)
        present = {"weight": elementwise_affine}
        super().__init__(normalized_shape, eps, device, dtype, zero_centered_gamma, present)
