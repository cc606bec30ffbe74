"""The groups that hold an op, which it tells of its edits."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import is_tensor

from ..handles import handles
from ..locks import new_lock
from .hooks import HOOKS

# The dicts of a module that C++ keeps.
KEPT_DICTS = (*HOOKS, "_parameters")
# A WeakSet must not change while it is copied.
_observers_lock = new_lock()


class Observer:
    """What holds ops, and is told when they change."""

    def _op_changed(self) -> None:
        """A group of the op has to be made anew."""
        raise NotImplementedError

    def _plans_changed(self) -> None:
        """The plans of the op's groups have to."""
        raise NotImplementedError

    def _is_group_of(self, ops: Sequence[Any]) -> bool:
        """Whether it is a group of these very ops."""
        return False


class ObservedMixin:
    """An op that tells the groups and Sequentials that hold it when it changes."""

    _is_watched = False

    @property
    def basic_ops(self) -> list[Any]:
        """The basic ops it stands for, in order."""
        raise NotImplementedError

    @property
    def _is_captured(self) -> bool:
        own = self.__dict__
        # A copy that is being made still carries what belongs to the original.
        return bool(own.get("_observers")) and handles.find(own["_number"]) is self

    def _add_observer(self, observer: Observer) -> None:
        """From now on the observer is told when this op changes."""
        with _observers_lock:
            self.__dict__.setdefault("_observers", weakref.WeakSet()).add(observer)

    def _current_observers(self) -> list[Observer]:
        with _observers_lock:
            return list(self.__dict__.get("_observers", ()))

    def _make_groups_stale(self) -> None:
        for observer in self._current_observers():
            observer._op_changed()

    def _structure(self) -> list[Any]:
        """What the groups that hold the op are made of, to be compared by identity."""
        own = self.__dict__
        dicts = [own[name] for name in KEPT_DICTS]
        return [type(self), own.get("forward"), *dicts, *self.basic_ops]

    def _planned_attributes(self) -> list[str] | None:
        try:
            # repr() tells -0.0 from 0.0 and True from 1.
            ops = [op for op in self.basic_ops if not op.is_python]
            native = [f"{op._kind} {op._attributes()!r}" for op in ops]
            return native + [repr(op._own_values()) for op in self.basic_ops if op._is_watched]
        except (AttributeError, RuntimeError):
            return None  # one was deleted or is unknown now, which the next call says

    def _listed_names(self) -> list[tuple[str, ...]] | None:
        try:
            return [op._tensor_names() for op in self.basic_ops if op._lists]
        except (AttributeError, TypeError):
            return None

    def _watch(self) -> None:
        """From now on plans depend on what the user keeps as attributes of the op."""
        self.__dict__["_is_watched"] = True

    def _own_values(self) -> dict[str, Any]:
        """Attributes that are no part of `nn.Module`, and no tensors."""
        own = self.__dict__.items()
        return {k: v for k, v in own if k[0] != "_" and k != "training" and not is_tensor(v)}

    @contextmanager
    def _noting_changes(self) -> Iterator[None]:
        """Makes plans and groups stale where the block changes what they were made of."""
        if not self._is_captured:
            yield
            return
        structure, attributes = self._structure(), self._planned_attributes()
        names = self._listed_names()
        yield
        now = self._structure()
        same = len(now) == len(structure) and all(map(operator.is_, now, structure))
        if not same or self._listed_names() != names:
            self._make_groups_stale()
        if self._planned_attributes() != attributes:
            for observer in self._current_observers():
                observer._plans_changed()
