"""Rows with a limit each, which programs beside bench.py measure: printed, checked and recorded."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import pages, plots
from .machine import describe
from .results import SECOND, Results
from .tables import rounded
from .timing import ratio

RECORDED = Path(__file__).parents[1] / "recorded.json"
# --check lets a ratio be so many times its limit: machines that others use are noisy, and other
# processors than the recorded one copy or compute faster.
SLACK, SLACK_ELSEWHERE = 1.5, 2.0
WORSE = "worse"  # what a program writes beside its results: a line for each that --check refuses


class Row(NamedTuple):
    """What is to be at most `limit`: a ratio, bytes, or a difference."""

    what: str
    against: str
    limit: float
    found: float
    ours: str
    theirs: str

    def text(self) -> str:
        """A line of a table."""
        found = rounded(self.found)
        verdict = "ok" if float(found) <= self.limit else "NO"
        return (
            f"{self.what:<72} {self.against:<11}{self.limit:>8g}{found:>8} {verdict}"
            f"  ({self.ours} against {self.theirs})"
        )


def timed(
    what: str, against: str, limit: float, times: dict[str, list[float]], way: str, other: str
) -> Row:
    """A row from the times of two ways, in milliseconds."""
    found = ratio(times[way], times[other])
    ours, theirs = (f"{statistics.median(times[name]):.2f} ms" for name in (way, other))
    return Row(what, against, limit, found, ours, theirs)


def run(name: str, doc: str, rows: Callable[[bool], Iterable[Row]]) -> int:
    """A program that measures `rows(quick)`, whose part of the record is `name`. Returns its exit
    status."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"fail beyond {SLACK} times a limit (on another processor: {SLACK_ELSEWHERE:g})",
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--record", action="store_true", help="write the rows into the checkout")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = describe(torch.device("cpu"), options.threads, dict(os.environ))
    results = Results.read(RECORDED)
    recorded = results.limited.get(name, {}).get("about", {})
    slack = SLACK if about["cpu"] == recorded.get("cpu") else SLACK_ELSEWHERE
    found = printed(rows(options.quick))
    if options.check and too_high(found, slack):
        # A neighbour on a shared machine spoils one measurement, hardly the same row twice.
        print(f"[{name}] measuring again", file=sys.stderr, flush=True)
        found = lower(found, printed(rows(options.quick)))
    worse = [f"[{name}] {row.text()}" for row in too_high(found, slack)] if options.check else []
    content: dict[str, Any] = {"about": about, "rows": [row._asdict() for row in found]}
    if options.out:
        options.out.write_text(json.dumps({**content, WORSE: worse}) + "\n", encoding="utf-8")
    if options.record:
        results.limited[name] = content
        RECORDED.write_text(results.text(), encoding="utf-8")
        pages.write(results)
        plots.draw_all(results, pages.PAGE.parent)
    for line in worse:
        print(line, file=sys.stderr)
    return 1 if worse else 0


def printed(rows: Iterable[Row]) -> list[Row]:
    """The rows, each printed as soon as it is measured."""
    found = []
    for row in rows:
        found.append(row)
        print(row.text(), flush=True)
    return found


def too_high(rows: list[Row], slack: float) -> list[Row]:
    """The rows beyond their limits: ratios by more than `slack`, bytes by anything."""
    ratios = [row for row in rows if row.against != SECOND]
    return [row for row in ratios if row.found > (slack if row.found < 100 else 1) * row.limit]


def lower(first: list[Row], second: list[Row]) -> list[Row]:
    """The lower one of the two measurements of each row."""
    again = {(row.what, row.against): row for row in second}
    return [
        min(row, again.get((row.what, row.against), row), key=attrgetter("found")) for row in first
    ]
