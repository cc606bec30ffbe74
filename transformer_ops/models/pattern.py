"""Statements with placeholders, matched against the source of a `forward` by what they compute.

In: the text of a rule, `H = X + any_steps(H)`, and statements, `y = self.up(x)` and `x = y + r`.
Out: the names that make them the same (`H` is x, `X` is r, and the step is `self.up`), or nothing.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .reads import is_replaced, objects_of, value_of_name
from .statements import Value, body_of, read_first, value_of
from .windows import Window

__all__ = [
    "INPUT",
    "Arguments",
    "Choices",
    "Names",
    "Pattern",
    "Scope",
    "Steps",
    "Template",
    "arguments_in",
    "calls_in",
    "choices",
    "find_step",
    "match_groups",
    "register_call",
    "register_global",
    "register_step",
]

# What begins an attribute that stands for any, or a name that stands for steps.
_ANY = "any_"
# What stands for all statements of a branch.
_ANY_STATEMENTS = "any_statements"
# What a step takes.
_HOLE = "_"
# The placeholder of the tensor that ops take.
INPUT = "H"
Names = dict[str, str]
# What names of modules mean in patterns.
_MODULES = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math}


# ---- patterns


class Scope(NamedTuple):
    """What names mean in a function."""

    locals: frozenset[str]
    value_of: Callable[[str], Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Scope:
        code = function.__code__
        found = {*code.co_varnames, *code.co_cellvars} - {"self"}
        return cls(frozenset(found), functools.partial(value_of_name, function))

    def object_of(self, node: ast.expr) -> Any:
        """What a name of a module or `module.name` is; None for a local variable, and for what took
        the place of a function of torch."""
        if isinstance(node, ast.Attribute):
            owner = self.object_of(node.value)
            found = getattr(owner, node.attr, None)
            return None if is_replaced(owner, node.attr, found) else found
        if isinstance(node, ast.Name) and node.id not in self.locals:
            return self.value_of(node.id)
        return None


class Found(NamedTuple):
    """Statements of a function that compute what a pattern does."""

    names: Names
    window: Window


class Pattern:
    """Statements in which `X`, `Y` and other single upper-case letters stand for local variables,
    attributes that begin with `any_` for attributes of any name, names that begin with `any_` for
    numbers, and calls of functions that begin with `any_` for steps: calls of submodules and
    functions, one on the result of the other.

    Statements match that compute the same expression of local variables, however they are divided
    into statements; the terms of a sum, and the factors of a product, may stand in any order, and
    arguments of a function of torch may have names. A branch that is `any_statements` matches every
    branch. Each placeholder stands for one name, the same one everywhere, and no two for the same
    one; `H` may also stand for a part of a variable, such as `x[:, i, :]` or `x.logits`.
    """

    def __init__(self, text: str) -> None:
        self.text = textwrap.dedent(text).strip()
        self._statements = statements = ast.parse(self.text).body
        self._inputs = list(dict.fromkeys(read_first(statements, _is_placeholder)))
        self._value = value_of(statements) if statements else None

    @property
    def expression(self) -> ast.expr:
        """What the statements compute."""
        assert self._value is not None
        return self._value.expression

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
        return _whole_match(self, function)

    def match_text(self, function: Callable[..., Any]) -> Names | None:
        """The names that make these, one by one, the statements of the function, or None."""
        return _text_match(self, function)

    def find(self, windows: Sequence[Window], scope: Scope) -> Iterator[Found]:
        """Those that compute this."""
        for window in windows:
            names = self._match(window.value, scope)
            if names is not None:
                yield Found(names, window)

    def _match(self, value: Value, scope: Scope) -> Names | None:
        return _names_of(self.expression, value.expression, scope)


def _remembered(match: Callable[[Any, Any], Names | None]) -> Callable[[Any, Any], Names | None]:
    """Matches each function once, as layers of a model share theirs, as long as its names are what
    they were."""
    remembered = functools.lru_cache(maxsize=4096)(
        lambda wanted, function, _: match(wanted, function)
    )

    def found(wanted: Any, function: Any) -> Names | None:
        names = remembered(wanted, function, objects_of(function))
        return None if names is None else dict(names)

    return found


@_remembered
def _whole_match(pattern: Pattern, function: Callable[..., Any]) -> Names | None:
    value = _value_of_body(function)
    if value is None or value.target is not None or value.idle:
        return None
    return pattern._match(value, Scope.of(function))


@functools.lru_cache(maxsize=1024)
def _value_of_body(function: Callable[..., Any]) -> Value | None:
    body = body_of(function)
    return value_of(body) if body else None


@_remembered
def _text_match(pattern: Pattern, function: Callable[..., Any]) -> Names | None:
    return _names_of(pattern._statements, body_of(function), Scope.of(function))


Choices = tuple[tuple[ast.stmt, ...], ...]


def choices(*texts: str) -> Choices:
    """Ways to write some statements, for `match_groups`; an empty text for none."""
    return tuple(tuple(ast.parse(textwrap.dedent(text)).body) for text in texts)


def match_groups(function: Callable[..., Any], groups: tuple[Choices, ...]) -> Names | None:
    """The names that make one choice of each group, one after the other, the statements of a
    function that nothing is wrapped around; None if there are none."""
    is_plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
    return _groups_match(groups, function) if is_plain else None


@_remembered
def _groups_match(groups: tuple[Choices, ...], function: Callable[..., Any]) -> Names | None:
    body = body_of(function)
    if body is None:
        return None
    matches = _matches_groups(groups, body, _Match({}, {}), Scope.of(function))
    first = next((match for match in matches if match.is_one_to_one()), None)
    return None if first is None else first.names


def _matches_groups(
    groups: Sequence[Choices], body: list[ast.stmt], match: _Match, scope: Scope
) -> Iterator[_Match]:
    if not groups:
        yield from () if body else (match,)
        return
    for statements in groups[0]:
        count = len(statements)
        for found in _matches(list(statements), body[:count], match, scope):
            yield from _matches_groups(groups[1:], body[count:], found, scope)


def _names_of(wanted: Any, found: Any, scope: Scope) -> Names | None:
    """The names that make `found` what is wanted, one for each placeholder, or None."""
    matches = _matches(wanted, found, _Match({}, {}), scope)
    first = next((match for match in matches if match.is_one_to_one()), None)
    return None if first is None else first.names


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
        if len(wanted) == 1 and _is_any_statements(wanted[0]):
            yield match
        elif isinstance(found, list) and len(found) == len(wanted):
            yield from _matches_all(list(zip(wanted, found, strict=True)), match, scope)
    elif not isinstance(wanted, ast.AST):
        if _is_same_constant(wanted, found):
            yield match
    elif isinstance(wanted, ast.Name) and wanted.id == _HOLE:
        yield from _some(match.with_node(_HOLE, found))
    elif isinstance(wanted, ast.Name) and _is_placeholder(wanted.id):
        if isinstance(found, ast.Name) and found.id in scope.locals:
            yield from _some(match.with_name(wanted.id, found.id))
        elif wanted.id == INPUT and _is_part_of_local(found, scope):
            yield from _some(match.with_name(wanted.id, ast.unparse(found)))
    elif isinstance(wanted, ast.Name) and _is_any(wanted):
        if isinstance(found, ast.Constant) and type(found.value) in (int, float):
            yield from _some(match.with_name(wanted.id.removeprefix(_ANY), repr(found.value)))
    elif isinstance(wanted, ast.Name | ast.Attribute) and _PATTERNS.object_of(wanted) is not None:
        if isinstance(found, ast.Name | ast.Attribute):
            known = scope.object_of(found)
            yield from _some(match if known is _PATTERNS.object_of(wanted) else None)
    elif isinstance(wanted, ast.BinOp) and isinstance(wanted.op, ast.Add | ast.Mult):
        yield from _matches_in_any_order(wanted, found, match, scope)
    elif isinstance(wanted, ast.Call) and _is_any(wanted.func):
        yield from _matches_steps(wanted, found, match, scope)
    elif isinstance(wanted, ast.Call) and (arguments := _arguments(wanted, _PATTERNS)) is not None:
        others = _arguments(found, scope) if isinstance(found, ast.Call) else None
        if others is not None and arguments.keys() == others.keys():
            pairs = [(arguments[name], others[name]) for name in arguments]
            yield from _matches_all([(wanted.func, found.func), *pairs], match, scope)
    elif type(wanted) is type(found):
        yield from _matches_fields(wanted, found, match, scope)


def _is_part_of_local(node: Any, scope: Scope) -> bool:
    """Whether it is an attribute of a local variable, or a local variable with an index of
    constants, slices and local variables."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id in scope.locals
    if not isinstance(node, ast.Subscript):
        return False
    kinds = (ast.Name, ast.Constant, ast.Slice, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
    inner = [node.value, *ast.walk(node.slice)]
    names = [one.id for one in inner if isinstance(one, ast.Name)]
    is_simple = isinstance(node.value, ast.Name) and all(isinstance(one, kinds) for one in inner)
    return is_simple and scope.locals.issuperset(names)


_PATTERNS = Scope(frozenset(), lambda name: _MODULES.get(name, getattr(builtins, name, None)))


def _some(match: _Match | None) -> Iterator[_Match]:
    if match is not None:
        yield match


def _is_same_constant(wanted: Any, found: Any) -> bool:
    kinds = [int if type(value) is float else type(value) for value in (wanted, found)]
    return kinds[0] is kinds[1] and bool(wanted == found)


def _is_any(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id.startswith(_ANY)


def _is_any_statements(node: Any) -> bool:
    return isinstance(node, ast.Expr) and getattr(node.value, "id", "") == _ANY_STATEMENTS


def _matches_all(pairs: Sequence[tuple[Any, Any]], match: _Match, scope: Scope) -> Iterator[_Match]:
    if not pairs:
        yield match
        return
    for first in _matches(*pairs[0], match, scope):
        yield from _matches_all(pairs[1:], first, scope)


def _arguments(call: ast.Call, scope: Scope) -> dict[str, Any] | None:
    """What a function of Python is given, by the names of its parameters; None of another call."""
    function = scope.object_of(call.func)
    return _bound(call, function) if inspect.isfunction(function) else None


@functools.lru_cache(maxsize=4096)
def _bound(call: ast.Call, function: Callable[..., Any]) -> dict[str, Any] | None:
    keywords = {keyword.arg or "**": keyword.value for keyword in call.keywords}
    try:
        bound = _signature(function).bind(*call.args, **keywords)
    except TypeError:
        return None
    has_star = any(isinstance(argument, ast.Starred) for argument in call.args)
    return None if has_star else bound.arguments


_signature = functools.lru_cache(maxsize=1024)(inspect.signature)


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


class Arguments(str):
    """What a call of a submodule is given behind the tensor that steps go on with, as text.

    Attributes:
        args: the positional arguments.
        keywords: the others.
        is_first: whether the first result of the call is taken.
    """

    args: Sequence[ast.expr]
    keywords: Sequence[ast.keyword]
    is_first: bool


def calls_in(names: Names) -> list[Arguments]:
    """What each attention module among steps is given."""
    steps = [name for name in names.values() if isinstance(name, Steps)]
    return [
        arguments
        for one in steps
        for _, own in one.list
        if isinstance(arguments := own.get("arguments"), Arguments)
    ]


def arguments_in(names: Names) -> Arguments | None:
    """What the one attention module among steps is given; None if there is none."""
    found = calls_in(names)
    return found[0] if found else None


_steps: list[Template] = []
_calls: list[Template] = []
_globals: list[Callable[[Any, str], Any]] = []
# How submodules that take more than one argument name the first one.
_FIRST_ARGUMENT = "hidden_states"


def register_step(text: str, make: Callable[[Any, Names], Any]) -> None:
    """Adds an expression of `_` that is a step. Of two that fit, the one that was added first
    counts."""
    _steps.append(Template(ast.parse(text, mode="eval").body, make))


def register_call(make: Callable[[Any, Names], Any]) -> None:
    """Says what makes ops of a submodule that is called with more than one argument, or whose first
    result alone is taken."""
    _calls.append(Template(ast.Name(_HOLE), make))


def register_global(make: Callable[[Any, str], Any]) -> None:
    """Says what makes ops of a module that is the value of a global variable, and its name."""
    _globals.append(make)


def _find_global(node: ast.expr, scope: Scope) -> tuple[Template, Names, ast.expr] | None:
    """`name(tensor)`, where the name is that of a module, such as an activation."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    found = scope.object_of(node.func) if isinstance(node.func, ast.Name) else None
    if not isinstance(found, torch.nn.Module) or isinstance(node.args[0], ast.Starred):
        return None
    name, make = ast.unparse(node.func), _globals[0]
    return Template(ast.Name(_HOLE), lambda *_: make(found, name)), {}, node.args[0]


def _find_call(node: ast.expr) -> tuple[Template, Names, ast.expr] | None:
    """`self.part(tensor, ...)`, or its first result."""
    is_first = isinstance(node, ast.Subscript) and _is_zero(node.slice)
    call = node.value if is_first and isinstance(node, ast.Subscript) else node
    if not _calls or not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    given = [*call.args, *(k.value for k in call.keywords if k.arg == _FIRST_ARGUMENT)]
    if not _is_self(call.func.value) or not given or isinstance(given[0], ast.Starred):
        return None
    rest = Arguments(ast.unparse(call))
    rest.is_first = is_first
    rest.args = call.args[1:]
    rest.keywords = [k for k in call.keywords if bool(call.args) or k.arg != _FIRST_ARGUMENT]
    if not is_first and not rest.args and not rest.keywords:
        return None
    return _calls[0], {"part": call.func.attr, "arguments": rest}, given[0]


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0 and type(node.value) is int


@functools.lru_cache(maxsize=4096)
def find_step(node: ast.expr, scope: Scope) -> tuple[Template, Names, ast.expr] | None:
    """The step that is last in an expression, its names, and what it takes."""
    for step in _steps:
        for match in _matches(step.expression, node, _Match({}, {}), scope):
            inner = match.nodes[_HOLE]
            assert isinstance(inner, ast.expr)
            return step, match.names, inner
    return _find_global(node, scope) or _find_call(node)


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
