"""tools/run_parts.py: every part runs, and the last lines list what failed in all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "run_parts.py"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]


def run_parts(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_later_parts_run_and_all_failures_are_listed(tmp_path: Path) -> None:
    first, last = tmp_path / "test_first.py", tmp_path / "test_last.py"
    first.write_text("def test_a():\n    assert 1 == 2\ndef test_b(nothing):\n    pass\n")
    last.write_text("import pytest\n@pytest.mark.parametrize('x', ['a-b'])\n"
                    "def test_c(x):\n    assert 0, x\n")  # fmt: skip
    # GoogleTest names a test where it fails, with its time, and again at its end.
    at_the_end = [
        "[  FAILED  ] 2 tests, listed below:",
        "[  FAILED  ] Plan.Parses",
        "[  FAILED  ] Norms/1.Rounds, where TypeParam = float",
    ]
    ctest = [
        *(f"{line} (3 ms)" for line in at_the_end[1:]),
        *at_the_end,
        "The following tests FAILED:",
        "\t  7 - fuser.0 (Failed)",
    ]
    status, output = run_parts(
        *("--part", "C++ tests", sys.executable, "-c", f"print({chr(10).join(ctest)!r}); exit(8)"),
        *("--part", "Python tests", *PYTEST, first),
        *("--part", "format", sys.executable, "-c", "print('1 - all (well)')"),
        *("--part", "emulated CUDA", *PYTEST, last),
    )
    assert status == 1
    lines = output.splitlines()
    names = [*(re.sub(r" \S*(test_\w+\.py\S*).*", r" \1", line) for line in lines[-10:])]
    assert names == [
        "C++ tests: failed (exit status 8)",
        "  [  FAILED  ] Plan.Parses",
        "  [  FAILED  ] Norms/1.Rounds, where TypeParam = float",
        "  7 - fuser.0 (Failed)",
        "Python tests: failed (exit status 1)",
        "  FAILED test_first.py::test_a",
        "  ERROR test_first.py::test_b",
        "format: passed",
        "emulated CUDA: failed (exit status 1)",
        "  FAILED test_last.py::test_c[a-b]",
    ]
    # What pytest says itself is there, too.
    assert "1 failed, 1 error in" in output and "\n1 failed in" in output


def test_all_parts_pass() -> None:
    status, output = run_parts("--part", "a", "true", "--part", "b c", "echo", "--part=", "x")
    assert status == 0
    assert output == "== a\n== b c\n--part= x\n\na: passed\nb c: passed\n"


def test_a_pattern_finds_what_an_earlier_part_made(tmp_path: Path) -> None:
    made = tmp_path / "made-by-a"
    status, output = run_parts("--part", "a", "touch", made, "--part", "b", "ls", tmp_path / "ma*")
    assert status == 0 and f"== b\n{made}\n" in output


def test_a_part_that_cannot_start_fails() -> None:
    status, output = run_parts("--part", "a", "/no/such/program", "--part", "b", "true")
    assert status == 1
    assert output.endswith("\na: failed (exit status 127)\nb: passed\n")


def test_bad_arguments_are_refused() -> None:
    for arguments in ([], ["--part", "a"], ["echo", "--part", "a", "true"]):
        status, output = run_parts(*arguments)
        assert status == 1 and "--part NAME COMMAND..." in output


def test_parts_side_by_side_are_shown_in_order(tmp_path: Path) -> None:
    made = tmp_path / "made-by-b"
    # The first part ends only once the second one runs.
    wait = f"import os, time\nwhile not os.path.exists({str(made)!r}): time.sleep(0.01)\nprint('a')"
    fail = f"open({str(made)!r}, 'w').close(); raise SystemExit('b')"
    status, output = run_parts(
        "--together",
        *("--part", "waits", sys.executable, "-c", wait),
        *("--part", "fails", sys.executable, "-c", fail),
    )
    assert status == 1
    assert output == "== waits\na\n== fails\nb\n\nwaits: passed\nfails: failed (exit status 1)\n"
