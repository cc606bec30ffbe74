"""Statements with placeholders, matched against the source of a `forward`."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["Pattern", "body_of", "function_of", "reads", "tree_of", "wrappers_of"]

# What begins an attribute that stands for any.
_ATTRIBUTE = "any_"
Names = dict[str, str]
# What names of modules mean in patterns.
_MODULES = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math}


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


class Pattern:
    """Statements in which `X`, `Y` and other single upper-case letters stand for local variables,
    and attributes that begin with `any_` for attributes of any name.

    `matches` compares them with consecutive statements; each placeholder stands for one name, the
    same one everywhere.
    """

    def __init__(self, text: str) -> None:
        self.text = textwrap.dedent(text).strip()
        self.statements = ast.parse(self.text).body

    @property
    def result(self) -> str | None:
        """The local variable that the last statement assigns; None for another statement."""
        last = self.statements[-1] if self.statements else None
        if not isinstance(last, ast.Assign) or len(last.targets) != 1:
            return None
        target = last.targets[0]
        is_local = isinstance(target, ast.Name) and _is_placeholder(target.id)
        return target.id if is_local else None  # type: ignore[attr-defined]

    @property
    def inputs(self) -> list[str]:
        """The local variables that are read before they are assigned, in the order of reading."""
        return list(dict.fromkeys(_read_first(self.statements, _is_placeholder)))

    def globals(self) -> set[str]:
        """The names of modules and functions in it."""
        nodes = (node for statement in self.statements for node in ast.walk(statement))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        return {name for name in names if not _is_placeholder(name) and name != "self"}

    def match_all(self, function: Callable[..., Any]) -> Names | None:
        """The names that make this the whole body of the function, or None."""
        body = body_of(function)
        if body is None or len(body) != len(self.statements) or not self.fits(function):
            return None
        return self.match(body)

    def fits(self, function: Callable[..., Any]) -> bool:
        """Whether the function's module means the same by the names of modules in the pattern."""
        known = function.__globals__
        return all(known.get(name) is _MODULES[name] for name in self.globals() & _MODULES.keys())

    def find(self, body: Sequence[ast.stmt]) -> Iterator[tuple[int, Names]]:
        """Where these statements stand in a body, and their names, from the first on."""
        count = len(self.statements)
        for i in range(len(body) - count + 1):
            names = self.match(body[i : i + count])
            if names is not None:
                yield i, names

    def match(self, statements: Sequence[ast.stmt]) -> Names | None:
        names: Names = {}
        pairs = zip(self.statements, statements, strict=True)
        is_match = all(_equal(wanted, found, names) for wanted, found in pairs)
        if not is_match:
            return None
        # Two placeholders never stand for one local variable, or for one attribute.
        kinds = [
            {k: v for k, v in names.items() if _is_placeholder(k) == is_local}
            for is_local in (0, 1)
        ]
        return names if all(len(set(kind.values())) == len(kind) for kind in kinds) else None


def _is_placeholder(name: str) -> bool:
    return len(name) == 1 and name.isupper()


def _bind(names: Names, placeholder: str, found: str) -> bool:
    return names.setdefault(placeholder, found) == found


def _equal(wanted: Any, found: Any, names: Names) -> bool:
    if isinstance(wanted, ast.AST):
        if type(wanted) is not type(found):
            return False
        if isinstance(wanted, ast.Name) and _is_placeholder(wanted.id):
            assert isinstance(found, ast.Name)
            return _bind(names, wanted.id, found.id)
        if isinstance(wanted, ast.Attribute) and wanted.attr.startswith(_ATTRIBUTE):
            assert isinstance(found, ast.Attribute)
            name = wanted.attr.removeprefix(_ATTRIBUTE)
            return _bind(names, name, found.attr) and _equal(wanted.value, found.value, names)
        fields = (name for name in wanted._fields if name not in ("ctx", "type_comment", "kind"))
        return all(_equal(getattr(wanted, f), getattr(found, f, None), names) for f in fields)
    if isinstance(wanted, list):
        return len(wanted) == len(found) and all(
            _equal(a, b, names) for a, b in zip(wanted, found, strict=True)
        )
    return type(wanted) is type(found) and bool(wanted == found)


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


def reads(statements: Sequence[ast.stmt], names: set[str]) -> bool:
    """Whether the statements may read one of these names before they assign it."""
    return any(True for _ in _read_first(statements, names.__contains__))
