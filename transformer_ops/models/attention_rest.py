"""The statements of an attention module behind its attention, as a function of what that gives."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .statements import function_from, reads_in, tree_of, variables_in

__all__ = ["Rest", "rest_of"]


class Rest(NamedTuple):
    """Statements that run behind ops.

    Attributes:
        run: of the module, its input, and both results of attention; what the module returns.
        result: the variable of the first result.
        attributes: those of the module that they read.
    """

    run: Callable[..., Any]
    result: str
    attributes: frozenset[str]


@functools.lru_cache(maxsize=1024)
def rest_of(function: Any, at: ast.stmt) -> Rest | None:
    """What is behind a statement with a call of attention, and what it reads of the statements
    before. None if it reads an argument, or the weights of attention other than to return them, or
    changes tensors in place: ops save what attention gives."""
    tree = copy.copy(tree_of(function))
    assert tree is not None
    place = tree.body.index(at)
    before, after = tree.body[:place], tree.body[place + 1 :]
    names = _names(at.targets[0]) if isinstance(at, ast.Assign) else []
    end = after[-1] if after else None
    if len(names) != 2 or not isinstance(end, ast.Return) or not isinstance(end.value, ast.Tuple):
        return None
    result, weights = names
    inner = [node for one in after for node in ast.walk(one)]
    is_pair = len(end.value.elts) == 2 and getattr(end.value.elts[1], "id", "") == weights
    uses = sum(isinstance(node, ast.Name) and node.id == weights for node in inner)
    ends = sum(isinstance(node, ast.Return) for node in inner)
    if not is_pair or (uses, ends) != (1, 1) or any(map(_changes, inner)):
        return None
    _, needed = _read(after, set(), always=True)
    kept, needed = _read(before, needed - {*names})
    given = list(inspect.signature(function).parameters)[:2]
    code = function.__code__
    if needed.intersection((*code.co_varnames, *code.co_cellvars)) - {*given}:
        return None
    arguments = [ast.arg(name) for name in (*given, *names)]
    tree.args = ast.arguments([], arguments, None, [], [], None, [])
    tree.body = [*kept, *after]
    attributes = {
        node.attr
        for one in tree.body
        for node in ast.walk(one)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == given[0]
    }
    return Rest(function_from(tree, function), result, frozenset(attributes))


def _changes(node: ast.AST) -> bool:
    """Whether something is changed in place."""
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return True
    if isinstance(node, ast.Attribute):
        return node.attr.endswith("_")
    return isinstance(node, ast.AugAssign) or getattr(node, "arg", None) in ("inplace", "out")


def _names(target: ast.expr) -> list[str]:
    """The variables of a tuple."""
    elements = target.elts if isinstance(target, ast.Tuple) else []
    return [one.id for one in elements if isinstance(one, ast.Name)]


def _read(
    statements: Sequence[ast.stmt], needed: set[str], always: bool = False
) -> tuple[list[ast.stmt], set[str]]:
    """The statements that give these variables, or always run, and what they read."""
    kept = []
    for one in reversed(statements):
        stored = variables_in(one, ast.Store)
        if not always and needed.isdisjoint(stored):
            continue
        if isinstance(one, ast.Assign):
            needed = needed - {*stored}
        needed = needed.union(reads_in(one))
        kept.append(one)
    return kept[::-1], needed
