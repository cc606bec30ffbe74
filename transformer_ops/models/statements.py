"""The source of a `forward`, and what its statements compute."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = [
    "Condition",
    "Value",
    "Window",
    "blocks_of",
    "body_of",
    "function_of",
    "read_first",
    "tree_of",
    "value_of",
    "windows_of",
    "wrappers_of",
]

# More statements than any pattern stands for.
_LONGEST = 18
# So many ways through the branches of a window are looked at.
_MOST_WAYS = 4


def wrappers_of(method: Any) -> list[Any]:
    """The code of what is wrapped around the function that the source of a method shows."""
    found = []
    while hasattr(method, "__wrapped__"):
        found.append(getattr(method, "__code__", method))
        method = method.__wrapped__
    return found


def function_of(owner: Any) -> Callable[..., Any]:
    """The function that the source of a method shows, without what is wrapped around it."""
    found: Callable[..., Any] = inspect.unwrap(owner)
    return found


@functools.lru_cache(maxsize=1024)
def tree_of(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The definition of a function, with its line numbers in the file; None if there is no source
    to read."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return None
    try:
        module = ast.parse(textwrap.dedent("".join(lines)))
    except SyntaxError:
        return None
    found = module.body[0]
    ast.increment_lineno(module, max(first, 1) - 1)
    if not isinstance(found, ast.FunctionDef) or any(map(_is_mangled, ast.walk(found))):
        return None
    return found


def body_of(function: Callable[..., Any]) -> list[ast.stmt] | None:
    """The statements of a function, without its docstring; None if there is no source to read."""
    tree = tree_of(function)
    if tree is None:
        return None
    first = tree.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return tree.body[is_text:]


def _is_mangled(node: ast.AST) -> bool:
    """Whether it is a name that means another one within a class."""
    name = getattr(node, "attr", None) or getattr(node, "id", None) or ""
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


# ---- what statements compute


class Value(NamedTuple):
    """What statements without branches compute: one expression of what they read."""

    expression: ast.expr
    target: str | None  # the local variable that the last statement assigns; None: it returns
    assigned: frozenset[str]  # all that they assign
    # The calls whose second results some of these are, as text.
    seconds: Mapping[str, str] = MappingProxyType({})


class _NoExpression(Exception):
    """A statement that is no assignment of an expression to local variables."""


def value_of(statements: Sequence[ast.stmt]) -> Value | None:
    """What they compute, or None for statements that do more. A local variable that they assign is
    replaced by its value, always by the same node: a call that is used twice is called once."""
    variables: dict[str, ast.expr] = {}
    try:
        for statement in statements[:-1]:
            _assign(statement, variables)
        last = statements[-1]
        if isinstance(last, ast.Return) and last.value is not None:
            value = _replaced(last.value, variables)
            return Value(value, None, frozenset(variables), _seconds(variables))
        target = _assign(last, variables)
    except _NoExpression:
        return None
    seconds = _seconds(variables)
    # The first result of a call is the value, and the second one is something else.
    if len(target) != 1 and not (len(target) == 2 and target[1] in seconds):
        return None
    return Value(variables[target[0]], target[0], frozenset(variables), seconds)


def _seconds(variables: Mapping[str, ast.expr]) -> dict[str, str]:
    return {
        name: ast.unparse(value.value)
        for name, value in variables.items()
        if isinstance(value, ast.Subscript)
        and isinstance(value.value, ast.Call)
        and isinstance(value.slice, ast.Constant)
        and value.slice.value == 1
    }


def _assign(statement: ast.stmt, variables: dict[str, ast.expr]) -> list[str]:
    if isinstance(statement, ast.If):
        statement = _as_assignment(statement)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        raise _NoExpression
    value = _replaced(statement.value, variables)
    target = statement.targets[0]
    if isinstance(target, ast.Name):
        variables[target.id] = value
        return [target.id]
    if not isinstance(target, ast.Tuple):
        raise _NoExpression
    names = [element.id for element in target.elts if isinstance(element, ast.Name)]
    if len(names) != len(target.elts):
        raise _NoExpression
    for i, name in enumerate(names):
        variables[name] = ast.Subscript(value, ast.Constant(i), ast.Load())
    return names


def _as_assignment(branches: ast.If) -> ast.Assign:
    """`x = a if c else b` for branches that assign one variable; without `else`, `b` is `x`."""
    first: dict[str, ast.expr] = {}
    second: dict[str, ast.expr] = {}
    if len(branches.body) != 1 or len(_assign(branches.body[0], first)) != 1:
        raise _NoExpression
    ((name, value),) = first.items()
    if not branches.orelse:
        second[name] = ast.Name(name, ast.Load())
    elif len(branches.orelse) != 1 or _assign(branches.orelse[0], second) != [name]:
        raise _NoExpression
    choice = ast.IfExp(branches.test, value, second[name])
    return ast.Assign([ast.Name(name, ast.Store())], choice)


_WITH_NAMES_OF_THEIR_OWN = (ast.Lambda, ast.comprehension, ast.NamedExpr, ast.Yield, ast.Await)


def _replaced(node: Any, variables: Mapping[str, ast.expr]) -> Any:
    """The node with the values of these variables in place of their names; itself without any."""
    if isinstance(node, ast.Name):
        return variables.get(node.id, node)
    if isinstance(node, _WITH_NAMES_OF_THEIR_OWN):
        raise _NoExpression
    if isinstance(node, list):
        found = [_replaced(inner, variables) for inner in node]
        return found if any(a is not b for a, b in zip(found, node, strict=True)) else node
    if not isinstance(node, ast.AST):
        return node
    fields = {name: getattr(node, name, None) for name in node._fields}
    made = {name: _replaced(field, variables) for name, field in fields.items()}
    if all(made[name] is fields[name] for name in fields):
        return node
    return type(node)(**made)


# ---- consecutive statements


class Condition(NamedTuple):
    """That the test of a branch is true, or false."""

    test: ast.expr
    is_true: bool

    def __str__(self) -> str:
        text = ast.unparse(self.test)
        return f"({text})" if self.is_true else f"not ({text})"


class Window(NamedTuple):
    """Consecutive statements of a function that compute one value, and nothing else that is read
    later."""

    block: int  # of `blocks_of` its body
    start: int
    end: int  # where the statements behind them begin
    lines: tuple[int, int]  # the first and the last one
    value: Value
    conditions: tuple[Condition, ...]  # they run where all of these hold
    # Second results of calls, such as the weights of attention, that are read later.
    others: frozenset[str] = frozenset()
    # The statements compute the value if these hold before the first one: other branches of theirs
    # do something else.
    assumed: tuple[Condition, ...] = ()


def windows_of(body: list[ast.stmt]) -> list[Window]:
    """All such statements of a function. A first one that adds nothing to a value is no part of
    it."""
    found = []
    for i, block in enumerate(blocks_of(body)):
        after = _after(body, block)
        for end in range(1, len(block) + 1):
            known: set[str] = set()
            for start in range(end - 1, max(-1, end - 1 - _LONGEST), -1):
                ways = [
                    (value, assumed)
                    for statements, assumed in _ways_through(block[start:end])
                    if (value := value_of(statements)) is not None
                ]
                if not ways:
                    break
                for value, assumed in ways:
                    text = ast.dump(value.expression)
                    inner = value.assigned - {value.target}
                    read = _read(([*block[end:], *after]), inner)
                    if text not in known and read <= value.seconds.keys():
                        lines = (block[start].lineno, block[end - 1].end_lineno or 0)
                        around = tuple(_conditions(body, block, start) or ())
                        conditions = (*around, *assumed)
                        found.append(Window(i, start, end, lines, value, conditions, read, assumed))
                    known.add(text)
    return found


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
        assigned.update(_names(statement, ast.Store))
    return found


def _choices(statement: ast.stmt, assigned: Set[str]) -> list[_Way]:
    if not isinstance(statement, ast.If) or _is_assignment(statement):
        return [([statement], ())]
    test = statement.test
    if not _is_known_before(test) or not assigned.isdisjoint(_names(test, ast.Load)):
        return []
    return [
        (own, (Condition(test, is_true), *others))
        for branch, is_true in ((statement.body, True), (statement.orelse, False))
        for own, others in _ways(branch, assigned)
    ]


def _is_assignment(statement: ast.If) -> bool:
    try:
        _as_assignment(statement)
    except _NoExpression:
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


# ---- local variables


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    """The names that are read, or assigned, in a node."""
    found = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
    return [name.id for name in found if isinstance(name.ctx, context)]


def read_first(statements: Sequence[ast.stmt], is_asked: Callable[[str], bool]) -> Iterator[str]:
    assigned: set[str] = set()
    for statement in statements:
        yield from (
            name for name in _names(statement, ast.Load) if is_asked(name) and name not in assigned
        )
        # Nobody knows which lines of a compound statement run.
        if isinstance(statement, ast.Assign):
            assigned.update(_names(statement, ast.Store))


def _read(statements: Sequence[ast.stmt], names: Set[str]) -> frozenset[str]:
    """Which of these names the statements may read before they assign them."""
    return frozenset(read_first(statements, names.__contains__))
