"""Builds the extension for aarch64 and runs Python tests under qemu, on Debian.

python tools/arm_python.py tests/ops/test_dropout.py -k float32    arguments are for pytest

Python comes from Debian's packages, torch from the index of pip: a CPU build saves gigabytes.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from cmake_build import (
    ARM,
    ARM_FOLDER,
    ARM_WITHOUT_TORCH,
    ROOT,
    cmake_build,
    install_arm_tools,
    run,
    tool,
    torch_version,
)

FOLDER = ROOT / "build/aarch64-python"
SYSTEM, SITE, TREE = FOLDER / "system", FOLDER / "site", FOLDER / "tree"
PYTHON = FOLDER / "python"
PACKAGES = ("numpy", "pytest", "expecttest")
# Inductor would call this machine's compiler.
SAMPLE = (
    *("tests/ops/test_products.py", "tests/fuser/test_fusions.py"),
    *("tests/quantization/test_quantize.py", "-k", "not inductor"),
)

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
    PYTHON.write_text(
        f'#!/bin/sh\nPYTHONPATH="{TREE}:{SITE}" exec qemu-aarch64-static -cpu neoverse-n1 '
        f'-L "{SYSTEM}" "{SYSTEM}/usr/bin/python3" "$@"\n',
        encoding="utf-8",
    )
    PYTHON.chmod(0o755)


def include_folder() -> Path:
    """The folder of Python.h, whose name has the version."""
    (found,) = SYSTEM.glob("usr/include/python3.*")
    return found


def install_packages() -> None:
    version = include_folder().name.removeprefix("python")
    options = [f"--target={SITE}", "--only-binary=:all:", f"--python-version={version}"]
    options += [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(17, 36)]
    packages = [f"torch=={torch_version()}", *PACKAGES]
    run([sys.executable, "-m", "pip", "install", "-q", *options, *packages])


def build() -> None:
    # `make test-arm` has compiled the kernels, perhaps.
    cmake_build(ARM_FOLDER, ARM_WITHOUT_TORCH, targets=("transformer_ops_kernels_library",))
    options = {
        **ARM,
        "Python_EXECUTABLE": str(PYTHON),
        "Python_INCLUDE_DIR": str(include_folder()),
        "CMAKE_CXX_FLAGS": f"-idirafter {SYSTEM}/usr/include",  # Debian's pyconfig.h
        "TRANSFORMER_OPS_KERNELS": str(ARM_FOLDER / "libtransformer_ops_kernels.so"),
    }
    os.environ["TRANSFORMER_OPS_CUDA"] = "OFF"  # nvcc is no cross compiler here
    cmake_build(FOLDER / "cmake", options, targets=("extension",))
    for folder in ("transformer_ops", "tests"):
        kept = shutil.ignore_patterns("lib", "include", "share", "__pycache__")
        shutil.copytree(ROOT / folder, TREE / folder, ignore=kept, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", TREE)
    run([tool("cmake"), "--install", str(FOLDER / "cmake"), "--prefix", str(TREE)])


def main(arguments: list[str]) -> None:
    install_arm_tools()
    if not PYTHON.exists():
        install_system()
    if not (SITE / "torch").exists():
        install_packages()
    build()
    run([str(PYTHON), "-m", "pytest", "-q", *(arguments or SAMPLE)], folder=TREE)


if __name__ == "__main__":
    main(sys.argv[1:])
