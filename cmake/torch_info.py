"""Prints, as CMake code, what the build must know of this interpreter and its torch."""

import sysconfig

import torch
from torch.utils import cpp_extension

facts = {
    "TORCH_VERSION": torch.__version__,
    "TORCH_INCLUDE_DIRS": ";".join(cpp_extension.include_paths()),
    "TORCH_LIBRARY_DIRS": ";".join(cpp_extension.library_paths()),
    "TORCH_CUDA_VERSION": torch.version.cuda or "",
    "TORCH_CXX11_ABI": int(torch.compiled_with_cxx11_abi()),
    "PYTHON_EXTENSION_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
}
for name, value in facts.items():
    print(f"set({name} [==[{value}]==])")
