"""C++ libraries that tests compile and load in addition to the package."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from transformer_ops import _C

ROOT = Path(__file__).parent.parent


def build_library(folder: Path, name: str, texts: dict[str, str]) -> Path:
    """Builds a library of these sources."""
    library = folder / f"lib{name}.so"
    sources = []
    for stem, text in texts.items():
        sources.append(folder / f"{stem}.cpp")
        sources[-1].write_text(text, encoding="utf-8")
    libraries = Path(_C.__file__).parent
    paths = [ROOT / "csrc", *include_paths()]
    subprocess.run(
        [
            *(os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-shared", "-fPIC", "-w"),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(f"-I{path}" for path in paths),
            *(str(source) for source in sources),
            *("-o", str(library), f"-L{libraries}", "-ltransformer_ops"),
        ],
        check=True,
    )
    return library
