"""A list of ops for the group that one of them owns."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


class Ops(Sequence[Any]):
    """A list of ops that does not keep `owner` alive, which owns what holds the list. Without one
    it keeps all."""

    def __init__(self, ops: Iterable[Any], owner: Any = None) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._ops = [None if op is owner else op for op in ops]

    def __len__(self) -> int:
        return len(self._ops)

    def __iter__(self) -> Iterator[Any]:
        return map(self._found, self._ops)

    def __getitem__(self, index: Any) -> Any:
        found = self._ops[index]
        if isinstance(index, slice):
            return list(map(self._found, found))
        return self._found(found) if found is None else found

    def _found(self, op: Any) -> Any:
        if op is not None or self._owner is None:
            return op
        owner = self._owner()
        if owner is None:
            raise RuntimeError("[OperationFuser] ops must exist, got a freed one")
        return owner

    def append(self, op: Any) -> None:
        """Adds an op."""
        self._ops.append(op)

    def copy(self) -> Ops:
        """A list of the same ops."""
        made = Ops(())
        made._owner, made._ops = self._owner, list(self._ops)
        return made
