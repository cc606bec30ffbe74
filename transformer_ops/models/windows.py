"""Consecutive statements of a function that compute one value, and what stands in the way of
computing it in another way.

In: a function, such as one with `y = f(x)` and `z = g(y)`. Out: its windows, here `f(x)`, `g(y)`
and `g(f(x))`, and for the last one whether other statements read `y`.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

from .statements import (
    NoExpression,
    Value,
    as_assignment,
    body_of,
    read_later,
    reads_in,
    value_of,
    variables_in,
)

__all__ = ["Condition", "Window", "blocks_of", "windows_of"]

# More statements than any pattern stands for.
_LONGEST = 18
# So many ways through the branches of a window are looked at.
_MOST_WAYS = 4


class Condition(NamedTuple):
    """That the test of a branch is true, or false."""

    test: ast.expr
    is_true: bool

    def __str__(self) -> str:
        text = ast.unparse(self.test)
        return f"({text})" if self.is_true else f"not ({text})"


class Window(NamedTuple):
    """Consecutive statements of a function that compute one value."""

    block: int  # of `blocks_of` its body
    start: int
    end: int  # where the statements behind them begin
    statements: tuple[ast.stmt, ...]  # those that compute the value
    lines: tuple[int, int]  # the first and the last one
    value: Value
    conditions: tuple[Condition, ...]  # they run where all of these hold
    # Second results of calls, such as the weights of attention, that are read later.
    others: frozenset[str] = frozenset()
    # The statements compute the value if these hold before the first one: other branches of theirs
    # do something else.
    assumed: tuple[Condition, ...] = ()
    # Why nothing else may run in their place; empty if nothing stands in the way.
    obstacle: str = ""


def windows_of(function: Callable[..., Any]) -> list[Window]:
    """All such statements of a function. A first one that adds nothing to a value is no part of
    it."""
    body = body_of(function)
    if body is None:
        return []
    found: list[Window] = []
    code, sees_all = function.__code__, _what_sees_all(body)
    nodes = (node for one in body for node in ast.walk(one))
    deletions = [node for node in nodes if isinstance(node, ast.Delete)]
    for i, block in enumerate(blocks_of(body)):
        after = _after(body, block)
        for end in range(1, len(block) + 1):
            known: set[str] = set()
            for start in range(end - 1, max(-1, end - 1 - _LONGEST), -1):
                ways = [
                    (way, value, assumed)
                    for way, assumed in _ways_through(block[start:end])
                    if (value := value_of(way)) is not None
                ]
                if not ways:
                    break
                behind = [*block[end:], *after]
                for way, value, assumed in ways:
                    text = ast.dump(value.expression)
                    if text in known:
                        continue
                    known.add(text)
                    inner = value.assigned - {value.target}
                    read = read_later(behind, inner)
                    lines = (block[start].lineno, block[end - 1].end_lineno or 0)
                    around = tuple(_conditions(body, block, start) or ())
                    own = tuple(one for one in way if one not in value.idle)
                    window = Window(i, start, end, own, lines, value, (*around, *assumed))
                    found.append(
                        window._replace(
                            others=read & value.seconds.keys(),
                            assumed=assumed,
                            obstacle=sees_all
                            or _obstacle(value, inner, read, behind, body, deletions, code),
                        )
                    )
    return found


def _obstacle(
    value: Value,
    inner: Set[str],
    read: Set[str],
    behind: Sequence[ast.stmt],
    body: Sequence[ast.stmt],
    deletions: Sequence[ast.Delete],
    code: types.CodeType,
) -> str:
    """Why nothing else may run in place of the statements with this value, or an empty text."""
    if value.idle:
        return f"between its statements is {_quoted(value.idle[0])}"
    shared = sorted(name for name in inner if name not in code.co_varnames)
    shared += sorted(inner & set(code.co_cellvars))
    if shared:
        return f"another function sees {shared[0]}"
    kept = sorted(read - value.seconds.keys())
    if kept:
        reader = next(one for one in behind if kept[0] in reads_in(one))
        return f"{kept[0]} is read by {_quoted(reader)}"
    given = set(variables_in(value.expression, ast.Load)) & {*code.co_varnames}
    # Ops read their variables before anything runs, so a deleted one would raise too early.
    for node in deletions:
        if not given.isdisjoint(variables_in(node, ast.Del)) and not _is_in(node, behind):
            return f"{_quoted(node)} deletes what they read"
    kept_by_ops = _aliases(body, given) - {value.target, "self"}
    changed = next(((one, name) for one in behind for name in _changes(one) & kept_by_ops), None)
    return "" if changed is None else f"{changed[1]} is changed by {_quoted(changed[0])}"


def _is_in(node: ast.AST, statements: Sequence[ast.stmt]) -> bool:
    return any(inner is node for one in statements for inner in ast.walk(one))


def _aliases(body: Sequence[ast.stmt], names: Set[str]) -> set[str]:
    """The names, and those of variables that some statement says are the same."""
    found = set(names)
    pairs = [
        (node.targets[0].id, node.value.id)
        for one in body
        for node in ast.walk(one)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Name)
    ]
    for _ in pairs:
        for pair in pairs:
            if not found.isdisjoint(pair):
                found.update(pair)
    return found


def _changes(statement: ast.stmt) -> set[str]:
    """The variables whose tensors a statement changes in place, as far as it shows."""
    found: set[str] = set()
    for node in ast.walk(statement):
        changed: Any = None
        if isinstance(node, ast.AugAssign):
            changed = node.target
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            changed = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            changed = node.func.value if name.endswith("_") and not name.endswith("__") else None
        while isinstance(changed, ast.Subscript | ast.Attribute | ast.Call):
            changed = changed.func if isinstance(changed, ast.Call) else changed.value
        if isinstance(changed, ast.Name):
            found.add(changed.id)
    return found


def _quoted(statement: ast.stmt) -> str:
    first, *others = ast.unparse(statement).splitlines()
    return f"`{first}{' ...' if others else ''}` in line {statement.lineno}"


# Calls that may read all local variables, and those that do so without arguments.
_SEE_ALL = {"locals", "eval", "exec", "_getframe", "currentframe"}
_SEE_ALL_ALONE = {"vars", "dir"}


def _what_sees_all(body: Sequence[ast.stmt]) -> str:
    """Says what may read all local variables of a function, or an empty text."""
    for node in (inner for one in body for inner in ast.walk(one)):
        name = getattr(node, "id", None) or getattr(node, "attr", None)
        if isinstance(node, ast.Name | ast.Attribute) and name in _SEE_ALL:
            return f"{name} sees all variables"
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            if getattr(node.func, "id", None) in _SEE_ALL_ALONE:
                return f"{ast.unparse(node)} sees all variables"
    return ""


_Way = tuple[list[ast.stmt], tuple[Condition, ...]]


def _ways_through(statements: Sequence[ast.stmt]) -> list[_Way]:
    """The statements without branches that may run, and what has to hold for that before the first
    one. Branches that assign one variable stay: they are an expression."""
    # A branch without statements adds nothing in the end.
    last = statements[-1]
    return [way for way in _ways(statements, set()) if not _is_skipped(last, way)]


def _is_skipped(last: ast.stmt, way: _Way) -> bool:
    inside = {id(node) for node in ast.walk(last)}
    return not way[0] or id(way[0][-1]) not in inside


def _ways(statements: Sequence[ast.stmt], assigned: Set[str]) -> list[_Way]:
    found: list[_Way] = [([], ())]
    assigned = set(assigned)
    for statement in statements:
        choices = _choices(statement, assigned)
        found = [([*a, *c], (*b, *d)) for a, b in found for c, d in choices][:_MOST_WAYS]
        assigned.update(variables_in(statement, ast.Store))
    return found


def _choices(statement: ast.stmt, assigned: Set[str]) -> list[_Way]:
    if not isinstance(statement, ast.If) or _is_assignment(statement):
        return [([statement], ())]
    test = statement.test
    if not _is_known_before(test) or not assigned.isdisjoint(variables_in(test, ast.Load)):
        return []
    return [
        (own, (Condition(test, is_true), *others))
        for branch, is_true in ((statement.body, True), (statement.orelse, False))
        for own, others in _ways(branch, assigned)
    ]


def _is_assignment(statement: ast.If) -> bool:
    try:
        as_assignment(statement)
    except NoExpression:
        return False
    return True


def _is_known_before(test: ast.expr) -> bool:
    """Whether a test reads attributes, or asks whether a variable is None: it may be asked early,
    and twice."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_known_before(test.operand)
    if isinstance(test, ast.BoolOp):
        return all(map(_is_known_before, test.values))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        other = test.comparators[0]
        is_none = isinstance(other, ast.Constant) and other.value is None
        if isinstance(test.ops[0], ast.Is | ast.IsNot) and is_none:
            return isinstance(test.left, ast.Name) or _is_attribute(test.left)
        return _is_attribute(test.left) and isinstance(other, ast.Constant)
    return _is_attribute(test)


def _is_attribute(node: ast.expr) -> bool:
    """Whether it is an attribute of `self`, or of one."""
    is_first = isinstance(node, ast.Attribute)
    while isinstance(node, ast.Attribute):
        node = node.value
    return is_first and isinstance(node, ast.Name) and node.id == "self"


def _conditions(body: list[ast.stmt], block: list[ast.stmt], start: int) -> list[Condition] | None:
    """What holds where a statement of a block runs; None if the block is not in this body."""
    found: list[Condition] = []
    for i, one in enumerate(body):
        if body is block and i == start:
            return found
        branches = ((one.body, True), (one.orelse, False)) if isinstance(one, ast.If) else ()
        for branch, is_true in branches:
            assert isinstance(one, ast.If)
            inner = _conditions(branch, block, start)
            if inner is not None:
                return [*found, Condition(one.test, is_true), *inner]
            if _leaves(branch):
                found.append(Condition(one.test, not is_true))
    return None


def _leaves(block: list[ast.stmt]) -> bool:
    """Whether nothing behind a block runs."""
    last = block[-1] if block else None
    if isinstance(last, ast.If):
        return _leaves(last.body) and _leaves(last.orelse)
    return isinstance(last, ast.Return | ast.Raise)


def blocks_of(body: list[ast.stmt]) -> list[list[ast.stmt]]:
    """The body of a function, and those of the branches in it."""
    branches = [
        branch for one in body if isinstance(one, ast.If) for branch in (one.body, one.orelse)
    ]
    return [body, *(inner for branch in branches for inner in blocks_of(branch))]


def _after(body: list[ast.stmt], block: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that run behind a block."""
    for i, one in enumerate(body):
        for branch in (one.body, one.orelse) if isinstance(one, ast.If) else ():
            if any(inner is block for inner in blocks_of(branch)):
                return [*_after(branch, block), *body[i + 1 :]]
    return []
