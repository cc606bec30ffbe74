"""Addition of an extra input, as in a residual connection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool

__all__ = ["AddExtraInput"]


class AddExtraInput(BasicOperation, kind="AddExtraInput"):
    """`x + extra`: the sum at the end of a residual connection (He et al. 2015).

    `x[...]` and the extra input `extra[...]`, both of one shape → `[...]` in the dtype to which
    both promote; the gradient goes to both.

    `in_place=True` allows, but never requires, overwriting the extra tensor. Raises ValueError
    unless the flag is a bool. A call raises RuntimeError unless both are of floating numbers and of
    one shape.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"in_place": check_bool}

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
