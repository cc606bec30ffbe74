"""What the `forward` of an attention module computes, by what its statements do to numbers.

Attributes have their values, and facts watch them. A cache that is given is an empty one. Arguments
that a statement asks for are absent, which each call is asked again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..modules.views import BorrowedLinear, BorrowedLoRALinear, is_torch
from ..op.base import FusibleOperation
from .adapters import base_of
from .attention_rest import Rest, rest_of
from .attention_rotation import Rotation, kind_of_rotation
from .attention_sinks import SinkReader
from .attention_statements import (
    BIASES,
    CACHES,
    MASK,
    PLAIN,
    TABLES,
    UNKNOWN,
    WEIGHTS,
    Bias,
    Frame,
    Given,
    Interface,
    Masking,
    Owned,
    Path,
    Rows,
    Scores,
    Sinks,
    Unknown,
)
from .parts import part, products
from .reads import Objects, objects_of
from .rules import FuseUnfit
from .whole import name_of
from .widths import width_of

__all__ = ["Reading", "part_behind", "product", "reach", "read_attention"]

# What was done to a number: ("norm", path, width), ("rotation",), ("scale", factor), and behind
# attention ("part", path), ("dropout", attribute).
Step = tuple[Any, ...]
Steps = tuple[Step, ...]
_PRODUCT: Steps = (("product",),)
_ATTENTION: Steps = (("attention",),)
_COLUMNS, _ROWS = 1 << 24, 1 << 8
# A product in more parts is many narrow ones.
_MOST_PARTS = 16
# What an attention module calls.
_CALLED = {"get_interface", "scaled_dot_product_attention", "softmax"}
# Batch, sequence and dtype of the two runs.
_SIZES = ((2, 3, torch.float32), (3, 5, torch.float16))


class Reading(NamedTuple):
    """Attention between products.

    Attributes:
        products: attributes of the layers whose rows are queries, keys and values.
        heads, kv_heads, head_dim: of them.
        by_head: whether query, key and value of each head are next to each other.
        parts: of the one product, (first row, number of rows) in the order of queries, keys and
            values; empty if they are in this order.
        before: what is done to queries and keys, in order: ("norm", paths of both norms, whether
            of all heads together) and ("rotation",).
        rotation: how they are rotated.
        after: what is done to the result: ("part", path), ("dropout", attribute) and
            ("sum", argument).
        scale: of the scores.
        key_factor: what multiplies keys, also those that a cache takes.
        p: the probability of dropout.
        is_causal: what the call of attention says; None if it leaves that to its arguments.
        has_cache: whether a cache may be given.
        implementation: the configured function of attention that this is.
        sinks: the parameter with a score of sinks for each head.
        slot: an argument that is added to the number of the layer in a cache; empty for none.
        has_eager: whether it is the same without torch's attention.
        absent: arguments that have to be None or False in a call.
        interface: what chooses the function of attention; None where statements compute it.
        asks: whether these statements are those of the implementation "sdpa".
        has_weights: whether the second result may be the weights of attention.
        is_plain: whether the statements compute scores and their softmax.
        dropout: the submodule that drops weights.
        masking: how scores by hand are masked.
        rest: the statements behind attention, where they are not all in `after`.
    """

    products: tuple[Path, ...]
    heads: int
    kv_heads: int
    head_dim: int
    by_head: bool
    parts: tuple[tuple[int, int], ...]
    before: Steps
    rotation: Rotation | None
    after: Steps
    scale: float
    key_factor: float
    p: float
    is_causal: bool | None
    has_cache: bool
    has_eager: bool
    absent: frozenset[str]
    interface: Any = None
    asks: bool = False
    has_weights: bool = False
    is_plain: bool = False
    dropout: Path = ()
    masking: Masking = Masking()
    rest: Rest | None = None
    slot: str = ""
    implementation: str = "sdpa"
    sinks: Path = ()


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
    if isinstance(found, PLAIN):
        return found
    if isinstance(found, nn.Parameter) and found.dim() == 1 and len(path) == 1:
        return tuple(found.shape)
    if isinstance(found, Tensor | list | dict):
        return f"{_NO} number but a {type(found).__name__}"
    return _IS_MODULE if isinstance(found, nn.Module) else _IS_OBJECT


def reach(module: nn.Module, path: Path) -> Any:
    """What is reached from a module by attributes."""
    return functools.reduce(getattr, path, module)


_LOOKS: dict[str, Callable[..., Any]] = {
    "value": _value_at,
    "names": lambda module, function: objects_of(function),
    "dropout": lambda module, path: _p_of(reach(module, path)),
    "has": lambda module, path: hasattr(reach(module, path[:-1]), path[-1]),
    "product": lambda module, path: _width([product(reach(module, path))]),
    "part": lambda module, path, width: _width(part_behind(reach(module, path)), width),
    "method": lambda module, path: inspect.getattr_static(
        type(reach(module, path[:-1])), path[-1], None
    ),
}


def _p_of(module: Any) -> Any:
    return module.p if is_torch(module, nn.Dropout) else None


class _Reader(SinkReader):
    """One run of a `forward`."""

    def __init__(
        self,
        module: nn.Module,
        function: Any,
        run: int,
        has_mask: bool,
        has_cache: bool = False,
        implementation: str = "sdpa",
        more: int | None = None,
        has_rest: bool = False,
    ) -> None:
        self.module, self.is_training, self.has_cache = module, run == 0, has_cache
        self.implementation, self.has_mask = implementation, has_mask
        self.batch, self.length, self.dtype = _SIZES[run]
        self.asks = self.mask_is_sized = False
        self.has_rest = has_rest  # statements behind attention are not read
        self.more = more  # columns of a bias beyond those of keys; None without a bias
        self.interface: Any = None
        self.steps: list[Steps] = [(), _ATTENTION]
        self.products: list[tuple[Path, int]] = []
        self.absent: set[str] = set()
        self.looks: dict[tuple[Any, ...], Any] = {}
        self.widths: dict[Steps, int] = {}  # of rows, by what was done to them
        self.rotation: Rotation | None = None
        self.found: Reading | None = None
        self.cached: Sequence[Rows] = ()  # keys and values
        self.slot = ""
        self.function = function

    def read(self) -> Reading:
        """What it computes; Unknown for what is no attention that ops know."""
        parameters = inspect.signature(self.function).parameters
        names = list(parameters)
        self.defaults = {name: one.default for name, one in parameters.items()}
        given: dict[str, Any] = {name: Given(name) for name in names[2:]}
        absent = [name for name in CACHES if not self.has_cache]
        absent += [] if self.has_mask else [MASK]
        given |= {name: None for name in absent if name in given}
        columns = torch.arange(self.length + (self.more or 0)).view(1, 1, -1)
        biases = [] if self.more is None else [name for name in BIASES if name in given]
        given |= {name: Bias(columns, name) for name in biases}
        given |= {names[0]: Owned(()), names[1]: Rows(torch.empty(0))}
        self.input = given[names[1]]
        frame = Frame(self, self.function, given)
        if self.has_rest:
            return self.read_until_attention(frame)
        result = frame.run()
        if not isinstance(result, tuple) or len(result) < 2 or not isinstance(result[0], Rows):
            raise Unknown("its result is no pair")
        weights = result[1]
        is_softmax = isinstance(weights, Scores) and weights.p is not None
        if self.found is None or not (weights is WEIGHTS or weights is None or is_softmax):
            raise Unknown("it does not return what attention gives")
        if result[0].at.dim() != 3:
            raise Unknown("its result has other rows")
        return self.finished(
            self.found,
            after=self.whole_rows(result[0])[1:],
            asks=self.asks and self.interface is None,
            has_weights=weights is not None,
        )

    def finished(self, found: Reading, **fields: Any) -> Reading:
        """What was read, with what is known at the end."""
        return found._replace(
            absent=frozenset(self.absent),
            interface=self.interface,
            masking=found.masking._replace(is_sized=self.mask_is_sized),
            slot=self.slot,
            **fields,
        )

    def read_until_attention(self, frame: Frame) -> Reading:
        """What is computed up to the statement that calls attention: the rest is run as it is."""
        at = next((one for one in frame.body() if frame.reaches_attention(one)), None)
        rest = None if at is None or self.interface is None else rest_of(self.function, at)
        if rest is None or self.found is None:
            raise Unknown("what is behind attention reads more than its result")
        wanted = self.output_of(self.found).at.transpose(1, 2)
        given = frame.variables[rest.result]
        if type(given) is not Rows or not given.at.equal(wanted):
            raise Unknown("what is behind attention takes other rows")
        if any(path[0] in rest.attributes for path in self.found.products):
            raise Unknown("what is behind attention takes queries, keys or values")
        return self.finished(self.found, rest=rest)

    # ---- attributes

    def look(self, kind: str, path: Any, *args: Any) -> Any:
        """What the module has, or a function does. All that is asked for is remembered."""
        found = _LOOKS[kind](self.module, path, *args)
        key = (kind, path, *args)
        self.looks[key] = found
        return found

    def attribute(self, path: Path) -> Any:
        if path[-1] == "training":
            return self.is_training
        if path[-1] == "_attn_implementation":
            self.asks = True
            return self.implementation
        if path[-1] == "dtype":
            return UNKNOWN
        found = self.look("value", path)
        if isinstance(found, tuple):
            return Sinks(torch.arange(*found), path)
        if isinstance(found, str) and found.startswith(_NO):
            raise Unknown(f"{'.'.join(path)} is {found}")
        return Owned(path) if found in (_IS_OBJECT, _IS_MODULE) else found

    def is_module(self, path: Path) -> bool:
        return bool(self.look("value", path) == _IS_MODULE)

    # ---- tensors

    def interned(self, steps: Steps) -> int:
        if steps not in self.steps:
            self.steps.append(steps)
        return self.steps.index(steps)

    def new_rows(self, steps: Steps, first: int, width: int) -> Rows:
        """[batch, length, width] with columns from a first one on."""
        self.widths[steps] = first + width
        rows = torch.arange(self.batch * self.length).view(self.batch, self.length, 1)
        at = (self.interned(steps) * _ROWS + rows) * _COLUMNS + torch.arange(first, first + width)
        return Rows(at)

    def with_step(self, rows: Rows, step: Step) -> Rows:
        rest, number = rows.at % (_ROWS * _COLUMNS), rows.at // (_ROWS * _COLUMNS)
        made = torch.empty_like(number)
        for old in number.unique().tolist():
            steps = self.steps[old]
            if steps[:1] == _ATTENTION or not steps:
                raise Unknown("it does something else to rows")
            made[number == old] = self.interned((*steps, step))
        return Rows(made * (_ROWS * _COLUMNS) + rest)

    def whole_rows(self, rows: Rows) -> Steps:
        """What was done to rows that are whole and in order."""
        at = rows.at
        steps = self.steps[int(at.flatten()[0]) // (_ROWS * _COLUMNS)]
        if steps not in self.widths:
            raise Unknown("it takes other rows")
        wanted = self.new_rows(steps, 0, self.widths[steps]).at
        is_whole = at.shape[-1] == wanted.shape[-1] and at.numel() == wanted.numel()
        if not is_whole or not at.reshape(wanted.shape).equal(wanted):
            raise Unknown("it takes parts of rows")
        return steps

    def call_part(self, path: Path, rows: Rows) -> Rows:
        """A submodule that is called."""
        if rows is self.input:
            if any(path == known for known, _ in self.products):
                raise Unknown("it computes a product twice")
            first = sum(width for _, width in self.products)
            width = self.look("product", path)
            self.products.append((path, width))
            return self.new_rows(_PRODUCT, first, width)
        steps = self.steps[int(rows.at.flatten()[0]) // (_ROWS * _COLUMNS)]
        if steps[:1] != _ATTENTION:
            return self.with_step(rows, self.norm(path, rows))
        width = self.look("part", path, rows.at.shape[-1])
        return self.behind(rows, ("part", path), width)

    def behind(self, rows: Rows, step: Step, width: int) -> Rows:
        """What a step behind attention makes of whole rows."""
        steps = self.whole_rows(rows)
        if steps[:1] != _ATTENTION:
            raise Unknown("it does something else to rows")
        made = self.new_rows((*steps, step), 0, width)
        return Rows(made.at.reshape(*rows.at.shape[:-1], width))

    def norm(self, path: Path, rows: Rows) -> Step:
        """A norm of the last dimension, which has to be whole heads."""
        columns = rows.at % _COLUMNS
        width = columns.shape[-1]
        if not _is_dense(columns) or (columns[..., 0] % width).any():
            raise Unknown("it normalizes parts of heads")
        return ("norm", path, width)

    def rotate(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A function of queries, keys and tables: what it does to numbers is seen by trying it."""
        rows = [one for one in (*args, *kwargs.values()) if isinstance(one, Rows)]
        if not all(_is_dense(one.at % _COLUMNS) for one in rows):
            raise Unknown("it rotates numbers of a head in another order")
        known = kind_of_rotation(self, function, args, kwargs, rows)
        if known is None:
            raise Unknown(f"what {function.__name__} does is not known")
        if self.rotation not in (None, known):
            raise Unknown("its tables are others")
        self.rotation = known
        found = tuple(self.with_step(one, ("rotation",)) for one in rows)
        return found if len(found) > 1 else found[0]

    def row_of(self, rows: Rows) -> Tensor:
        """Which row each number comes from."""
        return rows.at % (_ROWS * _COLUMNS) // _COLUMNS

    # ---- attention

    def choose(self, interface: Interface, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call of the function of attention that the configuration names."""
        if len(args) == 4 and MASK in kwargs:
            args = (*args, kwargs.pop(MASK))
        if self.interface is not None or len(args) != 5 or args[0] != Owned(()):
            raise Unknown("attention is called in another way")
        self.interface = interface.table
        if self.implementation == "eager":
            return Frame(self, interface.eager, {}).inside(interface.eager, args, kwargs)
        if any(kwargs.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
            raise Unknown("its scores are changed")
        scale, p = kwargs.get("scaling"), kwargs.get("dropout", 0.0)
        query, key, value, mask = args[1:]
        found = self.attend_with(query, key, value, mask, p, kwargs.get("is_causal"), scale)
        return Rows(found.at.transpose(1, 2)), WEIGHTS

    def attend_with(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: Any = 0.0,
        is_causal: Any = None,
        scale: Any = None,
    ) -> Rows:
        """Attention of torch."""
        if attn_mask not in (None, Given(MASK)):
            raise Unknown("its mask is another one")
        if not isinstance(scale, float | int | None) or not isinstance(is_causal, bool | None):
            raise Unknown("its scale is no number")
        found = self.attend(query, key, value, attn_mask is not None, dropout_p, scale)
        assert self.found is not None
        if self.interface is None:
            is_causal = bool(is_causal)
        self.found = self.found._replace(is_causal=is_causal)
        return found

    # Scores by hand: the product of queries and keys, a scale, a mask, the softmax, dropout, and
    # the product with values.

    def product(self, first: Any, second: Any) -> Rows:
        """A product of queries and keys, or of weights and values."""
        if type(first) is Scores and type(second) is Rows and first.p is not None:
            shape = *first.at.shape[:-1], second.at.shape[-1]
            if first.has_columns and (*shape[:-2], first.at.shape[-1]) == second.at.shape[:-1]:
                query, key, value = (
                    Rows(one.at.reshape(self.batch, -1, *one.at.shape[-2:]))
                    for one in (first.query, first.key, second)
                )
                found = self.attend(query, key, value, first.is_masked, first.p, first.scale)
                assert self.found is not None
                self.attended = first
                self.found = self.found._replace(
                    is_plain=True,
                    masking=first.masking,
                    dropout=first.dropout,
                    sinks=first.sinks,
                )
                return Rows(found.at.reshape(shape))
        elif type(first) is Rows and type(second) is Rows and first is not self.input:
            shape = *first.at.shape[:-1], second.at.shape[-1]
            if (*shape[:-2], first.at.shape[-1]) == second.at.shape[:-1] and len(shape) > 2:
                key = Rows(second.at.transpose(-1, -2))
                return Scores(torch.arange(math.prod(shape)).view(shape), first, key)
        raise Unknown("it multiplies something else")

    def scaled(self, scores: Scores, factor: float) -> Scores:
        if scores.p is not None or scores.is_masked or scores.masking.bias or scores.sinks:
            raise Unknown("its scores are changed")
        return dataclasses.replace(scores, scale=scores.scale * factor)

    def masked(self, scores: Scores, mask: Any, is_filled: bool = False) -> Scores:
        is_whole = scores.has_columns and scores.at.dim() == 4 and mask == Given(MASK)
        is_whole &= not scores.sinks
        is_known = not is_filled or scores.masking.bias  # the bias has the dtype of what is filled
        if scores.p is not None or scores.is_masked or not is_whole or not is_known:
            raise Unknown("its scores are changed")
        masking = scores.masking._replace(is_filled=is_filled)
        return dataclasses.replace(scores, is_masked=True, masking=masking)

    def biased(self, scores: Scores, bias: Bias) -> Scores:
        """Scores and a bias of the last of its columns. It may have one for each head."""
        assert self.more is not None
        is_last = bias.at.flatten().equal(torch.arange(self.length) + self.more)
        is_whole = scores.has_columns and scores.at.dim() in (3, 4) and bias.at.dim() == 3
        is_whole &= not scores.sinks
        is_changed = scores.p is not None or scores.is_masked or scores.masking.bias
        if is_changed or not is_last or not is_whole:
            raise Unknown("its scores are changed")
        masking = scores.masking._replace(
            bias=bias.name, is_last=self.more > 0, is_flat=scores.at.dim() == 3
        )
        return dataclasses.replace(scores, masking=masking)

    def added(self, rows: Rows, other: Given) -> Rows:
        """A sum behind attention with an argument of the call."""
        if other.element is not None or other.name in (MASK, TABLES, *CACHES):
            raise Unknown(f"{other.name} is added")
        return self.behind(rows, ("sum", other.name), rows.at.shape[-1])

    def softmax(self, scores: Scores, dim: Any = None, dtype: Any = None) -> Scores:
        if scores.p is not None or dim != -1 or not scores.has_columns:
            raise Unknown("its softmax is another one")
        return dataclasses.replace(scores, p=0.0)

    def dropped(self, scores: Scores, p: Any, path: Path = ()) -> Scores:
        """Weights of which some are dropped."""
        if scores.p != 0.0 or not isinstance(p, int | float) or scores.has_sink:
            raise Unknown("its dropout is another one")
        return dataclasses.replace(scores, p=float(p), dropout=path)

    def p_of(self, path: Path) -> float:
        p = self.look("dropout", path)
        if p is None:
            raise Unknown(f"{'.'.join(path)} is no dropout")
        return float(p) if self.is_training else 0.0

    def mask_size(self) -> tuple[int, ...]:
        self.mask_is_sized = True
        return (self.batch, 1, self.length, self.length)

    def attend(
        self, query: Any, key: Any, value: Any, is_masked: bool, p: Any, given: float | None
    ) -> Rows:
        """Attention of heads [batch, heads, length, head_dim]."""
        given_rows = query, key, value
        if self.found is not None or not all(type(one) is Rows for one in given_rows):
            raise Unknown("attention takes something else")
        for one, cached in zip((key, value), self.cached, strict=False):
            count = one.at.shape[1] // cached.at.shape[1]
            if not one.at[:, ::count].equal(cached.at):
                raise Unknown("the cache takes something else")
        if self.has_mask and not is_masked:
            self.absent.add(MASK)
        parts = [self.heads(one) for one in given_rows]
        head_dim = parts[0][0].shape[1]
        columns = [one[0] for one in parts]
        if {one.shape[1] for one in columns} != {head_dim} or len(columns[1]) != len(columns[2]):
            raise Unknown("its keys and values have different widths")
        # Each head of keys may be there several times.
        count = len(columns[1]) // len(columns[1].unique(dim=0))
        columns[1:] = (self.unrepeated(one, count) for one in columns[1:])
        products, by_head, rows = self.packed(columns)
        before, scale, factor = self.before(*parts)
        if by_head and any(step[0] == "norm" for step in before):
            raise Unknown("it normalizes heads that are not side by side")
        if not isinstance(p, int | float) or (p and not self.is_training):
            raise Unknown("its dropout is another one")
        self.found = Reading(
            products,
            len(columns[0]),
            len(columns[1]),
            head_dim,
            by_head,
            rows,
            before,
            self.rotation,
            (),
            scale * (head_dim**-0.5 if given is None else given),
            factor,
            float(p),
            False,
            False,
            False,
            frozenset(),
        )
        return self.output_of(self.found)

    def output_of(self, found: Reading) -> Rows:
        """What attention gives: [batch, heads, length, head_dim]."""
        rows = self.new_rows(_ATTENTION, 0, found.heads * found.head_dim).at
        return Rows(rows.unflatten(-1, (found.heads, found.head_dim)).transpose(1, 2))

    def unrepeated(self, columns: Tensor, count: int) -> Tensor:
        """The heads of keys, of which each is there so many times."""
        found = columns[::count]
        if not found.repeat_interleave(count, 0).equal(columns):
            raise Unknown("its heads are repeated in another way")
        return found

    def heads(self, rows: Rows) -> tuple[Tensor, list[Steps]]:
        """The columns [heads, head_dim] of queries, keys or values, and what was done to the
        numbers of a head."""
        at = rows.at
        if at.dim() != 4 or (at.shape[0], at.shape[2]) != (self.batch, self.length):
            raise Unknown("its heads are in another order")
        first = at[0, :, 0]
        wanted = torch.arange(self.batch * self.length).view(self.batch, 1, self.length, 1)
        if not at.eq(first[:, None] + wanted * _COLUMNS).all():
            raise Unknown("its rows are in another order")
        number = first // (_ROWS * _COLUMNS)
        if not number.eq(number[:1]).all():
            raise Unknown("its heads are different ones")
        return first % _COLUMNS, [self.steps[i] for i in number[0].tolist()]

    def packed(
        self, columns: Sequence[Tensor]
    ) -> tuple[tuple[Path, ...], bool, tuple[tuple[int, int], ...]]:
        """The products whose rows are these columns, side by side, head by head, or in parts."""
        ends = list(itertools.accumulate(width for _, width in self.products))
        used = torch.cat([one.flatten() for one in columns])
        order = torch.bucketize(used, torch.tensor(ends), right=True).unique_consecutive().tolist()
        if not all(0 <= i < len(self.products) for i in order):
            raise Unknown("it attends to something else")
        paths = tuple(self.products[i][0] for i in order)
        if len(order) != len(self.products) and not self.has_rest:
            raise Unknown("it has another product")
        ranges = [torch.arange(ends[i] - self.products[i][1], ends[i]) for i in order]
        wanted = torch.cat(ranges)
        if used.equal(wanted):
            return paths, False, ()
        if len(paths) == 1 and len(columns[0]) == len(columns[1]):
            if torch.cat([one for one in columns], 1).flatten().equal(wanted):
                return paths, True, ()
        cuts = (used.diff() != 1).nonzero().flatten() + 1
        parts = used.tensor_split(cuts)
        is_whole = len(paths) == 1 and used.sort().values.equal(wanted)
        is_whole &= all(map(_is_dense, columns))
        if not is_whole or len(parts) > _MOST_PARTS:
            raise Unknown("its heads are not side by side")
        return paths, False, tuple((int(one[0] - wanted[0]), len(one)) for one in parts)

    def before(self, *parts: tuple[Tensor, list[Steps]]) -> tuple[Steps, float, float]:
        """What is done to queries and keys, and the factors of scores and of keys."""
        (columns, query), (key_columns, key), (_, value) = parts
        if any(steps != _PRODUCT for steps in value):
            raise Unknown("it does something to values")
        scale, factor, found, rotated = 1.0, 1.0, [], []
        for steps in (query, key):
            first, rest = steps[0][1:], {one[1:] for one in steps}
            plain = tuple(step for step in first if step != ("rotation",))
            if rest - {first, plain} or first.count(("rotation",)) > 1:
                raise Unknown("it rotates parts of heads")
            is_rotated = [one[1:] == first for one in steps]
            if is_rotated != sorted(is_rotated, reverse=True):
                raise Unknown("it rotates other parts of heads")
            rotated.append(is_rotated)
            kinds = [step[0] for step in first]
            if "scale" in kinds and "norm" in kinds[kinds.index("scale") :]:
                raise Unknown("it normalizes what is scaled")
            factor = math.prod(step[1] for step in first if step[0] == "scale")
            scale *= factor
            found.append([step for step in first if step[0] != "scale"])
        kinds, others = ([step[0] for step in one] for one in found)
        if kinds != others or rotated[0] != rotated[1]:
            raise Unknown("queries and keys are made in different ways")
        made: list[Step] = []
        for one, other in zip(*found, strict=True):
            if one[0] == "rotation":
                made.append(one)
                continue
            widths = one[2], other[2]
            of_heads = (columns.shape[1],) * 2
            whole = columns.numel(), key_columns.numel()
            if widths not in (of_heads, whole):
                raise Unknown("its norms are those of something else")
            made.append(("norm", one[1], other[1], widths != of_heads))
        return tuple(made), scale, factor


def _is_dense(columns: Tensor) -> bool:
    """Whether columns in the last dimension follow each other."""
    return bool(columns.diff().eq(1).all())


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


@functools.lru_cache(maxsize=1024)
def _known(function: Any, objects: Objects) -> list[tuple[dict[Any, Any], Reading | str]]:
    """What was read before, and what was asked of the module for it."""
    return []


def read_attention(module: nn.Module, function: Any) -> Reading:
    """What a `forward` of an attention module computes. FuseUnfit with the reason for another
    one."""
    if _CALLED.isdisjoint(function.__code__.co_names):
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
    reasons: list[str] = []
    more: int | None = None
    has_rest = False
    implementation = "sdpa"

    def run(*args: Any, **options: Any) -> Reading | None:
        own = {"implementation": implementation, **options, "more": more, "has_rest": has_rest}
        reader = _Reader(module, function, *args, **own)
        reader.looks = looks
        try:
            return reader.read()
        except Unknown as unknown:
            reasons.append(str(unknown))
            return None

    def read(number: int, **options: Any) -> Reading | None:
        """What calls with and without a mask have in common."""
        masked, other = run(number, True, **options), run(number, False, **options)
        if masked is None or other is None:
            found = masked or other
            none = {MASK} if masked is None and MASK in defaults else frozenset()
            return found and found._replace(
                masking=found.masking._replace(is_needed=other is None),
                absent=found.absent | none,
            )
        common = other._replace(masking=masked.masking, absent=masked.absent | other.absent)
        same = common._replace(is_causal=masked.is_causal, absent=masked.absent)
        return common if same == masked else None

    defaults = inspect.signature(function).parameters
    found: Reading | None = None
    why = ""
    # A bias may have more columns than there are keys, or as many, or be absent.
    for one in (3, 0, None) if defaults.keys() & set(BIASES) else (None,):
        more = one
        reasons.clear()
        found = read(0)
        if found is not None and bool(found.masking.bias) is (more is not None):
            break
    if found is None:
        why = (reasons or ["it asks for its mask"])[0]
        # Where torch's attention does not take what is given, the eager function may be readable.
        more, implementation = None, "eager"
        found = read(0)
    if found is None:
        implementation, has_rest = "sdpa", True
        found = read(0)
    if found is None:
        return looks, why
    if read(1) != found._replace(p=0.0):
        return looks, "it depends on sizes"

    def is_same(other: Reading | None) -> bool:
        return other is not None and found == other._replace(
            is_causal=found.is_causal,
            is_plain=found.is_plain,
            has_weights=found.has_weights,
            asks=found.asks,
            slot=found.slot,
        )

    cached = read(0, has_cache=True)
    return looks, found._replace(
        has_cache=is_same(cached),
        has_eager=found.interface is not None and is_same(read(0, implementation="eager")),
        slot=cached.slot if cached else "",
        implementation=implementation,
    )
