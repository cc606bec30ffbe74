"""The basic ops: `__all__` of every module of this folder. Adding an op is adding a file."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

__all__: list[str] = []

for _module in pkgutil.iter_modules(__path__):
    _ops = importlib.import_module(f"{__name__}.{_module.name}")
    for _name in _ops.__all__:
        globals()[_name] = getattr(_ops, _name)
    __all__ += _ops.__all__

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
