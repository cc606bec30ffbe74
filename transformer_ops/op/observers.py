"""The groups that contain an op. The op tells them about its edits."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import is_tensor

from ..base.handles import handles
from ..base.locks import new_lock
from .hooks import HOOKS

# The dicts of a module that C++ references.
KEPT_DICTS = (*HOOKS, "_parameters")
# A WeakSet must not change while it is copied.
_observers_lock = new_lock()


class Observer:
    """An object that contains ops, and is told when they change."""

    def _op_changed(self) -> None:
        """Called when a group of the op has to be made again."""
        raise NotImplementedError

    def _plans_changed(self) -> None:
        """Called when the plans of the op's groups have to be made again."""
        raise NotImplementedError

    def _is_group_of(self, ops: Sequence[Any]) -> bool:
        """Whether it is a group of these very ops."""
        return False


class ObservedMixin:
    """An op that tells the groups and Sequentials that contain it when it changes."""

    _is_watched = False

    @property
    def basic_ops(self) -> list[Any]:
        """The basic ops that it consists of, in order."""
        raise NotImplementedError

    @property
    def _is_captured(self) -> bool:
        own = self.__dict__
        # A copy that is being made still has attributes of the original.
        return bool(own.get("_observers")) and handles.find(own["_number"]) is self

    def _add_observer(self, observer: Observer) -> None:
        """Adds an observer, which is told when this op changes."""
        with _observers_lock:
            self.__dict__.setdefault("_observers", weakref.WeakSet()).add(observer)

    def _current_observers(self) -> list[Observer]:
        with _observers_lock:
            return list(self.__dict__.get("_observers", ()))

    def _make_groups_stale(self) -> None:
        for observer in self._current_observers():
            observer._op_changed()

    def _structure(self) -> list[Any]:
        """What the groups that contain the op consist of, to be compared by identity."""
        own = self.__dict__
        dicts = [own[name] for name in KEPT_DICTS]
        return [type(self), own.get("forward"), *dicts, *self.basic_ops]

    def _planned_attributes(self) -> list[str] | None:
        try:
            # repr() distinguishes -0.0 from 0.0 and True from 1.
            ops = [op for op in self.basic_ops if not op.is_python]
            native = [f"{op._kind} {op._attributes()!r}" for op in ops]
            return native + [repr(op._own_values()) for op in self.basic_ops if op._is_watched]
        except (AttributeError, RuntimeError):
            return None  # one was deleted or is unknown now, which the next call reports

    def _listed_names(self) -> list[tuple[str, ...]] | None:
        try:
            return [op._tensor_names() for op in self.basic_ops if op._lists]
        except (AttributeError, TypeError):
            return None

    def _watch(self) -> None:
        """From now on plans depend on the user's attributes of the op."""
        self.__dict__["_is_watched"] = True

    def _own_values(self) -> dict[str, Any]:
        """The attributes that are neither part of `nn.Module` nor tensors, and what a guard may
        read of the parameters."""
        own = self.__dict__
        values = {k: v for k, v in own.items() if k[0] != "_" and k != "training"}
        shapes = {k: getattr(p, "shape", None) for k, p in own["_parameters"].items()}
        return {k: v for k, v in values.items() if not is_tensor(v)} | shapes

    @contextmanager
    def _noting_changes(self) -> Iterator[None]:
        """Makes plans and groups stale if the block changes what they were made from."""
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
