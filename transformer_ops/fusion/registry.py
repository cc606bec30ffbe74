"""Fusions: register, list and remove them. One registry has users' functions and built-in rules."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, Literal

from .. import _C
from ..base.locks import new_lock
from ..op.base import BasicOperation
from ..op.fused import FusedOperation
from ..op.methods import is_text, shown
from .pattern import Pattern, PatternEntry, check_pattern

Pass = Literal["forward", "backward", "forward_backward"]
FusionFunction = Callable[..., Any]
# Called with the basic ops of a match. Returns None, or the reason why the match does not fit.
Guard = Callable[[list[BasicOperation]], str | None]
# The forms in which a pattern may be given.
PatternLike = Sequence[type[BasicOperation] | tuple[type[BasicOperation], ...] | PatternEntry]

# Compiled graphs guard on this number: any change of the registry makes them stale. C++ writes it
# at each change, also when a library that is loaded later adds a rule.
VERSION: int
_C.keep_version_in(globals())

_handles: dict[int, FusionHandle] = {}
_rules: dict[int, FusionHandle] = {}
# C++ has a fusion before its handle is in this table.
_lock = new_lock()


class FusionHandle:
    """One registered fusion. Calling it calls the function. As a context manager it unregisters the
    fusion on exit.

    Attributes: `name`; `pass_name` ("forward", "backward" or "forward_backward"); `origin`
    ("built-in", the name of a C++ library, or the module of the function); `func` (None for a
    native rule); `pattern` (None for a function that rewrites the list of ops); `guard`.
    """

    def __init__(
        self,
        identity: int,
        name: str,
        pass_name: str,
        origin: str,
        func: FusionFunction | None,
        pattern: Pattern | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._identity = identity
        self.name = name
        self.pass_name = pass_name
        self.origin = origin
        self.func = func
        self.pattern = pattern
        self.guard = guard
        if func is not None:
            functools.update_wrapper(self, func, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.func is None:
            raise TypeError(f"[{self.name}] a native rule must not be called, got {self!r}")
        return self.func(*args, **kwargs)

    @property
    def registered(self) -> bool:
        """Whether it is still registered."""
        return any(row[0] == self._identity for row in _C.fusions())

    def remove(self) -> None:
        """Unregisters the fusion; plans made with it are dropped. A second call does nothing."""
        with _lock:
            _C.remove_fusion(self._identity)
            _handles.pop(self._identity, None)

    @contextmanager
    def disabled(self) -> Iterator[FusionHandle]:
        """In this scope no plan uses the fusion, in all threads. Use it to compare with and
        without.

        It also works for built-in rules and, unlike `remove()`, keeps the fusion's position in the
        order.
        """
        _C.suspend_fusion(self._identity, 1)
        try:
            yield self
        finally:
            _C.suspend_fusion(self._identity, -1)

    def __enter__(self) -> FusionHandle:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"FusionHandle({self.name!r}, pass={self.pass_name!r}, origin={self.origin!r})"


def fusions() -> list[FusionHandle]:
    """All registered fusions in the order they run, including built-in ones."""
    with _lock:
        return [_handle(*row) for row in _C.fusions()]


def _handle(identity: int, name: str, pass_name: str, origin: str, is_rule: bool) -> FusionHandle:
    if not is_rule:
        return _handles[identity]
    if identity not in _rules:
        _rules[identity] = FusionHandle(identity, name, pass_name, origin, None)
    return _rules[identity]


def handle_of(identity: int) -> FusionHandle | None:
    """The handle of a user's fusion; None if it was removed meanwhile."""
    with _lock:
        return _handles.get(identity)


def register_forward_fusion(
    func: FusionFunction,
    prepend: bool = False,
    *,
    pattern: PatternLike | None = None,
    guard: Guard | None = None,
    name: str | None = None,
) -> FusionHandle:
    """Registers a fused op for a pattern of ops, or a function that rewrites lists of ops.

    With a pattern, `func` is a `FusedOperation` class, or any function that makes a fused op from a
    list of basic ops. It replaces ops that no earlier fusion took: one op for each entry, without
    gaps. Users' fusions run before built-in rules, in registration order; those with `prepend=True`
    are first.

    Without a pattern, `func(ops, *, recipe=None, **unused)` gets the ops of a group as a plain
    list, and returns the list with some consecutive ops replaced by `FusedOperation`s.

    Either form may be called any number of times. If a class or a function of a module is defined
    again and registered, as when a cell of a notebook runs twice, it replaces the old one of the
    same name in this pass, and a UserWarning says so.

    Args:
        pattern: a list whose entries are classes of basic ops, tuples of alternatives, or
            `optional(...)`.
        guard: `guard(ops)` gets the ops of a match and returns None, or a str with the reason why
            it does not fit, which `explain()` shows.
        name: the name in plans and `explain()`; None: that of `func`.

    Raises:
        TypeError: `func` or `guard` is not callable; an entry is no class of basic ops; a class has
            no pattern, or a guard has none.
        ValueError: all entries are optional; `func` is already registered for this in this pass; a
            class lacks the methods of the pass.
    """
    return _register(func, "forward", prepend, pattern, guard, name)


def register_backward_fusion(
    func: FusionFunction,
    prepend: bool = False,
    *,
    pattern: PatternLike | None = None,
    guard: Guard | None = None,
    name: str | None = None,
) -> FusionHandle:
    """Same as `register_forward_fusion`, for the backward pass. Lists of ops are in forward
    order."""
    return _register(func, "backward", prepend, pattern, guard, name)


def register_forward_backward_fusion(
    func: FusionFunction,
    prepend: bool = False,
    *,
    pattern: PatternLike | None = None,
    guard: Guard | None = None,
    name: str | None = None,
) -> FusionHandle:
    """Same as `register_forward_fusion`, for both passes at once, before either of them.

    The `FusedOperation`s implement forward and backward and choose what they save.
    """
    return _register(func, "forward_backward", prepend, pattern, guard, name)


def _register(
    func: FusionFunction,
    pass_name: Pass,
    prepend: bool,
    pattern: PatternLike | None,
    guard: Guard | None,
    name: str | None,
) -> FusionHandle:
    if isinstance(func, FusionHandle) and func.func is not None:
        func = func.func
    if not callable(func) or isinstance(func, FusionHandle):
        raise TypeError(f"[fusion] func must be callable, got {shown(func)}")
    if name is not None and not is_text(name):
        raise TypeError(f"[fusion] name must be a str or None, got {shown(name)}")
    if type(prepend) is not bool:
        raise TypeError(f"[fusion] prepend must be a bool, got {shown(prepend)}")
    entries = None if pattern is None else check_pattern(pattern)
    check_kind(func, pass_name, entries, guard)
    _remove_redefined(func, pass_name)
    with _lock:
        for handle in _handles.values():
            is_same = handle.pass_name == pass_name and handle.pattern == entries
            if is_same and _is_same(handle.func, func):
                raise ValueError(
                    f"[fusion] func must be registered once in the {pass_name} pass, "
                    f"got {handle.name!r} again"
                )
        label = name if name is not None else getattr(func, "__name__", type(func).__name__)
        origin = getattr(func, "__module__", None) or "user"
        rows = [(entry.names, entry.optional) for entry in entries or ()]
        identity = _C.add_user_fusion(label, pass_name, origin, prepend, rows)
        handle = FusionHandle(identity, label, pass_name, origin, func, entries, guard)
        _handles[identity] = handle
    return handle


def check_kind(
    func: FusionFunction, pass_name: str, pattern: PatternLike | None, guard: object
) -> None:
    """Raises TypeError if function, pattern and guard do not match, and ValueError if a class lacks
    the methods of the pass."""
    fused = func if isinstance(func, type) and issubclass(func, FusedOperation) else None
    if pattern is None:
        if fused is not None:
            raise TypeError(f"[fusion] a fused op must have a pattern, got {shown(func)} alone")
        if guard is not None:
            raise TypeError(f"[fusion] a guard must have a pattern, got {shown(guard)} alone")
        return
    if guard is not None and not callable(guard):
        raise TypeError(f"[fusion] guard must be callable or None, got {shown(guard)}")
    if fused is not None:
        check_methods("fusion", pass_name, fused, ValueError)


def check_methods(
    fusion: str, pass_name: str, cls: type[FusedOperation], error: type[Exception]
) -> None:
    """Raises `error` unless the class of fused ops defines the methods that the pass calls."""
    missing = []
    if "forward" in pass_name and cls._python_forward is None:
        missing.append("a forward")
    if "backward" in pass_name and cls._python_backward is None:
        missing.append("fuser_backward")
    if missing:
        raise error(
            f"[{fusion}] a fused op of the {pass_name} pass must define "
            f"{' and '.join(missing)}, got {cls.__name__}"
        )


def _remove_redefined(func: FusionFunction, pass_name: Pass) -> None:
    """Removes fusions whose class or function was defined again under the same name, as when a cell
    of a notebook runs twice. The first one registered would otherwise take all matches."""
    where = (getattr(func, "__module__", None), getattr(func, "__qualname__", None))
    found: Any = sys.modules.get(str(where[0]))
    for name in str(where[1]).split("."):
        found = getattr(found, name, None)
    with _lock:
        registered = list(_handles.values())
    for handle in registered:
        old = handle.func
        theirs = (getattr(old, "__module__", None), getattr(old, "__qualname__", None))
        if old is func or theirs != where or handle.pass_name != pass_name:
            continue
        # The name is that of a decorated function until its decorator returns.
        if found is func or found is handle:
            handle.remove()
            warnings.warn(
                f"[fusion] {handle.name!r} in the {pass_name} pass is replaced, because "
                f"{'.'.join(map(str, where))} was defined again",
                stacklevel=4,
            )


def _is_same(func: object, other: object) -> bool:
    # Each access of a bound method creates a new object.
    return func is other or (isinstance(func, MethodType) and func == other)
