"""Dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool, check_probability

__all__ = ["Dropout"]


class Dropout(BasicOperation, kind="Dropout"):
    """In training, zeroes elements with probability `p` and scales the rest by `1 / (1 - p)`.

    `x[...]` → `[...]`, of the input's dtype (Srivastava et al. 2014). Random bits are
    Philox counters (Salmon et al. 2011) seeded by torch's generator of the device. `p = 1` gives
    zeros; `p = 0`, and eval mode, draw no random number. Raises ValueError unless `p` is in [0, 1].
    `inplace` is as in `ReLU`.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"p": check_probability, "inplace": check_bool}

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        self.p = p
        self.inplace = inplace

    def extra_repr(self) -> str:
        """The probability, and the flag if it is set."""
        return super().extra_repr() + ", inplace=True" * self.inplace
