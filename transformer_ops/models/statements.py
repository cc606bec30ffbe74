"""The source of a `forward`, and what its statements compute.

In: a function. Out: its definition as a tree; and of statements without branches, `a = x + 1` and
`b = a * a`, the expression of what they read, `(x + 1) * (x + 1)`.
"""

from __future__ import annotations
import __future__

import ast
import bisect
import dis
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = [
    "NoExpression",
    "Value",
    "as_assignment",
    "body_of",
    "compiled",
    "function_from",
    "function_of",
    "read_first",
    "read_later",
    "reads_in",
    "tree_of",
    "value_of",
    "variables_in",
    "wrappers_of",
]


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


_FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
_GENERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@functools.lru_cache(maxsize=1024)
def tree_of(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The definition of a function, with its line numbers in the file. None if there is no source
    to read, if the source is no longer that of the function, or if it makes a generator."""
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
    code = function.__code__
    is_current = found.name == code.co_name and _is_same_code(compiled(found, code), code)
    if not is_current or code.co_flags & _GENERATES:
        return None
    apart = _ViewsApart().visit(_with_self(found, function))
    assert isinstance(apart, ast.FunctionDef)
    return apart


def _with_self(tree: ast.FunctionDef, function: Callable[..., Any]) -> ast.FunctionDef:
    """The definition of a method, whose first parameter may have another name, with `self`."""
    owner = function.__qualname__.rpartition(".")[0]
    is_method = bool(owner) and not owner.endswith("<locals>")
    own = [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)][:1]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if is_method and own and not names & {"self", "super", "locals"}:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id == own[0]:
                node.id = "self"
            elif isinstance(node, ast.arg) and node.arg == own[0]:
                node.arg = "self"
    return tree


_VIEWS = ("reshape", "view")


class _ViewsApart(ast.NodeTransformer):
    """`x = self.part(a, b).view(shape)` as `x = self.part(a, b)` and `x = x.view(shape)`; where it
    is returned, with the name of `a`."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        is_name = len(node.targets) == 1 and isinstance(target, ast.Name)
        return self._apart(node, target) if is_name else node

    def visit_Return(self, node: ast.Return) -> Any:
        call = _call_under_view(node.value)
        return node if call is None else self._apart(node, call.args[0])

    def _apart(self, node: ast.Assign | ast.Return, name: Any) -> Any:
        call, view = _call_under_view(node.value), node.value
        if call is None or not isinstance(name, ast.Name) or not isinstance(view, ast.Call):
            return node
        if name.id in {name for argument in view.args for name in reads_in(argument)}:
            return node
        first = ast.Assign([ast.Name(name.id, ast.Store())], call)
        view.func = ast.Attribute(ast.Name(name.id, ast.Load()), view.func.attr, ast.Load())  # type: ignore[attr-defined]
        for inner in (first, first.targets[0], view.func, view.func.value):
            ast.copy_location(inner, node)
        return [first, node]


def _call_under_view(node: ast.expr | None) -> ast.Call | None:
    """`self.part(a, b)` in a view of it."""
    if not isinstance(node, ast.Call) or node.keywords or not isinstance(node.func, ast.Attribute):
        return None
    call = node.func.value
    if node.func.attr not in _VIEWS or not isinstance(call, ast.Call) or len(call.args) < 2:
        return None
    is_part = isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "self"
    return call if is_part else None


def compiled(
    tree: ast.FunctionDef, original: types.CodeType, free: Sequence[str] = ()
) -> types.CodeType:
    """The code of a definition, with the free variables of an original, and these."""
    fields: dict[str, Any] = {field: getattr(tree, field, None) for field in tree._fields}
    definition = ast.FunctionDef(**fields)
    # Its body may use its own name.
    definition.name, definition.decorator_list, definition.returns = "_tops_inner", [], None
    # Free variables are those of a function around it.
    outer = ast.parse("def _tops_outer(): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.args.args = [ast.arg(name) for name in (*original.co_freevars, *free)]
    outer.body = [ast.copy_location(definition, tree)]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    flags = original.co_flags & _FUTURE
    code: Any = compile(module, original.co_filename, "exec", flags, dont_inherit=True)
    for name in ("_tops_outer", "_tops_inner"):
        code = next(
            c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name
        )
    found: types.CodeType = code.replace(co_name=original.co_name)
    return found


# How names are called depends on the imports of the file.
_PLUMBING = {"EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL"}
_SAME = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL_FUNCTION"}


def _is_same_code(first: Any, second: Any) -> bool:
    """Whether two codes, or constants of codes, do the same."""
    if isinstance(first, types.CodeType) and isinstance(second, types.CodeType):
        pairs = itertools.zip_longest(_instructions(first), _instructions(second))
        return all(a and b and a[0] == b[0] and _is_same_code(a[1], b[1]) for a, b in pairs)
    return type(first) is type(second) and repr(first) == repr(second)


def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    found = [one for one in dis.get_instructions(code) if one.opname not in _PLUMBING]
    offsets = [one.offset for one in found]
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        (
            _SAME.get(one.opname, one.opname),
            bisect.bisect_left(offsets, one.argval) if one.opcode in jumps else one.argval,
        )
        for one in found
    ]


def function_from(
    tree: ast.FunctionDef, original: Any, free: Mapping[str, Any] = MappingProxyType({})
) -> types.FunctionType:
    """A function of this definition, with the globals and the free variables of an original, and
    more of these."""
    code = compiled(tree, original.__code__, [*free])
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    cells |= {name: types.CellType(value) for name, value in free.items()}
    closure = tuple(cells[name] for name in code.co_freevars)
    return types.FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__, closure
    )


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
    # Assignments whose values are no part of the expression.
    idle: tuple[ast.stmt, ...] = ()


class NoExpression(Exception):
    """A statement that is no assignment of an expression to local variables."""


def value_of(statements: Sequence[ast.stmt]) -> Value | None:
    """What they compute, or None for statements that do more. A local variable that they assign is
    replaced by its value, always by the same node: a call that is used twice is called once."""
    variables: dict[str, ast.expr] = {}
    values: list[tuple[ast.stmt, ast.expr]] = []
    last = statements[-1]
    target: str | None = None
    try:
        for statement in statements[:-1]:
            _, value = _assign(statement, variables)
            values.append((statement, value))
        if isinstance(last, ast.Return) and last.value is not None:
            expression = _replaced(last.value, variables)
        else:
            names, _ = _assign(last, variables)
            # The first result of a call is the value, and the second one is something else.
            if len(names) != 1 and not (len(names) == 2 and names[1] in _seconds(variables)):
                return None
            target = names[0]
            expression = variables[target]
    except NoExpression:
        return None
    used = set(map(id, ast.walk(expression)))
    idle = tuple(
        statement for statement, value in values if id(value) not in used and not _is_idle(value)
    )
    return Value(expression, target, frozenset(variables), _seconds(variables), idle)


_OF_TENSORS = {"shape", "dtype", "device", "ndim"}


def _is_idle(value: ast.expr) -> bool:
    """Whether nothing happens when the value is computed: a name, a constant, or a property of a
    tensor."""
    if isinstance(value, ast.Attribute):
        owner = value.value
        return value.attr in _OF_TENSORS and isinstance(owner, ast.Name) and owner.id != "self"
    return isinstance(value, ast.Name | ast.Constant)


def _seconds(variables: Mapping[str, ast.expr]) -> dict[str, str]:
    return {
        name: ast.unparse(value.value)
        for name, value in variables.items()
        if isinstance(value, ast.Subscript)
        and isinstance(value.value, ast.Call)
        and isinstance(value.slice, ast.Constant)
        and value.slice.value == 1
    }


def _assign(statement: ast.stmt, variables: dict[str, ast.expr]) -> tuple[list[str], ast.expr]:
    """The names that a statement assigns, and what it computes for them."""
    if isinstance(statement, ast.If):
        statement = as_assignment(statement)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        raise NoExpression
    value = _replaced(statement.value, variables)
    target = statement.targets[0]
    if isinstance(target, ast.Name):
        variables[target.id] = value
        return [target.id], value
    if not isinstance(target, ast.Tuple):
        raise NoExpression
    names = [element.id for element in target.elts if isinstance(element, ast.Name)]
    if len(names) != len(target.elts):
        raise NoExpression
    for i, name in enumerate(names):
        variables[name] = ast.Subscript(value, ast.Constant(i), ast.Load())
    return names, value


def as_assignment(branches: ast.If) -> ast.Assign:
    """`x = a if c else b` for branches that assign one variable; without `else`, `b` is `x`."""
    first: dict[str, ast.expr] = {}
    second: dict[str, ast.expr] = {}
    if len(branches.body) != 1 or len(_assign(branches.body[0], first)[0]) != 1:
        raise NoExpression
    ((name, value),) = first.items()
    if not branches.orelse:
        second[name] = ast.Name(name, ast.Load())
    elif len(branches.orelse) != 1 or _assign(branches.orelse[0], second)[0] != [name]:
        raise NoExpression
    choice = ast.IfExp(branches.test, value, second[name])
    return ast.Assign([ast.Name(name, ast.Store())], choice)


_WITH_NAMES_OF_THEIR_OWN = (ast.Lambda, ast.comprehension, ast.NamedExpr, ast.Yield, ast.Await)


def _replaced(node: Any, variables: Mapping[str, ast.expr]) -> Any:
    """The node with the values of these variables in place of their names; itself without any."""
    if isinstance(node, ast.Name):
        return variables.get(node.id, node)
    if isinstance(node, _WITH_NAMES_OF_THEIR_OWN):
        raise NoExpression
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


# ---- local variables


@functools.lru_cache(maxsize=4096)
def variables_in(node: ast.AST, context: type[ast.expr_context]) -> tuple[str, ...]:
    """The names that are read, or assigned, in a node."""
    found = (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
    return tuple(name.id for name in found if isinstance(name.ctx, context))


@functools.lru_cache(maxsize=4096)
def reads_in(node: ast.AST) -> tuple[str, ...]:
    """The names that have to have a value where a node runs, also to be deleted or changed."""
    changed = (inner.target for inner in ast.walk(node) if isinstance(inner, ast.AugAssign))
    names = (target.id for target in changed if isinstance(target, ast.Name))
    return (*variables_in(node, ast.Load), *variables_in(node, ast.Del), *names)


def read_first(statements: Sequence[ast.stmt], is_asked: Callable[[str], bool]) -> Iterator[str]:
    assigned: set[str] = set()
    for statement in statements:
        yield from (name for name in reads_in(statement) if is_asked(name) and name not in assigned)
        # Nobody knows which lines of a compound statement run.
        if isinstance(statement, ast.Assign):
            assigned.update(variables_in(statement, ast.Store))


def read_later(statements: Sequence[ast.stmt], names: Set[str]) -> frozenset[str]:
    """Which of these names the statements may read before they assign them."""
    return frozenset(read_first(statements, names.__contains__))
