"""Results as tables: for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from transformer_ops import _C

from .cases import (
    ALLOCATORS,
    BLOCK_SIZE,
    BLOCKS,
    COMPILED,
    DEFAULT,
    DTYPES,
    EAGER,
    FORWARD,
    OP_SIZE,
    OPS,
    OURS,
    OURS_COMPILED,
    SMALL_BLOCK_SIZE,
    TRAINING,
    WAYS,
    Case,
)
from .results import Results, Row
from .targets import Outcome, outcomes

NOTHING = "-"
CORES = (1, 2, 4, 8, 16, 32, 64, 128)
# Keys of call_cost.py.
GUARDS, GUARDS_US = "guards", "guards us"


class Table(NamedTuple):
    """Headers and rows of the same length."""

    headers: Sequence[str]
    rows: list[list[str]]

    def text(self) -> str:
        """Aligned columns: the first to the left, the others to the right."""
        lines = [list(self.headers), *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headers))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def markdown(self) -> str:
        """A table of GitHub's Markdown."""
        rule = ["---", *("---:" for _ in self.headers[1:])]
        lines = [self.headers, rule, *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return NOTHING
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def pair(row: Row, way: str) -> str:
    """Milliseconds, forward / forward+backward."""
    found = [row.median(way, name) for name in (FORWARD, TRAINING)]
    return NOTHING if found[1] is None else " / ".join(number(value) for value in found)


def targets(results: Results) -> Table:
    """What is to be reached, and what was measured."""
    headers = ["what", "against", "at most", *DTYPES, "worst of other sizes"]
    return Table(headers, [_outcome(outcome) for outcome in outcomes(results)])


def _outcome(outcome: Outcome) -> list[str]:
    target = outcome.target
    limits = list(dict.fromkeys(f"{limit:.2f}" for limit in target.limits.values()))
    cells = []
    for dtype, value in outcome.found.items():
        verdict = {True: " ok", False: " NO", None: ""}[outcome.ok(dtype)]
        # A value just beyond its limit is shown with the digit that tells them apart.
        limit = target.limits[dtype]
        digits = 3 if value is not None and value > limit >= round(value, 2) else 2
        cells.append(NOTHING if value is None else f"{value:.{digits}f}{verdict}")
    worst = NOTHING if outcome.worst is None else f"{outcome.worst[0]:.2f} ({outcome.worst[1]})"
    return [target.what, target.against, " / ".join(limits), *cells, worst]


def ops(results: Results, allocator: str) -> Table:
    """The ops at their full size, in milliseconds, forward / forward+backward."""
    headers = ["op", "dtype", *WAYS, "roof", "ours / best", "ours / roof"]
    rows = []
    for name in OPS:
        for dtype in DTYPES:
            row = results.find(name, dtype, OP_SIZE, allocator)
            if row is not None:
                rows.append([name, dtype, *_times(row)])
    return Table(headers, rows)


def blocks(results: Results, allocator: str) -> Table:
    """The blocks at the sizes of the limits, in milliseconds, forward / forward+backward."""
    headers = ["block", "dtype", "T, h, f", *WAYS, "floor", "ours / best", "ours / floor"]
    rows = []
    for name in BLOCKS:
        for size in (SMALL_BLOCK_SIZE, BLOCK_SIZE):
            for dtype in DTYPES:
                row = results.find(name, dtype, size, allocator)
                if row is not None:
                    rows.append([name, dtype, ", ".join(map(str, size)), *_times(row)])
    return Table(headers, rows)


def _times(row: Row) -> list[str]:
    bounds = [row.bound(name) for name in (FORWARD, TRAINING)]
    return [
        *(pair(row, way) for way in WAYS),
        " / ".join(number(value) for value in bounds),
        number(row.to_best(OURS)),
        number(row.to_bound(OURS)),
    ]


def sweep(results: Results, names: Iterable[str]) -> Table:
    """Forward+backward of ours against the best at every size, default allocator."""
    found = {
        (row.case.name, row.case.dtype, row.case.size): ratio
        for row in results.rows
        if row.case.name in names
        and row.case.allocator == DEFAULT
        and (ratio := row.to_best(OURS)) is not None
    }
    sizes = sorted({size for _, _, size in found})
    rows = [
        [name, dtype, *(number(found.get((name, dtype, size))) for size in sizes)]
        for name in names
        for dtype in DTYPES
        if any((name, dtype, size) in found for size in sizes)
    ]
    return Table(["ours / best", "dtype", *("x".join(map(str, size)) for size in sizes)], rows)


def memory(results: Results) -> Table:
    """Bytes kept for backward a token, in sizes of the input, by block."""
    headers = ["saved, in inputs", "dtype", "T, h, f", *WAYS, "ours / best"]
    rows = []
    for name in BLOCKS:
        for size in (SMALL_BLOCK_SIZE, BLOCK_SIZE):
            for dtype in DTYPES:
                row = results.find(name, dtype, size)
                if row is not None:
                    cells = [_in_inputs(row, way) for way in WAYS]
                    ratio = number(row.saved_ratio(OURS))
                    rows.append([name, dtype, ", ".join(map(str, size)), *cells, ratio])
    return Table(headers, rows)


def saved_by_ops(results: Results) -> Table:
    """Bytes kept for backward by an op alone, in sizes of the input."""
    headers = ["saved, in inputs", "dtype", *WAYS]
    rows = []
    for name in OPS:
        for dtype in DTYPES:
            row = results.find(name, dtype, OP_SIZE)
            if row is not None:
                rows.append([name, dtype, *(_in_inputs(row, way) for way in WAYS)])
    return Table(headers, rows)


def _in_inputs(row: Row, way: str) -> str:
    if way not in row.saved:
        return NOTHING
    return f"{row.saved[way] / input_bytes(row.case):.2f}"


def input_bytes(case: Case) -> int:
    """Bytes of one input [T, h]."""
    return case.size[0] * case.size[1] * DTYPES[case.dtype].itemsize


def peaks(results: Results) -> Table:
    """Peak memory above the parameters of the stacks, in MB."""
    headers = ["peak, MB", "dtype", "T, h, f", *WAYS, "ours / best"]
    rows = []
    for name in BLOCKS:
        for dtype in DTYPES:
            found = [results.peak(name, dtype, BLOCK_SIZE, way) for way in WAYS]
            if any(value is not None for value in found):
                cells = [NOTHING if value is None else f"{value / 1e6:.0f}" for value in found]
                ratio = number(results.peak_to_best(name, dtype, BLOCK_SIZE, OURS))
                rows.append([name, dtype, ", ".join(map(str, BLOCK_SIZE)), *cells, ratio])
    return Table(headers, rows)


def to_eager(results: Results) -> Table:
    """Every case against eager alone: all that a run without torch.compile can say."""
    ways = (OURS, OURS_COMPILED)
    headers = ["case", *ways, "saved by ours"]
    rows = []
    for row in results.rows:
        cells = []
        for way in ways:
            found = [row.ratio(way, EAGER, name) for name in (FORWARD, TRAINING)]
            known = found[1] is not None
            cells.append(" / ".join(number(value) for value in found) if known else NOTHING)
        kept = row.saved.get(OURS)
        base = row.saved.get(EAGER)
        cells.append(f"{kept / base:.2f}" if kept is not None and base else NOTHING)
        rows.append([row.case.id, *cells])
    return Table(headers, rows)


def calls(results: Results, block: str) -> Table:
    """What call_cost.py measured for a block: microseconds a call, the ratio to eager, guards."""
    found = (results.calls or {}).get("blocks", {}).get(block, [])
    passes = [key for key in found[0] if key not in ("way", GUARDS, GUARDS_US)] if found else []
    # A run without torch.compile has none.
    more = [GUARDS] if any(GUARDS in row for row in found) else []
    rows = [
        [
            row["way"],
            *(f"{row[p]['us']:.1f} ({row[p]['ratio']:.2f}x)" for p in passes),
            *(_guards(row) for _ in more),
        ]
        for row in found
    ]
    return Table([block, *passes, *more], rows)


def _guards(row: dict[str, Any]) -> str:
    return f"{row[GUARDS]} ({row[GUARDS_US]:.1f})" if GUARDS in row else NOTHING


def rounded(found: float) -> str:
    """As a row with a limit shows it, and holds it against that."""
    if abs(found) >= 100:
        return f"{found:.0f}"
    return f"{found:.2f}" if abs(found) >= 0.1 else f"{found:.4f}"


def limited(results: Results, name: str) -> Table:
    """What a program of rows.py measured: ratios, bytes a token, each with its limit."""
    rows = []
    for row in results.limited.get(name, {}).get("rows", []):
        found = rounded(row["found"])
        verdict = "ok" if float(found) <= row["limit"] else "NO"
        times = f"{row['ours']} / {row['theirs']}"
        rows.append([row["what"], row["against"], f"{row['limit']:g}", f"{found} {verdict}", times])
    return Table(["what", "against", "at most", "found", "ours / theirs"], rows)


def cores() -> Table:
    """How many threads work on a loop, by the number of cores, from the library's own functions."""
    shapes = [(16, 768), (128, 768), (1024, 768), (8192, 4096)]
    headers = ["cores", *CORES]
    rows = []
    for count, width in shapes:
        loop = [_C.threads_of_loop(count * width, 1, 1, n) for n in CORES]
        rows.append([f"elements of {count} x {width}", *map(str, loop)])
        norm = [_C.threads_of_loop(count, width, 1, n) for n in CORES]
        rows.append([f"rows of {count} x {width}", *map(str, norm)])
        parts = _C.parts_of_sum(count, width)
        rows.append([f"sums over {count} rows of {width}", *(str(min(parts, n)) for n in CORES)])
    for groups in (8, 64):
        ways = [_C.groups_side_by_side(groups, 64 * groups, 1024 * 1024, n) for n in CORES]
        cells = (f"{n} groups" if side else "1 group" for n, side in zip(CORES, ways, strict=True))
        rows.append([f"{groups} experts at once, 64 rows x 1024 x 1024", *cells])
    return Table([str(header) for header in headers], rows)


def everything(results: Results) -> str:
    """All tables with something in them, for the terminal."""
    times = "ms, forward / forward+backward"
    parts = []
    if not any(COMPILED in row.saved for row in results.rows):
        parts.append(("against eager, forward / forward+backward", to_eager(results)))
    for allocator in ALLOCATORS:
        parts.append((f"ops, {allocator} allocator, {times}", ops(results, allocator)))
        parts.append((f"blocks, {allocator} allocator, {times}", blocks(results, allocator)))
    for what, names in (("ops", OPS), ("blocks", BLOCKS)):
        title = f"{what} at every size, forward+backward, default allocator"
        parts.append((title, sweep(results, names)))
    parts.append(("bytes kept for backward, blocks", memory(results)))
    parts.append(("bytes kept for backward, ops", saved_by_ops(results)))
    parts.append(("peak memory of a stack of 6 in training, above its parameters", peaks(results)))
    title = "layers of experts, forward+backward unless it says otherwise"
    parts.append((title, limited(results, "experts")))
    parts.append(("the head of a language model and its loss", limited(results, "head_loss")))
    parts.append(("bfloat16 on a processor with AVX2 alone", limited(results, "avx2")))
    parts.append(("a decoder layer in one plan, and in parts", limited(results, "layer")))
    parts.append(("tensors in 8 bits and fewer", limited(results, "quantized")))
    parts.append(("what happens once: the import, and a first call", limited(results, "startup")))
    parts.append(("more threads than cores", limited(results, "threads")))
    parts.append(("whole models, with tops.fuse", limited(results, "models")))
    if any(set(outcome.found.values()) != {None} for outcome in outcomes(results)):
        parts.append(("to reach", targets(results)))
    return "\n\n".join(f"== {title}\n{table.text()}" for title, table in parts if table.rows)
