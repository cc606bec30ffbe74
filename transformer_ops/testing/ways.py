"""The ways in which a check runs ops or a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WITHOUT = "eager without a gradient for "
# All subsets of so many parameters are frozen; of more, each one and all but each one; of many,
# all.
_ALL_SUBSETS, _MOST_PARAMETERS = 4, 16


class Way(NamedTuple):
    """One way to run a list of ops. `name` says what differs from an eager call in training.

    Attributes:
        frozen: the parameters, and the inputs as "input 0", that require no gradient.
        input_grad: whether any input does.
        only_output: the only output with a gradient; None: all have one.
        second: "backward" runs it twice; "call" runs another call between forward and backward.
        changed: the parameter, input or output that changes in place between forward and backward.
        values: the "inputs", "parameters" or "attributes" that have other values than before.
    """

    name: str = "eager"
    grad: bool = True
    compiled: bool = False
    training: bool = True
    autocast: bool = False
    dtype: torch.dtype | None = None
    recompute: str = "cheap"
    shape: str = ""
    layout: str = ""
    frozen: frozenset[str] = frozenset()
    input_grad: bool = True
    only_output: int | None = None
    second: str = ""
    changed: str = ""
    values: str = ""

    def reference(self) -> Way:
        """The way in which the unfused ops run to give the same numbers."""
        layout = self.layout if self.layout == "expanded gradient" else ""
        return self._replace(
            name="", compiled=False, recompute="cheap", layout=layout, second="", changed=""
        )


def eager_ways(
    parameters: Sequence[str], dtype: torch.dtype, inputs: int, outputs: int, alone: bool
) -> Iterator[Way]:
    """Every eager way for ops with these parameters, an input of the dtype, and so many inputs and
    outputs."""
    for recompute in ("cheap", "none", "products"):
        for way in _ways(parameters, dtype, inputs, outputs):
            name = way.name + f', recompute="{recompute}"' * (recompute != "cheap")
            yield way._replace(name=name, recompute=recompute)
    tensors = (*(f"parameter {name}" for name in parameters), *_names_of(inputs), "output")
    for name in tensors if alone else ():
        yield Way(f"{name} changed in place before backward", changed=name)


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
    yield Way("autocast", autocast=True)
    yield Way("autocast without grad", autocast=True, grad=False)
    yield Way("autocast, three dimensions", autocast=True, shape="three dimensions")
    for name in parameters:
        yield Way(f"autocast, {name} frozen", autocast=True, frozen=frozenset([name]))
    yield Way("eval", training=False)
    yield Way("eval without grad", training=False, grad=False)
    yield Way("inputs of other values", values="inputs")
    yield Way("after an optimizer step", values="parameters")
    yield Way("attributes of other values", values="attributes")
    yield Way("a second backward", second="backward")
    yield Way("another call before backward", second="call")
    for k in range(outputs if outputs > 1 else 0):
        yield Way(f"a gradient of output {k} alone", only_output=k)


def compiled_ways(parameters: Sequence[str]) -> Iterator[Way]:
    """The ways to run under torch.compile. They take longer, so there are few."""
    yield Way("compiled")
    yield Way("compiled without grad", grad=False)
    yield Way("compiled, three dimensions", shape="three dimensions")
    yield Way("compiled, no rows", shape="no rows")
    yield Way("compiled, autocast", autocast=True)
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


def _strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() else tensor


def _swapped(tensor: Tensor) -> Tensor:
    return tensor.movedim(0, 1).contiguous().movedim(1, 0) if tensor.dim() > 1 else tensor


# How the inputs and the gradients of the outputs lie in memory.
LAYOUTS = {
    "strided input and gradient": _strided,
    "transposed input and gradient": _transposed,
    "input and gradient with swapped dimensions": _swapped,
    "expanded gradient": None,
}
