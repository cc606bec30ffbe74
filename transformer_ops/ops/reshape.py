"""Reshape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_shape

__all__ = ["Reshape"]


class Reshape(BasicOperation, kind="Reshape"):
    """`x.reshape(shape)`, `x[...]` → `[*shape]`; backward restores the shape of the input.

    `shape`: ints >= 0, one of which may be -1 and follows from the input. Any dtype is allowed.
    Raises ValueError for a shape that no tensor can have, and a call RuntimeError for one that
    the input does not fill.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"shape": check_shape}

    shape: tuple[int, ...]

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        self.shape = shape  # type: ignore[assignment]
