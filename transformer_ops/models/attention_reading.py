"""What the `forward` of an attention module computes: its statements run on the places of numbers
in place of numbers.

A tensor is one of integers here: each says which row and column of the products a number comes
from, and what was done to it since. So views, slices and concatenations are torch's own, however a
`forward` writes them. Attributes have their values, and facts watch them. A cache that is given is
an empty one. Arguments that a statement asks for are absent, which each call is asked again.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..op.base import FusibleOperation
from ..views import BorrowedLinear, BorrowedLoRALinear, is_torch
from .adapters import base_of
from .attention_forms import Rotation, rotation_of
from .parts import part, products
from .reads import Objects, objects_of, value_of_name
from .rules import FuseUnfit
from .statements import body_of, function_of
from .whole import name_of
from .widths import width_of

__all__ = ["Reading", "part_behind", "product", "read_attention"]

Path = tuple[str, ...]
# What was done to a number: ("norm", path, width), ("rotation",), ("scale", factor), and behind
# attention ("part", path), ("dropout", attribute).
Step = tuple[Any, ...]
Steps = tuple[Step, ...]
_PRODUCT: Steps = (("product",),)
_ATTENTION: Steps = (("attention",),)
_COLUMNS, _ROWS = 1 << 24, 1 << 8
_CACHES = ("cache", "past_key_values", "layer_past")
_TABLES, _MASK = "position_embeddings", "attention_mask"
# Batch and sequence of the two runs.
_SIZES = ((2, 3), (3, 5))


class Reading(NamedTuple):
    """Attention between products.

    Attributes:
        products: attributes of the layers whose rows are queries, keys and values.
        heads, kv_heads, head_dim: of them.
        by_head: whether query, key and value of each head are next to each other.
        before: what is done to queries and keys, in order: ("norm", paths of both norms, whether
            of all heads together) and ("rotation",).
        rotation: how they are rotated.
        after: what is done to the result: ("part", path) and ("dropout", attribute).
        scale: of the scores.
        p: the probability of dropout.
        is_causal: what the call of attention says; None if it leaves that to its arguments.
        has_cache: whether a cache may be given.
        has_eager: whether it is the same without torch's attention.
        absent: arguments that have to be None or False in a call.
        interface, eager: what chooses the function of attention, and the one in the source.
    """

    products: tuple[Path, ...]
    heads: int
    kv_heads: int
    head_dim: int
    by_head: bool
    before: Steps
    rotation: Rotation | None
    after: Steps
    scale: float
    p: float
    is_causal: bool | None
    has_cache: bool
    has_eager: bool
    absent: frozenset[str]
    interface: Any
    eager: Any


class _Unknown(Exception):
    """A statement that says nothing about attention as ops know it."""


@dataclass(frozen=True)
class _Object:
    """What is reached from the module by attributes."""

    path: Path


@dataclass(frozen=True)
class _Given:
    """An argument of the call, or an element of it."""

    name: str
    element: int | None = None


@dataclass(frozen=True)
class _Interface:
    table: Any
    eager: Any


@dataclass(eq=False)
class _Rows:
    """The places of numbers: `(steps * _ROWS + row) * _COLUMNS + column`."""

    at: Tensor


class _Weights:
    """The second result of attention."""


class _Maybe:
    """A truth that depends on the call."""


_MAYBE, _DTYPE = _Maybe(), object()
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_VIEWS = {"chunk", "dim", "expand", "flatten", "movedim", "permute", "repeat_interleave", "reshape"}
_VIEWS |= {"size", "split", "squeeze", "swapaxes", "transpose", "unbind", "unflatten", "unsqueeze"}
_VIEWS |= {"view"}
_CASTS = {"clone", "contiguous", "float", "to", "type", "type_as"}
_JOINS = (torch.cat, torch.concat, torch.split, torch.chunk, torch.unbind, torch.transpose)
_PURE = (int, float, bool, len, min, max, tuple, math.sqrt, math.prod)
_PLAIN = (bool, int, float, str, type(None))


# What an attribute may be beside a number.
_NO, _IS_OBJECT, _IS_MODULE = "<no>", "<object>", "<module>"


def _value_at(module: nn.Module, path: Path) -> Any:
    """What is reached by attributes: a number or a text, or what else it is."""
    found: Any = module
    for name in path:
        is_property = isinstance(inspect.getattr_static(type(found), name, None), property)
        if (is_property and isinstance(found, nn.Module)) or not hasattr(found, name):
            return f"{_NO} attribute"
        found = getattr(found, name)
    if isinstance(found, _PLAIN):
        return found
    if isinstance(found, Tensor | list | dict):
        return f"{_NO} number but a {type(found).__name__}"
    return _IS_MODULE if isinstance(found, nn.Module) else _IS_OBJECT


def _at(module: nn.Module, path: Path) -> Any:
    return functools.reduce(getattr, path, module)


_LOOKS: dict[str, Callable[..., Any]] = {
    "value": _value_at,
    "has": lambda module, path: hasattr(_at(module, path[:-1]), path[-1]),
    "product": lambda module, path: _width([product(_at(module, path))]),
    "part": lambda module, path, width: _width(part_behind(_at(module, path)), width),
    "method": lambda module, path: inspect.getattr_static(
        type(_at(module, path[:-1])), path[-1], None
    ),
}


class _Reader:
    """One run of a `forward`."""

    def __init__(
        self, module: nn.Module, function: Any, run: int, has_cache: bool, implementation: str
    ) -> None:
        self.module, self.is_training, self.has_cache = module, run == 0, has_cache
        self.implementation = implementation
        self.batch, self.length = _SIZES[run]
        self.steps: list[Steps] = [(), _ATTENTION]
        self.products: list[tuple[Path, int]] = []
        self.absent: set[str] = set()
        self.looks: dict[tuple[Any, ...], Any] = {}
        self.widths: dict[Steps, int] = {}  # of rows, by what was done to them
        self.rotation: Rotation | None = None
        self.found: Reading | None = None
        self.cached: tuple[Any, ...] | None = None
        self.function = function

    def read(self) -> Reading:
        """What it computes; _Unknown for what is no attention that ops know."""
        parameters = inspect.signature(self.function).parameters
        names = list(parameters)
        self.defaults = {name: one.default for name, one in parameters.items()}
        given: dict[str, Any] = {name: _Given(name) for name in names[2:]}
        given |= {name: None for name in _CACHES if name in given and not self.has_cache}
        given |= {names[0]: _Object(()), names[1]: _Rows(torch.empty(0))}
        self.input = given[names[1]]
        result = _Frame(self, self.function, given).run()
        if not isinstance(result, tuple) or len(result) < 2 or not isinstance(result[0], _Rows):
            raise _Unknown("its result is no pair")
        if self.found is None or not isinstance(result[1], _Weights):
            raise _Unknown("it does not return what attention gives")
        if result[0].at.dim() != 3:
            raise _Unknown("its result has other rows")
        after = self.whole_rows(result[0])[1:]
        return self.found._replace(after=after, absent=frozenset(self.absent))

    # ---- attributes

    def look(self, kind: str, path: Path, *args: Any) -> Any:
        """What the module has. All that is asked for is remembered."""
        found = _LOOKS[kind](self.module, path, *args)
        key = (kind, path, *args)
        self.looks[key] = found
        return found

    def attribute(self, path: Path) -> Any:
        if path[-1] == "training":
            return self.is_training
        if path[-1] == "_attn_implementation":
            return self.implementation
        if path[-1] == "dtype":
            return _DTYPE
        found = self.look("value", path)
        if isinstance(found, str) and found.startswith(_NO):
            raise _Unknown(f"{'.'.join(path)} is {found}")
        return _Object(path) if found in (_IS_OBJECT, _IS_MODULE) else found

    # ---- tensors

    def interned(self, steps: Steps) -> int:
        if steps not in self.steps:
            self.steps.append(steps)
        return self.steps.index(steps)

    def new_rows(self, steps: Steps, first: int, width: int) -> _Rows:
        """[batch, length, width] with columns from a first one on."""
        self.widths[steps] = first + width
        rows = torch.arange(self.batch * self.length).view(self.batch, self.length, 1)
        at = (self.interned(steps) * _ROWS + rows) * _COLUMNS + torch.arange(first, first + width)
        return _Rows(at)

    def with_step(self, rows: _Rows, step: Step) -> _Rows:
        rest, number = rows.at % (_ROWS * _COLUMNS), rows.at // (_ROWS * _COLUMNS)
        made = torch.empty_like(number)
        for old in number.unique().tolist():
            steps = self.steps[old]
            if steps[:1] == _ATTENTION or not steps:
                raise _Unknown("it does something else to rows")
            made[number == old] = self.interned((*steps, step))
        return _Rows(made * (_ROWS * _COLUMNS) + rest)

    def whole_rows(self, rows: _Rows) -> Steps:
        """What was done to rows that are whole and in order."""
        at = rows.at
        steps = self.steps[int(at.flatten()[0]) // (_ROWS * _COLUMNS)]
        if steps not in self.widths:
            raise _Unknown("it takes other rows")
        wanted = self.new_rows(steps, 0, self.widths[steps]).at
        is_whole = at.shape[-1] == wanted.shape[-1] and at.numel() == wanted.numel()
        if not is_whole or not at.reshape(wanted.shape).equal(wanted):
            raise _Unknown("it takes parts of rows")
        return steps

    def call_part(self, path: Path, rows: _Rows) -> _Rows:
        """A submodule that is called."""
        if rows is self.input:
            if any(path == known for known, _ in self.products):
                raise _Unknown("it computes a product twice")
            first = sum(width for _, width in self.products)
            width = self.look("product", path)
            self.products.append((path, width))
            return self.new_rows(_PRODUCT, first, width)
        steps = self.steps[int(rows.at.flatten()[0]) // (_ROWS * _COLUMNS)]
        if steps[:1] != _ATTENTION:
            return self.with_step(rows, self.norm(path, rows))
        steps = self.whole_rows(rows)
        width = self.look("part", path, rows.at.shape[-1])
        shape = (*rows.at.shape[:-1], width)
        return _Rows(self.new_rows((*steps, ("part", path)), 0, width).at.reshape(shape))

    def norm(self, path: Path, rows: _Rows) -> Step:
        """A norm of the last dimension, which has to be whole heads."""
        columns = rows.at % _COLUMNS
        width = columns.shape[-1]
        is_dense = (columns - columns[..., :1]).eq(torch.arange(width)).all()
        if not is_dense or (columns[..., 0] % width).any():
            raise _Unknown("it normalizes parts of heads")
        return ("norm", path, width)

    def rotate(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        known = rotation_of(function)
        if known is None:
            raise _Unknown(f"what {function.__name__} does is not known")
        rotation, names = known
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tables = [given[names[name]] for name in ("C", "N")]
        if tables != [_Given(_TABLES, 0), _Given(_TABLES, 1)] or self.rotation not in (
            None,
            rotation,
        ):
            raise _Unknown("its tables are others")
        self.rotation = rotation
        found = []
        for name in ("Q", "K"):
            rows = given[names[name]]
            number = rows.at % (_ROWS * _COLUMNS) // _COLUMNS
            wanted = torch.arange(self.batch * self.length).view(self.batch, self.length, 1)
            if rows.at.dim() != 4 or not number.eq(wanted.unsqueeze(given[names["U"]])).all():
                raise _Unknown("its tables are those of other dimensions")
            found.append(self.with_step(rows, ("rotation",)))
        return tuple(found)

    # ---- attention

    def attend(self, interface: _Interface, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) == 4 and _MASK in kwargs:
            args = (*args, kwargs[_MASK])
        if self.found is not None or len(args) != 5 or args[0] != _Object(()):
            raise _Unknown("attention is called in another way")
        if args[4] is None:
            self.absent.add(_MASK)
        elif args[4] != _Given(_MASK):
            raise _Unknown("its mask is another one")
        if not all(isinstance(one, _Rows) for one in args[1:4]):
            raise _Unknown("attention takes something else")
        if self.cached is not None and self.cached != tuple(one.at.data_ptr() for one in args[2:4]):
            raise _Unknown("the cache takes something else")
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
            raise _Unknown("its scores are changed")
        query, key, value = (self.heads(one) for one in args[1:4])
        head_dim = query[0].shape[1]
        columns = [one[0] for one in (query, key, value)]
        if {one.shape[1] for one in columns} != {head_dim} or len(columns[1]) != len(columns[2]):
            raise _Unknown("its keys and values have different widths")
        products, by_head = self.packed(columns)
        before, scale = self.before(query, key, value)
        if by_head and any(step[0] == "norm" for step in before):
            raise _Unknown("it normalizes heads that are not side by side")
        given = kwargs.get("scaling")
        p = kwargs.get("dropout", 0.0)
        if not isinstance(p, int | float) or (p and not self.is_training):
            raise _Unknown("its dropout is another one")
        is_causal = kwargs.get("is_causal")
        if not isinstance(given, float | int | None) or not isinstance(is_causal, bool | None):
            raise _Unknown("its scale is no number")
        self.found = Reading(
            products,
            len(columns[0]),
            len(columns[1]),
            head_dim,
            by_head,
            before,
            self.rotation,
            (),
            scale * (head_dim**-0.5 if given is None else given),
            float(p),
            is_causal,
            False,
            False,
            frozenset(),
            interface.table,
            interface.eager,
        )
        heads, width = len(columns[0]), len(columns[0]) * head_dim
        output = self.new_rows(_ATTENTION, 0, width).at
        return _Rows(output.view(self.batch, self.length, heads, head_dim)), _Weights()

    def heads(self, rows: _Rows) -> tuple[Tensor, list[Steps]]:
        """The columns [heads, head_dim] of queries, keys or values, and what was done to the
        numbers of a head."""
        at = rows.at
        if at.dim() != 4 or (at.shape[0], at.shape[2]) != (self.batch, self.length):
            raise _Unknown("its heads are in another order")
        first = at[0, :, 0]
        wanted = torch.arange(self.batch * self.length).view(self.batch, 1, self.length, 1)
        if not at.eq(first[:, None] + wanted * _COLUMNS).all():
            raise _Unknown("its rows are in another order")
        number = first // (_ROWS * _COLUMNS)
        if not number.eq(number[:1]).all():
            raise _Unknown("its heads are different ones")
        return first % _COLUMNS, [self.steps[i] for i in number[0].tolist()]

    def packed(self, columns: Sequence[Tensor]) -> tuple[tuple[Path, ...], bool]:
        """The products whose rows are these columns, side by side or head by head."""
        ends = list(itertools.accumulate(width for _, width in self.products))
        used = torch.cat([one.flatten() for one in columns])
        order = [sum(int(c) >= end for end in ends) for c in used]
        order = list(dict.fromkeys(order))
        if not all(0 <= i < len(self.products) for i in order):
            raise _Unknown("it attends to something else")
        paths = tuple(self.products[i][0] for i in order)
        if len(order) != len(self.products):
            raise _Unknown("it has another product")
        ranges = [torch.arange(ends[i] - self.products[i][1], ends[i]) for i in order]
        wanted = torch.cat(ranges)
        if used.equal(wanted):
            return paths, False
        if len(paths) == 1 and len(columns[0]) == len(columns[1]):
            if torch.cat([one for one in columns], 1).flatten().equal(wanted):
                return paths, True
        raise _Unknown("its heads are not side by side")

    def before(self, *parts: tuple[Tensor, list[Steps]]) -> tuple[Steps, float]:
        """What is done to queries and keys, and the factor of scores."""
        (columns, query), (key_columns, key), (_, value) = parts
        if any(steps != _PRODUCT for steps in value):
            raise _Unknown("it does something to values")
        scale, found, rotated = 1.0, [], []
        for steps in (query, key):
            first, rest = steps[0][1:], {one[1:] for one in steps}
            plain = tuple(step for step in first if step != ("rotation",))
            if rest - {first, plain} or first.count(("rotation",)) > 1:
                raise _Unknown("it rotates parts of heads")
            is_rotated = [one[1:] == first for one in steps]
            if is_rotated != sorted(is_rotated, reverse=True):
                raise _Unknown("it rotates other parts of heads")
            rotated.append(is_rotated)
            kinds = [step[0] for step in first]
            if "scale" in kinds and "norm" in kinds[kinds.index("scale") :]:
                raise _Unknown("it normalizes what is scaled")
            scale *= math.prod(step[1] for step in first if step[0] == "scale")
            found.append([step for step in first if step[0] != "scale"])
        kinds, others = ([step[0] for step in one] for one in found)
        if kinds != others or rotated[0] != rotated[1]:
            raise _Unknown("queries and keys are made in different ways")
        made: list[Step] = []
        for one, other in zip(*found, strict=True):
            if one[0] == "rotation":
                made.append(one)
                continue
            widths = one[2], other[2]
            of_heads = (columns.shape[1],) * 2
            whole = columns.numel(), key_columns.numel()
            if widths not in (of_heads, whole):
                raise _Unknown("its norms are those of something else")
            made.append(("norm", one[1], other[1], widths != of_heads))
        return tuple(made), scale


def product(module: Any) -> FusibleOperation:
    """The product of a `torch.nn.Linear`, or of a module that computes the same."""
    found = [] if is_torch(module, nn.Linear) else part(module)
    if len(found) == 1 and isinstance(found[0], BorrowedLinear | BorrowedLoRALinear):
        return found[0]
    return products(module)


def part_behind(module: Any) -> list[FusibleOperation]:
    """The ops of a submodule behind attention."""
    return [product(module)] if is_torch(base_of(module), nn.Linear) else part(module)


def _width(ops: Sequence[FusibleOperation], width: int = 0) -> int:
    """How many numbers the rows have that ops give, of rows of this width."""
    for basic in (basic for op in ops for basic in op.basic_ops):
        width = width_of(basic) or width
    return width


class _Frame:
    """The statements of one function that a `forward` runs."""

    def __init__(self, reader: _Reader, function: Any, variables: dict[str, Any]) -> None:
        self.reader, self.function, self.variables = reader, function, variables

    def run(self) -> Any:
        body = body_of(self.function)
        if body is None:
            raise _Unknown("it has no source")
        return self.statements(body)

    def statements(self, body: Sequence[ast.stmt]) -> Any:
        """Runs them, and returns what they return; the reader itself if they do not."""
        for one in body:
            if isinstance(one, ast.Return):
                return None if one.value is None else self.value(one.value)
            if isinstance(one, ast.If):
                found = self.statements(one.body if self.truth(one.test) else one.orelse)
                if found is not self.reader:
                    return found
            elif isinstance(one, ast.Assign) and len(one.targets) == 1:
                self.assign(one.targets[0], self.value(one.value))
            elif isinstance(one, ast.AnnAssign) and one.value is not None:
                self.assign(one.target, self.value(one.value))
            elif not isinstance(one, ast.Pass):
                raise _Unknown(f"what `{ast.unparse(one)[:60]}` does is not known")
        return self.reader

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
            return
        if not isinstance(target, ast.Tuple):
            raise _Unknown(f"`{ast.unparse(target)}` is assigned")
        if value == _Given(_TABLES) and len(target.elts) == 2:
            value = tuple(_Given(_TABLES, i) for i in range(2))
        if not isinstance(value, tuple | list) or len(value) != len(target.elts):
            raise _Unknown(f"`{ast.unparse(target)}` is no tuple")
        for inner, one in zip(target.elts, value, strict=True):
            self.assign(inner, one)

    def truth(self, node: ast.expr) -> bool:
        found = self.value(node)
        if isinstance(found, _Given) and found.name != _TABLES:
            if found.name == _MASK:
                raise _Unknown("it asks for its mask")
            if found.name in _CACHES:
                return self.reader.has_cache
            if self.reader.defaults[found.name] not in (None, False, inspect.Parameter.empty):
                raise _Unknown(f"{found.name} is given by default")
            self.reader.absent.add(found.name)
            return False
        if found is _MAYBE:
            raise _Unknown(f"`{ast.unparse(node)}` depends on the call")
        return not isinstance(found, _PLAIN) or bool(found)

    def value(self, node: ast.expr) -> Any:
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise _Unknown(f"what `{ast.unparse(node)[:60]}` is is not known")
        return method(node)

    # ---- expressions

    def _Constant(self, node: ast.Constant) -> Any:
        return node.value

    def _Name(self, node: ast.Name) -> Any:
        if node.id in self.variables:
            return self.variables[node.id]
        found = value_of_name(self.function, node.id)
        if found is None:
            raise _Unknown(f"{node.id} is not known")
        return found

    def _Attribute(self, node: ast.Attribute) -> Any:
        owner, name = self.value(node.value), node.attr
        if isinstance(owner, _Object):
            return self.reader.attribute((*owner.path, name))
        if isinstance(owner, _Rows):
            if owner is self.reader.input and name == "shape":
                return (self.reader.batch, self.reader.length, _MAYBE)
            if name in ("dtype", "device"):
                return _DTYPE
            if name == "shape":
                return tuple(owner.at.shape)
        if isinstance(owner, types.ModuleType):
            return getattr(owner, name)
        raise _Unknown(f"what `{ast.unparse(node)}` is is not known")

    def _Tuple(self, node: ast.Tuple | ast.List) -> Any:
        return tuple(self.many(node.elts))

    _List = _Tuple

    def many(self, nodes: Sequence[ast.expr]) -> list[Any]:
        found: list[Any] = []
        for one in nodes:
            if isinstance(one, ast.Starred):
                inner = self.value(one.value)
                if inner == _Given(_TABLES):
                    inner = tuple(_Given(_TABLES, i) for i in range(2))
                if not isinstance(inner, tuple | list):
                    raise _Unknown(f"`{ast.unparse(one)}` is no tuple")
                found += inner
            else:
                found.append(self.value(one))
        return found

    def _Subscript(self, node: ast.Subscript) -> Any:
        owner, index = self.value(node.value), self.value(node.slice)
        if isinstance(owner, _Rows) and owner is not self.reader.input:
            return _Rows(owner.at[index])
        if isinstance(owner, tuple | list) and isinstance(index, int | slice):
            return owner[index]
        if owner == _Given(_TABLES) and index in (0, 1):
            return _Given(_TABLES, index)
        raise _Unknown(f"what `{ast.unparse(node)}` is is not known")

    def _Slice(self, node: ast.Slice) -> slice:
        return slice(*(one and self.value(one) for one in (node.lower, node.upper, node.step)))

    def _UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return not self.truth(node.operand)
        found = self.value(node.operand)
        if not isinstance(found, int | float):
            raise _Unknown(f"what `{ast.unparse(node)}` is is not known")
        return _OPERATORS[type(node.op)](found)

    def _BinOp(self, node: ast.BinOp) -> Any:
        first, second = self.value(node.left), self.value(node.right)
        kind = type(node.op)
        if isinstance(second, _Rows) and kind is ast.Mult:
            first, second = second, first
        is_number = isinstance(second, int | float)
        if isinstance(first, _Rows) and is_number and kind in (ast.Mult, ast.Div):
            return self.reader.with_step(first, ("scale", _OPERATORS[kind](1.0, second)))
        if kind not in _OPERATORS:
            raise _Unknown(f"what `{ast.unparse(node)[:60]}` is is not known")
        is_shape = isinstance(first, tuple) and isinstance(second, tuple) and kind is ast.Add
        if not is_shape and not (is_number and isinstance(first, int | float)):
            raise _Unknown(f"what `{ast.unparse(node)[:60]}` is is not known")
        return _OPERATORS[kind](first, second)

    def _BoolOp(self, node: ast.BoolOp) -> bool:
        is_or = isinstance(node.op, ast.Or)
        is_open = False
        for one in node.values:
            try:
                if self.truth(one) is is_or:
                    return is_or
            except _Unknown:
                is_open = True
        if is_open:
            raise _Unknown(f"`{ast.unparse(node)[:60]}` depends on the call")
        return not is_or

    def _Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1:
            raise _Unknown(f"`{ast.unparse(node)}` is not known")
        kind = type(node.ops[0])
        first, second = (self.value(one) for one in (node.left, node.comparators[0]))
        if second is None and kind in (ast.Is, ast.IsNot):
            is_there = first is not None
            if isinstance(first, _Given):
                is_there = first.name == _TABLES or self.truth(node.left)
            return is_there is (kind is ast.IsNot)
        if _MAYBE in (first, second):
            return _MAYBE
        if not isinstance(first, _PLAIN) or not isinstance(second, (*_PLAIN, tuple)):
            raise _Unknown(f"`{ast.unparse(node)}` is not known")
        return _OPERATORS[kind](first, second)

    def _IfExp(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.truth(node.test) else node.orelse)

    # ---- calls

    def _Call(self, node: ast.Call) -> Any:
        args = self.many(node.args)
        kwargs = {one.arg: self.value(one.value) for one in node.keywords if one.arg is not None}
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            found = self.method(owner, node.func.attr, args, kwargs)
            if found is not self.reader:
                return found
        function = self.value(node.func)
        reader = self.reader
        if isinstance(function, _Interface):
            return reader.attend(function, args, kwargs)
        if isinstance(function, _Object):
            if len(args) == 1 and isinstance(args[0], _Rows) and not kwargs:
                if reader.look("value", function.path) == _IS_MODULE:
                    return reader.call_part(function.path, args[0])
        if function in (getattr, hasattr):
            return self.get(function, args)
        if function is isinstance and args[0] in map(_Given, _CACHES):
            return False
        if function is nn.functional.dropout and len(args) == 1 and isinstance(args[0], _Rows):
            return self.dropout(node, args[0], kwargs)
        if any(function is one for one in _JOINS):
            return self.joined(function, args, kwargs)
        if any(function is one for one in _PURE):
            if all(isinstance(one, (*_PLAIN, tuple)) for one in args) and not kwargs:
                return function(*args)
        if isinstance(function, types.FunctionType) and len(args) >= 2:
            if all(isinstance(one, _Rows) for one in args[:2]):
                return reader.rotate(function, args, kwargs)
        raise _Unknown(f"what `{ast.unparse(node)[:60]}` does is not known")

    def method(self, owner: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A method of a tensor, a cache or the module; the reader for another function."""
        reader = self.reader
        if isinstance(owner, _Rows):
            if owner is reader.input:
                if name == "size":
                    shape = (reader.batch, reader.length, _MAYBE)
                    return shape[args[0]] if args else shape
                raise _Unknown(f"its input is changed by {name}")
            if name in _CASTS:
                return owner
            if name in _VIEWS:
                return self.joined(getattr(Tensor, name), (owner, *args), kwargs)
            raise _Unknown(f"{name} of a tensor is not known")
        if isinstance(owner, _Given) and owner.name in _CACHES and name == "update":
            if reader.cached is not None or args[2] != reader.attribute(("layer_idx",)):
                raise _Unknown("its cache is filled in another way")
            reader.cached = tuple(one.at.data_ptr() for one in args[:2])
            return args[0], args[1]
        if name == "get_interface" and type(owner).__name__ == "AttentionInterface":
            return _Interface(owner, args[1])
        if owner == _Object(()):
            method = reader.look("method", (name,))
            if isinstance(method, types.FunctionType):
                if function_of(method) is not method:
                    raise _Unknown(f"{name} is wrapped")
                bound = inspect.signature(method).bind(owner, *args, **kwargs)
                bound.apply_defaults()
                return _Frame(reader, method, dict(bound.arguments)).run()
        return reader

    def joined(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A function of torch that gives views of tensors, or joins them."""

        def plain(one: Any) -> Any:
            if one is self.reader.input or one is _MAYBE:
                raise _Unknown("it divides its input")
            if isinstance(one, tuple):
                return tuple(map(plain, one))
            return one.at if isinstance(one, _Rows) else one

        values = [plain(one) for one in (*args, *kwargs.values())]
        allowed = (*_PLAIN, Tensor)
        for one in values:
            for inner in one if isinstance(one, tuple) else (one,):
                if not isinstance(inner, allowed):
                    raise _Unknown("a shape is not known")
        split = len(args)
        try:
            found = function(*values[:split], **dict(zip(kwargs, values[split:], strict=True)))
        except (RuntimeError, TypeError, IndexError) as error:
            raise _Unknown(str(error)) from None
        if isinstance(found, tuple | list):
            return tuple(_Rows(one) if isinstance(one, Tensor) else one for one in found)
        return _Rows(found) if isinstance(found, Tensor) else found

    def get(self, function: Any, args: Sequence[Any]) -> Any:
        owner, name = args[:2]
        if not isinstance(owner, _Object):
            raise _Unknown("it asks for an attribute of something else")
        has = self.reader.look("has", (*owner.path, name))
        if function is builtins.hasattr:
            return has
        if not has and len(args) < 3:
            raise _Unknown(f"it has no {name}")
        return self.reader.attribute((*owner.path, name)) if has else args[2]

    def dropout(self, node: ast.Call, rows: _Rows, kwargs: dict[str, Any]) -> _Rows:
        """Dropout behind attention, by an attribute of the module."""
        given = {one.arg: one.value for one in node.keywords}
        p = given.get("p")
        is_own = isinstance(p, ast.Attribute) and ast.unparse(p.value) == "self"
        if not is_own or ast.unparse(given.get("training", node)) != "self.training":
            raise _Unknown("it drops numbers in another way")
        steps = self.reader.whole_rows(rows)
        if steps[:1] != _ATTENTION:
            raise _Unknown("it drops numbers before attention")
        assert isinstance(p, ast.Attribute)
        made = self.reader.new_rows((*steps, ("dropout", p.attr)), 0, rows.at.shape[-1]).at
        return _Rows(made.reshape(rows.at.shape))


@functools.lru_cache(maxsize=1024)
def _known(function: Any, objects: Objects) -> list[tuple[dict[Any, Any], Reading | str]]:
    """What was read before, and what was asked of the module for it."""
    return []


def read_attention(module: nn.Module, function: Any) -> Reading:
    """What a `forward` of an attention module computes. FuseUnfit with the reason for another
    one."""
    if "get_interface" not in function.__code__.co_names:
        raise FuseUnfit(f"the forward of {name_of(module)} is not known")
    known = _known(function, objects_of(function))

    def is_alike(looks: dict[Any, Any]) -> bool:
        return all(_LOOKS[kind](module, *rest) == one for (kind, *rest), one in looks.items())

    found = next((found for looks, found in known if is_alike(looks)), None)
    if found is None:
        looks, found = _read(module, function)
        known[:] = [*known[-7:], (looks, found)]
    if isinstance(found, str):
        raise FuseUnfit(f"{name_of(module)}: {found}")
    return found


def _read(module: nn.Module, function: Any) -> tuple[dict[Any, Any], Reading | str]:
    looks: dict[Any, Any] = {}

    def read(run: int, has_cache: bool = False, implementation: str = "sdpa") -> Reading:
        reader = _Reader(module, function, run, has_cache, implementation)
        reader.looks = looks
        return reader.read()

    def is_same(**options: Any) -> bool:
        try:
            return read(0, **options) == found
        except _Unknown:
            return False

    try:
        found = read(0)
        if read(1) != found._replace(p=0.0):
            raise _Unknown("it depends on sizes")
    except _Unknown as unknown:
        return looks, str(unknown)
    return looks, found._replace(
        has_cache=is_same(has_cache=True), has_eager=is_same(implementation="eager")
    )
