"""tools/build_wheel.py: versions, and how wheels of several torches become one."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import os
import platform
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cmake_projects import ROOT
from packaging.specifiers import SpecifierSet

tool = importlib.import_module("build_wheel")  # tools/ is on the path since cmake_projects

SUFFIX = ".cpython-311-x86_64-linux-gnu.so"
METADATA = "Metadata-Version: 2.4\nName: transformer-ops\nVersion: 0.1.0\nRequires-Dist: torch=="


@pytest.mark.parametrize(
    ("minors", "asks", "inside", "outside"),
    [
        ([(2, 15)], ">=2.15,<2.16", ["2.15.0", "2.15.1"], ["2.14.1", "2.16.0"]),
        ([(2, 11), (2, 12)], ">=2.11,<2.13", ["2.11.0", "2.12.1"], ["2.10.0", "2.13.0"]),
        (
            [(2, 15), (2, 11), (2, 13)],
            ">=2.11,<2.16,!=2.12.*,!=2.14.*",
            ["2.11.0", "2.13.0", "2.15.0"],
            ["2.12.1", "2.14.0", "2.9.0"],
        ),
    ],
)
def test_what_the_wheel_asks_of_torch(
    minors: list[tuple[int, int]], asks: str, inside: list[str], outside: list[str]
) -> None:
    assert tool.requirement(minors) == f"torch{asks}"
    allowed = SpecifierSet(asks)
    assert [version for version in inside + outside if version in allowed] == inside


def test_the_torches_of_a_release_are_minors_in_order() -> None:
    minors = [tool.minor(version) for version in tool.TORCH]
    assert minors == sorted(set(minors))
    from cmake_build import OLDEST_TORCH

    assert minors[0] == tool.minor(OLDEST_TORCH)
    assert f"torch=={list(tool.TORCH)[-1]}" in (ROOT / "constraints.txt").read_text(
        encoding="utf-8"
    )


# ---- versions


def git(folder: Path, *words: str) -> str:
    identity = {
        f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", *words],
        cwd=folder,
        env=os.environ | identity,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("tag", "changed", "version"),
    [
        ("v0.1.0", False, "0.1.0"),
        ("v0.1.0", True, "0.1.0.dev0+gCOMMIT.changed"),
        ("", False, "0.1.0.dev0+gCOMMIT"),
        ("", True, "0.1.0.dev0+gCOMMIT.changed"),
        ("a-tag-of-another-kind", False, "0.1.0.dev0+gCOMMIT"),
        ("v0.2.0", False, None),
    ],
)
def test_a_tag_makes_a_release(
    tmp_path: Path, tag: str, changed: bool, version: str | None
) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    if tag:
        git(tmp_path, "tag", tag)
    if changed:
        (tmp_path / "file").write_text("two")
    if version is None:
        with pytest.raises(SystemExit, match=r"the tag must be v0\.1\.0, .* got v0\.2\.0"):
            tool.version_of(tmp_path, "0.1.0")
        return
    commit = git(tmp_path, "rev-parse", "--short=9", "HEAD")
    assert tool.version_of(tmp_path, "0.1.0") == version.replace("COMMIT", commit)


def test_a_folder_without_git_has_no_version(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="must be a git clone"):
        tool.version_of(tmp_path, "0.1.0")


# ---- wheels


def part(folder: Path, minor: str, **more: bytes) -> Path:
    """A wheel for one torch, with `more` files in the package."""
    path = folder / f"part-{minor}.whl"
    files = {
        "transformer_ops/__init__.py": b"",
        "transformer_ops/lib/libtransformer_ops_kernels.so": b"kernels",
        f"transformer_ops/lib/torch{minor}/libtransformer_ops.so": minor.encode(),
        f"transformer_ops/lib/torch{minor}/_C{SUFFIX}": minor.encode(),
        "transformer_ops-0.1.0.dist-info/METADATA": f"{METADATA}{minor}.*\n".encode(),
        "transformer_ops-0.1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\n",
    }
    files |= {f"transformer_ops/{name}": content for name, content in more.items()}
    tool.write_wheel(path, files, 1_700_000_000)
    return path


MINORS = [(2, 11), (2, 15)]


def test_two_wheels_become_one(tmp_path: Path) -> None:
    files = tool.merge([part(tmp_path, "2.15"), part(tmp_path, "2.11")], MINORS, "0.1.0.dev0+g1")
    assert sorted(name for name in files if name.endswith(".so")) == [
        "transformer_ops/lib/libtransformer_ops_kernels.so",
        *(
            f"transformer_ops/lib/torch{minor}/{name}"
            for minor in ("2.11", "2.15")
            for name in (f"_C{SUFFIX}", "libtransformer_ops.so")
        ),
    ]
    text = files["transformer_ops-0.1.0.dev0+g1.dist-info/METADATA"].decode()
    assert "\nVersion: 0.1.0.dev0+g1\nRequires-Dist: torch>=2.11,<2.16,!=2.12" in text
    assert text.count("Requires-Dist") == 1


def cuda_part(folder: Path, minor: str, toolkit: str = "13.0") -> Path:
    """A wheel for one torch with the CUDA backend."""
    info = f'VERSION = "0.1.0"\nCUDA = {{"toolkit": "{toolkit}", "architectures": "9.0a"}}\n'
    library = f"lib/torch{minor}/libtransformer_ops_cuda.so"
    more = {library: f"cuda {minor}".encode(), f"lib/torch{minor}/_build_info.py": info.encode()}
    return part(folder, minor, **more)


def test_the_wheel_of_the_cuda_backend(tmp_path: Path) -> None:
    parts = [cuda_part(tmp_path, "2.11"), cuda_part(tmp_path, "2.15")]
    files = tool.cuda_files(parts, MINORS, "0.1.0.dev0+g1")
    package, about = "transformer_ops_cuda13", "transformer_ops_cuda13-0.1.0.dev0+g1.dist-info"
    assert {name: content for name, content in files.items() if name.endswith(".so")} == {
        f"{package}/lib/torch{minor}/libtransformer_ops_cuda.so": f"cuda {minor}".encode()
        for minor in ("2.11", "2.15")
    }
    assert set(files) - {name for name in files if name.endswith(".so")} == {
        f"{package}/__init__.py",
        f"{about}/METADATA",
        f"{about}/WHEEL",
    }
    module: dict[str, Any] = {}
    exec(files[f"{package}/__init__.py"].decode(), module)
    assert module["VERSION"] == "0.1.0" and module["CUDA"]["toolkit"] == "13.0"
    text = files[f"{about}/METADATA"].decode()
    assert "\nName: transformer-ops-cuda13\nVersion: 0.1.0.dev0+g1\n" in text
    assert "\nRequires-Dist: transformer-ops==0.1.0.dev0+g1\n" in text
    assert f"\nTag: py3-none-linux_{platform.machine()}\n" in files[f"{about}/WHEEL"].decode()


def test_parts_for_several_versions_of_cuda_are_refused(tmp_path: Path) -> None:
    parts = [cuda_part(tmp_path, "2.11", "12.9"), cuda_part(tmp_path, "2.15")]
    with pytest.raises(SystemExit, match="each part must be for the same CUDA, got"):
        tool.cuda_files(parts, MINORS, "0.1.0")


@pytest.mark.parametrize(
    ("more", "minors", "message"),
    [
        ({"a.py": b"two"}, MINORS, "transformer_ops/a.py must be the same for each torch"),
        ({"b.so": b""}, MINORS, "libraries must be"),
        ({}, [*MINORS, (2, 16)], "libraries must be"),
        (
            {"__init__.py": str(ROOT).encode()},
            MINORS,
            "transformer_ops/__init__.py must be the same",
        ),
    ],
)
def test_what_does_not_belong_together(
    tmp_path: Path, more: dict[str, bytes], minors: list[tuple[int, int]], message: str
) -> None:
    parts = [part(tmp_path, "2.15", **{"a.py": b"one"}), part(tmp_path, "2.11", **more)]
    with pytest.raises(SystemExit, match=message):
        tool.merge(parts, minors, "0.1.0")


def test_a_library_that_names_the_build_folder_is_refused() -> None:
    folder = "transformer_ops/lib"
    files = {
        f"{folder}/torch2.15/_C{SUFFIX}": b"",
        f"{folder}/torch2.15/libtransformer_ops.so": b"",
    }
    files[f"{folder}/libtransformer_ops_kernels.so"] = f"at {ROOT}/csrc/x.cpp".encode()
    with pytest.raises(SystemExit, match=r"kernels\.so must not name .*, where it was built"):
        tool.check_contents(files, [(2, 15)])


def test_the_bytes_follow_from_the_files(tmp_path: Path) -> None:
    files = tool.read_wheel(part(tmp_path, "2.15"))
    again = dict(reversed(list(files.items())))
    for name, content, epoch in (("a", files, 10**9), ("b", again, 10**9), ("c", files, 2 * 10**9)):
        tool.write_wheel(tmp_path / name, content, epoch)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c
    with zipfile.ZipFile(tmp_path / "a") as wheel:
        assert {entry.date_time for entry in wheel.infolist()} == {(2001, 9, 9, 1, 46, 40)}
        assert wheel.namelist()[-1] == "transformer_ops-0.1.0.dist-info/WHEEL"
        rows = list(
            csv.reader(wheel.read("transformer_ops-0.1.0.dist-info/RECORD").decode().splitlines())
        )
    assert {row[0] for row in rows} == set(wheel.namelist())
    for name, digest, size in rows[:-1]:
        wanted = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={wanted}", str(len(files[name])))


def test_one_torch_of_each_minor() -> None:
    with pytest.raises(SystemExit, match="--torch must have one of each minor"):
        tool.main(["--torch", "2.15.0", "2.15.1"])


# ---- the libraries that are built here


def test_the_kernels_know_nothing_of_torch() -> None:
    """A wheel holds them once. They export their lookup alone: the rest may be for AVX-512."""
    import transformer_ops as tops

    kernels = Path(tops.__file__).parent / "lib" / "libtransformer_ops_kernels.so"
    content = kernels.read_bytes()
    assert b"libtorch" not in content and b"libc10" not in content
    command = ["nm", "--dynamic", "--demangle", "--defined-only", str(kernels)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {
        line.split(maxsplit=2)[2].split("(")[0].split("[")[0] for line in done.stdout.splitlines()
    }
    cpu = {"find", "find_for", "has_isa", "processor", "processor_levels"}
    assert names == {f"transformer_ops::cpu::{name}" for name in cpu}
