"""Where one of two processes does something else, the other one ends with an error, in time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import failure_worker
from process_groups import OLD_GROUPS
from ranks import spawn


def test_ranks_that_go_different_ways(tmp_path: Path) -> None:
    spawn(failure_worker.work, str(tmp_path), ranks=2, limit=200)
    files = [tmp_path / f"told{rank}" for rank in range(2)]
    first, second = (json.loads(file.read_text()) if file.exists() else {} for file in files)
    want = r"\[\w+\] process group '\w+' must have all its ranks, got: .*[Cc]onnection"
    assert re.search(want, first["death"]), first["death"]
    if OLD_GROUPS:  # which do not compare what the ranks call
        return
    # Both are told what each of them called, by which op.
    assert set(first) == {"other_plan", "other_rows", "death"}
    assert set(second) == {"other_plan", "other_rows"}
    for told in (first, second):
        assert "Detected mismatch between collectives on ranks" in told["other_plan"]
        assert re.search(r"\[all_gather\] over process group '\w+'", told["other_rows"])
        assert "Tensor shapes" in told["other_rows"]
    assert "[gather_linear_backward] over process group" in first["other_plan"]
    assert "[linear_scatter] over process group" in second["other_plan"]
