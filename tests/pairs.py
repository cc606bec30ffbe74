"""Small tables in which every two values of different axes meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]


def all_rows(axes: Mapping[str, Sequence[str]]) -> list[Row]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def pairs_of_all(rows: Sequence[Row]) -> set[Pair]:
    return set().union(*map(pairs_of, rows))


def pairwise(axes: Mapping[str, Sequence[str]], is_allowed: Callable[[Row], bool]) -> list[Row]:
    """Few rows that contain every pair of values of an allowed row. Each step adds the row with the
    most new pairs."""
    allowed = [(row, pairs_of(row)) for row in all_rows(axes) if is_allowed(row)]
    missing = pairs_of_all([row for row, _ in allowed])
    table = []
    while missing:
        row, pairs = max(allowed, key=lambda each: len(each[1] & missing))
        table.append(row)
        missing -= pairs
    return table
