"""LayerScale: a learned factor for each channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from ..op.base import BasicOperation, Check
from ..op.checks import check_float, check_size
from ..op.parameters import new_parameter

__all__ = ["LayerScale"]


class LayerScale(BasicOperation, kind="LayerScale"):
    """`x * gamma` over the last dimension; `gamma` starts at `init_values` (Touvron et al. 2021).

    `x[..., size]`, `gamma[size]` → the shape and dtype of `x`, computed in float32 (float64 for
    float64). The input is saved for backward only if `gamma` needs a gradient. Followed by a
    `DropPath` and an `AddExtraInput`, forward is one pass. The parameter has the same name as in
    timm. Raises ValueError if the size is below 1, or if `init_values` is no finite number.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"size": check_size}

    def __init__(
        self,
        size: int,
        init_values: float = 1e-5,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.size = size
        self._init_values = check_float(op, "init_values", init_values)
        self.gamma = new_parameter(op, (self.size,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets `gamma` to `init_values`."""
        nn.init.constant_(self.gamma, self._init_values)
