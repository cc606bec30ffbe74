"""The version stands in pyproject.toml; CMake reads it there, and the package what CMake wrote."""

from __future__ import annotations

import re
from pathlib import Path

import transformer_ops as tops
from transformer_ops._loader import build_info

ROOT = Path(__file__).parents[2]
VERSION = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


def test_the_package_and_the_build_have_the_version_of_pyproject():
    assert [tops.__version__] == [build_info().VERSION] == VERSION
    (config,) = Path(tops.cmake_prefix_path).rglob("transformer_opsConfigVersion.cmake")
    assert f'set(PACKAGE_VERSION "{VERSION[0]}")' in config.read_text()
    header = Path(tops.__file__).parent / "include" / "transformer_ops" / "version.h"
    assert f'#define TRANSFORMER_OPS_VERSION "{VERSION[0]}"' in header.read_text()


def test_no_other_file_states_it():
    folders = ["transformer_ops", "csrc", "cmake", "tools"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    files += [ROOT / "CMakeLists.txt", ROOT / "setup.py"]
    written = [ROOT / "transformer_ops" / name for name in ("lib", "include", "share")]
    texts = (".py", ".pyi", ".cpp", ".h", ".cu", ".cmake", ".in", ".txt")
    found = [
        str(path.relative_to(ROOT))
        for path in files
        if path.suffix in texts
        and not any(path.is_relative_to(place) for place in written)
        and re.search(rf"\b{re.escape(VERSION[0])}\b", path.read_text(encoding="utf-8"))
    ]
    assert found == []
