"""A row for each built-in fusion; `test_fusions.py` runs every property on each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import transformer_ops as tops

ACTIVATIONS = ["GELU", "QGELU", "ReLU", "SReLU", "SiLU"]


class Case(NamedTuple):
    """A fusion, ops on which it fires, and the basic ops that it covers.

    The first op takes rows of 16. `extra_inputs` of the input's shape come from the caller.
    """

    rule: str
    pass_name: str
    make: Callable[[], list[tops.FusibleOperation]]
    covers: tuple[int, ...]
    extra: str = ""
    extra_inputs: int = 0

    def __str__(self) -> str:
        return f"{self.rule}{self.extra and '-' + self.extra}"

    def inputs(self, x: Tensor) -> list[Tensor]:
        """The main input and the extra inputs."""
        generator = torch.Generator().manual_seed(7)
        shapes = [x.shape] * self.extra_inputs
        return [x, *(torch.randn(shape, generator=generator).to(x.dtype) for shape in shapes)]


def before(*made: tops.FusibleOperation) -> list[tops.FusibleOperation]:
    """A norm in front, so that the input of the fused op wants a gradient as well."""
    return [tops.LayerNorm(16), *made]


def cases() -> Iterator[Case]:
    """All rows."""
    for name in ACTIVATIONS:
        activation = getattr(tops, name)
        block = lambda a=activation: before(tops.Linear(16, 24), a(), tops.L2Normalization())  # noqa: E731
        yield Case("linear_bias_activation", "forward", block, (1, 2, 3), name)
        yield Case("activation_bias", "backward", block, (2, 3), name)
        alone = lambda a=activation: before(tops.Bias(16), a())  # noqa: E731
        yield Case("activation_bias", "backward", alone, (1, 2), name + " without Linear")
    for name in ("ReLU", "SReLU"):
        activation = getattr(tops, name)
        block = lambda a=activation: before(a(), tops.Linear(16, 24))  # noqa: E731
        yield Case("activation_linear", "forward_backward", block, (1, 2), name)
    yield Case("linear_bias", "forward", lambda: before(tops.Linear(16, 24)), (1, 2))


CASES = list(cases())
