"""The bytes that a plan saves for backward: each distinct tensor counts once, parameters do not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class SavedSlot(NamedTuple):
    """One slot: its bytes, and a number that slots in the same memory share."""

    bytes: int
    storage: int


class SavedBytes(NamedTuple):
    """The bytes that one call saves. `slots` is by op and name, such as (3, "input"); the tensors
    that a Python op saves itself are (3, "saved0")..."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    slots: dict[tuple[int, str], SavedSlot]

    @property
    def width(self) -> int:
        """The number of elements in a row of the input."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """The number of rows of the input: the product of all its dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def total(self) -> int:
        """The bytes of the distinct tensors of the call."""
        return sum({kept.storage: kept.bytes for kept in self.slots.values()}.values())


def saved_bytes(
    shape: Sequence[int], dtype: torch.dtype, rows: Iterable[tuple[int, str, int, int]]
) -> SavedBytes:
    """Converts the rows (op, slot, bytes, storage) of C++."""
    slots = {(op, name): SavedSlot(size, storage) for op, name, size, storage in rows}
    return SavedBytes(tuple(shape), dtype, slots)


def likely_shape(ops: Sequence[tuple[str, Mapping[str, Any]]], changes: set[str]) -> list[int]:
    """An input that the ops of a plan would accept, for a compiled call whose sizes are not known.

    The first op that fixes a size decides, unless a kind that `changes` it comes before; then it is
    [].
    """
    rows = 8  # whole bytes for a bit mask of any width
    for kind, attributes in ops:
        for name in ("normalized_shape", "in_features", "size"):
            size = attributes.get(name)
            if size is not None:
                return [rows, *(size if isinstance(size, list) else [size])]
        if kind in changes:
            return []
    return []
