"""The source of a `forward`, and what its statements compute."""

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
    "Condition",
    "Value",
    "Window",
    "blocks_of",
    "body_of",
    "compiled",
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
    return _with_self(found, function) if is_current and not code.co_flags & _GENERATES else None


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


def compiled(tree: ast.FunctionDef, original: types.CodeType) -> types.CodeType:
    """The code of a definition, with the free variables of an original."""
    fields: dict[str, Any] = {field: getattr(tree, field, None) for field in tree._fields}
    definition = ast.FunctionDef(**fields)
    # Its body may use its own name.
    definition.name, definition.decorator_list, definition.returns = "_tops_inner", [], None
    # Free variables are those of a function around it.
    outer = ast.parse("def _tops_outer(): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.args.args = [ast.arg(name) for name in original.co_freevars]
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


class _NoExpression(Exception):
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
    except _NoExpression:
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
        statement = _as_assignment(statement)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        raise _NoExpression
    value = _replaced(statement.value, variables)
    target = statement.targets[0]
    if isinstance(target, ast.Name):
        variables[target.id] = value
        return [target.id], value
    if not isinstance(target, ast.Tuple):
        raise _NoExpression
    names = [element.id for element in target.elts if isinstance(element, ast.Name)]
    if len(names) != len(target.elts):
        raise _NoExpression
    for i, name in enumerate(names):
        variables[name] = ast.Subscript(value, ast.Constant(i), ast.Load())
    return names, value


def _as_assignment(branches: ast.If) -> ast.Assign:
    """`x = a if c else b` for branches that assign one variable; without `else`, `b` is `x`."""
    first: dict[str, ast.expr] = {}
    second: dict[str, ast.expr] = {}
    if len(branches.body) != 1 or len(_assign(branches.body[0], first)[0]) != 1:
        raise _NoExpression
    ((name, value),) = first.items()
    if not branches.orelse:
        second[name] = ast.Name(name, ast.Load())
    elif len(branches.orelse) != 1 or _assign(branches.orelse[0], second)[0] != [name]:
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
                    read = _read(behind, inner)
                    lines = (block[start].lineno, block[end - 1].end_lineno or 0)
                    around = tuple(_conditions(body, block, start) or ())
                    own = tuple(one for one in way if one not in value.idle)
                    window = Window(i, start, end, own, lines, value, (*around, *assumed))
                    found.append(
                        window._replace(
                            others=read & value.seconds.keys(),
                            assumed=assumed,
                            obstacle=sees_all or _obstacle(value, inner, read, behind, code),
                        )
                    )
    return found


def _obstacle(
    value: Value,
    inner: Set[str],
    read: Set[str],
    behind: Sequence[ast.stmt],
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
    if not kept:
        return ""
    reader = next(one for one in behind if kept[0] in _reads(one))
    return f"{kept[0]} is read by {_quoted(reader)}"


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


def _reads(node: ast.AST) -> list[str]:
    """The names that have to have a value where a node runs, also to be deleted or changed."""
    changed = (inner.target for inner in ast.walk(node) if isinstance(inner, ast.AugAssign))
    names = (target.id for target in changed if isinstance(target, ast.Name))
    return [*_names(node, ast.Load), *_names(node, ast.Del), *names]


def read_first(statements: Sequence[ast.stmt], is_asked: Callable[[str], bool]) -> Iterator[str]:
    assigned: set[str] = set()
    for statement in statements:
        yield from (name for name in _reads(statement) if is_asked(name) and name not in assigned)
        # Nobody knows which lines of a compound statement run.
        if isinstance(statement, ast.Assign):
            assigned.update(_names(statement, ast.Store))


def _read(statements: Sequence[ast.stmt], names: Set[str]) -> frozenset[str]:
    """Which of these names the statements may read before they assign them."""
    return frozenset(read_first(statements, names.__contains__))
