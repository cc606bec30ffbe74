"""The result of explain()."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...reports.svg import save_svg
from ..plan import Plan
from .picture import svg
from .summary import Group, Plain
from .table import html_table
from .text import text


class Explanation:
    """What ran in the last call: the steps of each pass and the rules that made them, what every
    step saves, and the rules that nearly matched.

    `str()` returns aligned text, a notebook shows a table, and `save()` writes a picture. `parts`
    are the groups and the plain modules between them; `plans` are the plans of the groups.
    """

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

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(self.parts)

    def svg(self) -> str:
        """A standalone SVG picture, without scripts, external fonts or external files."""
        return svg(self.parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file.

        Raises:
            ValueError: the path does not end in ".svg".
            OSError: the file cannot be written.
        """
        save_svg("explain", path, self.svg())
