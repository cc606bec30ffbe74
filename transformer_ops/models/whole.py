"""What the whole `forward` of a module computes.

In: a module and texts such as `return self.any_act(H)`. Out: the names in the first text that is
all of its `forward`: act is `act_fn`, and H is `x`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..op.borrowed import class_of
from .pattern import Names, Pattern
from .rules import FuseSkip

__all__ = ["check_number", "find", "name_of", "names_in", "patterns", "unknown", "whole"]


def patterns(*texts: str) -> tuple[Pattern, ...]:
    """A pattern for each text."""
    return tuple(map(Pattern, texts))


def find(module: nn.Module, patterns: Iterable[Pattern]) -> Names | None:
    """The names in the first pattern that is the whole `forward` of the module. None of a function
    that is wrapped: who knows in what."""
    function = class_of(module).forward
    if hasattr(function, "__wrapped__"):
        return None
    found = (pattern.match_all(function) for pattern in patterns)
    return next((names for names in found if names is not None), None)


def unknown(module: nn.Module) -> FuseSkip:
    """Says that no ops are known for a module."""
    return FuseSkip(f"the forward of {name_of(module)} is not known")


def name_of(module: nn.Module) -> str:
    """The name of a module's class; in full, where a class of torch.nn has the same."""
    kind = class_of(module)
    is_namesake = getattr(nn, kind.__name__, kind) is not kind
    return f"{kind.__module__}.{kind.__qualname__}" if is_namesake else kind.__name__


def whole(module: nn.Module, pattern: Pattern) -> Names:
    """The names that make a pattern the whole `forward` of a module. FuseSkip for another one."""
    names = find(module, (pattern,))
    if names is None:
        raise unknown(module)
    return names


def names_in(function: Any, pattern: Pattern) -> Names | None:
    """The names that make a pattern the statements of a function that nothing is wrapped around."""
    is_plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
    return pattern.match_text(function) if is_plain else None


def check_number(module: nn.Module, name: str) -> None:
    """FuseSkip if an attribute is no number: a tensor may train, or change its value."""
    found = getattr(module, name)
    if not isinstance(found, int | float):
        raise FuseSkip(f"{name} is no number but a {type(found).__name__}")
