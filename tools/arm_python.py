"""Builds the extension for aarch64 and runs its tests under qemu, on Debian.

python tools/arm_python.py    the executor's C++ tests, and some of Python's
python tools/arm_python.py tests/ops/test_dropout.py -k float32    arguments are for pytest

Python comes from Debian's packages, torch from the index of pip: a CPU build saves gigabytes.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from build_wheel import Build, pinned
from cmake_build import (
    ARM_FOLDER,
    ARM_WITHOUT_TORCH,
    ROOT,
    build_and_run,
    cmake_build,
    install_arm_tools,
    run,
    tool,
    torch_version,
)

FOLDER = ROOT / "build/aarch64-python"
SYSTEM, TREE = FOLDER / "system", FOLDER / "tree"
PYTHON = FOLDER / "python"
TOOLCHAIN = FOLDER / "toolchain.cmake"
# Inductor would call this machine's compiler, and an emulator traces for minutes.
LEFT_OUT = "not inductor and not compile and not graph"
EMULATOR = ("qemu-aarch64-static", "-cpu", "neoverse-n1", "-L", SYSTEM)

# What torch asks about the processor, as on a Neoverse N1.
CPUINFO = """processor\t: 0
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def install_system() -> None:
    """Unpacks Debian's Python for arm64, and all that it needs, beside this system."""
    install_arm_tools()
    if not PYTHON.exists():
        unpack_system()
    emulator = ";".join(map(str, EMULATOR))
    lines = (
        f'include("{ROOT}/cmake/aarch64.cmake")',
        f'set(CMAKE_CROSSCOMPILING_EMULATOR "{emulator}")',
        f'set(Python_INCLUDE_DIR "{include_folder()}")',
        f"set(CMAKE_CXX_FLAGS_INIT -idirafter{SYSTEM}/usr/include)  # Debian's pyconfig.h",
        "set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)  # torch is beside the system",
    )
    TOOLCHAIN.write_text("\n".join(lines), encoding="utf-8")


def unpack_system() -> None:
    apt = FOLDER / "apt"
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in settings.items())]
    run([*command, "update"])
    packages = ["python3-dev", "libstdc++6"]
    run([*command, "install", "-y", "--download-only", "--no-install-recommends", *packages])
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        run(["dpkg", "-x", str(package), str(SYSTEM)])
    (SYSTEM / "proc").mkdir(exist_ok=True)
    (SYSTEM / "proc/cpuinfo").write_text(CPUINFO, encoding="utf-8")
    make_interpreter(PYTHON)


def make_interpreter(path: Path, *finds: Path) -> Path:
    """An interpreter that imports from these folders. It is sys.executable itself, so Python can
    start Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    words = " ".join(f'"{word}"' for word in (*EMULATOR, "-0", "$0", SYSTEM / "usr/bin/python3"))
    folders = ":".join(map(str, finds))
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{folders}" exec {words} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def include_folder() -> Path:
    """The folder of Python.h, whose name has the version."""
    (found,) = SYSTEM.glob("usr/include/python3.*")
    return found


def install_packages(folder: Path, *packages: str | Path) -> Path:
    """Has this machine's pip install packages for aarch64: an emulated one takes minutes for it."""
    installed, text = folder / "installed.txt", "\n".join(map(str, packages))
    if not installed.exists() or installed.read_text() != text:
        shutil.rmtree(folder, ignore_errors=True)
        version = include_folder().name.removeprefix("python")
        options = [f"--target={folder}", "--only-binary=:all:", f"--python-version={version}"]
        tags = ("2014", *(f"_2_{minor}" for minor in range(17, 36)))
        options += [f"--platform=manylinux{tag}_aarch64" for tag in tags]
        run([sys.executable, "-m", "pip", "install", "-q", *options, *map(str, packages)])
        installed.write_text(text)
    return folder


def install_torch(version: str) -> Path:
    """A folder of this torch, and of what builds and tests need beside it."""
    packages = (*pinned("setuptools", "transformers"), "numpy", "pytest", "expecttest", "pip")
    return install_packages(FOLDER / f"torch{version}", f"torch=={version}", *packages)


def build(python: Path) -> dict[str, str]:
    """Builds what the tests import; returns the options of CMake."""
    # `make test-arm` has compiled the kernels, perhaps.
    cmake_build(ARM_FOLDER, ARM_WITHOUT_TORCH, targets=("transformer_ops_kernels_library",))
    options = {
        "CMAKE_TOOLCHAIN_FILE": str(TOOLCHAIN),
        "Python_EXECUTABLE": str(python),
        "TRANSFORMER_OPS_KERNELS": str(ARM_FOLDER / "libtransformer_ops_kernels.so"),
        "TRANSFORMER_OPS_TESTS": "ON",
    }
    os.environ["TRANSFORMER_OPS_CUDA"] = "OFF"  # nvcc is no cross compiler here
    cmake_build(FOLDER / "cmake", options, targets=("extension",))
    for folder in ("transformer_ops", "tests"):
        kept = shutil.ignore_patterns("lib", "include", "share", "__pycache__")
        shutil.copytree(ROOT / folder, TREE / folder, ignore=kept, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", TREE)
    run([tool("cmake"), "--install", str(FOLDER / "cmake"), "--prefix", str(TREE)])
    return options


class ArmBuild(Build):
    """Wheels for aarch64: an emulated Python runs setuptools, and CMake a cross compiler."""

    emulator = EMULATOR

    def __init__(self, folder: Path, native: bool, cuda: bool) -> None:
        super().__init__(folder, native, cuda)
        install_system()
        self.python = f"cp{include_folder().name.removeprefix('python').replace('.', '')}-aarch64"
        self.kind = f"{self.python}{'-native' * native}"
        tools = Path(sys.executable).parent
        os.environ |= {
            "CMAKE_TOOLCHAIN_FILE": str(TOOLCHAIN),
            # The host's CMake and Ninja.
            "PATH": os.pathsep.join((str(tools), os.environ.get("PATH", os.defpath))),
        }

    def interpreter(self, torch: str) -> Path:
        # To build takes nothing of what torch needs to run.
        packages = (f"torch=={torch}", *pinned("setuptools"), "pip")
        found = install_packages(FOLDER / f"build-torch{torch}", "--no-deps", *packages)
        return make_interpreter(FOLDER / f"python-build{torch}", found)

    def user(self, place: Path, torch: str, wheel: Path) -> tuple[Path, Path]:
        packages = install_packages(place / "site-packages", "--no-deps", wheel)
        python = make_interpreter(place / "python", packages, install_torch(torch))
        return python, Path(tool("cmake")).parent


def sample(day: int) -> list[str]:
    """Arguments for pytest: a file of each kind, another one each day, and what depends on the
    processor."""
    folders = [ROOT / "tests" / name for name in ("ops", "fuser", "quantization", "models")]
    files = [sorted(folder.glob("test_*.py")) for folder in folders]
    chosen = {ROOT / f"tests/ops/test_{name}.py" for name in ("products", "processor")}
    chosen |= {found[day % len(found)] for found in files}
    names = [str(path.relative_to(ROOT)) for path in sorted(chosen)]
    return [*names, "-m", "not slow", "-k", LEFT_OUT]


def main(arguments: list[str]) -> None:
    install_system()
    torch = torch_version()
    if torch is None:
        raise SystemExit(f"[arm_python] {sys.executable} must have the torch to test, got none")
    python = make_interpreter(FOLDER / "python-tests", TREE, install_torch(torch))
    options = build(python)
    if not arguments:
        build_and_run(FOLDER / "cmake", options, ["executor"])
        arguments = sample(int(time.time()) // 86400)
    run([str(python), "-m", "pytest", "-q", *arguments], folder=TREE)


if __name__ == "__main__":
    main(sys.argv[1:])
