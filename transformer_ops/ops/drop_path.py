"""Stochastic depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_probability

__all__ = ["DropPath"]


class DropPath(BasicOperation, kind="DropPath"):
    """In training, zeroes samples with probability `p` and scales the rest by `1 / (1 - p)`.

    Samples are the first dimension (Huang et al. 2016, "stochastic depth"; `DropPath` in timm,
    `StochasticDepth(p, "row")` in torchvision). `x[n, ...]` → `[n, ...]`, of the input's dtype. One
    number for each sample is saved for backward. Random bits are those of `Dropout`. `p = 1` gives
    zeros; `p = 0`, and eval mode, draw no random number. Raises ValueError unless `p` is in [0, 1],
    and a call RuntimeError for an input without a dimension.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"p": check_probability}

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
