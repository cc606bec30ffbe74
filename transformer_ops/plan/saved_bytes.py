"""How many bytes a plan keeps for backward: each distinct tensor once, parameters left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Kept(NamedTuple):
    """One slot: its bytes, and a number that slots in the same memory share."""

    bytes: int
    storage: int


class SavedBytes(NamedTuple):
    """What one call keeps. `slots` by op and name, (3, "input"); those that a Python op keeps for
    itself are (3, "saved0")..."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    slots: dict[tuple[int, str], Kept]

    @property
    def width(self) -> int:
        """Elements in a row of the input."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Rows of the input: all its dimensions but the last."""
        return math.prod(self.shape[:-1])

    @property
    def total(self) -> int:
        """Bytes of the distinct tensors of the call."""
        return sum({kept.storage: kept.bytes for kept in self.slots.values()}.values())


def saved_bytes(
    shape: Sequence[int], dtype: torch.dtype, rows: Iterable[tuple[int, str, int, int]]
) -> SavedBytes:
    """Of the rows (op, slot, bytes, storage) that C++ gives."""
    slots = {(op, name): Kept(size, storage) for op, name, size, storage in rows}
    return SavedBytes(tuple(shape), dtype, slots)


def likely_shape(ops: Sequence[tuple[str, Mapping[str, Any]]], changes: set[str]) -> list[int]:
    """An input that the ops of a plan would take, for a call whose sizes nobody saw (compiled).

    The first op that fixes a size decides, unless a kind that `changes` it comes before; else [].
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
