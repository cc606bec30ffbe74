"""An explanation as aligned text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ..plan import NearMiss
from .summary import Group, Link, Plain, Slot, StepRow

WIDTH = 100


def text(parts: Sequence[Group | Plain]) -> str:
    """All parts, with a blank line between them."""
    groups = sum(isinstance(part, Group) for part in parts)
    blocks = []
    number = 0
    for part in parts:
        if isinstance(part, Plain):
            blocks.append([part.line])
            continue
        title = f"group {number}: " if groups > 1 else ""
        blocks.append(_group(part, title))
        number += 1
    return "\n\n".join("\n".join(block) for block in blocks) or "no ops"


def ops_text(ops: Sequence[int]) -> str:
    """ "3", or "3-5"; the ops of a step follow each other."""
    return str(ops[0]) if len(ops) == 1 else f"{ops[0]}-{ops[-1]}"


def bytes_text(count: float | None) -> str:
    """The bytes for each row, with at most two decimals (a row of a bit mask may end within a
    byte)."""
    return "?" if count is None else f"{round(count, 2):,.10g}"


def slot_text(slot: Slot) -> str:
    """The slot and its bytes for each row."""
    if slot.same_as is not None:
        return f"{slot.full_name} = {slot.same_as}"
    return f"{slot.full_name} {bytes_text(slot.bytes)}" + (f" ({slot.format})" * bool(slot.format))


def summary_text(group: Group) -> str:
    """The tensors that the group saves for backward."""
    if not group.plan.needs_backward:
        return "no gradient is needed, nothing is kept"
    kept = f"{bytes_text(group.saved_a_row)} bytes a row saved for backward"
    if group.saved is None:
        return kept
    dtype = str(group.saved.dtype).removeprefix("torch.")
    return f"{kept}; a row of the input is {group.saved.width:,} x {dtype}"


def miss_text(miss: NearMiss) -> str:
    """The position where a rule nearly matched, and the reason why it did not."""
    label = {"forward_backward": "joint"}.get(miss.pass_name, miss.pass_name)
    return f"{miss.fusion} ({label}) at {ops_text(miss.ops)}: {miss.reason}"


def link_text(link: Link) -> str:
    """The source and the destination of an extra tensor."""
    if link.source is None:
        return f"{link.label} goes to op {link.target}"
    if link.target is None:
        return f"{link.label} comes from op {link.source}"
    return f"{link.label!r} goes from op {link.source} to op {link.target}"


def reads_text(row: StepRow) -> str:
    """The saved tensors that a backward step reads."""
    if row.skipped:
        return "needs no gradient"
    again = f"computes {', '.join(row.computes)} again from " if row.computes else ""
    return again + ", ".join(row.reads)


def _group(group: Group, title: str) -> list[str]:
    lines = [f"{title}{summary_text(group)}"]
    if group.note:
        lines.append(group.note)
    lines += ["", *_ops(group)]
    saves = [_row(row, ", ".join(map(slot_text, row.saves))) for row in group.forward]
    tables = [["forward", "op", "made by", "saves, bytes a row"], *saves]
    backward = []
    if group.plan.needs_backward:
        reads = [_row(row, reads_text(row)) for row in reversed(group.backward)]
        backward = [["backward", "op", "made by", "reads"], *reads]
    widths = [max(len(row[k]) for row in tables + backward) for k in range(3)]
    for table in (tables, backward):
        lines += [""] * bool(table)
        for row in table:
            lines += _aligned(row, widths)
    if group.near_misses:
        lines += ["", "nearly matched"]
        for miss in group.near_misses:
            lines += _wrapped("  ", miss_text(miss))
    return lines


def _ops(group: Group) -> list[str]:
    number = len(str(len(group.kinds) - 1))
    kind = max(map(len, group.kinds))
    lines = []
    for i, name in enumerate(group.kinds):
        detail = group.details[i] if i < len(group.details) else ""
        lines.append(f"{i:>{number}}  {name:<{kind}}  {detail}".rstrip())
    return lines + [line for link in group.links for line in _wrapped("", link_text(link))]


def _row(row: StepRow, last: str) -> list[str]:
    return [f"  {ops_text(row.ops)}", row.runs, row.made_by or "-", last]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    start = "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)) + "  "
    if not row[3]:
        return [start.rstrip()]
    room = max(30, WIDTH - len(start))
    first, *rest = textwrap.wrap(row[3], room, break_long_words=False, break_on_hyphens=False)
    return [start + first, *(" " * len(start) + line for line in rest)]


def _wrapped(indent: str, line: str) -> list[str]:
    return textwrap.wrap(
        line,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
