"""An explanation as an SVG picture.

forward steps   [ LayerNorm ] [ linear_bias_activation      ] [ linear_epilogue    ]
ops             [ LayerNorm ] [ BasicLinear ] [ Bias ] [ GELU ] [ BasicLinear ] [ Bias ]
kept              input 64      input 64               input 256  input 256
backward steps  [ LayerNorm ] [ BasicLinear ] [ activation_bias ] [ BasicLinear ] [ Bias ]
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from ...reports.svg import Canvas, text_width
from .summary import Group, Link, Plain, Slot, StepRow
from .text import bytes_text, miss_text, summary_text

LEFT, TOP, GAP = 104.0, 20.0, 16.0
BAR, OP, CHIP, RAIL = 42.0, 44.0, 22.0, 26.0
INK, MUTED, LINE = "#0f172a", "#64748b", "#94a3b8"


class Style(NamedTuple):
    """The colours of a box."""

    fill: str
    stroke: str
    ink: str


ALONE = Style("#f1f5f9", "#cbd5e1", "#475569")
FORWARD = Style("#dbeafe", "#3b82f6", "#1e3a8a")
BACKWARD = Style("#ffedd5", "#f97316", "#7c2d12")
JOINT = Style("#ede9fe", "#8b5cf6", "#4c1d95")
KEPT = Style("#fef9c3", "#eab308", "#713f12")
BAND = Style("#faf5ff", "#ddd6fe", INK)
PYTHON = Style("#ffffff", MUTED, INK)
LEGEND = {
    ALONE: "runs as it is",
    FORWARD: "fused in forward",
    BACKWARD: "fused in backward",
    JOINT: "joint: fused in both passes",
    KEPT: "saved for backward, bytes a row",
    PYTHON: "in Python",
}


def svg(parts: Sequence[Group | Plain]) -> str:
    """The picture of all parts, one below the other."""
    canvas = Canvas()
    used: set[Style] = set()
    many = sum(isinstance(part, Group) for part in parts) > 1
    y, number = TOP, 0
    for part in parts:
        if isinstance(part, Plain):
            canvas.text(LEFT, y + 12, part.line, color=MUTED, anchor="start", bold=True, size=13)
            y += 42
        else:
            title = f"group {number}: " if many else ""
            y = _GroupPicture(canvas, used, part, y).draw(title) + 24
            number += 1
    _legend(canvas, used, y - 6)
    return canvas.document("transformer_ops plan")


def _legend(canvas: Canvas, used: set[Style], y: float) -> None:
    x = LEFT
    for style, label in LEGEND.items():
        if style not in used:
            continue
        dashed = style is PYTHON
        canvas.box(x, y, 16, 12, fill=style.fill, stroke=style.stroke, dashed=dashed, radius=3)
        canvas.text(x + 22, y + 10, label, size=11, color=MUTED, anchor="start")
        x += 38 + text_width(label, 11)


class _GroupPicture:
    def __init__(self, canvas: Canvas, used: set[Style], group: Group, y: float) -> None:
        self.canvas, self.used, self.group = canvas, used, group
        self.chips: list[list[Slot]] = [[] for _ in group.kinds]
        for row in group.forward:
            for slot in row.saves:
                self.chips[slot.op].append(slot)
        self.widths = _column_widths(group, self.chips)
        self.lefts = [LEFT + sum(self.widths[:i]) + GAP * i for i in range(len(self.widths))]
        self.links = _rails(group.links)
        rails = 1 + max((rail for _, rail in self.links), default=-1)
        self.title = y
        self.forward = y + 30 + (20 if group.note else 0)
        self.rails = self.forward + BAR + 8
        self.ops = self.rails + rails * RAIL + 10
        self.kept = self.ops + OP + 14
        self.backward = self.kept + max(map(len, self.chips)) * (CHIP + 6) + 12

    def draw(self, title: str) -> float:
        """Draws everything; returns the y coordinate below it."""
        group, canvas = self.group, self.canvas
        canvas.text(
            LEFT, self.title + 12, title + summary_text(group), bold=True, anchor="start", size=13
        )
        if group.note:
            canvas.text(LEFT, self.title + 32, group.note, color="#b45309", anchor="start")
        self._joint_bands()
        self._lane("forward", self.forward, group.forward)
        self._lane_label("ops", self.ops + OP / 2)
        if any(self.chips):
            self._lane_label("kept", (self.kept + self.backward - 12) / 2)
        self._chip_columns()
        for link, rail in self.links:
            self._link(link, self.rails + RAIL * rail + RAIL / 2)
        for i, kind in enumerate(group.kinds):
            self._op(i, kind)
        bottom = self.backward
        if group.plan.needs_backward:
            self._lane("backward", self.backward, group.backward)
            bottom += BAR
        return self._near_misses(bottom + 22)

    def _span(self, ops: Sequence[int]) -> tuple[float, float]:
        left = self.lefts[ops[0]]
        return left, self.lefts[ops[-1]] + self.widths[ops[-1]] - left

    def _middle(self, op: int) -> float:
        return self.lefts[op] + self.widths[op] / 2

    def _joint_bands(self) -> None:
        for row in self.group.forward:
            if row.joint and self.group.plan.needs_backward:
                left, width = self._span(row.ops)
                top = self.forward - 6
                height = self.backward + BAR + 6 - top
                self.canvas.box(
                    left - 6, top, width + 12, height, fill=BAND.fill, stroke=BAND.stroke, radius=10
                )

    def _lane_label(self, label: str, y: float) -> None:
        self.canvas.text(LEFT - 24, y + 4, label, color=MUTED, bold=True, anchor="end")

    def _lane(self, name: str, y: float, rows: Sequence[StepRow]) -> None:
        self._lane_label(name, y + BAR / 2)
        left_to_right = name == "forward"
        self.canvas.arrow_head(LEFT - 14, y + BAR / 2, left=not left_to_right, color=MUTED)
        for row in rows:
            left, width = self._span(row.ops)
            self._step(row, left, y, width, FORWARD if left_to_right else BACKWARD)
            if row.ops[0] > 0:
                self.canvas.arrow_head(
                    left - GAP / 2, y + BAR / 2, left=not left_to_right, color=LINE
                )

    def _step(self, row: StepRow, left: float, y: float, width: float, fused: Style) -> None:
        style = ALONE if row.skipped or not row.rule else JOINT if row.joint else fused
        fill = "#ffffff" if row.skipped else style.fill
        if not row.skipped:
            self.used |= {style, PYTHON} if row.python else {style}
        self.canvas.box(
            left, y, width, BAR, fill=fill, stroke=style.stroke, dashed=row.python or row.skipped
        )
        middle = left + width / 2
        label, note = _labels(row)
        if not note:
            self.canvas.text(middle, y + BAR / 2 + 4, label, color=style.ink, bold=bool(row.rule))
            return
        self.canvas.text(middle, y + 18, label, color=style.ink, bold=bool(row.rule))
        self.canvas.text(middle, y + 33, note, color=style.ink, size=10.5)

    def _op(self, i: int, kind: str) -> None:
        left, width = self.lefts[i], self.widths[i]
        self.canvas.box(left, self.ops, width, OP, fill="#ffffff", stroke="#334155")
        self.canvas.text(self._middle(i), self.ops + 20, kind, size=13, bold=True)
        self.canvas.text(self._middle(i), self.ops + 35, f"op {i}", size=10.5, color=MUTED)
        if i:
            x, y = left - GAP, self.ops + OP / 2
            self.canvas.path(f"M{x:.1f} {y:.1f} H{left:.1f}", stroke=LINE)

    def _chip_columns(self) -> None:
        for i, chips in enumerate(self.chips):
            if not chips:
                continue
            x = self._middle(i)
            self.canvas.path(
                f"M{x:.1f} {self.ops + OP:.1f} V{self.backward - 2:.1f}",
                stroke="#ca8a04",
                arrow=True,
            )
            for k, slot in enumerate(chips):
                self._chip(slot, i, self.kept + k * (CHIP + 6))

    def _chip(self, slot: Slot, op: int, y: float) -> None:
        label = _chip_text(slot)
        width = text_width(label, 11) + 14
        x = self._middle(op)
        self.used.add(KEPT)
        shared = slot.same_as is not None
        fill = "#ffffff" if shared else KEPT.fill
        self.canvas.box(
            x - width / 2, y, width, CHIP, fill=fill, stroke=KEPT.stroke, dashed=shared, radius=11
        )
        self.canvas.text(x, y + 15, label, size=11, color=KEPT.ink)

    def _link(self, link: Link, y: float) -> None:
        top = self.ops - 1
        width = text_width(link.label, 11) + 8
        if link.source is not None and link.target is not None:
            a, b = self._middle(link.source), self._middle(link.target)
            middle = (a + b) / 2
            start = f"M{a:.1f} {top:.1f} V{y + 6:.1f} Q{a:.1f} {y:.1f} {a + 6:.1f} {y:.1f} "
            end = f"H{b - 6:.1f} Q{b:.1f} {y:.1f} {b:.1f} {y + 6:.1f} V{top:.1f}"
            self.canvas.path(f"{start}H{middle - width / 2:.1f}", stroke=MUTED)
            self.canvas.path(f"M{middle + width / 2:.1f} {y:.1f} {end}", stroke=MUTED, arrow=True)
        else:
            op = link.target if link.target is not None else link.source
            assert op is not None
            middle = self._middle(op)
            ends = (y + 6, top) if link.target is not None else (top, y + 8)
            line = f"M{middle:.1f} {ends[0]:.1f} V{ends[1]:.1f}"
            self.canvas.path(line, stroke=MUTED, arrow=True)
        self.canvas.text(middle, y + 3, link.label, size=11, color=MUTED)

    def _near_misses(self, y: float) -> float:
        room = max(100, int((self.lefts[-1] + self.widths[-1] - LEFT) / (11 * 0.55)))
        for i, miss in enumerate(self.group.near_misses):
            for k, line in enumerate(textwrap.wrap(miss_text(miss), room)):
                if i == 0 and k == 0:
                    self.canvas.text(LEFT - 24, y, "nearly", color=MUTED, bold=True, anchor="end")
                indent = 12 if k else 0
                self.canvas.text(LEFT + indent, y, line, size=11, color=MUTED, anchor="start")
                y += 17
        return y


def _labels(row: StepRow) -> tuple[str, str]:
    """The texts in the bar of a step."""
    if row.skipped:
        return "no gradient", ""
    if not row.rule:
        return row.runs, "Python" if row.python else ""
    name = row.runs.partition("(")[0] if row.python else row.rule
    notes = ["joint"] if row.joint else []
    if row.python:
        notes.append(f"by {row.rule}")
    elif row.foreign_origin:
        notes.append(f"from {row.foreign_origin}")
    return name, ", ".join(notes)


def _chip_text(slot: Slot) -> str:
    if slot.same_as is not None:
        return f"{slot.name} = {slot.same_as}"
    return f"{slot.name} {bytes_text(slot.bytes)} B" + (f" {slot.format}" * bool(slot.format))


def _rails(links: Sequence[Link]) -> list[tuple[Link, int]]:
    """Puts each link on the first rail that is free."""
    busy: list[list[tuple[int, int]]] = []
    placed = []
    for link in links:
        ends = [op for op in (link.source, link.target) if op is not None]
        first, last = min(ends), max(ends)
        rail = 0
        while rail < len(busy) and any(a <= last and first <= b for a, b in busy[rail]):
            rail += 1
        if rail == len(busy):
            busy.append([])
        busy[rail].append((first, last))
        placed.append((link, rail))
    return placed


def _column_widths(group: Group, chips: Sequence[Sequence[Slot]]) -> list[float]:
    widths = []
    for kind, slots in zip(group.kinds, chips, strict=True):
        labels = [text_width(_chip_text(slot), 11) + 18 for slot in slots]
        widths.append(max([84.0, text_width(kind, 13, bold=True) + 16, *labels]))
    for link in group.links:
        if link.source is None or link.target is None:
            op = link.target if link.target is not None else link.source
            assert op is not None
            widths[op] = max(widths[op], text_width(link.label, 11) + 12)
    for row in (*group.forward, *group.backward):
        label, note = _labels(row)
        wanted = max(text_width(label, 12, bold=True), text_width(note, 10.5)) + 20
        missing = wanted - sum(widths[i] for i in row.ops) - GAP * (len(row.ops) - 1)
        for i in row.ops:
            widths[i] += max(0.0, missing) / len(row.ops)
    return widths
