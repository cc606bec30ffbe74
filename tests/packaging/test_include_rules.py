"""What a file of csrc/ may include: the row of its folder in FOLDERS."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import draw_layers

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"


class Folder(NamedTuple):
    """A folder of csrc/, or a file that lies in no folder."""

    name: str
    # Folders, and single files, from which it includes besides itself.
    includes: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()  # besides the standard library
    shares_headers: bool = True  # False: a header serves the .cpp file of its name alone


TORCH = ("torch",)

# From the bottom up: a row names only rows above it, so no circle of folders can arise.
FOLDERS = [
    # The slots and scalar formulas: all that the rest of the library sees of the kernels.
    Folder("kernels"),
    # Compiled for each instruction set: of an inline function from elsewhere, the linker might keep
    # the copy for AVX-512.
    Folder("kernels/cpu", ("kernels",)),
    Folder("kernels/cuda", ("kernels",), ("cuda",)),
    Folder("memory"),
    # Knows neither tensors nor Python.
    Folder("fuser", ("kernels/format.h",)),
    # The frame knows no kernel, so nothing above sees one by including it.
    Folder("op", ("fuser", "memory"), TORCH),
    Folder("wrappers", ("op", "fuser", "kernels"), TORCH),
    # How operands are rounded, and the scales of delayed scaling.
    Folder("quantization", ("wrappers", "op", "fuser", "kernels"), TORCH),
    # They register themselves: no row names them.
    Folder("ops", ("wrappers", "op", "fuser", "kernels"), TORCH, shares_headers=False),
    Folder("fusions", ("wrappers", "op", "fuser", "kernels"), TORCH, shares_headers=False),
    Folder("cuda", ("wrappers", "op", "kernels"), ("torch", "cuda")),
    # No particular op, no body, no kernel: rows of the registry.
    Folder("executor", ("op", "fuser"), TORCH),
    Folder("runtime", ("executor", "op", "fuser", "quantization/delayed_scales.h"), TORCH),
    Folder(
        "python",
        ("runtime", "executor", "op", "fuser", "quantization/delayed_scales.h"),
        ("torch", "python"),
    ),
    Folder("pch.h", ("op",), TORCH),
    # For libraries of others: nothing of ours includes it.
    Folder("extension.h", ("op", "fuser"), TORCH),
    Folder("library.cpp", ("runtime", "executor"), TORCH),
    Folder(
        "bindings.cpp",
        ("python", "runtime", "executor", "op", "fuser", "kernels/cpu.h", "kernels/format.h"),
        ("torch", "python"),
    ),
]
ROWS = {folder.name: folder for folder in FOLDERS}

# (file, header): why the rule does not hold there.
EXCEPTIONS = {
    ("kernels/cuda/device.h", "emulate.h"): "stands in for CUDA where tests compile for the CPU",
    ("op/library.h", "transformer_ops/version.h"): "written by the build, from pyproject.toml",
}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)
# A header belongs to each library whose pattern it matches.
LIBRARIES = {
    "torch": re.compile(r"(torch|ATen|c10)/"),
    "cuda": re.compile(r"(ATen/cuda/|c10/cuda/|cuda|cublas)"),
    # Only a few folders of torch/csrc/ do not need Python.
    "python": re.compile(
        r"Python\.h|pybind11/|torch/(extension|python)\.h|torch/csrc/(?!(api|autograd|jit)/)"
        r"|torch/csrc/.*(python|pybind)"
    ),
}
STANDARD = re.compile(
    r"\w+|math\.h|(dlfcn|pthread)\.h|(sys/(auxv|mman)|malloc)\.h|(arm_neon|cpuid|immintrin)\.h|sanitizer/asan_interface\.h"
)


def row_of(file: str) -> Folder | None:
    """The row of the innermost folder that has one."""
    parts = Path(file).parts
    names = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((ROWS[name] for name in names if name in ROWS), None)


def resolve(csrc: Path, file: str, header: str, quoted: bool) -> str | None:
    """The file of csrc/ that is meant, or None."""
    places = [(csrc / file).parent, csrc] if quoted else [csrc]
    for place in places:
        path = (place / header).resolve()
        if path.is_file() and path.is_relative_to(csrc):
            return path.relative_to(csrc).as_posix()
    return None


def why_not(folder: Folder, file: str, header: str, found: str | None) -> str | None:
    """What is wrong about an include of `header`, which is the file `found` of csrc/."""
    if found is None:
        used = [name for name, pattern in LIBRARIES.items() if pattern.match(header)]
        if not used and not STANDARD.fullmatch(header):
            return "no file of csrc/, and of no library that the test knows"
        return next((f"of {name}" for name in used if name not in folder.libraries), None)
    owner = row_of(found)
    if owner == folder:
        own = folder.shares_headers or Path(found).stem == Path(file).stem
        return None if own else "another's in the same folder"
    allowed = found in folder.includes or (owner is not None and owner.name in folder.includes)
    return None if allowed else f"of {owner.name if owner else 'no row'}"


def violations(csrc: Path) -> Iterator[tuple[str, str, str]]:
    """(file, header, what is wrong) for each include that the table forbids."""
    csrc = csrc.resolve()
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        file = path.relative_to(csrc).as_posix()
        folder = row_of(file)
        if folder is None:
            yield file, "", "its folder has no row"
            continue
        for quote, header in INCLUDE.findall(path.read_text(encoding="utf-8")):
            found = resolve(csrc, file, header, quoted=quote == '"')
            wrong = why_not(folder, file, header, found)
            if wrong is not None:
                yield file, header, wrong


def test_includes() -> None:
    found = {(file, header): wrong for file, header, wrong in violations(CSRC)}
    assert {key: wrong for key, wrong in found.items() if key not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() <= found.keys(), "an exception that nothing needs any more"


def test_a_row_names_only_rows_above_it() -> None:
    for i, folder in enumerate(FOLDERS):
        assert all(row_of(name) in FOLDERS[:i] for name in folder.includes), folder.name


def test_the_table_of_the_docs_names_every_folder() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `csrc/")]
    for path in CSRC.iterdir():
        if path.is_dir():
            assert any(f"`csrc/{path.name}/`" in row for row in rows), path.name
            # Two lines say what belongs there, and what does not.
            text = (path / "README.md").read_text(encoding="utf-8")
            assert len(text.splitlines()) == 2, path.name


def test_the_picture_of_the_layers_is_that_of_the_rules() -> None:
    assert draw_layers.draw() == draw_layers.TARGET.read_text(encoding="utf-8")


# ---- the check itself


def planted(csrc: Path, file: str, include: str) -> list[tuple[str, str, str]]:
    """The violations of a small csrc/ with one more include."""
    for header in (
        "kernels/math.h",
        "kernels/bias.h",
        "kernels/cpu/simd.h",
        "op/op.h",
        "wrappers/linear.h",
        "ops/linear.h",
        "fusions/glu.h",
        "executor/run.h",
    ):
        (csrc / header).parent.mkdir(parents=True, exist_ok=True)
        (csrc / header).write_text("#pragma once\n#include <vector>\n")
    (csrc / file).parent.mkdir(parents=True, exist_ok=True)
    (csrc / file).write_text(f"// First line.\n#include {include}\nint x;\n")
    return list(violations(csrc))


@pytest.mark.parametrize(
    ("file", "include", "wrong"),
    [
        ("executor/a.cpp", '"ops/linear.h"', "of ops"),
        ("executor/a.cpp", '"wrappers/linear.h"', "of wrappers"),
        ("executor/a.cpp", "<wrappers/linear.h>", "of wrappers"),
        ("executor/a.cpp", '"kernels/bias.h"', "of kernels"),
        ("op/a.cpp", '"executor/run.h"', "of executor"),
        ("op/a.cpp", '"../executor/run.h"', "of executor"),
        ("ops/a.cpp", '"ops/linear.h"', "another's in the same folder"),
        ("ops/a.cpp", '"linear.h"', "another's in the same folder"),
        ("fusions/a.cpp", '"ops/linear.h"', "of ops"),
        ("wrappers/a.cpp", '"kernels/cpu/simd.h"', "of kernels/cpu"),
        ("kernels/cuda/a.cu", '"kernels/cpu/simd.h"', "of kernels/cpu"),
        ("fuser/a.h", '"op/op.h"', "of op"),
        ("fuser/a.h", "<ATen/core/Tensor.h>", "of torch"),
        ("fuser/a.h", "<c10/util/SmallVector.h>", "of torch"),
        ("fuser/a.h", "<json/json.h>", "no file of csrc/, and of no library that the test knows"),
        ("memory/a.cpp", "<torch/library.h>", "of torch"),
        ("executor/a.cpp", "<pybind11/pybind11.h>", "of python"),
        ("executor/a.cpp", "<Python.h>", "of python"),
        ("runtime/a.cpp", "<torch/csrc/Exceptions.h>", "of python"),
        ("runtime/a.cpp", "<torch/csrc/autograd/python_variable.h>", "of python"),
        ("wrappers/a.cpp", "<c10/cuda/CUDAStream.h>", "of cuda"),
        (
            "wrappers/a.cpp",
            '"missing.h"',
            "no file of csrc/, and of no library that the test knows",
        ),
    ],
)
def test_a_bad_include_is_found(tmp_path: Path, file: str, include: str, wrong: str) -> None:
    assert planted(tmp_path, file, include) == [(file, include[1:-1], wrong)]


@pytest.mark.parametrize(
    ("file", "include"),
    [
        ("executor/a.cpp", '"op/op.h"'),
        ("executor/a.cpp", "<torch/csrc/autograd/custom_function.h>"),
        ("ops/linear.cpp", '"ops/linear.h"'),
        ("wrappers/a.cpp", '"kernels/bias.h"'),
        ("kernels/cpu/a.cpp", '"simd.h"'),
        ("kernels/cpu/a.cpp", '"../math.h"'),
        ("fuser/a.h", "<string_view>"),
        ("python/a.cpp", "<pybind11/pybind11.h>"),
    ],
)
def test_a_good_include_passes(tmp_path: Path, file: str, include: str) -> None:
    assert planted(tmp_path, file, include) == []


def test_a_folder_without_a_row_is_found(tmp_path: Path) -> None:
    assert planted(tmp_path, "new/a.cpp", "<vector>") == [
        ("new/a.cpp", "", "its folder has no row")
    ]
