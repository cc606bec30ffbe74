"""Prints, as CMake code, what the build must know of this interpreter and its torch.

Torch is not imported: its headers and libraries suffice, so that the packages that it needs to run
may be missing.
"""

import runpy
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

python, found = sys.executable, find_spec("torch")
if "-musl" in str(sysconfig.get_config_var("SOABI")):
    raise SystemExit(f"{python} must be a Python for glibc, as torch is, got one for musl")
if found is None or found.origin is None:
    raise SystemExit(f"{python} must have torch >= 2.11, got none: install it there first")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(f"{python} must be a Python with the global lock, got a free-threaded one")
torch = Path(found.origin).parent
version = runpy.run_path(str(torch / "version.py"))
include = torch / "include"
facts = {
    "TORCH_VERSION": version["__version__"],
    "TORCH_INCLUDE_DIRS": f"{include};{include / 'torch' / 'csrc' / 'api' / 'include'}",
    "TORCH_LIBRARY_DIRS": torch / "lib",
    "TORCH_CUDA_VERSION": version["cuda"] or "",
    "PYTHON_EXTENSION_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
}
for name, value in facts.items():
    print(f"set({name} [==[{value}]==])")
