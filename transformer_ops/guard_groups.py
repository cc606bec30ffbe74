"""States that compiled graphs guard on. Objects in the same one may take each other's place."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

from . import _C
from .locks import new_lock

_lock = new_lock()
_records: weakref.WeakValueDictionary[str, GuardGroup] = weakref.WeakValueDictionary()


class GuardGroup:
    """The living objects of one state. They alone keep it."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._asked: weakref.ref[Any] | None = None

    def members(self) -> list[Any]:
        """The one that was asked last for its state comes first, as it is being traced; the others
        in no order, and some of them may be garbage that is not collected yet."""
        with _lock:
            found = list(self._members)
        first = self._asked() if self._asked is not None else None
        if first is None:
            return found
        return [first, *(member for member in found if member is not first)]

    def note_asked(self, member: Any) -> None:
        """Says that the member was asked for its state."""
        self._asked = weakref.ref(member)


def join(member: Any, state: str, left: GuardGroup | None) -> GuardGroup:
    """The group of a state, which the member has to keep in place of those it leaves."""
    with _lock:
        if left is not None:
            left._members.discard(member)
        group = _records.get(state)
        if group is None:
            group = _records[state] = GuardGroup()
        group._members.add(member)
        return group


def find(state: str) -> list[Any]:
    """All that have joined the group of a state and live."""
    group = _records.get(state)
    return [] if group is None else group.members()


def untraced(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The method as a built-in function: Dynamo reads a property with such a getter as it reads
    an attribute, and guards on the value alone."""
    found: Callable[[Any], Any] = _C.untraced(method)
    return found


def digest(content: object) -> str:
    """A short text for what a state is made of; equal where `repr` is."""
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()
