"""Branches of a `forward` that attributes of the module decide.

In: a module and the tests that lead to statements, `if self.gamma is not None:`. Out: whether the
statements may run in the next call.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .windows import Condition

__all__ = ["may_run"]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
# What else may be compared, or asked whether it is true, may be a tensor.
_PLAIN = (bool, int, float, str, type(None))


class _Undecided(Exception):
    """Something else than attributes decides."""


def may_run(module: nn.Module, conditions: Iterable[Condition]) -> bool:
    """Whether statements under these conditions may run in the next call: False if an attribute of
    the module, other than `training`, is in the way."""
    return all(_truth(module, test) in (is_true, None) for test, is_true in conditions)


def _truth(module: nn.Module, test: ast.expr) -> bool | None:
    """Whether a test is true; None if attributes do not decide."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        found = _truth(module, test.operand)
        return None if found is None else not found
    if isinstance(test, ast.BoolOp):
        decisive = isinstance(test.op, ast.Or)  # one that is true, or one that is false
        truths = [_truth(module, value) for value in test.values]
        if decisive in truths:
            return decisive
        return None if None in truths else not decisive
    try:
        value = _value(module, test)
    except _Undecided:
        return None
    return bool(value) if isinstance(value, _PLAIN) else None


def _value(module: nn.Module, node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id == "self":
        return module
    if isinstance(node, ast.Attribute) and node.attr != "training":
        return _attribute(_value(module, node.value), node.attr)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        first, second = (_value(module, side) for side in (node.left, node.comparators[0]))
        is_identity = isinstance(node.ops[0], ast.Is | ast.IsNot)
        if is_identity or (isinstance(first, _PLAIN) and isinstance(second, _PLAIN)):
            return _COMPARISONS[type(node.ops[0])](first, second)
    raise _Undecided


def _attribute(owner: Any, name: str) -> Any:
    if isinstance(inspect.getattr_static(type(owner), name, None), property):
        raise _Undecided  # which may do anything
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _Undecided from None
