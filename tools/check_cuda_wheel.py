"""What tools/build_wheel.py --cuda runs where both wheels are: `check_cuda_wheel.py TORCH`."""

import sys

import torch

import transformer_ops as tops
from transformer_ops._loader import build_info

wanted = sys.argv[1]
assert torch.__version__.partition("+")[0] == wanted, torch.__version__
assert build_info().CUDA is not None, "the CUDA backend must be loaded, got a CPU build"
block = tops.Sequential(tops.RMSNorm(64), tops.Linear(64, 128), tops.SwiGLU())
devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
for device in devices:
    y = block.to(device)(torch.randn(4, 64, device=device, requires_grad=True))
    y.sum().backward()
print(f"torch {wanted}: the backend is loaded, for {build_info().CUDA}; a block ran on {devices}")
