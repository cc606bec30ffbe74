"""`quantize_`: the weights of a model's linear layers as codes and scales, in place."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _C
from ..base.sharding import storages
from ..op.base import FusibleOperation
from ..reports.progress import progress
from ..reports.tables import html_table, size_text, text_table
from .number_format import FORMATS
from .quantized_tensor import QuantizedTensor
from .statistics import Report, Row, errors_of

__all__ = ["QuantizedWeights", "quantize_"]

_HEAD = ("weights", "SNR dB", "underflow", "saturated")
_KINDS = (Tensor, nn.Parameter, QuantizedTensor)


class _Place(NamedTuple):
    """A weight of a product."""

    path: str
    module: nn.Module
    name: str  # among the module's parameters

    @property
    def weight(self) -> Any:
        return self.module._parameters[self.name]


@dataclass(frozen=True)
class QuantizedWeights(Report):
    """What `quantize_` did: a row for each weight, and the bytes of all. As text and in a notebook,
    weights whose paths differ only in numbers are one line, with the worst of their errors.

    Attributes:
        before, after: the bytes of these weights.
        left: the path of each weight that stays as it is, and why.
    """

    before: int
    after: int
    left: tuple[tuple[str, str], ...]

    def _lines(self) -> list[tuple[str, ...]]:
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(re.sub(r"\b\d+\b", "*", row.module), []).append(row)
        return [
            (
                f"{len(rows)} x {name}",
                f"{min(row.signal_to_noise for row in rows):.1f}",
                f"{max(row.underflow for row in rows):.2%}",
                f"{max(row.saturated for row in rows):.2%}",
            )
            for name, rows in groups.items()
        ]

    def _head(self) -> str:
        formats = ", ".join(dict.fromkeys(row.format for row in self.rows))
        sizes = f"{size_text(self.before)} -> {size_text(self.after)}"
        return f"{len(self.rows)} weights as {formats}: {sizes}" if self.rows else "no weights"

    def __str__(self) -> str:
        table = text_table([_HEAD, *self._lines()], indent="  ")
        left = (f"  {path} stays as it is: {why}" for path, why in self.left)
        return "\n".join([self._head(), *table, *left])

    def _repr_html_(self) -> str:
        return html_table(_HEAD, self._lines())


def quantize_(
    model: nn.Module, format: str, only: str | Iterable[str] | None = None
) -> QuantizedWeights:
    """Replaces the weights of linear layers by `QuantizedTensor`s, in place.

    It encodes one weight after the other, so the model is never in memory twice. The new weights
    are parameters that do not require gradients; biases stay as they are. `fuse` may come before or
    after it. Call it before you make an optimizer, which would hold the old weights.

    A weight that other modules also use, such as an embedding, stays as it is. Linear layers that
    share a weight share the encoded one.

    Args:
        model: a model with `torch.nn.Linear`s, or with `Linear`, `BasicLinear`, `PackedLinear` or
            `GroupedLinear` of this package.
        format: a format of `torch.ops.transformer_ops.quantize`, such as "nvfp4" or "int8 1x32".
        only: names of modules, as of `named_modules()`, with wildcards: `"model.layers.*"`. None
            for all.

    Returns:
        What it cost: bytes before and after, and the rounding errors of each weight. `print` shows
        it.

    Raises:
        TypeError: `model` is no module; a weight is of another class (a `DTensor`, or a weight that
            another library has quantized).
        ValueError: there is no such format, or no such layer; a weight has no numbers yet, is
            parametrized, or does not fit the format. The model is then as before.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"[quantize_] model must be an nn.Module, got {type(model).__name__}")
    if format not in FORMATS:
        near = difflib.get_close_matches(str(format), FORMATS, 1, cutoff=0)
        raise ValueError(
            f"[quantize_] format must be one of {', '.join(FORMATS)}, got {format!r}; the nearest "
            f"is {near[0]!r}"
        )
    places = list(_places(model, only))
    if not places:
        what = "model must have a linear layer" if only is None else "only must name a linear layer"
        given = type(model).__name__ if only is None else repr(only)
        raise ValueError(f"[quantize_] {what}, got {given}")
    for place in places:
        _check(place, format)
    groups: dict[int, list[_Place]] = {}
    for place in places:
        groups.setdefault(id(place.weight), []).append(place)
    others = _other_users(model, groups)
    left = tuple(
        (place.path, f"it is also {others[number]}")
        for number, group in groups.items()
        if number in others
        for place in group
    )
    chosen = [group for number, group in groups.items() if number not in others]
    rows: list[Row] = []
    before = after = 0
    # A parameter created as an inference tensor could never be trained.
    with (
        progress("quantize_", len(chosen), "weight") as advance,
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        for group in chosen:
            before += _bytes_of(group[0].weight)
            row, weight = _encoded(group[0], format)
            for place in group:
                place.module.register_parameter(place.name, weight)
            rows.append(row)
            after += _bytes_of(weight)
            del weight
            _C.memory_trim()  # otherwise the old weight's memory is kept for others of its size
            advance()
    return QuantizedWeights(tuple(rows), before, after, left)


def _places(model: nn.Module, only: str | Iterable[str] | None) -> Iterator[_Place]:
    wanted = None if only is None else [only] if isinstance(only, str) else list(only)
    for path, module in model.named_modules():
        if wanted is None or any(fnmatch.fnmatchcase(path, pattern) for pattern in wanted):
            for owner, name in _weights_of(module):
                yield _Place(path or type(module).__name__, owner, name)


def _weights_of(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    if isinstance(module, nn.Linear):
        yield module, "weight"
    elif isinstance(module, FusibleOperation) and not module.is_fused_op:
        for op in module.basic_ops:
            if not op.is_python and "weight" in op._declaration()["operands"]:
                owner = op._parameter_owner
                yield from ((owner, name) for name in op._names_in("weight"))


def _check(place: _Place, format: str) -> None:
    what = f"[quantize_] weight of {place.path}"
    if place.name not in place.module._parameters:
        raise ValueError(f"{what} must be a parameter, got one with a parametrization")
    weight = place.weight
    if type(weight) not in _KINDS:
        raise TypeError(f"{what} must be a plain tensor, got a {type(weight).__name__}")
    if not weight.is_floating_point():
        raise TypeError(f"{what} must be floating, got {weight.dtype}")
    if weight.is_meta:
        raise ValueError(f"{what} must have numbers, got a tensor on the meta device")
    if FORMATS[format].bits == 4 and weight.shape[-1] % 2:
        raise ValueError(
            f"{what} must have an even number of columns for format '{format}', "
            f"got {weight.shape[-1]}"
        )


def _other_users(model: nn.Module, groups: dict[int, list[_Place]]) -> dict[int, str]:
    """For weights that are also parameters of modules that are not chosen: the name of one."""
    own = {(id(place.module), place.name) for group in groups.values() for place in group}
    return {
        id(parameter): f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in groups and (id(module), name) not in own
    }


def _bytes_of(weight: Tensor) -> int:
    return sum(storages(weight).values())


def _encoded(place: _Place, format: str) -> tuple[Row, nn.Parameter]:
    weight = place.weight.detach()
    plain = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    found = QuantizedTensor.quantize(plain, format)
    errors = errors_of(plain, found.codes, found.scale, format)
    row = Row(place.path, place.name, format, *errors.summary(), is_recipe=False)
    return row, nn.Parameter(found, requires_grad=False)
