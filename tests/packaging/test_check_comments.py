"""tools/check_comments.py finds comments and docstrings that begin without a subject."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_comments.py"


def check(path: Path, text: str) -> tuple[int, list[str]]:
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, str(TOOL), str(path)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.returncode, [line for line in done.stdout.splitlines() if str(path) in line]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.cpp", "int x;\n// Of both operands.\nint y;\n", "2: Of both operands."),
        ("a.h", "int x;  // Those of a\n        // row.\n", "1: Those of a row."),
        ("a.cu", "int a = 1'000;  /* Of all. */\n", "1: Of all."),
        ("a.py", "x = 1  # That of a row.\n", "1: That of a row."),
        ("a.py", 'def f():\n    """Of a tie,\n    the upper one."""\n', "2: Of a tie,"),
    ],
)
def test_a_comment_without_a_subject_fails(tmp_path: Path, name: str, text: str, line: str) -> None:
    path = tmp_path / name
    assert check(path, text) == (1, [f"{path}:{line}"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.cpp", "// The scales\n// Of both operands.\nint x;\n"),
        ("a.cpp", 'auto x = "// Of a string"; auto y = R"(\n// Of a raw string)";\n'),
        ("a.cpp", "auto x = '\"'; // Often\n"),
        ("a.py", 'x = "# Of a string"\ny = """Of a string."""\n'),
        ("a.py", '"""The number of rows in a block."""\n# Offsets follow.\n'),
    ],
)
def test_a_comment_with_a_subject_passes(tmp_path: Path, name: str, text: str) -> None:
    assert check(tmp_path / name, text) == (0, [])


def test_other_kinds_are_listed_but_do_not_fail(tmp_path: Path) -> None:
    status, lines = check(tmp_path / "a.py", "# In which x is 1.\n\n# As torch has it.\n")
    assert status == 0
    assert len(lines) == 2
