"""The names and attributes that statements of a function read.

In: statements, `F.gelu(self.up(x))`. Out: `F.gelu` and `self.up`, and what these names are at the
moment, compared by identity.
"""

from __future__ import annotations

import ast
import builtins
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .statements import body_of

__all__ = [
    "Chain",
    "Objects",
    "Reads",
    "Source",
    "cell_of",
    "is_of_torch",
    "is_replaced",
    "objects_of",
    "reads_of",
    "reads_of_function",
    "value_of_name",
]

Chain = tuple[str, ...]


class Reads(NamedTuple):
    """The names that statements read, each with the attributes of it that they read."""

    own: frozenset[Chain]  # of `self`
    others: frozenset[Chain]  # which are no local variables


@functools.lru_cache(maxsize=1024)
def reads_of(nodes: tuple[ast.AST, ...], code: types.CodeType) -> Reads:
    """What these statements of a function read."""
    local = {*code.co_varnames, *code.co_cellvars}
    found = [chain for node in nodes for chain in _chains(node)]
    own = frozenset(chain[1:] for chain in found if chain[0] == "self")
    return Reads(own, frozenset(chain for chain in found if chain[0] not in local))


def _chains(node: ast.AST) -> Iterable[Chain]:
    chain = _chain(node)
    if chain:
        return [chain]
    return [found for inner in ast.iter_child_nodes(node) for found in _chains(inner)]


def _chain(node: ast.AST) -> Chain:
    """`a.b.c` as a tuple; an empty one of another node, also of a name that is assigned."""
    if isinstance(node, ast.Name):
        return () if isinstance(node.ctx, ast.Store) else (node.id,)
    if isinstance(node, ast.Attribute):
        owner, name = _chain(node.value), node.attr
        return (*owner, name) if owner else ()
    is_known = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr")
    if is_known and isinstance(node, ast.Call) and len(node.args) >= 2:
        owner, second = _chain(node.args[0]), node.args[1]
        if owner and isinstance(second, ast.Constant) and isinstance(second.value, str):
            return (*owner, second.value)
    return ()


@functools.lru_cache(maxsize=1024)
def reads_of_function(function: Callable[..., Any]) -> Reads:
    """What the whole body of a function reads; nothing if it has no source."""
    body = body_of(function)
    return (
        Reads(frozenset(), frozenset())
        if body is None
        else reads_of(tuple(body), function.__code__)
    )


class Objects:
    """What names are, compared by identity."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects = list(objects)
        self._ids = tuple(map(id, self._objects))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Objects) and self._ids == other._ids

    def __hash__(self) -> int:
        return hash(self._ids)


def objects_of(function: Callable[..., Any], reads: Reads | None = None) -> Objects:
    """What the names that a function reads are now, or those among them that some statements read.
    What is matched by them is a match as long as they stay."""
    return Objects(_objects(function, reads_of_function(function) if reads is None else reads))


def _objects(function: Any, reads: Reads) -> Iterator[Any]:
    for name, *attributes in reads.others:
        value = value_of_name(function, name)
        yield value
        for attribute in attributes:
            value = vars(value).get(attribute) if isinstance(value, types.ModuleType) else None
            yield value


def cell_of(function: Any, name: str) -> types.CellType | None:
    """Where a variable of a function around this one is; None if it has no such variable."""
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)] if name in names else None


def value_of_name(function: Any, name: str) -> Any:
    """What a name of a function is that is no local variable; None if it is nothing."""
    cell = cell_of(function, name)
    if cell is not None:
        return getattr(cell, "cell_contents", None)
    return function.__globals__.get(name, getattr(builtins, name, None))


class Source(NamedTuple):
    """Statements of a function: what they read, and what the names were when they were matched."""

    function: Any
    reads: Reads
    objects: Objects


def is_replaced(owner: Any, name: str, function: Any) -> bool:
    """Whether an attribute of a module of torch was a function, and is another one now."""
    if not isinstance(owner, types.ModuleType) or not callable(function):
        return False
    if not is_of_torch(owner.__name__) or isinstance(function, type | types.ModuleType):
        return False
    if owner.__name__.startswith("torch.ops."):  # where other libraries have their ops
        return False
    if isinstance(function, types.FunctionType):
        return not is_of_torch(str(function.__globals__.get("__name__"))) or (
            function.__name__ != name
        )
    return not isinstance(function, types.BuiltinFunctionType) or function.__name__ != name


def is_of_torch(module: str) -> bool:
    """Whether it is the name of a module of torch."""
    return module.split(".")[0] == "torch"
