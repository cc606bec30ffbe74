"""The hooks of modules: a group must not go past a module that has any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

# The dicts of a module that hold them.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules carries forward, pre-forward or backward hooks."""
    return any(
        op._forward_hooks or op._forward_pre_hooks or op._backward_hooks or op._backward_pre_hooks
        for op in modules
    )


def hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    """The dicts that hold the hooks of a module; setting another one is an edit of the module."""
    return [getattr(module, name) for name in HOOKS]
