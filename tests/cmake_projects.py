"""Separate projects that tests build against an installed copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from cmake_build import build_folder, tool  # noqa: E402


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def configure(
    source: Path, folder: Path, *prefixes: str | Path
) -> subprocess.CompletedProcess[str]:
    prefix = ";".join(map(str, prefixes))
    make = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    command = (tool("cmake"), "-S", source, "-B", folder, "-G", "Ninja", make)
    return run(*command, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release")


def build(folder: Path, target: str) -> None:
    """Builds a configured project, and checks that it used no file of the source tree."""
    done = run(tool("cmake"), "--build", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    check_commands(folder, target)


def check_commands(folder: Path, target: str) -> None:
    commands = run(tool("ninja"), "-C", folder, "-t", "commands", target).stdout
    assert commands
    assert not any(f"{ROOT / name}/" in commands for name in ("csrc", "transformer_ops"))


def install_copy(prefix: Path) -> Path:
    """A copy outside of the source tree, as a wheel lays it out."""
    done = run(tool("cmake"), "--install", build_folder(), "--prefix", prefix)
    assert done.returncode == 0, done.stdout + done.stderr
    for source in (ROOT / "transformer_ops").rglob("*.py"):
        copy = prefix / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    return prefix / "transformer_ops"
