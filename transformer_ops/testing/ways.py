"""The ways in which a check runs ops or a model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

WITHOUT = "eager without a gradient for "
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
        values: a key of `VALUES`; or "parameters", or "data" for parameters that are written behind
            the back of autograd.
        attributes: a key of `ATTRIBUTES`, which has another value, or "all".
        gradient: a key of `GRADIENTS`.
        weights: whether the parameters are not contiguous.
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

    def reference(self) -> Way:
        """The way in which the unfused ops run to give the same numbers."""
        layout = self.layout if self.layout == "expanded gradient" else ""
        # An op that reads an attribute in backward does so fused or not.
        changed = self.changed if self.changed in STATES else ""
        plain = self._replace(name="", compiled=False, recompute="cheap", second="", weights=False)
        return plain._replace(layout=layout, changed=changed)

    @property
    def is_finite(self) -> bool:
        """Whether all inputs and gradients are."""
        return "NaN" not in self.values + self.gradient


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
    for state in STATES:
        yield Way(f"{state} changed before backward", changed=state)
    tensors = (*(f"parameter {name}" for name in parameters), *_names_of(inputs), "output")
    for name in tensors if alone else ():
        yield Way(f"{name} changed in place before backward", changed=name)
    if alone:
        rows, signs = "thousands of rows", "positive gradients"
        yield Way(MANY_ROWS, dtype=torch.bfloat16, shape=rows, gradient=signs)
        yield Way("float16 autocast", autocast=torch.float16)
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
    yield Way("inputs of other values", values="inputs of other values")
    yield Way("after an optimizer step", values="parameters")
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
    half, every = torch.float16, frozenset(parameters)
    for values in VALUES:
        # What ReLU and its kind do with the gradient of NaN is up to them.
        yield Way(values, values=values, grad="NaN" not in values)
    for gradient in GRADIENTS:
        yield Way(gradient, gradient=gradient)
    for name in attributes:
        yield Way(f"another {name}", attributes=name)
    if dtype != half:
        yield Way("float16, large inputs", dtype=half, values="large inputs")
        yield Way("float16, large gradients", dtype=half, gradient="large gradients")
    yield Way("inference mode", inference=True, grad=False)
    yield Way("weights that are not contiguous", weights=True)
    for grad in (True, False):
        name = "parameters written through .data" + ", without grad" * (not grad)
        yield Way(name, values="data", grad=grad, frozen=frozenset() if grad else every)


def compiled_ways(parameters: Sequence[str]) -> Iterator[Way]:
    """The ways to run under torch.compile. They take longer, so there are few."""
    yield Way("compiled")
    yield Way("compiled without grad", grad=False)
    yield Way("compiled, three dimensions", shape="three dimensions")
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


# Each takes the rows of an input, [n, columns].
SHAPES = {
    "one dimension": lambda rows: rows[0],
    "three dimensions": lambda rows: torch.stack([rows, rows.flip(0)]),
    "one row": lambda rows: rows[:1],
    "no rows": lambda rows: rows[:0],
}
MORE_SHAPES = {
    "four dimensions": lambda rows: torch.stack([rows, -rows, rows / 2, rows.flip(0)]).unflatten(
        0, (2, 2)
    ),
    "65 rows": lambda rows: _repeated(rows, 65),
    "as many rows as columns": lambda rows: _repeated(rows, rows.shape[-1]),
    "thousands of rows": lambda rows: _repeated(rows, 5003),
}


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


LARGE_MEAN = "inputs with a large mean"
MANY_ROWS = "bfloat16, thousands of rows, positive gradients"
# The values of the inputs, and those of the gradients of the outputs.
VALUES = {
    "inputs of other values": lambda t: t * 0.5 + 0.25,
    "large inputs": lambda t: t * (1000 / t.abs().max().clamp(min=1e-3)) if t.numel() else t,
    "small inputs": lambda t: t * 1e-3,
    LARGE_MEAN: lambda t: t + 300,
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
# What the attributes of an op become, by name.
ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "eps": lambda eps: eps and (0.1 if eps < 0.01 else 1e-3),
    "scale": lambda scale: scale and -2 * scale,
    "zero_centered_gamma": lambda flag: not flag,
    "approximate": lambda form: "none" if form == "tanh" else "tanh",
    "glu_interleave_size": lambda size: 2 if size == 1 else 1,
}
# The value of an attribute that an op does not have.
NO_ATTRIBUTE = object()
# What changes between forward and backward, besides tensors.
STATES = ("attributes", "training")


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, with others between them."""
    return torch.stack([tensor, tensor], -1)[..., 0]


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
}
