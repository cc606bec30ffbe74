"""Products on CPU, each in two ways: in float32 by oneDNN, where csrc/wrappers/product.cpp has it,
and by MKL; in 16 bits as the library runs them, and as PyTorch does.

    python benchmarks/products.py [--threads N] [--dtype float32|bfloat16|float16]

Both in turn, round after round, in one process. Milliseconds; their ratio, the median over the
rounds; and the error of each: the root mean square of its distance to the float64 product, over
that of the product. Where both run the same code (float32 on an Intel processor, or a small
product), the ratio is 1. TRANSFORMER_OPS_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
MKL_ENABLE_INSTRUCTIONS=AVX2 in front of it measures 16 bits as on a processor with AVX2,
TRANSFORMER_OPS_ISA=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE as on one with AVX-512 alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor

import transformer_ops  # noqa: F401  (loads the typed ops)

typed = torch.ops.transformer_ops

# Rows, outputs, inputs: of the blocks that bench.py measures, and odd ones.
SIZES = [
    (1024, 4096, 768),
    (1024, 768, 2048),
    (256, 2048, 768),
    (64, 2048, 256),
    (64, 256, 1024),
    (8, 2048, 2048),
    (128, 4096, 4096),
    (16384, 128, 128),
    (65536, 64, 8),
    (1000, 2049, 513),
    (1024, 50257, 256),
]
SECONDS = 1.0
Way = Callable[[str, Tensor, Tensor, Tensor], Tensor]


def product(which: str, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    if which == "forward":
        return typed.linear(x, weight)
    mask = [which == "grad_input", which == "grad_weight"]
    return typed.linear_backward(grad, x, weight, mask)[mask.index(True)]


def plain(which: str, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """The same by PyTorch."""
    if which == "forward":
        return x @ weight.t()
    return grad @ weight if which == "grad_input" else grad.t() @ x


def with_onednn(enabled: bool) -> Way:
    def run(which: str, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        mkldnn: Any = torch.backends.mkldnn
        before = mkldnn.enabled
        mkldnn.enabled = enabled
        try:
            return product(which, x, weight, grad)
        finally:
            mkldnn.enabled = before

    return run


def ways_of(dtype: torch.dtype) -> dict[str, Way]:
    """The two that are compared."""
    if dtype == torch.float32:
        return {"oneDNN": with_onednn(True), "MKL": with_onednn(False)}
    return {"ours": product, "PyTorch": plain}


def measure(which: str, x: Tensor, weight: Tensor, grad: Tensor) -> str:
    """One row of the table."""
    ways = ways_of(x.dtype)
    exact = product(which, x.double(), weight.double(), grad.double())
    errors = []
    for run in ways.values():
        got = run(which, x, weight, grad).double()
        errors.append(((got - exact).square().mean() / exact.square().mean()).sqrt().item())
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + SECONDS
    while len(min(rounds.values(), key=len)) < 3 or time.perf_counter() < end:
        for name, run in ways.items():
            start = time.perf_counter()
            run(which, x, weight, grad)
            rounds[name].append(time.perf_counter() - start)
    pairs = zip(*rounds.values(), strict=True)
    ratio = statistics.median(first / second for first, second in pairs)
    times = [f"{1e3 * statistics.median(times):9.3f}" for times in rounds.values()]
    return " ".join([*times, f"{ratio:6.2f}", *(f"{error:9.1e}" for error in errors)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    names = " ".join(f"{name:>9}" for name in ways_of(dtype))
    print(f"{'rows, outputs, inputs':22} {'product':12} {names}  ratio    errors")
    for rows, outputs, inputs in SIZES:
        x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        grad = torch.randn(rows, outputs).to(dtype)
        for which in ("forward", "grad_input", "grad_weight"):
            size = f"{rows}, {outputs}, {inputs}"
            print(f"{size:22} {which:12} {measure(which, x, weight, grad)}", flush=True)


if __name__ == "__main__":
    main()
