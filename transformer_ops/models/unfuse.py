"""The way back from `fuse`."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .fused_class import FusedModule
from .region import IS_OFF, RECOMPUTE, REGIONS

__all__ = ["unfuse", "unfused"]


def unfuse(model: nn.Module) -> None:
    """Takes `fuse` back: each module has its own class again. What others have derived from the
    fused class since, such as FSDP2 or `parametrize`, stays."""
    known: dict[type[Any], type[Any]] = {}
    for module in list(model.modules()):
        if isinstance(module, FusedModule):
            kind = _without_ops(type(module), known)
            for name in (REGIONS, IS_OFF, RECOMPUTE):
                module.__dict__.pop(name, None)
            module.__class__ = kind


def _without_ops(kind: type[Any], known: dict[type[Any], type[Any]]) -> type[Any]:
    """The class itself, or one that is derived from the base of the fused class in its place."""
    if "_tops_base" in vars(kind):
        base: type[Any] = kind._tops_base
        return base
    if not issubclass(kind, FusedModule):
        return kind
    if kind not in known:
        bases = tuple(_without_ops(base, known) for base in kind.__bases__)
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        meta: Any = type(kind)
        made = known[kind] = meta(kind.__name__, bases, names)
        fused: Any = next(one for one in kind.__mro__ if "_tops_base" in vars(one))
        ours = [inspect.unwrap(vars(fused)[name]) for name in fused._tops_methods]
        for name, value in vars(kind).items():
            # A base class may have wrapped our forward for its subclass, as it has its own now.
            is_ours = callable(value) and inspect.unwrap(value) in ours
            if name not in ("__dict__", "__weakref__") and not is_ours:
                setattr(made, name, _moved(value, kind, made))
    return known[kind]


def _moved(value: Any, kind: type[Any], made: type[Any]) -> Any:
    """An attribute of a class for another one. The class that methods refer to, as `super()` does,
    is the other one."""
    if isinstance(value, classmethod | staticmethod):
        return type(value)(_moved(value.__func__, kind, made))
    if isinstance(value, property):
        return property(
            *(_moved(part, kind, made) for part in (value.fget, value.fset, value.fdel))
        )
    if not isinstance(value, types.FunctionType):
        return value
    cells = value.__closure__ or ()
    if not any(_refers_to(cell, kind) for cell in cells):
        return value
    closure = tuple(types.CellType(made) if _refers_to(cell, kind) else cell for cell in cells)
    moved = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
    )
    moved.__kwdefaults__ = value.__kwdefaults__
    return functools.update_wrapper(moved, value)


def _refers_to(cell: types.CellType, kind: type[Any]) -> bool:
    try:
        return cell.cell_contents is kind
    except ValueError:  # a variable that has no value yet
        return False


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Within this context the modules of a fused model run their own statements."""
    found = [module for module in model.modules() if isinstance(module, FusedModule)]
    before = [module.__dict__.get(IS_OFF, False) for module in found]
    for module in found:
        module.__dict__[IS_OFF] = True
    try:
        yield
    finally:
        for module, is_off in zip(found, before, strict=True):
            module.__dict__[IS_OFF] = is_off
