"""Loads the shared objects, after checking that they were built for the installed torch."""

from __future__ import annotations

import importlib
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

_FOLDER = Path(__file__).parent


def load() -> ModuleType:
    """Registers `torch.ops.transformer_ops` and returns the pybind11 module `_C`.

    Raises:
        ImportError: nothing is built in this folder, or it was built for another torch or Python.
    """
    _check(build_info())
    torch.ops.load_library(_FOLDER / "libtransformer_ops.so")
    if build_info().CUDA is not None and torch.version.cuda is not None:
        torch.ops.load_library(_FOLDER / "libtransformer_ops_cuda.so")
    return importlib.import_module("transformer_ops._C")


def build_info() -> ModuleType:
    """The module that the build wrote, with versions and backends of the shared objects."""
    try:
        return importlib.import_module("transformer_ops._build_info")
    except ModuleNotFoundError:
        raise ImportError(
            f"transformer_ops is not built in {_FOLDER}: {_how_to_build()}, or, if it is installed "
            "elsewhere, start Python in another folder"
        ) from None


def _check(info: ModuleType) -> None:
    built, here = _minor(info.TORCH_VERSION), _minor(torch.__version__)
    if built != here:
        raise ImportError(
            f"transformer_ops was built for torch {built}, got torch {torch.__version__}: to build "
            f"it again, {_how_to_build()}; to keep it, run `pip install 'torch=={built}.*'`"
        )
    if info.CUDA is not None and torch.version.cuda is not None:
        toolkit, runtime = info.CUDA["toolkit"].split(".")[0], torch.version.cuda.split(".")[0]
        if toolkit != runtime:
            raise ImportError(
                f"transformer_ops was built for CUDA {toolkit}, got a torch for CUDA {runtime}: "
                f"{_how_to_build()}"
            )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not (_FOLDER / f"_C{suffix}").exists():
        raise ImportError(
            f"transformer_ops was built for another Python ({info.EXTENSION_SUFFIX}), "
            f"got {suffix}: {_how_to_build()}"
        )


def _how_to_build() -> str:
    checkout = _FOLDER.parent
    if (checkout / "CMakeLists.txt").exists():
        return f"run `pip install --no-build-isolation -e .` in {checkout}"
    return "run `pip install --force-reinstall --no-deps .` in its source folder"


def _minor(version: str) -> str:
    return ".".join(str(version).split(".")[:2])
