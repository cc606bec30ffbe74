"""The hooks of modules: a group must not bypass a module that has any."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

# The dicts of a module that contain hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules has forward, pre-forward or backward hooks."""
    return any(
        op._forward_hooks or op._forward_pre_hooks or op._backward_hooks or op._backward_pre_hooks
        for op in modules
    )


class HookDicts:
    """The dicts that contain the hooks of modules; true if one contains any. Replacing one of the
    dicts is an edit of its module.

    It is no tuple: `torch.export` rebuilds the tuples and dicts among the attributes of a module,
    and hooks that are registered later would be missing in the copies.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._dicts = [getattr(module, name) for module in modules for name in HOOKS]

    def __bool__(self) -> bool:
        return any(self._dicts)
