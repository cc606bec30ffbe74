"""docs/adding-an-op.md, followed to the letter in a copy of the tree: two files and a row bring an
op that all generic tests accept, one file more its CUDA kernel, one file and a row a fused op; and
they go without a trace."""

from __future__ import annotations

import ast
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from cmake_build import tool  # noqa: E402

PAGE = (ROOT / "docs" / "adding-an-op.md").read_text(encoding="utf-8")

FUSION = """\
// forward:  Softcap ─► ConstantScale
#include <ATen/ops/tanh.h>

#include "op/op.h"

namespace transformer_ops::fused::softcap_scale {
namespace {

Tensor softcap_scale(const Tensor& input, double cap, double scale) {
  const Tensor x = to_accumulate(input);
  return (scale * cap * at::tanh(x / cap)).to(input.scalar_type());
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "softcap_scale",
             .pass = Pass::Forward,
             .benefit = 20,
             .pattern = {{"Softcap"}, {"ConstantScale"}}},
    .forward = {.schema = "softcap_scale(Tensor input, float cap, float scale) -> Tensor output",
                .bodies = {.decomposition = softcap_scale}},
});

}  // namespace
}  // namespace transformer_ops::fused::softcap_scale
"""
FUSION_ROW = """,
    Case(
        "softcap_scale",
        "forward",
        lambda: before(tops.Softcap(2.0), tops.ConstantScale(0.5)),
        (1, 2),
    ),
"""
# The tests that take whatever rows, declarations and modules there are.
GENERIC = ["test_ops", "test_modules", "test_typed_ops", "test_fusions", "test_compile"]
GENERIC += ["test_functorch", "test_cuda_build", "test_reference", "test_include_rules"]
GENERIC += ["test_import_rules", "test_export"]


def block(language: str, section: str) -> str:
    """The first piece of code in this language in a section of the page."""
    _, found, rest = PAGE.partition(f"\n## {section}")
    assert found
    return rest.partition(f"```{language}\n")[2].partition("```")[0]


def with_cuda_body(cpp: str) -> str:
    """The declaration with the lines that the section on kernels adds to it."""
    for place, text in (
        ('#include "op/op.h"\n', '#include "wrappers/cuda.h"\n'),
        ("[[maybe_unused]] const bool registered", block("cpp", "A CUDA kernel") + "\n"),
        (".decomposition = softcap}", ".cuda = softcap_cuda, "),
    ):
        assert cpp.count(place) == 1
        cpp = cpp.replace(place, text + place)
    return cpp


def lines_by_hand(cpp: str, python: str, row: str) -> int:
    """Without blank lines, comments, docstrings and braces alone."""
    code = [line.split("//")[0].strip() for line in cpp.splitlines()]
    strings = {
        line
        for node in ast.walk(ast.parse(python))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(python).readline)
    names = {token.start[0] for token in tokens if token.string.strip()} - strings
    rows = [line for line in row.splitlines() if line.strip()]
    return len([line for line in code if line.strip("{}")]) + len(names) + len(rows)


class Copy:
    """The tree, with a build of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in names.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def run(self, *command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "TRANSFORMER_OPS_CUDA": "OFF"}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        text = done.stdout[-6000:] + done.stderr[-3000:]
        assert done.returncode == 0, f"{' '.join(command)}\n{text}"
        return done.stdout

    def python(self, *arguments: str) -> str:
        return self.run(sys.executable, *arguments)

    def build(self, *targets: str) -> None:
        """Without optimization, which takes a third of the time."""
        cmake, folder = tool("cmake"), str(self.folder / "build" / "recipe")
        options = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0 -g0 -DNDEBUG"]
        options += [
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        options += ["-DTRANSFORMER_OPS_TESTS=ON", "-DTRANSFORMER_OPS_NATIVE=ON"]
        self.run(cmake, "-S", ".", "-B", folder, "-G", "Ninja", *options)
        self.run(cmake, "--build", folder, "--target", "extension", *targets)
        self.run(cmake, "--install", folder, "--prefix", str(self.folder))

    def test(self, *arguments: str) -> str:
        files = [f"tests/{name}.py" for name in GENERIC]
        return self.python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *arguments)

    def insert(self, name: str, before: str, text: str) -> None:
        """The text in front of the last place of `before` in a file."""
        path = self.folder / name
        head, found, tail = path.read_text(encoding="utf-8").rpartition(before)
        assert found
        path.write_text(head + text + found + tail, encoding="utf-8")


def passed(summary: str) -> int:
    return int(re.findall(r"(\d+) passed", summary)[-1])


# What does not depend on rows alone: lists, reference pages, include rules.
OTHERS = "softcap or Softcap or row or list or reference or include or import or declared"


@pytest.mark.slow
def test_two_files_and_a_row(tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    cpp, python, row = block("cpp", "1."), block("py", "2."), block("text", "3.")
    assert lines_by_hand(cpp, python, row) <= 30
    files = {
        "csrc/ops/softcap.cpp": with_cuda_body(cpp),
        "csrc/kernels/cuda/softcap.cu": block("cuda", "A CUDA kernel"),
        "transformer_ops/ops/softcap.py": python.replace("transformer_ops.op ", "..op "),
        "csrc/fusions/softcap_scale.cpp": FUSION,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    rows = {name: (tmp_path / name).read_text() for name in ("tests/op_cases.py",)}
    rows["tests/fusion_cases.py"] = (tmp_path / "tests/fusion_cases.py").read_text()
    copy.insert("tests/op_cases.py", "]\nNAMES = ", row)
    copy.insert("tests/fusion_cases.py", "]\n", FUSION_ROW)
    copy.build("transformer_ops_emulated")
    copy.python("tools/make_reference.py")
    # Values and gradients in four dtypes, gradcheck, opcheck, fullgraph, meta, torch.func, errors.
    assert passed(copy.test("-k", OTHERS)) > 60
    # The kernel, compiled for the CPU: where no file fills its slot, a call raises.
    library = "build/recipe/tests/cpp/emulated/libtransformer_ops_emulated.so"
    on_cuda = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--emulate-cuda", library)
    assert passed(copy.python(*on_cuda, "tests/packaging/test_cuda.py", "-k", "Softcap")) >= 4
    # The check has teeth: an op without a row is missed.
    (tmp_path / "tests/op_cases.py").write_text(rows["tests/op_cases.py"])
    with pytest.raises(AssertionError, match="test_every_op_has_a_row"):
        copy.python("-m", "pytest", "-q", "tests/ops/test_modules.py", "-k", "every_op_has_a_row")

    for name in files:
        (tmp_path / name).unlink()
    for name, text in rows.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    copy.build()
    copy.python("tools/make_reference.py")
    assert passed(copy.test("-k", OTHERS.replace("softcap or Softcap", "SiLU"))) > 60
    for name in ("docs/reference.md", "transformer_ops/ops/__init__.pyi"):
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
