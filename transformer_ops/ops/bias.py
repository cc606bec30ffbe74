"""Addition of a bias vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from ..op.base import BasicOperation, Check
from ..op.checks import check_size
from ..op.parameters import new_parameter

__all__ = ["Bias"]


class Bias(BasicOperation, kind="Bias"):
    """`x + bias` over the last dimension.

    `x[..., size]`, `bias[size]` (zeros at start) → `[..., size]` in the input's dtype. The
    gradient of `bias` is the sum over the leading dimensions. ValueError unless `size` >= 1.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"size": check_size}

    size: int
    bias: nn.Parameter

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.bias = new_parameter(type(self).__name__, (self.size,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set `bias` to zeros."""
        nn.init.zeros_(self.bias)
