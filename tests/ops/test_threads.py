"""What each op does on 1 to 16 threads, more than there are cores, and how loops are divided."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops import _C

ROWS, WIDTH = 600, 1024  # enough for every one of 16 threads
THREADS = (2, 4, 8, 16)


# The promise of docs/measurements.md: these give the same bits on any number of threads.
EXACT: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: tops.Sequential(tops.GELU()),
    "swiglu": lambda: tops.Sequential(tops.SwiGLU()),
    "bias": lambda: tops.Sequential(tops.Bias(WIDTH)),
    "dropout": lambda: tops.Sequential(tops.Dropout(0.3)),
    "layer_norm": lambda: tops.Sequential(tops.LayerNorm(WIDTH)),
    "rms_norm": lambda: tops.Sequential(tops.RMSNorm(WIDTH)),
    "layer_scale": lambda: tops.Sequential(tops.LayerScale(WIDTH)),
    "l2_normalization": lambda: tops.Sequential(tops.L2Normalization()),
    "codes": lambda: tops.Sequential(
        tops.GELU(), tops.RMSNorm(WIDTH), tops.SiLU(), saved="fp8", saved_inputs=True
    ),
}
# These contain products, which a library divides between threads as it likes.
NEAR: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: tops.Sequential(tops.Linear(WIDTH, 64), tops.GELU(), tops.Linear(64, 64)),
    "swiglu block": lambda: tops.Sequential(
        tops.RMSNorm(WIDTH), tops.Linear(WIDTH, 256, bias=False), tops.SwiGLU(), tops.Linear(128, 8)
    ),
}


def step(module: nn.Module, dtype: torch.dtype, threads: int) -> list[Tensor]:
    """Output and gradients."""
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], torch.randn_like(y))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXACT)
def test_any_number_of_threads_gives_the_same_bits(name: str, dtype: torch.dtype) -> None:
    module = EXACT[name]().to(dtype)
    want = step(module, dtype, 1)
    for threads in THREADS:
        found = step(module, dtype, threads)
        assert all(map(torch.equal, found, want)), threads


@pytest.mark.parametrize("name", NEAR)
def test_products_are_right_on_any_number_of_threads(name: str) -> None:
    module = NEAR[name]().double()
    want = step(module, torch.float64, 1)
    for threads in THREADS:
        torch.testing.assert_close(step(module, torch.float64, threads), want)


@pytest.mark.parametrize("active", [2, 64])
def test_experts_are_right_on_any_number_of_threads(active: int) -> None:
    """Few groups run one after the other, many side by side."""
    module = tops.GroupedLinear(64, 64, 64).double()
    splits = torch.zeros(64, dtype=torch.int64)
    splits[:active] = 512 // active
    x = torch.randn(512, 64, dtype=torch.float64, requires_grad=True)
    wanted = [x, *module.parameters()]

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        y = module(x, splits)
        return [y, *torch.autograd.grad(y.square().sum(), wanted)]

    want = results(1)
    side_by_side = {t: _C.groups_side_by_side(active, 512, 64 * 64, t) for t in THREADS}
    assert side_by_side == {t: active == 64 for t in THREADS}
    for threads in THREADS:
        torch.testing.assert_close(results(threads), want)


def test_loops_are_divided_as_the_page_says() -> None:
    # Under 65,536 elements a loop has one thread, and above each thread has 32,768 at least.
    cases = {65535: 1, 65536: 2, 3 * 32768: 3, 1 << 22: 128, 1 << 23: 128}
    assert {n: _C.threads_of_loop(n, 1, 1, 128) for n in cases} == cases
    assert _C.threads_of_loop(1 << 22, 1, 1, 16) == 16
    assert _C.threads_of_loop(0, 1, 1, 16) == 1
    # Rows are not divided, and a mask's range is not.
    assert _C.threads_of_loop(8, 1 << 20, 1, 128) == 8
    assert _C.threads_of_loop(65536, 1, 64, 128) == 2
    # A sum has parts by its size alone, 16 at most.
    assert [_C.parts_of_sum(rows, 1024) for rows in (0, 1, 128, 512, 65536)] == [1, 1, 2, 8, 16]
    # Groups run side by side if there are two for each thread, and each product is small.
    groups = [(127, 1), (128, 1), (128, 1 << 26)]
    found = [_C.groups_side_by_side(active, 8 * active, work, 64) for active, work in groups]
    assert found == [False, True, False]
