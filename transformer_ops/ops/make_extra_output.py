"""A second copy of the input, for a branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool

__all__ = ["MakeExtraOutput"]


class MakeExtraOutput(BasicOperation, kind="MakeExtraOutput"):
    """Hands its input out a second time, as an extra output on the same memory.

    Backward adds the gradients of both; a missing one is zero. `in_place=True` permits, and never
    requires, to overwrite the extra gradient. ValueError unless the flag is a bool.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"in_place": check_bool}

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
