"""Measures a list of cases in one process: `python -m suite.worker JOB.json`.

The job names the file that takes a line of JSON for each case, as soon as it is measured. Without
one, the cases are only compiled, into the cache that all processes share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Compiling for CPU, torch would say that it sees no GPU.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

import torch  # noqa: E402

from .cases import EAGER, OURS, TRAINING, WARM, Case  # noqa: E402
from .measure import compile_only, measure  # noqa: E402
from .timing import ratio  # noqa: E402

DIGITS = 4
WARM_BYTES = 1 << 30


def main(job: dict[str, Any]) -> None:
    """Measure, or only compile, the cases of a job."""
    # Inductor's code depends on it, so for compiling too.
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    cases = [Case.parse(row) for row in job["cases"]]
    if job["out"] is None:
        for case in cases:
            # An error will be reported where the case is measured.
            with contextlib.suppress(Exception):
                compile_only(case, device)
    else:
        measure_all(cases, device, job["out"])


def measure_all(cases: list[Case], device: torch.device, path: str) -> None:
    """Write a row for each case. One that fails is a row with the error; the rest go on."""
    if any(case.allocator == WARM for case in cases):
        # Else the first cases pay for pages that the later ones find.
        torch.ones(WARM_BYTES, dtype=torch.uint8)
    with open(path, "w", encoding="utf-8") as out:
        for number, case in enumerate(cases, 1):
            start = time.perf_counter()
            try:
                row = rounded(measure(case, device))
                said = summary(row)
            except Exception as error:
                traceback.print_exc()
                row = {"case": case.as_json(), "error": f"{type(error).__name__}: {error}"}
                said = "failed"
            print(json.dumps(row), file=out, flush=True)
            spent = time.perf_counter() - start
            print(
                f"[{number:3d}/{len(cases)}] {case.id:<44} {said:<30} {spent:5.1f} s",
                file=sys.stderr,
                flush=True,
            )


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the digits of its times that mean something."""
    for ways in row["ms"].values():
        for way, times in ways.items():
            ways[way] = [float(f"{t:.{DIGITS}g}") for t in times]
    return row


def summary(row: dict[str, Any]) -> str:
    """A glance at a row while the rest is measured."""
    times = row["ms"][TRAINING]
    if OURS not in times or EAGER not in times:
        return ""
    rounds = len(times[OURS])
    return f"ours {ratio(times[OURS], times[EAGER]):.2f} of eager, {rounds} rounds"


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
