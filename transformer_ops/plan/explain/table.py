"""An explanation as a small HTML table, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .summary import Group, Plain, StepRow
from .text import link_text, miss_text, ops_text, reads_text, slot_text, summary_text

_CELL = ' style="text-align:left;vertical-align:top;padding:2px 10px"'


def html_table(parts: Sequence[Group | Plain]) -> str:
    """One table for each group."""
    return "<div>" + "".join(map(_part, parts)) + "</div>"


def _part(part: Group | Plain) -> str:
    if isinstance(part, Plain):
        return f"<p>{escape(part.line)}</p>"
    caption = [summary_text(part), part.note, *map(link_text, part.links)]
    rows = [_line("th", "forward", "op", "made by", "saves, bytes a row")]
    rows += [_step(row, ", ".join(map(slot_text, row.saves))) for row in part.forward]
    if part.plan.needs_backward:
        rows.append(_line("th", "backward", "op", "made by", "reads"))
        rows += [_step(row, reads_text(row)) for row in reversed(part.backward)]
    for i, miss in enumerate(part.near_misses):
        heading = f"<th{_CELL}>{'' if i else 'nearly matched'}</th>"
        reason = f"<td{_CELL} colspan='3'>{escape(miss_text(miss))}</td>"
        rows.append(f"<tr>{heading}{reason}</tr>")
    title = "<br>".join(escape(line) for line in caption if line)
    return f"<p>{title}</p><table>{''.join(rows)}</table>"


def _step(row: StepRow, last: str) -> str:
    return _line("td", ops_text(row.ops), row.runs, row.made_by, last)


def _line(tag: str, *cells: str) -> str:
    return "<tr>" + "".join(f"<{tag}{_CELL}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
