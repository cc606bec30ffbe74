"""Picks and loads the shared libraries for the torch that is here, or says why there are none.

    lib/libtransformer_ops_kernels.so     CPU kernels, which know nothing of torch
    lib/torch2.15/libtransformer_ops.so   ops, fuser and executor, for one minor version of torch
    lib/torch2.15/_C.cpython-*.so         the bindings
    lib/torch2.15/_build_info.py          what the build was for

A wheel has several folders lib/torch*; a build of a checkout has one. A build with CUDA also has
lib/torch2.15/libtransformer_ops_cuda.so. Beside a wheel, the package transformer-ops-cuda13 has it:

    transformer_ops_cuda13/lib/torch2.15/libtransformer_ops_cuda.so
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

_PACKAGE = Path(__file__).parent
_OLDEST_TORCH = (2, 11)
_KERNELS = "libtransformer_ops_kernels.so"
_LIBRARY = "libtransformer_ops.so"
_CUDA = "libtransformer_ops_cuda.so"


def load() -> ModuleType:
    """Registers `torch.ops.transformer_ops` and returns the pybind11 module `_C`.

    Raises:
        ImportError: nothing is built here, it was built for another torch, Python, CUDA or system,
            a file is missing, or another copy of the package is loaded.
    """
    folder = find_folder(_PACKAGE, torch.__version__)
    check_folder(folder, sysconfig.get_config_var("EXT_SUFFIX"))
    check_no_other_copy(folder)
    # The folder holds modules of the package: `_C` and `_build_info`.
    sys.modules[__package__].__path__.insert(0, str(folder))
    info = build_info()
    libraries = [folder / _LIBRARY]
    if info.CUDA is not None and torch.version.cuda is not None:
        check_cuda(info.CUDA["toolkit"], torch.version.cuda)
        libraries.append(folder / _CUDA)
    elif torch.version.cuda is not None:
        package = find_cuda_package(torch.version.cuda)
        if package is not None:
            libraries.append(cuda_library(package, info.VERSION, folder.name))
            vars(info)["CUDA"] = package.CUDA
    for library in libraries:
        load_library(library)
    return importlib.import_module(f"{__package__}._C")


def build_info() -> ModuleType:
    """The module that the build wrote: versions and backends of the shared libraries."""
    return importlib.import_module(f"{__package__}._build_info")


@functools.cache
def build_digest() -> str:
    """Tells this build of the ops from others: the start of the SHA-256 of their library."""
    library = find_folder(_PACKAGE, torch.__version__) / _LIBRARY
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def find_folder(package: Path, torch_version: str) -> Path:
    """The folder of libraries for that version of torch.

    Raises:
        ImportError: `package` has none, and what to do.
    """
    found = sorted(map(_version, (package / "lib").glob("torch*")))
    wanted = _version(f"torch{torch_version}")
    if wanted in found:
        return package / "lib" / f"torch{_text(wanted)}"
    elsewhere = _other_folders(package, wanted)
    if elsewhere:
        raise ImportError(
            f"transformer_ops in {package} is {_built_for(found)}, got torch {torch_version}, and "
            f"hides the one in {elsewhere[0]}, which has libraries for it: start Python in another "
            "folder"
        )
    if not found and _is_checkout(package):
        raise ImportError(
            f"transformer_ops is not built in {package}: {_how_to_build(package)}, or, if it is "
            "installed elsewhere, start Python in another folder"
        )
    if not found:
        raise ImportError(_incomplete(package, package / "lib"))
    if wanted < _OLDEST_TORCH:
        build = f"it needs torch {_text(_OLDEST_TORCH)} or newer"
    else:
        build = f"to build it for torch {_text(wanted)}, {_how_to_build(package)}"
    raise ImportError(
        f"transformer_ops is {_built_for(found)}, got torch {torch_version}: "
        f"run `pip install 'torch=={_text(found[-1])}.*'`; {build}"
    )


def check_folder(folder: Path, extension_suffix: str) -> None:
    """Raises ImportError where a file is missing, or the bindings are for another Python."""
    package = folder.parents[1]
    for file in (package / "lib" / _KERNELS, folder / _LIBRARY, folder / "_build_info.py"):
        if not file.exists():
            raise ImportError(_incomplete(package, file))
    if (folder / f"_C{extension_suffix}").exists():
        return
    others = sorted(file.name.removeprefix("_C") for file in folder.glob("_C*.so"))
    if not others:
        raise ImportError(_incomplete(package, folder / f"_C{extension_suffix}"))
    raise ImportError(
        f"transformer_ops was built for another Python ({others[0]}), got {extension_suffix}: "
        f"{_how_to_build(package)}"
    )


def check_cuda(toolkit: str, runtime: str) -> None:
    """Raises ImportError where the build was for another major version of CUDA than torch's."""
    built, here = toolkit.split(".")[0], runtime.split(".")[0]
    if built != here:
        raise ImportError(
            f"transformer_ops was built for CUDA {built}, got a torch for CUDA {here}: "
            f"{_how_to_build(_PACKAGE)}"
        )


def find_cuda_package(cuda: str) -> ModuleType | None:
    """The package with the CUDA backend for that version of CUDA, where it is installed."""
    name = f"transformer_ops_cuda{cuda.split('.')[0]}"
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def cuda_library(package: ModuleType, version: str, folder: str) -> Path:
    """The library of that package for a version of transformer_ops and the folder of a torch.

    Raises:
        ImportError: the package is of another version, or has none for that torch.
    """
    assert package.__file__ is not None
    distribution = package.__name__.replace("_", "-")
    if package.VERSION != version:
        raise ImportError(
            f"{distribution} must have the version of transformer_ops, {version}, got "
            f"{package.VERSION}: run `pip install --force-reinstall --no-deps "
            f"{distribution}=={version}`, or uninstall it"
        )
    root = Path(package.__file__).parent
    library = root / "lib" / folder / _CUDA
    if not library.exists():
        found = sorted(map(_version, (root / "lib").glob("torch*")))
        raise ImportError(
            f"{distribution} is {_built_for(found)}, got torch {_text(_version(folder))}: install "
            "one of these, or uninstall it"
        )
    return library


def check_no_other_copy(folder: Path) -> None:
    """Raises ImportError where another copy is loaded: both would register the same ops."""
    loaded = _loaded_library(_LIBRARY)
    if loaded is not None and not os.path.samefile(loaded, folder / _LIBRARY):
        raise ImportError(
            f"transformer_ops must be loaded once, got {loaded}, which this process has loaded "
            f"before {folder / _LIBRARY}: uninstall one of the two copies, or import "
            "transformer_ops before the library that loads the other"
        )


def load_library(path: Path) -> None:
    """Loads a library of ops, or raises ImportError that says what to do about it."""
    try:
        torch.ops.load_library(path)
    except OSError as error:
        # Some versions of torch give what the linker says as the cause of an error of their own.
        raise ImportError(explain_load_error(str(error.__cause__ or error))) from error


def explain_load_error(error: str) -> str:
    """What to do about a message of the dynamic linker."""
    needed = re.search(r"version `(GLIBC|GLIBCXX|CXXABI)_([\d.]+)' not found", error)
    if needed is not None:
        library = "glibc" if needed[1] == "GLIBC" else "libstdc++"
        here = (
            f", got glibc {_glibc()}" if needed[1] == "GLIBC" and _glibc() else ", got an older one"
        )
        return (
            f"transformer_ops was built for a newer system, whose {library} has {needed[1]}_"
            f"{needed[2]}{here}: {_how_to_build(_PACKAGE)}"
        )
    if re.search(r"file too short|invalid ELF header|No such file|cannot read file", error):
        return (
            f"transformer_ops in {_PACKAGE} has a damaged library ({error}): {_reinstall(_PACKAGE)}"
        )
    return f"transformer_ops cannot load its libraries ({error}): {_how_to_build(_PACKAGE)}"


def _loaded_library(name: str) -> str | None:
    """The path of the library of that name that this process has loaded."""
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = (line.split(maxsplit=5)[-1].rstrip("\n") for line in maps)
        return next((path for path in paths if os.path.basename(path) == name), None)


def _other_folders(package: Path, version: tuple[int, ...]) -> list[Path]:
    """Other copies of the package with libraries for that torch, in the order of the search."""
    folders = [Path(entry or ".") / package.name for entry in sys.path]
    return [
        folder
        for folder in folders
        if (folder / "lib" / f"torch{_text(version)}").is_dir()
        and not os.path.samefile(folder, package)
    ]


def _is_checkout(package: Path) -> bool:
    return (package.parent / "CMakeLists.txt").exists()


def _how_to_build(package: Path) -> str:
    if _is_checkout(package):
        return f"run `pip install --no-build-isolation -e .` in {package.parent}"
    return (
        "run `pip install --force-reinstall --no-deps --no-binary transformer-ops "
        "transformer-ops`, which builds it from source"
    )


def _reinstall(package: Path) -> str:
    if _is_checkout(package):
        return _how_to_build(package)
    return "run `pip install --force-reinstall --no-deps transformer-ops`"


def _incomplete(package: Path, missing: Path) -> str:
    return (
        f"transformer_ops in {package} is incomplete, got no {missing.relative_to(package)}: "
        f"{_reinstall(package)}"
    )


def _built_for(found: list[tuple[int, ...]]) -> str:
    if not found:
        return "not built"
    *first, last = map(_text, found)
    return "built for torch " + (f"{', '.join(first)} and {last}" if first else last)


def _version(name: str | Path) -> tuple[int, ...]:
    """The minor version at the end of lib/torch2.15 or of torch2.15.0+cpu, as two numbers."""
    major, minor = re.findall(r"\d+", str(name).rpartition("torch")[2])[:2]
    return int(major), int(minor)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ")
    except (ValueError, OSError):
        return ""
