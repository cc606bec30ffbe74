"""The bytes that a training step of a model holds, with its own statements and with ops."""

from __future__ import annotations

from typing import NamedTuple

from ..reports.step_bytes import StepBytes
from ..reports.tables import html_table, size_text

__all__ = ["StepComparison"]

_BAR = 28  # characters of the longest bar in a terminal


class StepComparison(NamedTuple):
    """The bytes that a training step holds at its peak: as text, as a dict, and as a table in a
    notebook.

    Attributes:
        before: with the model's own statements.
        after: with ops in their place.
    """

    before: StepBytes
    after: StepBytes

    def as_dict(self) -> dict[str, dict[str, int]]:
        """For JSON: `{"before": {...}, "after": {...}}`."""
        return {"before": self.before.as_dict(), "after": self.after.as_dict()}

    def _rows(self) -> list[tuple[str, int, int]]:
        before, after = self.before.titled(), self.after.titled()
        return [(title, count, after[title]) for title, count in before.items()]

    def __str__(self) -> str:
        peaks = size_text(self.before.peak), size_text(self.after.peak)
        lines = ["a step holds {} at its peak without ops, {} with".format(*peaks)]
        most = max(max(row[1:]) for row in self._rows()) or 1
        for title, before, after in self._rows():
            bar = "#" * round(_BAR * after / most)
            rest = "." * (round(_BAR * before / most) - len(bar))
            sizes = f"{size_text(before):>10} {size_text(after):>10}"
            lines.append(f"  {title:22} {sizes}  {bar}{rest}".rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = [*self._rows(), ("peak", self.before.peak, self.after.peak)]
        cells = [(title, size_text(before), size_text(after)) for title, before, after in rows]
        return html_table(("at the peak", "without ops", "with ops"), cells)
