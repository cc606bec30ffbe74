"""States that compiled graphs guard on. Objects in the same state are interchangeable."""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from .locks import new_lock

_CAN_ISOLATE = "isolate_recompiles" in inspect.signature(torch.compile).parameters

_lock = new_lock()
_records: weakref.WeakValueDictionary[str, GuardGroup] = weakref.WeakValueDictionary()
# For each state that was traced: what the last plan was made for. There are as many as graphs.
_traced: dict[str, Any] = {}


class GuardGroup:
    """The living objects of one state. Only they keep the group alive."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._asked: weakref.ref[Any] | None = None
        # (what is compiled, options, the compiled function)
        self._compiled: list[tuple[Any, Any, Any]] = []

    def compiled(self, function: Callable[..., Any], *options: Any) -> Callable[..., Any]:
        """The function, compiled for the members. What compiled functions of other groups do does
        not count against its limit of recompilations."""
        with _lock:
            for known, given, found in self._compiled:
                if known is function and given == options:
                    return found
            arguments, keywords = options
            # Older torch has only one limit, for all that run the same code.
            own = {"isolate_recompiles": True} if _CAN_ISOLATE else {}
            made: Any = torch.compile(function, *arguments, **{**own, **keywords})
            self._compiled.append((function, options, made))
        return made

    def members(self) -> list[Any]:
        """The member whose state was read last comes first, because it is being traced. The others
        are in no order, and some may be garbage that is not collected yet."""
        with _lock:
            found = list(self._members)
        first = self._asked() if self._asked is not None else None
        if first is None:
            return found
        return [first, *(member for member in found if member is not first)]

    def note_asked(self, member: Any) -> None:
        """Records that the member's state was read."""
        self._asked = weakref.ref(member)


def join(member: Any, state: str, left: GuardGroup | None) -> GuardGroup:
    """The group of a state. The member must store it instead of the group that it leaves."""
    with _lock:
        if left is not None:
            left._members.discard(member)
        group = _records.get(state)
        if group is None:
            group = _records[state] = GuardGroup()
        group._members.add(member)
        return group


def find(state: str) -> list[Any]:
    """All living objects that have joined the group of a state."""
    group = _records.get(state)
    return [] if group is None else group.members()


def note_traced(state: str, facts: Any) -> None:
    """Records what a plan of a graph was made for, which is plain data."""
    _traced[state] = facts


def traced(state: str) -> Any:
    """What the last plan of a graph in this state was made for, or None."""
    return _traced.get(state)


def untraced(method: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The method as a built-in function. Dynamo reads a property with such a getter like an
    attribute, and guards only on the value."""
    found: Callable[[Any], Any] = _C.untraced(method)
    return found


def digest(content: object) -> str:
    """A short text for the content of a state; equal if `repr` is equal."""
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()
