"""An explanation as aligned text."""

from __future__ import annotations

from collections.abc import Sequence

from ...reports.tables import text_table, unbroken, wrapped
from ..plan import NearMiss
from .summary import Group, Link, Plain, Slot, StepRow


def text(parts: Sequence[Group | Plain]) -> str:
    """All parts, with a blank line between them."""
    groups = sum(isinstance(part, Group) for part in parts)
    blocks = []
    number = 0
    for part in parts:
        if isinstance(part, Plain):
            blocks.append(wrapped(part.line))
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
        return "no gradient is needed, nothing is saved"
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
    lines = [*wrapped(title + summary_text(group)), *wrapped(group.note), "", *_ops(group)]
    saves = [
        _row(row, ", ".join(unbroken(slot_text(slot)) for slot in row.saves))
        for row in group.forward
    ]
    rows = [["forward", "op", "made by", "saves, bytes a row"], *saves]
    if group.plan.needs_backward:
        reads = [_row(row, reads_text(row)) for row in reversed(group.backward)]
        # One table with an empty line, so that both have the same columns.
        rows += [[""] * 4, ["backward", "op", "made by", "reads"], *reads]
    lines += ["", *text_table(rows)]
    if group.near_misses:
        lines += ["", "nearly matched"]
        for miss in group.near_misses:
            lines += wrapped(miss_text(miss), indent="  ")
    return lines


def _ops(group: Group) -> list[str]:
    digits = len(str(len(group.kinds) - 1))
    details = [*group.details, *[""] * (len(group.kinds) - len(group.details))]
    rows = [
        [f"{i:>{digits}}", kind, detail]
        for i, (kind, detail) in enumerate(zip(group.kinds, details, strict=True))
    ]
    return text_table(rows) + [line for link in group.links for line in wrapped(link_text(link))]


def _row(row: StepRow, last: str) -> list[str]:
    return [f"  {ops_text(row.ops)}", row.runs, row.made_by or "-", last]
