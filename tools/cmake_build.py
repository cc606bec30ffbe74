"""Runs CMake for setup.py and, to build and run the C++ tests, for the Makefile."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path

from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent.parent
WHEEL_FOLDER = Path("build/wheel")
OLDEST_TORCH = "2.11"


def torch_version() -> str | None:
    """The version of the torch that this interpreter imports, without its "+cu130"."""
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def runtime_requirement() -> str:
    """The C++ ABI of torch holds within a minor version, so the wheel asks for that one."""
    version = torch_version()
    if version is None:
        return f"torch>={OLDEST_TORCH}"
    major, minor = version.split(".")[:2]
    return f"torch=={major}.{minor}.*"


def build_folder(suffix: str = "") -> Path:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return ROOT / "build" / f"{tag}-torch{torch_version()}{suffix}"


def tool(name: str) -> str:
    """The tool that pip installed beside this interpreter, else the one on PATH."""
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = shutil.which(name, path=places)
    if found is None:
        raise SystemExit(f"transformer_ops needs {name} to build: pip install {name}")
    return found


def jobs() -> str:
    return os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))


def cmake_build(folder: Path, options: dict[str, str], targets: tuple[str, ...]) -> None:
    options = {
        # The tools of an isolated build are gone at the next one: never trust the cached paths.
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "Python_EXECUTABLE": sys.executable,
        "TRANSFORMER_OPS_UNITY": os.environ.get("TRANSFORMER_OPS_UNITY", "ON"),
        "TRANSFORMER_OPS_NATIVE": os.environ.get("TRANSFORMER_OPS_NATIVE", "ON"),
        **options,
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    # The environment alone decides on CUDA; a folder of an earlier version has a choice cached.
    defines.append("-UTRANSFORMER_OPS_CUDA")
    cmake = tool("cmake")
    run([cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *defines])
    run([cmake, "--build", str(folder), "--parallel", jobs(), "--target", *targets])


def run(command: list[str], *, folder: Path = ROOT) -> None:
    print("+", " ".join(command), flush=True)
    if subprocess.run(command, cwd=folder, check=False).returncode != 0:
        raise SystemExit(f"transformer_ops: {Path(command[0]).name} failed, see above")


# The options of a build that belongs to this checkout.
EDITABLE = {"TRANSFORMER_OPS_WERROR": "ON"}


class CMakeBuild(build_ext):
    """Builds and installs into the source folder (editable) or into the wheel."""

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            folder, destination = build_folder(), ROOT
            options = EDITABLE
        else:
            # tools/build_wheel.py keeps a folder for each torch, and builds the kernels once.
            given = os.environ.get("TRANSFORMER_OPS_BUILD_FOLDER")
            folder = ROOT / (given or WHEEL_FOLDER / "cmake")
            destination = Path(self.build_lib).resolve()
            # A compiler newer than ours may warn of more; that must not stop a user's install. A
            # wheel may be installed on other machines.
            options = {
                "TRANSFORMER_OPS_WERROR": "OFF",
                "TRANSFORMER_OPS_NATIVE": os.environ.get("TRANSFORMER_OPS_NATIVE", "OFF"),
                "TRANSFORMER_OPS_WHEEL": "ON",
                "TRANSFORMER_OPS_KERNELS": os.environ.get("TRANSFORMER_OPS_KERNELS", ""),
            }
        cmake_build(folder, options, targets=("extension",))
        run([tool("cmake"), "--install", str(folder), "--prefix", str(destination)])


def sanitizer_options(sanitizer: str) -> dict[str, str]:
    options = {"TRANSFORMER_OPS_SANITIZE": sanitizer, "TRANSFORMER_OPS_NATIVE": "ON"}
    if sanitizer == "thread":
        cmake_build(build_folder(), {}, targets=("transformer_ops",))
        options["TRANSFORMER_OPS_PLAIN_BUILD"] = str(build_folder())
    os.environ["TRANSFORMER_OPS_CUDA"] = "OFF"  # nvcc takes no sanitizer
    return options


def with_clang(folder: Path, options: dict[str, str]) -> tuple[Path, dict[str, str]]:
    """The same build by clang, in a folder of its own: CMake forgets all if a compiler changes."""
    return Path(f"{folder}-clang"), {**options, "CMAKE_CXX_COMPILER": "clang++"}


ARM = {"CMAKE_TOOLCHAIN_FILE": str(ROOT / "cmake/aarch64.cmake")}
ARM_WITHOUT_TORCH = {**ARM, "TRANSFORMER_OPS_TORCH": "OFF"}
ARM_FOLDER = ROOT / "build/aarch64"
# What the tests for Arm take, and the package of Debian and Ubuntu that has it.
ARM_TOOLS = {
    "/usr/bin/aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "/usr/bin/qemu-aarch64-static": "qemu-user-static",
    "/usr/src/googletest": "googletest",
}


def install_arm_tools() -> None:
    missing = [package for path, package in ARM_TOOLS.items() if not Path(path).exists()]
    if not missing:
        return
    if shutil.which("apt-get") is None or (os.geteuid() != 0 and shutil.which("sudo") is None):
        raise SystemExit(
            f"transformer_ops: the tests for Arm need {' '.join(missing)} (packages of Debian and "
            "Ubuntu), and this needs apt-get, and root or sudo, to install them"
        )
    root = ["sudo"] if os.geteuid() != 0 else []
    run([*root, "apt-get", "update", "-q"])
    run([*root, "apt-get", "install", "-q", "-y", "--no-install-recommends", *missing])


def build_and_run_arm_tests(parts: list[str], sample: bool = False, clang: bool = False) -> None:
    """Cross-compiles what needs no torch, and runs its tests under qemu."""
    install_arm_tools()
    folder, options = ARM_FOLDER, ARM_WITHOUT_TORCH
    if clang:
        folder, options = with_clang(folder, options)
    if not sample:
        return build_and_run(folder, options, parts)
    # Tests of kernels are in four shards, of which each day has two.
    today = (0, 1) if date.today().toordinal() % 2 else (2, 3)
    print(f"Of four shards of tests of kernels, today's are {today}; `make test-arm` runs all.")
    shards = "|".join(map(str, today))
    build_and_run(folder, options, ["kernels"], f"({shards})$")


def build_and_run_tests(sanitizer: str | None, parts: list[str], clang: bool) -> None:
    options = {"TRANSFORMER_OPS_TESTS": "ON", "TRANSFORMER_OPS_SANITIZE": "OFF"}
    if sanitizer is not None:
        options |= sanitizer_options(sanitizer)
    folder = build_folder({None: "", "address": "-san", "thread": "-tsan"}[sanitizer])
    if clang:
        folder, options = with_clang(folder, options)
    build_and_run(folder, options, parts)


def build_and_run(folder: Path, options: dict[str, str], parts: list[str], tests: str = "") -> None:
    cmake_build(folder, options, targets=tuple(f"test_{part}" for part in parts) or ("cpp_tests",))
    chosen = ["--tests-regex", f"^({'|'.join(parts)})\\.{tests}"] if parts else []
    # Tests side by side must not take the cores from each other while their threads wait.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run([tool("ctest"), "--output-on-failure", "--parallel", jobs(), *chosen], folder=folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Builds and runs the C++ tests.")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--extension",
        action="store_true",
        help="only build what `pip install -e .` installs: pip does not show how far it is",
    )
    kinds.add_argument(
        "--sanitize",
        choices=("address", "thread"),
        help="address: with ASan and UBSan; thread: those that use threads, with TSan",
    )
    kinds.add_argument(
        "--arm",
        action="store_true",
        help="those that need no libtorch, compiled for aarch64, under qemu",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="PART",
        help="programs of tests/cpp, such as fuser memory, which need no libtorch",
    )
    parser.add_argument(
        "--sample", action="store_true", help="with --arm: half of the tests of kernels, each day's"
    )
    parser.add_argument(
        "--clang", action="store_true", help="compiled by clang++, in a build folder of its own"
    )
    given = parser.parse_args()
    if given.extension and (given.only or given.clang):
        parser.error("--extension must be alone: it builds no tests")
    if given.sample and (given.only or not given.arm):
        parser.error("--sample must stand with --arm alone: it names the tests")
    if given.extension:
        cmake_build(build_folder(), EDITABLE, targets=("extension",))
    elif given.arm:
        build_and_run_arm_tests(given.only, given.sample, given.clang)
    else:
        build_and_run_tests(given.sanitize, given.only, given.clang)
