"""Codes depend on two roundings: no compiler may fuse a product with the sum that rounds it again.

x86 has such instructions only if they are asked for; elsewhere g++ fuses unless it is told not to.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from cmake_build import build_folder  # noqa: E402

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
FORMULAS = ROOT / "csrc/kernels/encoding.h"


def included(file: Path, folders: list[Path], seen: set[Path]) -> set[Path]:
    """The file and all of this tree that it includes, whatever conditions say."""
    if file not in seen:
        seen.add(file)
        for header in INCLUDE.findall(file.read_text(encoding="utf-8")):
            for folder in [file.parent, *folders]:
                path = (folder / header).resolve()
                if path.is_file() and path.is_relative_to(ROOT):
                    included(path, folders, seen)
                    break
    return seen


def uses_of_the_formulas() -> Iterator[tuple[str, str | None]]:
    """The output of each command of g++ or clang that compiles them, and what contraction is
    in it."""
    commands = json.loads((build_folder() / "compile_commands.json").read_text(encoding="utf-8"))
    for entry in commands:
        folders = [Path(folder) for folder in re.findall(r"-I(\S+)", entry["command"])]
        is_nvcc = "nvcc" in Path(entry["command"].split()[0]).name
        if not is_nvcc and FORMULAS in included(Path(entry["file"]), folders, set()):
            asked = re.findall(r"-ffp-contract=(\w+)", entry["command"])
            yield entry["output"], asked[-1] if asked else None


def test_codes_are_compiled_without_contraction() -> None:
    """The last option counts; each file of kernels is compiled for several instruction sets."""
    uses = dict(uses_of_the_formulas())
    assert any(output.endswith("kernels/cpu/quantize.cpp.o") for output in uses)
    assert {output: asked for output, asked in uses.items() if asked != "off"} == {}
