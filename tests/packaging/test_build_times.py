"""tools/build_times.py on the log of a build that never was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import build_times  # noqa: E402

SOURCES = {
    "CMakeFiles/a.dir/csrc/library.cpp.o": "csrc/library.cpp",
    "CMakeFiles/a.dir/csrc/kernels/cpu/glu.cpp.o": "csrc/kernels/cpu/glu.cpp",
    "never/compiled.cpp.o": "never/compiled.cpp",
}
# The first was compiled twice; one is of a file that is gone; the last is no compilation.
LOG = """\
# ninja log v7
0	900000	1	CMakeFiles/a.dir/csrc/library.cpp.o	1a
1000	101000	2	CMakeFiles/a.dir/csrc/kernels/cpu/glu.cpp.o	2b
301000	{end}	3	CMakeFiles/a.dir/csrc/library.cpp.o	1a
0	800000	1	CMakeFiles/a.dir/csrc/gone.cpp.o	3c
400000	990000	4	libtransformer_ops.so	4d
500	61000	5	CMakeFiles/a.dir/cmake_pch.hxx.gch	5e
"""


def build(folder: Path, *, seconds: float) -> Path:
    entries = [{"file": str(ROOT / file), "output": output} for output, file in SOURCES.items()]
    pch = "CMakeFiles/a.dir/cmake_pch.hxx"
    # Some versions of CMake write absolute paths.
    entries.append({"file": str(folder / f"{pch}.cxx"), "output": str(folder / f"{pch}.gch")})
    (folder / "compile_commands.json").write_text(json.dumps(entries))
    (folder / ".ninja_log").write_text(LOG.format(end=301000 + int(seconds * 1000)))
    return folder


def test_slowest_first(tmp_path, capsys):
    build_times.main(["--folder", str(build(tmp_path, seconds=59.5)), "--check"])
    assert capsys.readouterr().out.splitlines() == [
        "  100.0  csrc/kernels/cpu/glu.cpp",
        "   60.5  cmake_pch.hxx.cxx",
        "   59.5  csrc/library.cpp",
        "  220.0  in all, of 3 files; 2 took longer than 60 s",
    ]


def test_a_file_over_its_budget(tmp_path):
    folder = str(build(tmp_path, seconds=120.5))
    with pytest.raises(SystemExit) as error:
        build_times.main(["--folder", folder, "--check"])
    assert error.value.code == "[build_times] csrc/library.cpp must compile in 120 s, got 120.5"
    build_times.main(["--folder", folder])


def test_without_a_build(tmp_path):
    with pytest.raises(SystemExit, match=r"\[build_times\] folder must hold a build, got "):
        build_times.main(["--folder", str(tmp_path)])
