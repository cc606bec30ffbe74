"""Writes tables of a run into Markdown pages, between <!-- bench NAME --> and <!-- /bench -->."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from typing import Any

from . import tables
from .cases import BLOCKS, DEFAULT, OPS, PRODUCTS, WARM
from .machine import ROOT, caption
from .results import SECOND, Results

PAGE = ROOT / "docs" / "measurements.md"
SUMMARY = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
MODELS = ROOT / "docs" / "models.md"
# What families.py --record wrote.
FAMILIES = ROOT / "benchmarks" / "families.json"
MARKED = re.compile(r"(<!-- bench (.+?) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)
UNKNOWN = "*Not measured yet: `make bench ARGS=--record` fills this in.*"


def _table(table: tables.Table) -> str:
    return table.markdown() if table.rows else ""


def _limited(results: Results, name: str) -> str:
    # Its machine may be another one than that of the rest.
    about = results.limited.get(name, {}).get("about")
    return f"{_table(tables.limited(results, name))}\n\n{caption(about)}." if about else ""


def _calls(results: Results) -> str:
    calls = results.calls
    if calls is None:
        return ""
    made = [tables.calls(results, block).markdown() for block in calls["blocks"]]
    return "\n\n".join([*made, f"{caption(calls['about'])}."])


def _in_short(results: Results) -> str:
    """Three numbers of the whole models, for README.md."""
    record = results.limited.get("models")
    if record is None:
        return ""
    rows = [row for row in record["rows"] if ", float32: " in row["what"]]

    def found(part: str) -> list[float]:
        rest = f", float32: {part}"
        against = ("eager", SECOND)
        return [r["found"] for r in rows if r["what"].endswith(rest) and r["against"] in against]

    def fewer(part: str) -> str:
        percents = sorted(round(100 * (1 - ratio)) for ratio in found(part))
        return f"**{percents[0]} to {percents[-1]} %"

    return "\n".join(
        [
            f"- {fewer('saved for backward')} fewer bytes** saved for backward than eager PyTorch",
            f"- {fewer('step')} less time** for a training step than eager PyTorch",
            f"- **{max(found('seconds of fuse')):.1f} s** to fuse a model: nothing is compiled",
            "",
            _in_short_about(record["about"], len(found("step"))),
        ]
    )


def _in_short_about(about: dict[str, Any], models: int) -> str:
    number = ("no", "one", "two", "three", "four", "five", "six")[models]
    features = "".join(f", {name}" for name in about["features"][:1])
    return (
        f"Measured in float32 on the {number} models of the picture "
        f"({about['cpu']}{features}, {about['cores']} cores)."
    )


def _products_in_short(results: Results) -> str:
    """Whole models that recompute products, for README.md."""
    rows = results.limited.get("models", {}).get("rows", ())

    def found(part: str) -> list[float]:
        rest = f", float32, {PRODUCTS}: {part}"
        return sorted(row["found"] for row in rows if row["what"].endswith(rest))

    saved, times = found("saved for backward"), found("step")
    if not saved or not times:
        return ""
    return "\n".join(
        [
            'With `tops.fuse(model, recompute="products")` (the green bars) forward saves '
            f"**{100 * (1 - saved[-1]):.0f} to",
            f"{100 * (1 - saved[0]):.0f} % fewer bytes** than eager PyTorch, and a step takes "
            f"{times[0]:.2f} to {times[-1]:.2f} of its time: backward",
            "recomputes outputs of matrix products, too ([Save memory](docs/memory.md)).",
        ]
    )


def _models_in_short(results: Results) -> str:
    """Whole models against eager torch, for the page that answers first."""
    record = results.limited.get("models")
    if record is None:
        return ""
    found = {row["what"]: row["found"] for row in record["rows"] if row["against"] == "eager"}
    parts = ("saved for backward", "peak of a step", "step")
    models = [what.removesuffix(": step") for what in found if what.endswith(": step")]
    rows = []
    for model in models:
        if PRODUCTS not in model:
            texts = [f"{one}: {part}" for one in (model, f"{model}, {PRODUCTS}") for part in parts]
            cells = (f"{found[text]:.2f}" if text in found else "-" for text in texts)
            rows.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(
        [
            "| model | saved | peak | time | products recomputed: saved | peak | time |",
            f"| --- |{' ---: |' * 6}",
            *rows,
            "",
            f"{caption(record['about'])}.",
        ]
    )


def families(record: dict[str, Any]) -> str:
    """The families of causal models, for the page about whole models."""
    rows = sorted(record["rows"], key=lambda row: (row["attention"] == 0, row["name"]))
    table = tables.Table(
        ["family", "attention", "saved", "parts"],
        [
            [
                row["name"],
                str(row["attention"] or "-"),
                f"{row['saved']:.2f}",
                ", ".join(f"{count} {rule}" for rule, count in row["rules"].items()),
            ]
            for row in rows
        ],
    )
    count = sum(row["attention"] > 0 for row in rows)
    error = max(row["error"] for row in rows)
    saved = statistics.median(row["saved"] for row in rows)
    return "\n".join(
        [
            f"Of {len(rows)} families of causal models of transformers {record['transformers']}, "
            f"{count} have attention in a plan.",
            f"Forward saves {saved:.2f} of the plain model's bytes in the median.",
            f"The largest error of a gradient is {error:.0e}.",
            "",
            table.markdown(),
        ]
    )


PARTS: dict[str, Callable[[Results], str]] = {
    "products in short": _products_in_short,
    "machine": lambda results: caption(results.about) + ".",
    "targets": lambda results: _table(tables.targets(results)),
    "ops": lambda results: _table(tables.ops(results, DEFAULT)),
    "ops warm": lambda results: _table(tables.ops(results, WARM)),
    "blocks": lambda results: _table(tables.blocks(results, DEFAULT)),
    "op sizes": lambda results: _table(tables.sweep(results, OPS)),
    "block sizes": lambda results: _table(tables.sweep(results, BLOCKS)),
    "saved": lambda results: _table(tables.memory(results)),
    "saved by ops": lambda results: _table(tables.saved_by_ops(results)),
    "peaks": lambda results: _table(tables.peaks(results)),
    "experts": lambda results: _limited(results, "experts"),
    "head_loss": lambda results: _limited(results, "head_loss"),
    "avx2": lambda results: _limited(results, "avx2"),
    "layer": lambda results: _limited(results, "layer"),
    "quantized": lambda results: _limited(results, "quantized"),
    "startup": lambda results: _limited(results, "startup"),
    "threads": lambda results: _limited(results, "threads"),
    "cores": lambda results: _table(tables.cores()),
    "models": lambda results: _limited(results, "models"),
    "adapters": lambda results: _limited(results, "adapters"),
    "models in short": _models_in_short,
    "calls": lambda results: _calls(results),
    "families": lambda _: families(json.loads(FAMILIES.read_text(encoding="utf-8"))),
    "in short": lambda results: _in_short(results),
}


def rendered(text: str, results: Results) -> str:
    """The page with every marked part made anew. KeyError for a part that nothing makes."""

    def part(found: re.Match[str]) -> str:
        made = PARTS[found[2]](results)
        return f"{found[1]}{made or UNKNOWN}\n{found[4]}"

    return MARKED.sub(part, text)


def write(results: Results) -> None:
    """Write the numbers into the pages."""
    for page in (PAGE, SUMMARY, README, MODELS):
        text = page.read_text(encoding="utf-8")
        page.write_text(rendered(text, results), encoding="utf-8")
