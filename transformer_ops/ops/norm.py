"""LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import nn

from ..op.base import BasicOperation, Check
from ..op.checks import check_not_negative, check_optional_not_negative, check_sizes
from ..op.parameters import new_parameter

__all__ = ["LayerNorm", "RMSNorm"]


class _Norm(BasicOperation):
    """What the two norms share: a scale over the trailing dimensions."""

    _checks: ClassVar[Mapping[str, Check]] = {
        "normalized_shape": check_sizes,
        "eps": check_not_negative,
    }

    normalized_shape: tuple[int, ...]
    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = normalized_shape  # type: ignore[assignment]
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        op = type(self).__name__
        for name in self._parameter_names:
            setattr(self, name, new_parameter(op, self.normalized_shape, device, dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scale to one (a zero-centred `weight` to zero), and a bias to zero."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}"
        return text + (", zero_centered_gamma=True" * self.zero_centered_gamma)


class LayerNorm(_Norm, kind="LayerNorm"):
    """`(x - mean) / sqrt(var + eps) * weight + bias` over the trailing dimensions.

    Ba et al. 2016, var without Bessel's correction. `x[..., *normalized_shape]`, `weight` and
    `bias` `[*normalized_shape]` → the shape and dtype of `x`, computed in float32 (float64 for
    float64). With `zero_centered_gamma` the scale is `1 + weight` and `weight` starts at zero.
    ValueError for sizes below 1, eps negative or not finite, or a flag that is no bool.
    """

    bias: nn.Parameter

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)


class RMSNorm(_Norm, kind="RMSNorm"):
    """`x / sqrt(mean(x^2) + eps) * weight` over the trailing dimensions.

    Zhang and Sennrich 2019. `x[..., *normalized_shape]`, `weight[*normalized_shape]` → the shape
    and dtype of `x`, computed in float32 (float64 for float64). With `zero_centered_gamma` the
    scale is `1 + weight` and `weight` starts at zero. `eps=None` is that of `torch.nn.RMSNorm`: the
    machine epsilon of the dtype that it computes in. Errors are those of `LayerNorm`.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"eps": check_optional_not_negative}

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        *,
        eps: float | None = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__(
            normalized_shape,
            eps=eps,  # type: ignore[arg-type]
            device=device,
            dtype=dtype,
            zero_centered_gamma=zero_centered_gamma,
        )
