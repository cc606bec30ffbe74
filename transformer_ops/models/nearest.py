"""The statements that come nearest to those of a rule, and what differs."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from typing import Any

from torch import nn

from .pattern import Pattern
from .rules import FuseRule
from .statements import function_of
from .windows import Window, windows_of

__all__ = ["nearest_statements"]


def nearest_statements(rule: FuseRule, model: nn.Module) -> str:
    """For a rule that matches nothing in the model: the nearest lines, and the first part that
    differs; an empty text if no module of it has such statements."""
    best, text = 0.0, ""
    for kind in dict.fromkeys(map(type, model.modules())):
        for pattern, window in _pairs(rule, kind):
            wanted, found = pattern.expression, window.value.expression
            likeness = difflib.SequenceMatcher(None, _labels(wanted), _labels(found)).ratio()
            difference = _difference(wanted, found)
            if likeness > best and difference is not None:
                best = likeness
                lines = "-".join(map(str, dict.fromkeys(window.lines)))
                text = (
                    f"lines {lines} of {kind.__name__}.{rule.method}, which have "
                    f"'{ast.unparse(difference[1])}' where the rule has "
                    f"'{ast.unparse(difference[0])}'"
                )
    return text


def _pairs(rule: FuseRule, kind: type[nn.Module]) -> Iterator[tuple[Pattern, Window]]:
    method = getattr(kind, rule.method, None)
    # Classes of torch are no part of a model of its own.
    if method is None or kind.__module__.startswith("torch."):
        return
    for window in windows_of(function_of(method)):
        for pattern in rule.patterns:
            yield pattern, window


def _labels(expression: ast.expr) -> list[str]:
    """What is alike in two expressions: their nodes, and the names of functions of modules."""
    names = (getattr(node, "attr", "") for node in ast.walk(expression))
    return [type(node).__name__ for node in ast.walk(expression)] + [n for n in names if n]


def _difference(wanted: Any, found: Any) -> tuple[Any, Any] | None:
    """The first parts that differ, of a pattern and of an expression."""
    if isinstance(wanted, ast.Name) and _stands_for(wanted.id, found):
        return None
    if isinstance(wanted, ast.Call) and getattr(wanted.func, "id", "").startswith("any_"):
        return None
    if type(wanted) is not type(found):
        return wanted, found
    names = [name for name in wanted._fields if name not in ("ctx", "kind")]
    if isinstance(wanted, ast.Attribute) and wanted.attr.startswith("any_"):
        names.remove("attr")
    for name in names:
        one, other = getattr(wanted, name), getattr(found, name)
        pairs = [(one, other)]
        if isinstance(one, list):
            if len(one) != len(other):
                return wanted, found
            pairs = list(zip(one, other, strict=True))
        for a, b in pairs:
            if isinstance(a, ast.AST) and isinstance(b, ast.AST):
                inner = _difference(a, b)
                if inner is not None:
                    # An operator or a name alone says little.
                    return inner if isinstance(inner[0], ast.expr) else (wanted, found)
            elif a != b:
                return wanted, found
    return None


def _stands_for(placeholder: str, found: Any) -> bool:
    if placeholder.startswith("any_"):
        return isinstance(found, ast.Constant)
    return len(placeholder) == 1 and placeholder.isupper() and isinstance(found, ast.Name)
