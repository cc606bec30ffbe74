"""C++ libraries that tests compile and load in addition to the package."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from transformer_ops import _C

ROOT = Path(__file__).parent.parent


def compiler() -> list[str]:
    """The command that compiles against the headers of the source tree."""
    return [
        *(os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-fPIC", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{path}" for path in (ROOT / "csrc", *include_paths())),
    ]


def precompiled_header(folder: Path) -> Path:
    """op/op.h, which takes most of the time of a small source. All processes of one run of pytest
    share it."""
    worker = next((path for path in folder.parents if path.name.startswith("popen-")), folder)
    run = worker.parent
    header = run / "precompiled.h"
    with (run / "precompiled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compiled = run / "precompiled.h.gch"
        if not compiled.exists():
            header.write_text('#include "op/op.h"\n', encoding="utf-8")
            made = ("-x", "c++-header", str(header), "-o", str(compiled))
            subprocess.run([*compiler(), *made], check=True)
    return header


def build_library(folder: Path, name: str, texts: dict[str, str]) -> Path:
    """Builds a library of these sources in a folder of pytest's."""
    library = folder / f"lib{name}.so"
    sources = []
    for stem, text in texts.items():
        sources.append(folder / f"{stem}.cpp")
        sources[-1].write_text(text, encoding="utf-8")
    header = precompiled_header(folder)
    subprocess.run(
        [
            *(*compiler(), "-shared", "-include", str(header)),
            *(str(source) for source in sources),
            *("-o", str(library), f"-L{Path(_C.__file__).parent}", "-ltransformer_ops"),
        ],
        check=True,
    )
    return library
