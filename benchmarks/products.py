"""Products of float32 on CPU: by oneDNN, where csrc/bodies/product.cpp takes it, and by MKL.

    python benchmarks/products.py [--threads N]

Both in turn, round after round, in one process. Milliseconds; their ratio, the median over the
rounds; and the error of each: the root mean square of its distance to the float64 product, over
that of the product. Where both are MKL's (an Intel processor, or a small product), the ratio is 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
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
LIBRARIES = {"oneDNN": True, "MKL": False}
SECONDS = 1.0


def product(which: str, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    if which == "forward":
        return typed.linear(x, weight)
    mask = [which == "grad_input", which == "grad_weight"]
    return typed.linear_backward(grad, x, weight, mask)[mask.index(True)]


def measure(which: str, x: Tensor, weight: Tensor, grad: Tensor) -> str:
    """One row of the table."""
    exact = product(which, x.double(), weight.double(), grad.double())
    error = {}
    rounds: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    mkldnn: Any = torch.backends.mkldnn
    before = mkldnn.enabled
    try:
        for library, enabled in LIBRARIES.items():
            mkldnn.enabled = enabled
            got = product(which, x, weight, grad).double()
            error[library] = ((got - exact).square().mean() / exact.square().mean()).sqrt().item()
        end = time.perf_counter() + SECONDS
        while len(rounds["MKL"]) < 3 or time.perf_counter() < end:
            for library, enabled in LIBRARIES.items():
                mkldnn.enabled = enabled
                start = time.perf_counter()
                product(which, x, weight, grad)
                rounds[library].append(time.perf_counter() - start)
    finally:
        mkldnn.enabled = before
    pairs = zip(rounds["oneDNN"], rounds["MKL"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    times = [f"{1e3 * statistics.median(times):9.3f}" for times in rounds.values()]
    return " ".join([*times, f"{ratio:6.2f}", *(f"{e:9.1e}" for e in error.values())])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    print(f"{'rows, outputs, inputs':22} {'product':12}    oneDNN       MKL  ratio    errors")
    for rows, outputs, inputs in SIZES:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        grad = torch.randn(rows, outputs)
        for which in ("forward", "grad_input", "grad_weight"):
            size = f"{rows}, {outputs}, {inputs}"
            print(f"{size:22} {which:12} {measure(which, x, weight, grad)}", flush=True)


if __name__ == "__main__":
    main()
