"""examples/cpp/: a C++ program against an installed copy, its headers and its CMake package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cmake_projects import ROOT, build, configure, install_copy, run, tool

import transformer_ops

pytestmark = pytest.mark.takes(seconds=25)

INCLUDE = "include/transformer_ops/runtime/pipeline.h"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_copy(tmp_path_factory.mktemp("installed"))


def test_the_example_trains_and_prints_its_plan(installed: Path, tmp_path: Path) -> None:
    prefixes = (installed / "share" / "cmake", torch.utils.cmake_prefix_path)
    done = configure(ROOT / "examples" / "cpp", tmp_path, *prefixes)
    assert done.returncode == 0, done.stdout + done.stderr
    build(tmp_path, "train")
    commands = run(tool("ninja"), "-C", tmp_path, "-t", "commands", "train").stdout
    assert str(installed / "include") in commands

    done = run(tmp_path / "train")
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 10
    assert "forward linear_bias_activation ops=[1, 2, 3]" in done.stdout
    assert "libpython" not in run("ldd", tmp_path / "train").stdout
    # The plan is a text that Python reads too.
    text = done.stdout[done.stdout.index("plan 5") : done.stdout.index("\nevaluated")]
    assert str(transformer_ops.Plan.parse(text)) == text


def test_installed_headers_include_installed_headers_only(installed: Path) -> None:
    headers = sorted((installed / "include").rglob("*.h"))
    assert installed / INCLUDE in headers
    for header in headers:
        for line in header.read_text().splitlines():
            if line.startswith('#include "'):
                named = installed / "include" / line.split('"')[1]
                assert named in headers, f"{header.name}: {line}"


def test_another_torch_is_refused(installed: Path, tmp_path: Path) -> None:
    fake = tmp_path / "torch"
    version = fake / "include" / "torch" / "headeronly" / "version.h"
    version.parent.mkdir(parents=True)
    version.write_text("#define TORCH_VERSION_MAJOR 1\n#define TORCH_VERSION_MINOR 13\n")
    (fake / "lib").symlink_to(Path(torch.__file__).parent / "lib")
    (fake / "share" / "cmake").mkdir(parents=True)
    source = ROOT / "examples" / "cpp"
    prefixes = (installed / "share" / "cmake", fake / "share" / "cmake")
    done = configure(source, tmp_path / "build", *prefixes)
    assert done.returncode != 0
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"has a library for ({minor}), got 1.13 in" in " ".join(done.stderr.split())

    done = configure(source, tmp_path / "without", installed / "share" / "cmake")
    assert done.returncode != 0
    assert "torch must be found by find_package(Torch)" in " ".join(done.stderr.split())


def test_the_package_names_its_cmake_folder() -> None:
    found = Path(transformer_ops.cmake_prefix_path)
    assert (found / "transformer_ops" / "transformer_opsConfig.cmake").is_file()
