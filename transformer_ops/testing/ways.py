"""The ways in which a check runs ops or a model."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..quantization.recipe import NVFP4BlockScaling
from ..quantization.region import autocast

WITHOUT, TOGETHER = "eager without a gradient for ", "together: "
# All subsets of so many parameters are frozen; of more, each one and all but each one; of many,
# all.
_ALL_SUBSETS, _MOST_PARAMETERS = 4, 16


class Way(NamedTuple):
    """One way to run a list of ops. `name` says what differs from an eager call in training.

    Attributes:
        autocast: the dtype of autocast, or None.
        input_dtype: the dtype of the inputs, if it is not that of the parameters.
        frozen: the parameters, and the inputs as "input 0", that require no gradient.
        input_grad: whether any input does.
        only_output: the only output with a gradient; None: all have one.
        second: "backward" runs it three times; "call" runs another call between forward and
            backward.
        changed: the parameter, input or output that changes in place between forward and backward,
            or "attributes" or "training".
        values: a key of `VALUES` or `PARAMETERS`; or "data" for parameters that are written behind
            the back of autograd, or "others" for new ones.
        attributes: a key of `ATTRIBUTES`, which has another value, maybe with `OF_ONE_OP`, or with
            " of " and a number, its value; or "all".
        gradient: a key of `GRADIENTS`.
        weights: whether the parameters are not contiguous.
        scope: a key of `SCOPES`, in which it runs; `AUTOCAST_AROUND` or `OTHER_THREAD`, in which
            backward runs.
        exact: the dtypes of the outputs. With them it computes in float64, from the same numbers.
    """

    name: str = "eager"
    grad: bool = True
    compiled: bool = False
    training: bool = True
    inference: bool = False
    autocast: torch.dtype | None = None
    dtype: torch.dtype | None = None
    input_dtype: torch.dtype | None = None
    recompute: str = "cheap"
    shape: str = ""
    layout: str = ""
    frozen: frozenset[str] = frozenset()
    input_grad: bool = True
    only_output: int | None = None
    second: str = ""
    changed: str = ""
    values: str = ""
    attributes: str = ""
    gradient: str = ""
    weights: bool = False
    scope: str = ""
    exact: tuple[torch.dtype, ...] | None = None

    def reference(self) -> Way:
        """The way in which the unfused ops run to give the same numbers."""
        layout = self.layout if self.layout in EXPANDED else ""
        # An op that reads an attribute in backward does so fused or not.
        changed = self.changed if self.changed in STATES else ""
        plain = self._replace(name="", compiled=False, recompute="cheap", second="", weights=False)
        scope = self.scope if self.scope == RECIPE else ""
        return plain._replace(layout=layout, changed=changed, scope=scope)

    @property
    def is_finite(self) -> bool:
        """Whether all inputs and gradients are."""
        return "NaN" not in self.values + self.gradient

    @property
    def has_exact(self) -> bool:
        """Whether float64 can compute the same from the same numbers, which differ: errors of equal
        ones do not cancel."""
        changes = self.changed or self.values not in ("", *VALUES)
        return self.is_finite and not changes and not self.scope and self.layout not in EXPANDED


def eager_ways(
    parameters: Sequence[str],
    attributes: Sequence[str],
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    alone: bool,
) -> Iterator[Way]:
    """Every eager way for ops with these parameters and attributes, an input of the dtype, and so
    many inputs and outputs."""
    for recompute in ("cheap", "none", "products"):
        for way in _ways(parameters, dtype, inputs, outputs):
            name = way.name + f', recompute="{recompute}"' * (recompute != "cheap")
            yield way._replace(name=name, recompute=recompute)
    yield from _draws(parameters, attributes, dtype)
    yield from _together(parameters, dtype)
    for state in STATES:
        yield Way(f"{state} changed before backward", changed=state)
    results = ["output", *(f"extra output {i}" for i in range(outputs - 1))]
    tensors = (*(f"parameter {name}" for name in parameters), *_names_of(inputs), *results)
    for name in tensors if alone else ():
        yield Way(f"{name} changed in place before backward", changed=name)
    if alone:
        way = Way(MANY_ROWS, dtype=torch.bfloat16, shape=THOUSANDS, values="positive inputs")
        yield way._replace(gradient="positive gradients")
        yield Way("float16 autocast", autocast=torch.float16)
        if dtype.itemsize > 2:
            yield Way(RECIPE, scope=RECIPE)
    for other in (torch.bfloat16, torch.float64) if alone else ():
        if other != dtype:
            name = str(other).removeprefix("torch.")
            yield Way(f"inputs in {name}", input_dtype=other)


def _names_of(inputs: int) -> list[str]:
    return [f"input {i}" for i in range(inputs)]


def _ways(
    parameters: Sequence[str], dtype: torch.dtype, inputs: int, outputs: int
) -> Iterator[Way]:
    yield Way()
    yield Way("eager without grad", grad=False)
    for frozen, input_grad in itertools.product(_subsets(parameters), (True, False)):
        if frozen or not input_grad:
            without = [*sorted(frozen), *["the input"] * (not input_grad)]
            name = WITHOUT + ", ".join(without)
            yield Way(name, frozen=frozen, input_grad=input_grad)
    for name in _names_of(inputs) if inputs > 1 else ():
        yield Way(WITHOUT + name, frozen=frozenset([name]))
    for shape in SHAPES:
        yield Way(shape, shape=shape)
        yield Way(f"{shape}, without grad", shape=shape, grad=False)
    for layout in LAYOUTS:
        yield Way(layout, layout=layout)
        yield Way(f"three dimensions, {layout}", shape="three dimensions", layout=layout)
    for other in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        if other != dtype:
            name = str(other).removeprefix("torch.")
            yield Way(name, dtype=other)
    low = torch.bfloat16
    yield Way("autocast", autocast=low)
    yield Way("autocast without grad", autocast=low, grad=False)
    yield Way("autocast, three dimensions", autocast=low, shape="three dimensions")
    for name in parameters:
        yield Way(f"autocast, {name} frozen", autocast=low, frozen=frozenset([name]))
    yield Way("eval", training=False)
    yield Way("eval without grad", training=False, grad=False)
    yield Way(OTHER_VALUES, values=OTHER_VALUES)
    yield Way("after an optimizer step", values="after an optimizer step")
    yield Way("attributes of other values", attributes="all")
    yield Way("more than one backward", second="backward")
    yield Way("another call before backward", second="call")
    for k in range(outputs if outputs > 1 else 0):
        yield Way(f"a gradient of output {k} alone", only_output=k)


def _draws(
    parameters: Sequence[str], attributes: Sequence[str], dtype: torch.dtype
) -> Iterator[Way]:
    """Numbers, sizes and modes that few models have at once. They run with one `recompute`."""
    for shape in MORE_SHAPES:
        yield Way(shape, shape=shape)
        yield Way(f"{shape}, without grad", shape=shape, grad=False)
    half, every = torch.float16, frozenset(parameters)
    for values in VALUES:
        # What ReLU and its kind do with the gradient of NaN is up to them.
        yield Way(values, values=values, grad="NaN" not in values)
    for gradient in GRADIENTS:
        yield Way(gradient, gradient=gradient)
    for name in [name for name in PARAMETERS if parameters and "optimizer" not in name]:
        yield Way(name, values=name)
    for name in attributes:
        yield Way(name if name[-1].isdigit() else f"another {name}", attributes=name)
    for other in (t for t in (half, torch.float64) if t != dtype):
        for size in ("large", "small"):
            name = f"{str(other).removeprefix('torch.')}, {size}"
            yield Way(f"{name} inputs", dtype=other, values=f"{size} inputs")
            yield Way(f"{name} gradients", dtype=other, gradient=f"{size} gradients")
    for scope in (*(name for name in SCOPES if name != RECIPE), AUTOCAST_AROUND, OTHER_THREAD):
        yield Way(scope, scope=scope)
    low = torch.bfloat16
    yield Way("autocast of inputs in bfloat16", autocast=low, input_dtype=low)
    yield Way("autocast, eval without grad", autocast=low, training=False, grad=False)
    yield Way("inference mode", inference=True, grad=False)
    yield Way("weights that are not contiguous", weights=True)
    for grad in (True, False):
        name = "parameters written through .data" + ", without grad" * (not grad)
        yield Way(name, values="data", grad=grad, frozen=frozenset() if grad else every)
    if parameters:
        yield Way("parameters that are others", values="others")


def _together(parameters: Sequence[str], dtype: torch.dtype) -> Iterator[Way]:
    """Ways in which each two values of these fields are tried together."""
    dtypes = [t for t in (torch.float64, torch.bfloat16, torch.float16) if t != dtype]
    fields: list[list[tuple[tuple[str, Any], ...]]] = [
        [(("recompute", value),) for value in ("cheap", "none", "products")],
        [(("shape", value),) for value in ("", *SHAPES, *MORE_SHAPES) if "thousands" not in value],
        [(("layout", value),) for value in ("", *LAYOUTS)],
        [(), (("autocast", torch.bfloat16),), *((("dtype", value),) for value in dtypes)],
        [(), (("input_grad", False),), *((("frozen", frozenset([p])),) for p in parameters[:4])],
        [(), (("training", False),), (("grad", False),)],
        [(("second", value),) for value in ("", "backward", "call")],
        [(("values", value),) for value in ("", ZEROS)],
        [(("attributes", value),) for value in ("", "all")],
    ]
    left = {
        pair
        for first, second in itertools.combinations(fields, 2)
        for pair in itertools.product(first, second)
    }
    rng = random.Random(0)
    while left:
        drawn = [[rng.choice(values) for values in fields] for _ in range(20)]
        row = max(drawn, key=lambda row: len(left.intersection(itertools.combinations(row, 2))))
        found = left.intersection(itertools.combinations(row, 2))
        if found:
            left -= found
            values = dict(itertools.chain(*row))
            names = (f"{field}={value}" for field, value in values.items() if value)
            yield Way(TOGETHER + ", ".join(names), **values)


def compiled_ways(parameters: Sequence[str]) -> Iterator[Way]:
    """The ways to run under torch.compile. They take longer, so there are few."""
    yield Way("compiled")
    yield Way("compiled without grad", grad=False)
    strided = "strided input and gradient"
    yield Way(f"compiled, three dimensions, {strided}", shape="three dimensions", layout=strided)
    yield Way("compiled, no rows", shape="no rows")
    yield Way("compiled, autocast", autocast=torch.bfloat16)
    yield Way("compiled, eval", training=False)
    for name in parameters[:1]:
        yield Way(f"compiled, {name} frozen", frozen=frozenset([name]))


def _subsets(names: Sequence[str]) -> Iterator[frozenset[str]]:
    count = len(names)
    sizes = range(count + 1) if count <= _ALL_SUBSETS else sorted({0, 1, count - 1, count})
    if count > _MOST_PARAMETERS:
        sizes = [0, count]
    for size in sizes:
        yield from map(frozenset, itertools.combinations(names, size))


THOUSANDS, VERY_MANY_ROWS = "thousands of rows", "tens of thousands of rows"
# Each takes the rows of an input, [n, columns].
SHAPES = {
    "one dimension": lambda rows: rows[0],
    "three dimensions": lambda rows: torch.stack([rows, rows.flip(0)]),
    "one row": lambda rows: rows[:1],
    "no rows": lambda rows: rows[:0],
}
MORE_SHAPES = {
    "four dimensions": lambda rows: _stacked(rows).unflatten(0, (2, 2)),
    "five dimensions": lambda rows: _stacked(rows).unflatten(0, (2, 1, 2)),
    "batches of one row": lambda rows: rows[:, None],
    "batches without rows": lambda rows: rows[None, :0].repeat(2, 1, 1),
    "65 rows": lambda rows: _repeated(rows, 65),
    "as many rows as columns": lambda rows: _repeated(rows, rows.shape[-1]),
    THOUSANDS: lambda rows: _repeated(rows, 5003),
    # More than 16 bits count, if that is not too large. One alone reads no other, as in attention.
    VERY_MANY_ROWS: lambda rows: _repeated(
        rows, min(70001, 5003 + 2**23 // max(rows.shape[-1], 1))
    )[:, None],
}


def _stacked(rows: Tensor) -> Tensor:
    others = (-rows, rows / 2) if rows.is_floating_point() else (rows, rows)
    return torch.stack([rows, *others, rows.flip(0)])


def _repeated(rows: Tensor, count: int) -> Tensor:
    """So many rows, which all differ."""
    numbers = torch.arange(count, device=rows.device)
    found = rows[numbers % max(len(rows), 1)]
    return found * (1 + 0.01 * (numbers % 97)[:, None]).to(found) if count else found


def _with_numbers(tensor: Tensor, *numbers: float) -> Tensor:
    """With these numbers, from the end."""
    made = tensor.clone()
    flat = made.view(-1)
    for k, number in enumerate(numbers[: flat.numel()]):
        flat[flat.numel() - 1 - k * 7 % flat.numel()] = number
    return made


LARGE_MEAN, OTHER_VALUES = "inputs with a large mean", "inputs of other values"
MANY_ROWS = "bfloat16, thousands of rows, positive inputs and gradients"
# The values of the inputs, and those of the gradients of the outputs.
VALUES = {
    # Integers, such as the sizes of groups, are in another order.
    OTHER_VALUES: lambda t: t * 0.5 + 0.25 if t.is_floating_point() else t.flip(*range(t.dim())),
    "large inputs": lambda t: t * (1000 / t.abs().max().clamp(min=1e-3)) if t.numel() else t,
    "small inputs": lambda t: t * 1e-3,
    LARGE_MEAN: lambda t: t + 300,
    "positive inputs": torch.abs,
    "inputs of zeros": torch.zeros_like,
    "rows of zeros": lambda t: torch.cat([t[:1], torch.zeros_like(t[1:])]) if t.dim() else t,
    "equal rows": lambda t: t[:1].expand(t.shape).contiguous() if t.dim() else t,
    "inf and NaN in inputs": lambda t: _with_numbers(t, math.inf, math.nan),
}
GRADIENTS = {
    "large gradients": lambda t: t * 100,
    "small gradients": lambda t: t * 1e-3,
    "gradients of zeros": torch.zeros_like,
    "positive gradients": torch.abs,
    "NaN in gradients": lambda t: _with_numbers(t, math.nan),
}


def step(tensor: Tensor) -> Tensor:
    """What stands for an optimizer step. Equal numbers become different ones."""
    different = torch.arange(tensor.numel(), device=tensor.device) % 7
    return tensor * 2 + (1 + 0.1 * different).view(tensor.shape).to(tensor)


OTHER_SIGN, ZEROS = "parameters of the other sign", "parameters of zeros"
# What the parameters become.
PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {
    "after an optimizer step": step,
    ZEROS: torch.zeros_like,
    OTHER_SIGN: lambda t: -40 * t,
}
# What the attributes of an op become, by name.
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "eps": lambda eps: eps and (0.1 if eps < 0.01 else 1e-3),
    "scale": lambda scale: -2 * (0.3 if scale is None else scale),
    "zero_centered_gamma": lambda flag: not flag,
    "approximate": lambda form: "none" if form == "tanh" else "tanh",
    "glu_interleave_size": lambda size: 2 if size == 1 else 1,
    "causal": lambda flag: not flag,
    "by_head": lambda flag: not flag,
    "interleaved": lambda flag: not flag,
    "normalize": lambda flag: not flag,
    "label_smoothing": lambda part: 0.0 if part else 0.1,
    "softcap": lambda cap: None if cap else 2.0,
    "reduction": lambda form: "sum" if form == "mean" else "mean",
}
# Ops with equal attributes differ if only the first one has another value.
OF_ONE_OP = " of one op"
# The only masks that any two ways to draw them have in common, besides none.
ALL_DROPPED = "p of 1"
# The value of an attribute that an op does not have.
NO_ATTRIBUTE = object()
# What changes between forward and backward, besides tensors.
STATES = ("attributes", "training")


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, with others before and between them."""
    return torch.stack([torch.ones_like(tensor), tensor], -1)[..., 1]


def transposed(tensor: Tensor) -> Tensor:
    """The same numbers, the first dimension last in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() else tensor


def _swapped(tensor: Tensor) -> Tensor:
    return tensor.movedim(0, 1).contiguous().movedim(1, 0) if tensor.dim() > 1 else tensor


# How the inputs and the gradients of the outputs lie in memory.
LAYOUTS = {
    "strided input and gradient": strided,
    "transposed input and gradient": transposed,
    "input and gradient with swapped dimensions": _swapped,
    "expanded gradient": None,
    "expanded rows": lambda t: t[:1].expand(t.shape) if t.dim() > 1 else t,
}
EXPANDED = ("expanded gradient", "expanded rows")


@contextmanager
def _set(setter: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


RECIPE = "a recipe of 4 bits"
# What a call may find around it.
SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64 as the default dtype": lambda: _set(
        torch.set_default_dtype, torch.float64, torch.get_default_dtype()
    ),
    "three threads": lambda: _set(torch.set_num_threads, 3, torch.get_num_threads()),
    "hooks that copy what is saved": lambda: saved_tensors_hooks(
        lambda tensor: tensor.detach().clone(), lambda tensor: tensor
    ),
    # Torch fills new memory with NaN.
    "deterministic algorithms": lambda: _set(
        lambda on: torch.use_deterministic_algorithms(on, warn_only=True),
        True,
        torch.are_deterministic_algorithms_enabled(),
    ),
    # A fusion that ignores it is off by more than rounding errors.
    RECIPE: lambda: autocast(recipe=NVFP4BlockScaling(disable_stochastic_rounding=True)),
}
AUTOCAST_AROUND, OTHER_THREAD = "backward in a region of autocast", "backward in another thread"
