"""How a function of a model rotates queries and keys, found by what it does to some numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_statements import TABLES, Frame, Given, Numbers, Rows, Unknown

__all__ = ["Rotation", "kind_of_rotation"]


class Rotation(NamedTuple):
    """How queries and keys are rotated.

    Attributes:
        is_interleaved: pairs are next to each other.
        tables: what is read of a table: "all" numbers, "half" of them, or "pairs": a table has one
            number for each pair.
        is_swapped: sines come before cosines.
        is_reversed: by the angle the other way.
        width: that of a head, where tables have to be of all its numbers; else 0.
    """

    is_interleaved: bool
    tables: str
    is_swapped: bool
    is_reversed: bool
    width: int = 0

    def of(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, int]:
        """What the op takes for two tables, and how many numbers of a head it rotates."""
        cos, sin = (second, first) if self.is_swapped else (first, second)
        width = cos.shape[-1] * (2 if self.tables == "pairs" else 1)
        if self.tables == "half":
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        return cos, -sin if self.is_reversed else sin, width

    def apply(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor | None:
        """The rotation of rows by a row of each table; None where the tables do not fit."""
        cos, sin, width = self.of(first, second)
        if width > x.shape[-1] or width % 2:
            return None
        if cos.shape[-1] != width:
            dim = -1
            cos, sin = (
                t.repeat_interleave(2, dim) if self.is_interleaved else torch.cat([t, t], dim)
                for t in (cos, sin)
            )
        part = x[..., :width]
        if self.is_interleaved:
            turned = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
        else:
            turned = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], -1)
        return torch.cat([part * cos + turned * sin, x[..., width:]], -1)


_KINDS = tuple(
    itertools.starmap(
        Rotation,
        itertools.product((False, True), ("all", "half", "pairs"), (False, True), (False, True)),
    )
)


def kind_of_rotation(
    reader: Any,
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    rows: Sequence[Rows],
) -> Rotation | None:
    """How a function rotates these rows; None of another function. What it does is tried with
    tables of several widths."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    width = rows[0].at.shape[-1]
    kinds, taken = _KINDS, []
    for n in sorted({width, width // 2, width // 4 * 2} - {0}):
        tables = [Numbers(some(reader.batch, reader.length, n)) for _ in range(2)]
        numbers = {id(one): Numbers(some(*one.at.shape)) for one in rows}

        def tried(one: Any, tables: Any = tables, numbers: Any = numbers) -> Any:
            if isinstance(one, Given) and one.name == TABLES:
                return tuple(tables) if one.element is None else tables[one.element]
            return numbers.get(id(one), one)

        try:
            found = Frame(reader, function, {}).inside(
                function, [*map(tried, args)], {name: tried(one) for name, one in kwargs.items()}
            )
        except Unknown:
            continue
        given = found if isinstance(found, tuple) else (found,)
        if len(given) != len(rows) or not all(isinstance(one, Numbers) for one in given):
            return None
        places = [reader.row_of(one) for one in rows]
        if any(not one.eq(one[..., :1]).all() for one in places):
            return None
        taken.append(tables[0].at)
        kinds = tuple(
            kind
            for kind in kinds
            if all(
                (n % 2 and kind.tables != "pairs")
                or _is_close(
                    own.at,
                    kind.apply(
                        numbers[id(one)].at, *(t.at.flatten(0, 1)[at[..., 0]] for t in tables)
                    ),
                )
                for one, own, at in zip(rows, given, places, strict=True)
            )
        )
    if not kinds or not taken:
        return None
    is_whole = all(kinds[0].of(table, table)[2] == width for table in taken)
    return kinds[0]._replace(width=width if is_whole else 0)


def _is_close(own: Tensor, wanted: Tensor | None) -> bool:
    return wanted is not None and own.shape == wanted.shape and torch.allclose(own, wanted)
