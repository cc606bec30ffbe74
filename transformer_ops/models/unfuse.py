"""The way back from `fuse`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .fused_class import FusedModule
from .region import IS_OFF, RECOMPUTE, REGIONS

__all__ = ["unfuse", "unfused"]


def unfuse(model: nn.Module) -> None:
    """Takes `fuse` back: each module has its own class again."""
    for module in list(model.modules()):
        if isinstance(module, FusedModule):
            for name in (REGIONS, IS_OFF, RECOMPUTE):
                module.__dict__.pop(name, None)
            module.__class__ = module._tops_base  # type: ignore[assignment]


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
