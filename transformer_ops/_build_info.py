"""Written by the build: what the shared objects beside this file were built for."""

VERSION = "0.1.0"
TORCH_VERSION = "2.15.0+cu132"
EXTENSION_SUFFIX = ".cpython-311-x86_64-linux-gnu.so"
# {"toolkit": version, "architectures": as in TORCH_CUDA_ARCH_LIST}, or None for CPU only.
CUDA = None
# The environment variables TRANSFORMER_OPS_CUDA and TRANSFORMER_OPS_NATIVE, and what was not built, with the reason.
CUDA_ASKED = ""
NATIVE = "ON"
LEFT_OUT = "the CUDA backend, for want of a GPU (TRANSFORMER_OPS_CUDA=ON builds it); CPU kernels for avx2, default (TRANSFORMER_OPS_NATIVE=OFF builds them)"
