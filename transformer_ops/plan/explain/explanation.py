"""The result of explain()."""

from __future__ import annotations

from collections.abc import Sequence

from ...reports.svg import Pictured
from ..plan import Plan
from .picture import svg
from .summary import Group, Plain
from .table import html_table
from .text import text


class Explanation(Pictured):
    """What ran in the last call: the steps of each pass and the rules that made them, what every
    step saves, and the rules that nearly matched.

    `str()` returns aligned text, a notebook shows a table, and `save()` writes a picture. `parts`
    are the groups and the plain modules between them; `plans` are the plans of the groups.
    """

    _made_by = "explain"

    def __init__(self, parts: Sequence[Group | Plain]) -> None:
        self.parts = tuple(parts)

    @property
    def groups(self) -> list[Group]:
        """The groups of fusible ops, in order."""
        return [part for part in self.parts if isinstance(part, Group)]

    @property
    def plans(self) -> list[Plan]:
        """The plan of each group."""
        return [group.plan for group in self.groups]

    def __str__(self) -> str:
        return text(self.parts)

    def _repr_html_(self) -> str:
        return html_table(self.parts)

    def svg(self) -> str:
        """A standalone SVG picture, without scripts, external fonts or external files."""
        return svg(self.parts)
