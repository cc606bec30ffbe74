"""An explanation as a small HTML table, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...reports.tables import CELL_STYLE, html_row
from .summary import Group, Plain, StepRow
from .text import link_text, miss_text, ops_text, reads_text, slot_text, summary_text


def html_table(parts: Sequence[Group | Plain]) -> str:
    """One table for each group."""
    return "<div>" + "".join(map(_part, parts)) + "</div>"


def _part(part: Group | Plain) -> str:
    if isinstance(part, Plain):
        return f"<p>{escape(part.line)}</p>"
    caption = [summary_text(part), part.note, *map(link_text, part.links)]
    rows = [html_row("th", "forward", "op", "made by", "saves, bytes a row")]
    rows += [_step(row, ", ".join(map(slot_text, row.saves))) for row in part.forward]
    if part.plan.needs_backward:
        rows.append(html_row("th", "backward", "op", "made by", "reads"))
        rows += [_step(row, reads_text(row)) for row in reversed(part.backward)]
    for i, miss in enumerate(part.near_misses):
        heading = f"<th{CELL_STYLE}>{'' if i else 'nearly matched'}</th>"
        reason = f"<td{CELL_STYLE} colspan='3'>{escape(miss_text(miss))}</td>"
        rows.append(f"<tr>{heading}{reason}</tr>")
    title = "<br>".join(escape(line) for line in caption if line)
    return f"<p>{title}</p><table>{''.join(rows)}</table>"


def _step(row: StepRow, last: str) -> str:
    return html_row("td", ops_text(row.ops), row.runs, row.made_by, last)
