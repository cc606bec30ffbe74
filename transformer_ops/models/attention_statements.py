"""The statements of an attention module, run on the places of numbers in place of numbers.

A tensor is one of integers here: each says which row and column of the products a number comes
from, and what was done to it since. So views, slices and concatenations are torch's own, however a
`forward` writes them.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import operator
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .reads import value_of_name
from .statements import body_of, function_of

__all__ = [
    "BIASES",
    "CACHES",
    "MASK",
    "PLAIN",
    "TABLES",
    "UNKNOWN",
    "WEIGHTS",
    "Bias",
    "Frame",
    "Given",
    "Interface",
    "Masking",
    "Numbers",
    "Owned",
    "Path",
    "Rows",
    "Scores",
    "Sinks",
    "Slot",
    "Unknown",
]

Path = tuple[str, ...]
CACHES = ("cache", "past_key_values", "layer_past")
TABLES, MASK = "position_embeddings", "attention_mask"
BIASES = ("alibi", "position_bias")


class Unknown(Exception):
    """A statement that says nothing about attention as ops know it."""


@dataclass(frozen=True)
class Owned:
    """What is reached from the module by attributes."""

    path: Path


@dataclass(frozen=True)
class Given:
    """An argument of the call, or an element of it."""

    name: str
    element: int | None = None


@dataclass(frozen=True)
class Slot:
    """A layer of a cache: a number and an argument of the call."""

    number: int
    argument: str


@dataclass(frozen=True)
class Interface:
    table: Any
    eager: Any


@dataclass(eq=False)
class Rows:
    """The places of numbers: `(steps * _ROWS + row) * _COLUMNS + column`."""

    at: Tensor


@dataclass(eq=False)
class Numbers(Rows):
    """Numbers of their own, to see what a function does to them."""


@dataclass(eq=False)
class Bias(Rows):
    """Numbers that are added to scores, the same for each query: which column each is from. An
    argument of the call."""

    name: str


@dataclass(eq=False)
class Sinks(Rows):
    """A parameter with one score for each head: which head each is of."""

    path: Path


class Masking(NamedTuple):
    """How scores by hand are masked.

    Attributes:
        is_clamped: masked scores are raised to the least number.
        is_filled: a mask of booleans says which scores are the least number.
        is_sized: a mask is the same for all heads, and has as many rows as columns.
        is_needed: a call has to have a mask.
        bias: an argument that is added to scores; empty for none.
        is_last: the last columns of it are, which may be more than keys.
        is_flat: its first dimension is that of heads of all sequences.
    """

    is_clamped: bool = False
    is_filled: bool = False
    is_sized: bool = False
    is_needed: bool = False
    bias: str = ""
    is_last: bool = False
    is_flat: bool = False


_UNMASKED = Masking()


@dataclass(eq=False)
class Scores(Rows):
    """Products of queries and keys, or their softmax: where each of them is. The last column may be
    a sink."""

    query: Rows
    key: Rows
    scale: float = 1.0
    is_masked: bool = False
    masking: Masking = _UNMASKED
    p: float | None = None  # None before the softmax
    dropout: Path = ()
    sinks: Path = ()
    has_sink: bool = False

    @property
    def has_columns(self) -> bool:
        """Whether the last dimension has all scores of a row."""
        return self.at.flatten().equal(torch.arange(self.at.numel())) and (
            self.at.shape[-1] == self.key.at.shape[-2] + self.has_sink
        )


@dataclass(frozen=True)
class Greatest:
    """The greatest score of each row."""

    scores: Scores


# The second result of torch's attention, what nobody knows, and the least number of a dtype.
WEIGHTS, UNKNOWN, FINFO, LEAST = object(), object(), object(), object()
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
_VIEWS |= {"reshape_as", "view", "view_as"}
_CASTS = {"clone", "contiguous", "float", "to", "type", "type_as"}
_JOINS: tuple[Any, ...] = (torch.cat, torch.concat, torch.split, torch.chunk, torch.unbind)
_JOINS += (torch.transpose, torch.stack, torch.repeat_interleave)
_PRODUCTS = (torch.matmul, torch.bmm)
_SOFTMAX = (nn.functional.softmax, torch.softmax)
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_PURE = (int, float, bool, len, min, max, tuple, math.sqrt, math.prod)
PLAIN = (bool, int, float, str, type(None))


class Frame:
    """The statements of one function that a `forward` runs."""

    def __init__(self, reader: Any, function: Any, variables: dict[str, Any]) -> None:
        self.reader, self.function, self.variables = reader, function, variables

    def body(self) -> list[ast.stmt]:
        body = body_of(self.function)
        if body is None:
            raise Unknown("it has no source")
        return body

    def run(self) -> Any:
        return self.statements(self.body())

    def reaches_attention(self, statement: ast.stmt) -> bool:
        """Runs a statement, and says whether attention is in it."""
        self.statements([statement])
        return self.reader.found is not None

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
                raise Unknown(f"what `{ast.unparse(one)[:60]}` does is not known")
        return self.reader

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.variables[target.id] = value
            return
        if not isinstance(target, ast.Tuple):
            raise Unknown(f"`{ast.unparse(target)}` is assigned")
        if value == Given(TABLES) and len(target.elts) == 2:
            value = tuple(Given(TABLES, i) for i in range(2))
        if not isinstance(value, tuple | list) or len(value) != len(target.elts):
            raise Unknown(f"`{ast.unparse(target)}` is no tuple")
        for inner, one in zip(target.elts, value, strict=True):
            self.assign(inner, one)

    def truth(self, node: ast.expr) -> bool:
        found = self.value(node)
        if isinstance(found, Given) and found.name != TABLES:
            if found.name == MASK:
                return True
            if found.name == "position_bias":
                raise Unknown("its scores are changed")
            if found.name in CACHES:
                return self.reader.has_cache
            if self.reader.defaults[found.name] not in (None, False, inspect.Parameter.empty):
                raise Unknown(f"{found.name} is given by default")
            self.reader.absent.add(found.name)
            return False
        if found is UNKNOWN:
            raise Unknown(f"`{ast.unparse(node)}` depends on the call")
        return not isinstance(found, PLAIN) or bool(found)

    def value(self, node: ast.expr) -> Any:
        method = getattr(self, f"_{type(node).__name__}", None)
        if method is None:
            raise Unknown(f"what `{ast.unparse(node)[:60]}` is is not known")
        return method(node)

    # ---- expressions

    def _Constant(self, node: ast.Constant) -> Any:
        return node.value

    def _Name(self, node: ast.Name) -> Any:
        if node.id in self.variables:
            return self.variables[node.id]
        found = value_of_name(self.function, node.id)
        if found is None:
            raise Unknown(f"{node.id} is not known")
        return found

    def _Attribute(self, node: ast.Attribute) -> Any:
        owner, name = self.value(node.value), node.attr
        if isinstance(owner, Owned):
            return self.reader.attribute((*owner.path, name))
        if isinstance(owner, Rows):
            if owner is self.reader.input and name == "shape":
                return (self.reader.batch, self.reader.length, UNKNOWN)
            if name in ("dtype", "device"):
                return self.reader.dtype if name == "dtype" else UNKNOWN
            if name == "shape":
                return tuple(owner.at.shape)
        if isinstance(owner, types.ModuleType):
            return getattr(owner, name)
        if owner is FINFO and name == "min":
            return LEAST
        if isinstance(owner, Greatest) and name == "values":
            return owner
        raise Unknown(f"what `{ast.unparse(node)}` is is not known")

    def _Tuple(self, node: ast.Tuple | ast.List) -> Any:
        return tuple(self.many(node.elts))

    _List = _Tuple

    def many(self, nodes: Sequence[ast.expr]) -> list[Any]:
        found: list[Any] = []
        for one in nodes:
            if isinstance(one, ast.Starred):
                inner = self.value(one.value)
                if inner == Given(TABLES):
                    inner = tuple(Given(TABLES, i) for i in range(2))
                if not isinstance(inner, tuple | list):
                    raise Unknown(f"`{ast.unparse(one)}` is no tuple")
                found += inner
            else:
                found.append(self.value(one))
        return found

    def _Subscript(self, node: ast.Subscript) -> Any:
        owner, index = self.value(node.value), self.value(node.slice)
        if isinstance(owner, Rows) and owner is not self.reader.input:
            if isinstance(owner, Scores):
                return self.reader.columns(owner, index)
            return replace(owner, at=owner.at[index])
        if isinstance(owner, tuple | list) and isinstance(index, int | slice):
            return owner[index]
        if owner == Given(TABLES) and index in (0, 1):
            return Given(TABLES, index)
        raise Unknown(f"what `{ast.unparse(node)}` is is not known")

    def _Slice(self, node: ast.Slice) -> slice:
        return slice(*(one and self.value(one) for one in (node.lower, node.upper, node.step)))

    def _UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return not self.truth(node.operand)
        found = self.value(node.operand)
        if isinstance(found, Numbers) and isinstance(node.op, ast.USub):
            return Numbers(-found.at)
        if not isinstance(found, int | float):
            raise Unknown(f"what `{ast.unparse(node)}` is is not known")
        return _OPERATORS[type(node.op)](found)

    def _BinOp(self, node: ast.BinOp) -> Any:
        first, second = self.value(node.left), self.value(node.right)
        kind = type(node.op)
        if isinstance(second, Rows) and (kind is ast.Mult or isinstance(first, Given | Bias)):
            first, second = second, first
        is_number = isinstance(second, int | float)
        if isinstance(first, Numbers) and (is_number or isinstance(second, Numbers)):
            if kind in _ARITHMETIC:
                other = second.at if isinstance(second, Numbers) else second
                try:
                    return Numbers(_OPERATORS[kind](first.at, other))
                except RuntimeError as error:
                    raise Unknown(str(error)) from None
        if isinstance(first, int) and isinstance(second, Given) and kind is ast.Add:
            return Slot(first, second.name)
        if isinstance(first, Rows) and kind is ast.MatMult:
            return self.reader.product(first, second)
        if isinstance(first, Rows) and isinstance(second, Sinks) and kind is ast.Sub:
            return self.reader.less_sinks(first, second)
        if isinstance(first, Scores):
            # A softmax is the same for scores less a number of their row.
            if isinstance(second, Greatest) and second.scores is first and kind is ast.Sub:
                return first
            if is_number and kind in (ast.Mult, ast.Div):
                return self.reader.scaled(first, _OPERATORS[kind](1.0, second))
            if isinstance(second, Bias) and kind is ast.Add:
                return self.reader.biased(first, second)
            if kind is ast.Add:
                return self.reader.masked(first, second)
            raise Unknown("its scores are changed")
        if isinstance(first, Bias):
            raise Unknown("its bias is changed")
        if type(first) is Rows and isinstance(second, Given) and kind is ast.Add:
            return self.reader.added(first, second)
        if isinstance(first, Rows) and is_number and kind in (ast.Mult, ast.Div):
            return self.reader.with_step(first, ("scale", _OPERATORS[kind](1.0, second)))
        if isinstance(first, Rows) and isinstance(second, Rows) and kind is ast.Mult:
            return self.reader.times_part(first, second)
        if kind not in _OPERATORS:
            raise Unknown(f"what `{ast.unparse(node)[:60]}` is is not known")
        is_shape = isinstance(first, tuple) and isinstance(second, tuple) and kind is ast.Add
        if not is_shape and not (is_number and isinstance(first, int | float)):
            raise Unknown(f"what `{ast.unparse(node)[:60]}` is is not known")
        return _OPERATORS[kind](first, second)

    def _BoolOp(self, node: ast.BoolOp) -> bool:
        is_or = isinstance(node.op, ast.Or)
        is_open = False
        for one in node.values:
            try:
                if self.truth(one) is is_or:
                    return is_or
            except Unknown:
                is_open = True
        if is_open:
            raise Unknown(f"`{ast.unparse(node)[:60]}` depends on the call")
        return not is_or

    def _Compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1:
            raise Unknown(f"`{ast.unparse(node)}` is not known")
        kind = type(node.ops[0])
        first, second = (self.value(one) for one in (node.left, node.comparators[0]))
        if second is None and kind in (ast.Is, ast.IsNot):
            is_there = first is not None
            if isinstance(first, Given):
                is_there = first.name == TABLES or self.truth(node.left)
            return is_there is (kind is ast.IsNot)
        if UNKNOWN in (first, second):
            return UNKNOWN
        kinds = (*PLAIN, tuple, torch.dtype)
        if not isinstance(first, kinds) or not isinstance(second, kinds):
            raise Unknown(f"`{ast.unparse(node)}` is not known")
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
        if isinstance(function, Interface):
            return reader.choose(function, args, kwargs)
        if function is nn.functional.scaled_dot_product_attention:
            return reader.attend_with(*args, **kwargs)
        if isinstance(function, Owned):
            if len(args) == 1 and isinstance(args[0], Rows) and not kwargs:
                if reader.is_module(function.path):
                    if isinstance(args[0], Scores):
                        return reader.dropped(args[0], reader.p_of(function.path), function.path)
                    return reader.call_part(function.path, args[0])
        if function in (getattr, hasattr):
            return self.get(function, args)
        if function is isinstance and args[0] in map(Given, CACHES):
            return False
        if function is nn.functional.dropout and len(args) == 1 and isinstance(args[0], Rows):
            if isinstance(args[0], Scores):
                return reader.dropped(args[0], kwargs["p"] if kwargs["training"] else 0.0)
            return self.dropout(node, args[0], kwargs)
        if any(function is one for one in _PRODUCTS):
            return reader.product(*args)
        if any(function is one for one in _SOFTMAX) and isinstance(args[0], Scores):
            return reader.softmax(args[0], *args[1:], **kwargs)
        if function is torch.logsumexp:
            return reader.log_sums(*args, **kwargs)
        if function is torch.finfo:
            return FINFO
        if function in (torch.full, torch.tensor) and LEAST in args:
            return LEAST
        if function is torch.max and len(args) == 2 and args[1] is LEAST:
            if isinstance(args[0], Scores) and args[0].p is None:
                masking = args[0].masking._replace(is_clamped=True)
                return replace(args[0], masking=masking)
        if any(function is one for one in _JOINS):
            return self.joined(function, args, kwargs)
        if any(function is one for one in _PURE):
            if all(isinstance(one, (*PLAIN, tuple)) for one in args) and not kwargs:
                return function(*args)
        if isinstance(function, types.FunctionType):
            given = [*args, *kwargs.values()]
            if any(isinstance(one, Given) and one.name == TABLES for one in given):
                return reader.rotate(function, args, kwargs)
            if any(isinstance(one, Rows) for one in given):
                return self.inside(function, args, kwargs)
        raise Unknown(f"what `{ast.unparse(node)[:60]}` does is not known")

    def inside(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a function gives whose statements are read too."""
        self.reader.look("names", function)
        if function_of(function) is not function:
            raise Unknown(f"{function.__name__} is wrapped")
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise Unknown(str(error)) from None
        bound.apply_defaults()
        return Frame(self.reader, function, dict(bound.arguments)).run()

    def method(self, owner: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A method of a tensor, a cache or the module; the reader for another function."""
        reader = self.reader
        if isinstance(owner, Rows):
            if owner is reader.input:
                if name == "size":
                    shape = (reader.batch, reader.length, UNKNOWN)
                    return shape[args[0]] if args else shape
                raise Unknown(f"its input is changed by {name}")
            if name in _CASTS:
                return owner
            if name == "sigmoid" and not args and not kwargs:
                return reader.part_of(owner)
            if name == "max" and isinstance(owner, Scores) and not args:
                if owner.p is None and owner.has_columns and kwargs == {"dim": -1, "keepdim": True}:
                    return Greatest(owner)
            if name == "softmax" and isinstance(owner, Scores):
                return reader.softmax(owner, *args, **kwargs)
            if name == "masked_fill" and isinstance(owner, Scores) and args[1:] == [LEAST]:
                return reader.masked(owner, args[0], is_filled=True)
            if name == "baddbmm" and isinstance(owner, Bias) and kwargs.pop("beta", 1) == 1:
                factors = (*args, *(kwargs.pop(f"batch{i}") for i in range(len(args) + 1, 3)))
                scores = reader.scaled(reader.product(*factors), kwargs.pop("alpha", 1))
                if not kwargs:
                    return reader.biased(scores, owner)
            if name in _VIEWS:
                return self.joined(getattr(Tensor, name), (owner, *args), kwargs)
            raise Unknown(f"{name} of a tensor is not known")
        if owner == Given(MASK) and name == "size" and not args:
            return reader.mask_size()
        if isinstance(owner, Given) and owner.name in CACHES and name == "get_seq_length":
            return 0
        if isinstance(owner, Given) and owner.name in CACHES and name == "update":
            slot = args[2] if isinstance(args[2], Slot) else Slot(args[2], "")
            is_first = reader.defaults.get(slot.argument, 0) == 0
            if reader.cached or slot.number != reader.attribute(("layer_idx",)) or not is_first:
                raise Unknown("its cache is filled in another way")
            reader.cached, reader.slot = args[:2], slot.argument
            return args[0], args[1]
        if name == "get_interface" and type(owner).__name__ == "AttentionInterface":
            return Interface(owner, args[1])
        if owner == Owned(()):
            method = reader.look("method", (name,))
            if isinstance(method, types.FunctionType):
                return self.inside(method, (owner, *args), kwargs)
        return reader

    def plain(self, function: Any, one: Any) -> Any:
        """An argument of a function of torch, as it is given to that."""
        if one is UNKNOWN and function in (Tensor.reshape, Tensor.view):
            return -1  # the width of the input, or else the statement raises
        if one is self.reader.input or one is UNKNOWN:
            raise Unknown("it divides its input")
        if isinstance(one, tuple):
            return tuple(self.plain(function, inner) for inner in one)
        return one.at if isinstance(one, Rows) else one

    def joined(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A function of torch that gives views of tensors, or joins them."""
        listed = args[0] if isinstance(args[0], tuple) else args
        tensors = [one for one in listed if isinstance(one, Rows)]
        is_scores = any(isinstance(one, Scores) for one in tensors)
        if [*map(type, tensors)] == [Scores, Sinks] and function in (torch.cat, torch.concat):
            return self.reader.with_sinks(*tensors, *args[1:], **kwargs)
        if not tensors or len({*map(type, tensors)}) > 1 or (is_scores and len(tensors) > 1):
            raise Unknown("it joins different tensors")
        values = [self.plain(function, one) for one in (*args, *kwargs.values())]
        allowed = (*PLAIN, Tensor)
        for one in values:
            for inner in one if isinstance(one, tuple) else (one,):
                if not isinstance(inner, allowed):
                    raise Unknown("a shape is not known")
        split = len(args)
        try:
            found = function(*values[:split], **dict(zip(kwargs, values[split:], strict=True)))
        except (RuntimeError, TypeError, IndexError) as error:
            raise Unknown(str(error)) from None
        if isinstance(found, tuple | list):
            found = [
                replace(tensors[0], at=one) if isinstance(one, Tensor) else one for one in found
            ]
            return tuple(found)
        return replace(tensors[0], at=found) if isinstance(found, Tensor) else found

    def get(self, function: Any, args: Sequence[Any]) -> Any:
        owner, name = args[:2]
        if not isinstance(owner, Owned):
            raise Unknown("it asks for an attribute of something else")
        has = self.reader.look("has", (*owner.path, name))
        if function is builtins.hasattr:
            return has
        if not has and len(args) < 3:
            raise Unknown(f"it has no {name}")
        return self.reader.attribute((*owner.path, name)) if has else args[2]

    def dropout(self, node: ast.Call, rows: Rows, kwargs: dict[str, Any]) -> Rows:
        """Dropout behind attention, by an attribute of the module."""
        given = {one.arg: one.value for one in node.keywords}
        p = given.get("p")
        is_own = isinstance(p, ast.Attribute) and ast.unparse(p.value) == "self"
        if not is_own or ast.unparse(given.get("training", node)) != "self.training":
            if kwargs.get("p") == 0:
                return rows
            raise Unknown("it drops numbers in another way")
        assert isinstance(p, ast.Attribute)
        found: Rows = self.reader.behind(rows, ("dropout", p.attr), rows.at.shape[-1])
        return found
