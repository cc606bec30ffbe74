"""Pictures of the results."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .cases import (
    BLOCK_SIZE,
    BLOCKS,
    COMPILED,
    DEFAULT,
    DTYPES,
    EAGER,
    OP_SIZE,
    OPS,
    OTHER_OP_SIZES,
    OURS,
    OURS_COMPILED,
    PRODUCTS,
    SMALL_BLOCK_SIZE,
    STACK,
    WARM,
)
from .machine import caption
from .results import Results
from .tables import input_bytes
from .targets import OP_LIMITS

COLORS = {EAGER: "#8c8c8c", COMPILED: "#d98032", OURS: "#1f5f99", OURS_COMPILED: "#86b3d9"}
LABELS = {
    EAGER: "eager torch.nn",
    COMPILED: "torch.compile (Inductor)",
    OURS: "transformer_ops",
    OURS_COMPILED: "transformer_ops, compiled",
    PRODUCTS: 'transformer_ops, recompute="products"',
}
MODEL_WAYS = (EAGER, COMPILED, OURS, PRODUCTS)
MODEL_COLORS = {**COLORS, PRODUCTS: "#5d9c6b"}
LIMIT = {"color": "#b3262e", "linestyle": "--", "linewidth": 1.0}


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Every picture for which there are numbers, as SVG; the paths written."""
    written = []
    for name, draw in PICTURES.items():
        figure = draw(results)
        if figure is None:
            continue
        path = folder / f"bench-{name}.svg"
        # The same numbers give the same bytes.
        with matplotlib.rc_context({"svg.hashsalt": "bench", "svg.fonttype": "none"}):
            figure.savefig(path, metadata={"Date": None, "Creator": None})
        path.write_text(_shortened(path.read_text(encoding="utf-8")), encoding="utf-8")
        written.append(path)
    return written


def _shortened(svg: str) -> str:
    """The same picture without what nobody needs: comments, metadata, names of groups, and digits
    behind a hundredth of a point. Each part of an axes is a line, so that a diff stays short."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # References point to definitions by id; groups have ids that nothing refers to.
    svg = re.sub(r'<g id="[^"]*"/>', "", svg)
    svg = re.sub(r"(-?\d+\.\d{2})\d+", r"\1", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = re.sub(r"> <", "><", svg)
    svg = re.sub(r' id="(?!clip|[mp][0-9a-f]{10})[^"]*"(?=[ >])', "", svg)
    for _ in range(3):
        svg = re.sub(r"<g></g>", "", svg)
    return re.sub(r"</g><g>", "</g>\n<g>", svg).strip() + "\n"


def ops(results: Results) -> Figure | None:
    """Each op's distance to its roof; filled where memory is fresh, hollow where it is warm."""
    figure = _figure(9, 4.6)
    panels = figure.subplots(1, 2, sharey=True)
    seen = False
    for axes, dtype in zip(panels, DTYPES, strict=True):
        for place, name in enumerate(OPS):
            for allocator in (DEFAULT, WARM):
                row = results.find(name, dtype, OP_SIZE, allocator)
                for way in (EAGER, COMPILED, OURS):
                    value = row.to_bound(way) if row else None
                    if value is not None:
                        seen = True
                        _dot(axes, value, place, way, filled=allocator == DEFAULT)
        axes.set_xscale("log")
        _ticks(axes, [1, 1.5, 2, 3, 5, 10, 20, 50, 100])
        axes.axvline(1, color="black", linewidth=1)
        axes.axvline(1.5, **LIMIT)
        axes.set_title(dtype, loc="left", fontsize=10)
        axes.set_xlabel("time / roof")
        _rows(axes, list(OPS))
    if not seen:
        return None
    handles = [_handle(way, filled=True) for way in (EAGER, COMPILED, OURS)]
    handles += [
        _handle(None, filled=True, label="default allocator"),
        _handle(None, filled=False, label="warm allocator"),
        Line2D([], [], **LIMIT, label="limit, warm: 1.5"),  # type: ignore[arg-type]
    ]
    _finish(
        figure,
        f"Ops, forward+backward, T={OP_SIZE[0]}, h={OP_SIZE[1]}: how far from memory bandwidth",
        results,
        handles,
    )
    return figure


def blocks(results: Results) -> Figure | None:
    """Each block's distance to its products alone."""
    figure = _figure(8, 4.2)
    axes = figure.add_subplot()
    labels: list[str] = []
    for size in (BLOCK_SIZE, SMALL_BLOCK_SIZE):
        for name in BLOCKS:
            for dtype in DTYPES:
                row = results.find(name, dtype, size)
                if row is None:
                    continue
                for way in COLORS:
                    value = row.to_bound(way)
                    if value is not None:
                        _dot(axes, value, len(labels), way, filled=True)
                t, h, f = size
                labels.append(f"{name}, {dtype}\nT={t}, h={h}, f={f}")
    if not labels:
        return None
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("time / floor (the six matrix products alone)")
    _rows(axes, labels)
    _finish(
        figure,
        "Blocks, forward+backward, default allocator: how far from their products",
        results,
        [_handle(way, filled=True) for way in COLORS],
    )
    return figure


def memory(results: Results) -> Figure | None:
    """What blocks keep for backward, and the peak of a stack in training."""
    figure = _figure(9, 3.8)
    kept, peak = figure.subplots(1, 2)
    names = [(name, dtype) for name in BLOCKS for dtype in DTYPES]
    seen = False
    for offset, way in enumerate(COLORS):
        for place, (name, dtype) in enumerate(names):
            row = results.find(name, dtype, BLOCK_SIZE)
            saved = row.saved.get(way) if row else None
            highest = results.peak(name, dtype, BLOCK_SIZE, way)
            where = place + (offset - 1.5) * 0.2
            if row is not None and saved is not None:
                seen = True
                kept.bar(where, saved / input_bytes(row.case), 0.18, color=COLORS[way])
            if highest is not None:
                seen = True
                peak.bar(where, highest / 1e6, 0.18, color=COLORS[way])
    if not seen:
        return None
    for axes in (kept, peak):
        axes.set_xticks(range(len(names)), [f"{name}\n{dtype}" for name, dtype in names])
        axes.tick_params(axis="x", labelsize=8, length=0)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    kept.set_ylabel("saved bytes / bytes of the input")
    kept.set_title("Saved by one block", loc="left", fontsize=10)
    peak.set_ylabel("MB above the parameters")
    peak.set_title(f"Peak of a stack of {STACK} in training", loc="left", fontsize=10)
    t, h, f = BLOCK_SIZE
    _finish(
        figure,
        f"Memory, T={t}, h={h}, f={f}",
        results,
        [_handle(way, filled=True, marker="s") for way in COLORS],
    )
    return figure


def sweep(results: Results) -> Figure | None:
    """Ours against the best of the others by number of tokens, a panel for each op."""
    width = OP_SIZE[1]
    tokens = sorted(size[0] for size in (OP_SIZE, *OTHER_OP_SIZES) if size[1] == width)
    figure = _figure(9, 4.8)
    panels = figure.subplots(2, (len(OPS) + 1) // 2, sharex=True, sharey=True)
    styles = {"fp32": ("#1f5f99", "o-"), "bf16": ("#d98032", "s-")}
    seen = False
    for axes, name in zip(panels.flat, OPS, strict=False):
        for dtype, (color, style) in styles.items():
            found = [results.find(name, dtype, (t, width)) for t in tokens]
            points = [
                (t, value)
                for t, row in zip(tokens, found, strict=True)
                if row is not None and (value := row.to_best(OURS)) is not None
            ]
            if points:
                seen = True
                axes.plot(*zip(*points, strict=True), style, color=color, markersize=4)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.axhline(OP_LIMITS[name], **LIMIT)
        axes.set_title(name, loc="left", fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, [str(t) for t in tokens])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    if not seen:
        return None
    for axes in panels[-1]:
        axes.set_xlabel("tokens T")
    for axes in panels[:, 0]:
        axes.set_ylabel("time / best of others")
    handles = [
        Line2D([], [], marker=style[0], color=color, markersize=4, label=dtype)
        for dtype, (color, style) in styles.items()
    ]
    handles += [
        Line2D([], [], color="black", linewidth=0.8, label="best of eager and Inductor"),
        Line2D([], [], **LIMIT, label="limit at T=8192"),  # type: ignore[arg-type]
    ]
    _finish(
        figure,
        f"Ops, forward+backward, h={width}, default allocator: against the best of the others",
        results,
        handles,
    )
    return figure


def models(results: Results) -> Figure | None:
    """A training step of whole models: time, and bytes saved for backward."""
    record = results.limited.get("models", {})
    rows = {(row["what"], row["against"]): row for row in record.get("rows", ())}
    suffix = ", float32: step"
    names = [
        what.removesuffix(suffix)
        for what, against in rows
        if what.endswith(suffix) and against == EAGER
    ]
    if not names:
        return None
    figure = _figure(9, 3.6)
    panels = figure.subplots(1, 2)
    parts = [("step", "time of a step", "ms"), ("saved for backward", "saved for backward", "MiB")]
    for axes, (part, title, unit) in zip(panels, parts, strict=True):
        for place, name in enumerate(names):
            found = _by_way(rows, f"{name}, float32", part)
            # Not all models are compiled.
            here = [way for way in MODEL_WAYS if way in found]
            for offset, way in enumerate(here):
                where = place + (offset - (len(here) - 1) / 2) * 0.21
                height, text = found[way] / found[EAGER], f" {found[way]:.0f}"
                axes.bar(where, height, 0.19, color=MODEL_COLORS[way])
                axes.text(where, height, text, ha="center", va="bottom", fontsize=7, rotation=90)
        short = [textwrap.fill(name.split(",")[0], 11) for name in names]
        axes.set_xticks(range(len(names)), short, fontsize=8)
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(0, 1.35)
        axes.set_ylabel("relative to eager")
        axes.set_title(f"{title} (numbers: {unit})", loc="left", fontsize=10)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    _finish(
        figure,
        "A training step of whole models, float32",
        Results(record["about"]),
        [_handle(way, filled=True, marker="s") for way in MODEL_WAYS],
    )
    return figure


def _by_way(rows: dict[tuple[str, str], Any], name: str, part: str) -> dict[str, float]:
    """A number of every way, from the rows that compare two of them."""
    found = {}
    for policy, ours in (("", OURS), (f", {PRODUCTS}", PRODUCTS)):
        for way, against in ((EAGER, "eager"), (COMPILED, "Inductor")):
            row = rows.get((f"{name}{policy}: {part}", against))
            if row is not None:
                found[way] = float(row["theirs"].split()[0])
                found[ours] = float(row["ours"].split()[0])
    return found


PICTURES: dict[str, Callable[[Results], Figure | None]] = {
    "ops": ops,
    "blocks": blocks,
    "memory": memory,
    "sweep": sweep,
    "models": models,
}


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _dot(axes: Axes, x: float, y: float, way: str, filled: bool) -> None:
    color = COLORS[way]
    face = color if filled else "white"
    axes.plot(x, y, "o", color=color, markerfacecolor=face, markersize=7, zorder=3)


def _handle(way: str | None, filled: bool, label: str = "", marker: str = "o") -> Line2D:
    color = "black" if way is None else MODEL_COLORS[way]
    face = color if filled else "white"
    return Line2D(
        [], [], linestyle="", marker=marker, color=color, markerfacecolor=face, markersize=7,
        label=label or LABELS[way or ""],
    )  # fmt: skip


def _rows(axes: Axes, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="both", alpha=0.25)
    axes.set_axisbelow(True)


def _ticks(axes: Axes, places: list[float]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _finish(figure: Figure, title: str, results: Results, handles: list[Any]) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    legend = figure.legend(
        handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=8,
        title=caption(results.about), title_fontsize=7, alignment="left",
    )  # fmt: skip
    legend.get_title().set_color("#555555")
