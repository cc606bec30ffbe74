"""Hooks of transformers that record outputs in calls that ask for them, and do nothing in others.
Once a call has asked, they stay on its modules for good."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import nn

from ..op.hooks import HOOKS
from .reads import cell_of

__all__ = ["Captures", "captures_of"]

_MODULE = "transformers.utils.output_capturing"


class Captures(NamedTuple):
    """What hooks record, by name, and the variable with what the current call asks for."""

    keys: frozenset[str]
    collector: Any

    def are_on(self) -> bool:
        """Whether the current call asks for one of them."""
        asked = self.collector.get()
        return asked is not None and any(key in asked for key in self.keys)


def captures_of(module: nn.Module) -> Captures | None:
    """What the hooks of a module record; None if it has no such hooks, or others as well."""
    own, keys = vars(module), []
    if not own.get("_forward_hooks") or any(own.get(n) for n in HOOKS if n != "_forward_hooks"):
        return None
    for hook in module._forward_hooks.values():
        if getattr(hook, "__module__", "") != _MODULE:
            return None
        cell = cell_of(hook, "key")
        if cell is None:
            return None
        keys.append(cell.cell_contents)
    collector = getattr(sys.modules[_MODULE], "_active_collector", None)
    return None if collector is None else Captures(frozenset(keys), collector)
