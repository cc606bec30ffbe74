"""Statements with placeholders, matched against the source of a `forward` by what they compute."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

__all__ = [
    "Names",
    "Pattern",
    "Scope",
    "Steps",
    "Template",
    "blocks_of",
    "body_of",
    "find_step",
    "function_of",
    "register_step",
    "tree_of",
    "windows_of",
    "wrappers_of",
]

# What begins an attribute that stands for any, or a name that stands for steps.
_ANY = "any_"
# What a step takes.
_HOLE = "_"
Names = dict[str, str]
# What names of modules mean in patterns.
_MODULES = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math}
# More statements than any pattern stands for.
_LONGEST = 12


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
            return Value(_replaced(last.value, variables), None, frozenset(variables))
        target = _assign(last, variables)
    except _NoExpression:
        return None
    if len(target) != 1:
        return None
    return Value(variables[target[0]], target[0], frozenset(variables))


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


# ---- patterns


class Scope(NamedTuple):
    """What names mean in a function."""

    locals: frozenset[str]
    globals: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Scope:
        code = function.__code__
        found = {*code.co_varnames, *code.co_cellvars} - {"self"}
        return cls(frozenset(found), function.__globals__)

    def object_of(self, node: ast.expr) -> Any:
        """What a name of a module or `module.name` is; None for a local variable."""
        if isinstance(node, ast.Attribute):
            return getattr(self.object_of(node.value), node.attr, None)
        if isinstance(node, ast.Name) and node.id not in self.locals:
            return self.globals.get(node.id, getattr(builtins, node.id, None))
        return None


class Window(NamedTuple):
    """Consecutive statements of a function that compute one value, and nothing else that is read
    later."""

    block: int  # of `blocks_of` its body
    start: int
    end: int  # where the statements behind them begin
    lines: tuple[int, int]  # the first and the last one
    value: Value


class Found(NamedTuple):
    """Statements of a function that compute what a pattern does."""

    names: Names
    window: Window


def windows_of(body: list[ast.stmt]) -> list[Window]:
    """All such statements of a function. A first one that adds nothing to a value is no part of
    it."""
    found = []
    for i, block in enumerate(blocks_of(body)):
        after = _after(body, block)
        for end in range(1, len(block) + 1):
            known = ""
            for start in range(end - 1, max(-1, end - 1 - _LONGEST), -1):
                value = value_of(block[start:end])
                if value is None:
                    break
                known, before = ast.dump(value.expression), known
                inner = value.assigned - {value.target}
                if known != before and not _reads([*block[end:], *after], inner):
                    lines = (block[start].lineno, block[end - 1].end_lineno or 0)
                    found.append(Window(i, start, end, lines, value))
    return found


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


class Pattern:
    """Statements in which `X`, `Y` and other single upper-case letters stand for local variables,
    attributes that begin with `any_` for attributes of any name, and calls of functions that begin
    with `any_` for steps: calls of submodules and functions, one on the result of the other.

    Statements match that compute the same expression of local variables, however they are divided
    into statements; the terms of a sum, and the factors of a product, may stand in any order. Each
    placeholder stands for one name, the same one everywhere, and no two for the same one.
    """

    def __init__(self, text: str) -> None:
        self.text = textwrap.dedent(text).strip()
        self._statements = statements = ast.parse(self.text).body
        self._inputs = list(dict.fromkeys(_read_first(statements, _is_placeholder)))
        self._value = value_of(statements) if statements else None

    @property
    def is_expression(self) -> bool:
        """Whether the statements compute one value from local variables."""
        value = self._value
        return value is not None and (value.target is None or _is_placeholder(value.target))

    @property
    def inputs(self) -> list[str]:
        """The local variables that are read before they are assigned, in the order of reading."""
        return self._inputs

    def match_all(self, function: Callable[..., Any]) -> Names | None:
        """The names that make this the whole body of the function, or None."""
        body = body_of(function)
        value = value_of(body) if body else None
        if value is None or value.target is not None:
            return None
        return self._match(value, Scope.of(function))

    def match_text(self, function: Callable[..., Any]) -> Names | None:
        """The names that make these, one by one, the statements of the function, or None."""
        matches = _matches(self._statements, body_of(function), _Match({}, {}), Scope.of(function))
        found = next((match for match in matches if match.is_one_to_one()), None)
        return None if found is None else found.names

    def find(self, windows: Sequence[Window], scope: Scope) -> Iterator[Found]:
        """Those that compute this."""
        for window in windows:
            names = self._match(window.value, scope)
            if names is not None:
                yield Found(names, window)

    def _match(self, value: Value, scope: Scope) -> Names | None:
        assert self._value is not None
        matches = _matches(self._value.expression, value.expression, _Match({}, {}), scope)
        found = next((match for match in matches if match.is_one_to_one()), None)
        return None if found is None else found.names


class _Match(NamedTuple):
    names: Names
    # Nodes of the pattern that stand for one node of the source: calls of submodules, what a step
    # takes.
    nodes: dict[int | str, ast.AST]

    def with_name(self, placeholder: str, found: str) -> _Match | None:
        if self.names.get(placeholder, found) != found:
            return None
        return self._replace(names={**self.names, placeholder: found})

    def with_node(self, key: int | str, found: ast.AST) -> _Match | None:
        if not _is_same_node(self.nodes.get(key, found), found):
            return None
        return self._replace(nodes={**self.nodes, key: found})

    def is_one_to_one(self) -> bool:
        """Whether each local variable, each attribute and each call has one placeholder."""
        kinds: list[Sequence[Any]] = [list(map(id, self.nodes.values()))]
        for is_local in (False, True):
            kinds.append([v for k, v in self.names.items() if _is_placeholder(k) == is_local])
        return all(len(set(kind)) == len(kind) for kind in kinds)


def _is_same_node(first: ast.AST, second: ast.AST) -> bool:
    """Whether it is computed once, or is one local variable."""
    if isinstance(first, ast.Name) and isinstance(second, ast.Name):
        return first.id == second.id
    return first is second


def _is_placeholder(name: str) -> bool:
    return len(name) == 1 and name.isupper() and name not in _MODULES


def _matches(wanted: Any, found: Any, match: _Match, scope: Scope) -> Iterator[_Match]:
    """All ways in which `found` is `wanted`, beyond what is known from `match`."""
    if isinstance(wanted, list):
        if isinstance(found, list) and len(found) == len(wanted):
            yield from _matches_all(list(zip(wanted, found, strict=True)), match, scope)
    elif not isinstance(wanted, ast.AST):
        if _is_same_constant(wanted, found):
            yield match
    elif isinstance(wanted, ast.Name) and wanted.id == _HOLE:
        yield from _some(match.with_node(_HOLE, found))
    elif isinstance(wanted, ast.Name) and _is_placeholder(wanted.id):
        if isinstance(found, ast.Name) and found.id in scope.locals:
            yield from _some(match.with_name(wanted.id, found.id))
    elif isinstance(wanted, ast.Name | ast.Attribute) and _PATTERNS.object_of(wanted) is not None:
        if isinstance(found, ast.Name | ast.Attribute):
            known = scope.object_of(found)
            yield from _some(match if known is _PATTERNS.object_of(wanted) else None)
    elif isinstance(wanted, ast.BinOp) and isinstance(wanted.op, ast.Add | ast.Mult):
        yield from _matches_in_any_order(wanted, found, match, scope)
    elif isinstance(wanted, ast.Call) and _is_any(wanted.func):
        yield from _matches_steps(wanted, found, match, scope)
    elif type(wanted) is type(found):
        yield from _matches_fields(wanted, found, match, scope)


_PATTERNS = Scope(frozenset(), _MODULES)


def _some(match: _Match | None) -> Iterator[_Match]:
    if match is not None:
        yield match


def _is_same_constant(wanted: Any, found: Any) -> bool:
    kinds = [int if type(value) is float else type(value) for value in (wanted, found)]
    return kinds[0] is kinds[1] and bool(wanted == found)


def _is_any(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.startswith(_ANY)


def _matches_all(pairs: Sequence[tuple[Any, Any]], match: _Match, scope: Scope) -> Iterator[_Match]:
    if not pairs:
        yield match
        return
    for first in _matches(*pairs[0], match, scope):
        yield from _matches_all(pairs[1:], first, scope)


def _matches_fields(
    wanted: ast.AST, found: ast.AST, match: _Match, scope: Scope
) -> Iterator[_Match]:
    names = [name for name in wanted._fields if name not in ("ctx", "type_comment", "kind")]
    known: _Match | None = match
    if isinstance(wanted, ast.Attribute) and wanted.attr.startswith(_ANY):
        assert isinstance(found, ast.Attribute)
        names.remove("attr")
        known = match.with_name(wanted.attr.removeprefix(_ANY), found.attr)
    elif isinstance(wanted, ast.Call) and _is_of_self(wanted.func):
        known = match.with_node(id(wanted), found)
    if known is not None:
        pairs = [(getattr(wanted, name), getattr(found, name, None)) for name in names]
        yield from _matches_all(pairs, known, scope)


def _is_of_self(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "self"


def _matches_in_any_order(
    wanted: ast.BinOp, found: Any, match: _Match, scope: Scope
) -> Iterator[_Match]:
    terms, others = (_terms(node, type(wanted.op)) for node in (wanted, found))
    if len(terms) == len(others):
        for order in itertools.permutations(others):
            yield from _matches_all(list(zip(terms, order, strict=True)), match, scope)


def _terms(node: Any, kind: type[ast.operator]) -> list[Any]:
    """The terms of a sum, or the factors of a product."""
    if isinstance(node, ast.BinOp) and type(node.op) is kind:
        return [*_terms(node.left, kind), *_terms(node.right, kind)]
    return [node]


# ---- steps


class Steps(str):
    """Calls of submodules and functions in a `forward`, one on the result of the other. As text,
    `_` stands for what the first one takes.

    Attributes:
        list: what each is, from the first one on, and its names.
        attributes: those of `self` that they read.
    """

    list: Sequence[tuple[Template, Names]]
    attributes: frozenset[str]


class Template(NamedTuple):
    """A step: an expression of `_`, and what makes ops of it for a module and the names in it."""

    expression: ast.expr
    make: Callable[[Any, Names], Any]


_steps: list[Template] = []


def register_step(text: str, make: Callable[[Any, Names], Any]) -> None:
    """Adds an expression of `_` that is a step. Of two that fit, the one that was added first
    counts."""
    _steps.append(Template(ast.parse(text, mode="eval").body, make))


def find_step(node: ast.expr, scope: Scope) -> tuple[Template, Names, ast.expr] | None:
    """The step that is last in an expression, its names, and what it takes."""
    for step in _steps:
        for match in _matches(step.expression, node, _Match({}, {}), scope):
            inner = match.nodes[_HOLE]
            assert isinstance(inner, ast.expr)
            return step, match.names, inner
    return None


def _matches_steps(wanted: ast.Call, found: Any, match: _Match, scope: Scope) -> Iterator[_Match]:
    """`any_name(inner)`: one step or more on what matches `inner`."""
    assert isinstance(wanted.func, ast.Name)
    name, whole = wanted.func.id.removeprefix(_ANY), found
    steps: list[tuple[Template, Names]] = []
    while isinstance(found, ast.expr) and (step := find_step(found, scope)) is not None:
        template, names, found = step
        steps.insert(0, (template, names))
        for inner in _matches(wanted.args[0], found, match, scope):
            yield from _some(inner.with_name(name, _steps_of(whole, found, steps)))


def _steps_of(whole: ast.expr, inner: ast.expr, steps: Sequence[tuple[Template, Names]]) -> Steps:
    hidden = _with_hole(whole, inner)
    found = Steps(ast.unparse(hidden))
    found.list = list(steps)
    found.attributes = frozenset(
        node.attr
        for node in ast.walk(hidden)
        if isinstance(node, ast.Attribute) and _is_self(node.value)
    )
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _with_hole(node: Any, inner: ast.expr) -> Any:
    """The node with `_` in place of another one in it."""
    if isinstance(node, ast.AST) and _is_same_node(node, inner):
        return ast.Name(_HOLE, ast.Load())
    if isinstance(node, list):
        return [_with_hole(one, inner) for one in node]
    if not isinstance(node, ast.AST):
        return node
    return type(node)(**{f: _with_hole(getattr(node, f, None), inner) for f in node._fields})


# ---- local variables


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    """The names that are read, or assigned, in a node."""
    found = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
    return [name.id for name in found if isinstance(name.ctx, context)]


def _read_first(statements: Sequence[ast.stmt], is_asked: Callable[[str], bool]) -> Iterator[str]:
    assigned: set[str] = set()
    for statement in statements:
        yield from (
            name for name in _names(statement, ast.Load) if is_asked(name) and name not in assigned
        )
        # Of a compound statement nobody knows which of its lines run.
        if isinstance(statement, ast.Assign):
            assigned.update(_names(statement, ast.Store))


def _reads(statements: Sequence[ast.stmt], names: Set[str]) -> bool:
    """Whether the statements may read one of these names before they assign it."""
    return any(True for _ in _read_first(statements, names.__contains__))
