"""The hooks of modules: a group must not bypass a module that has any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

# The dicts of a module that contain hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules has forward, pre-forward or backward hooks."""
    return any(
        op._forward_hooks or op._forward_pre_hooks or op._backward_hooks or op._backward_pre_hooks
        for op in modules
    )


def hook_dicts(module: nn.Module) -> list[dict[int, Any]]:
    """The dicts that contain the hooks of a module. Replacing one is an edit of the module."""
    return [getattr(module, name) for name in HOOKS]
