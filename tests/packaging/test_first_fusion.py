"""The C++ half of docs/first-fusion.md: its files build with its commands, and its check passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cmake_projects import ROOT, check_commands, install_copy, tool

pytestmark = pytest.mark.takes(seconds=80)

PAGE = (ROOT / "docs" / "first-fusion.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def run(command: list[str], folder: Path, installed: Path) -> str:
    programs = [str(Path(path).parent) for path in (sys.executable, tool("cmake"), tool("ninja"))]
    environment = os.environ | {
        "PATH": os.pathsep.join([*programs, os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": str(installed.parent),
        "CMAKE_GENERATOR": "Ninja",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_slots_of_a_joint_rule(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cpp-extension.md").read_text(encoding="utf-8")
    (source,) = re.findall(
        r"^```cpp\n(// x [^\n]*slope.*?)^```$", page.partition("## Slots")[2], re.DOTALL | re.M
    )
    installed, folder = install_copy(tmp_path / "installed"), tmp_path / "my_slopes"
    folder.mkdir()
    (project,), (commands,) = map(blocks, ("cmake", "bash"))
    (folder / "linear_silu.cpp").write_text(source)
    (folder / "CMakeLists.txt").write_text(project.replace("my_fusions", "my_slopes"))
    run(["bash", "-ec", commands], folder, installed)
    script = "\n".join([blocks("python")[0], blocks("py")[-1], "print(block.explain())"])
    script = script.replace("my_fusions", "my_slopes")
    script = script.replace("print(block.explain())", "block(x)\nprint(block.explain())")
    printed = run([sys.executable, "-c", script], folder, installed)
    assert "my_slopes::linear_silu: " in printed and "ways equal the unfused ops" in printed
    assert re.search(r"my_slopes::linear_silu +.*slope 1,024", printed)


def test_the_fusion_in_cpp(tmp_path: Path) -> None:
    installed = install_copy(tmp_path / "installed")
    folder = tmp_path / "my_fusions"
    folder.mkdir()
    (source,), (project,), (commands,) = map(blocks, ("cpp", "cmake", "bash"))
    (folder / "linear_silu.cpp").write_text(source)
    (folder / "CMakeLists.txt").write_text(project)
    run(["bash", "-ec", commands], folder, installed)
    check_commands(folder / "build", "my_fusions")
    call = "block(x)\nprint(block.explain())"
    script = "\n".join([blocks("python")[0], blocks("py")[-1], call])
    printed = run([sys.executable, "-c", script], folder, installed)
    assert "my_fusions::linear_silu: " in printed and "ways equal the unfused ops" in printed
    assert re.search(r"1-2 .*my_fusions::linear_silu", printed)
    assert "264 bytes a row saved for backward" in printed
