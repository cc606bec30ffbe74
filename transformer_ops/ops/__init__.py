"""The basic ops: `__all__` of every module of this folder. Adding an op is adding a file;
`tools/make_reference.py` then writes the stub for type checkers."""

from __future__ import annotations

import importlib
import pkgutil

__all__: list[str] = []

for _module in pkgutil.iter_modules(__path__):
    _ops = importlib.import_module(f"{__name__}.{_module.name}")
    for _name in _ops.__all__:
        globals()[_name] = getattr(_ops, _name)
    __all__ += _ops.__all__
