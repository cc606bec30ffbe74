"""A second copy of the input, for a branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool

__all__ = ["MakeExtraOutput"]


class MakeExtraOutput(BasicOperation, kind="MakeExtraOutput"):
    """Also returns its input as an extra output, in the same memory: the start of a residual
    connection (He et al. 2015).

    `x[...]` → the same tensor, and the extra output `[...]`, of any shape and dtype.

    Backward adds the gradients of both; a missing one is zero. `in_place=True` allows, but never
    requires, overwriting the extra gradient. Raises ValueError unless the flag is a bool.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"in_place": check_bool}

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
