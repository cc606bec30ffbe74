"""Every op and every fusion once, forward and backward: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck python tests/cuda_load.py [--device cuda]

Numbers are left to the tests. Sizes are odd where the op allows it, so that vectors have tails and
rows start anywhere.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import fusion_cases
import op_cases
import torch
from torch import Tensor, nn

import transformer_ops as tops

DTYPES = (torch.bfloat16, torch.float32)


def run(module: Callable[..., object], inputs: list[Tensor], parameters: list[Tensor]) -> None:
    """Runs forward, and backward for every output with a gradient."""
    found = module(*inputs)
    outputs = [t for t in (found if isinstance(found, tuple) else (found,)) if t.requires_grad]
    wanted = [t for t in (*inputs, *parameters) if t.requires_grad]
    torch.autograd.grad(outputs, wanted, [torch.randn_like(t) for t in outputs], allow_unused=True)


def main() -> None:
    """Runs all rows on a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--without-products", action="store_true", help="our own kernels alone")
    options = parser.parse_args()
    device = torch.device(options.device)
    count = 0
    for dtype in DTYPES:
        for op_case in op_cases.CASES:
            op = op_case.build(dtype).to(device)
            if options.without_products and has_products(op):
                continue
            shape = (77,) if op_case.elementwise else (7, 3, *op_case.row)
            given = op_case.inputs(dtype, shape)
            inputs = [t.detach().to(device).requires_grad_(t.requires_grad) for t in given]
            run(op, inputs, list(op.parameters()))
            count += 1
        for fusion_case in fusion_cases.CASES:
            module = tops.Sequential(*fusion_case.make()).to(device, dtype)
            if options.without_products and has_products(module):
                continue
            tensors = fusion_case.inputs(torch.randn(7, 3, 16, dtype=dtype))
            run(module, [leaf(t, device) for t in tensors], list(module.parameters()))
            count += 1
        # These rows need several blocks of threads, an odd number of blocks, or are not aligned to
        # vectors.
        for width in (4096, 1031):
            for make in (tops.RMSNorm, tops.LayerNorm):
                block = tops.Sequential(
                    make(width), tops.GELU(), tops.Bias(width), tops.Dropout(0.5)
                )
                block.to(device, dtype)
                x = leaf(torch.randn(133, width, dtype=dtype), device)
                run(block, [x], list(block.parameters()))
                count += 1
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(f"{count} modules, forward and backward", flush=True)
    if device.type == "cuda":
        # Threads of torch that still run end the process under compute-sanitizer.
        os._exit(0)


def has_products(module: nn.Module) -> bool:
    """Whether it calls kernels of cuBLASLt, or of torch's attention."""
    names = [type(inner).__name__ for inner in module.modules()]
    return any("Linear" in name or name in ("Attention", "Router") for name in names)


def leaf(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a tensor to the device; it requires a gradient if it can have one."""
    return tensor.detach().to(device).requires_grad_(tensor.is_floating_point())


if __name__ == "__main__":
    main()
