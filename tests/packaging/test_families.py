"""benchmarks/families.py on one family."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "families.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = run("--kind", "causal", "--only", "llama", "--out", str(out))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())
    assert (row["name"], row["failed"]) == ("llama", "")
    assert row["rules"]["layer"] and row["attention"]
    assert row["saved"] < 1 and row["error"] < 5e-5
    assert "1 of 1 have attention in a plan" in done.stdout


def test_the_record_is_of_all_families() -> None:
    done = run("--only", "llama", "--record")
    assert done.returncode == 1
    assert "--record must be of all causal families, got --only" in done.stderr


def test_a_family_that_is_not_there() -> None:
    done = run("--only", "llama,lama")
    assert done.returncode == 1
    assert "--only must name families of causal, got lama" in done.stderr
