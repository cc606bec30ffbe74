"""Products of 16-bit numbers in float32, as on processors without instructions for them.

They run so on any machine while oneDNN is switched off, which has PyTorch's products in 16 bits.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch
from helpers import block_bytes
from test_memory import HEADER, run_script
from torch import Tensor

import transformer_ops as tops

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")
typed = torch.ops.transformer_ops
every_short_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Rows, input and output features: below, at and above the sizes of a block.
SIZES = [(1, 3, 5), (40, 0, 8), (70, 512, 1024), (1030, 520, 6), (5, 1100, 1030), (1025, 30, 1025)]


@pytest.fixture(autouse=True)
def _without_onednn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def is_rounded_once(got: Tensor, want: Tensor) -> bool:
    """As near to `want` (float64) as it is in that dtype, up to what sums in float32 move."""
    error, least = (got.double() - want).norm(), (want.to(got.dtype).double() - want).norm()
    return got.shape == want.shape and bool(error <= 1.01 * least)


@every_short_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sums_are_rounded_once(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, k, n = size
    x, w, grad = (torch.randn(shape).to(dtype) for shape in ((rows, k), (n, k), (rows, n)))
    bias, start = torch.randn(n).to(dtype), torch.randn(rows, k).to(dtype)
    xd, wd, gd = x.double(), w.double(), grad.double()
    for stored in (lambda t: t, lambda t: t.t().contiguous().t()):
        assert is_rounded_once(typed.linear(stored(x), stored(w)), xd @ wd.t())
    got = typed.linear_epilogue(x, w, bias, None, 1.0)
    assert is_rounded_once(got, xd @ wd.t() + bias.double())
    dx, dw = typed.linear_residual_scale_backward(grad, start, x, w, 0.25, [True, True])
    assert is_rounded_once(dx, 0.25 * (gd @ wd) + start.double())
    assert is_rounded_once(dw, 0.25 * (gd.t() @ xd))


def test_memory_beside_the_operands_is_bounded() -> None:
    """Each more than those before it, because a process has one peak."""
    sizes = [(64, 256, 256), (100, 512, 1024), (1024, 512, 1024), (1024, 4096, 1024)]
    sizes += [(3072, 512, 1024), (2048, 2048, 4096)]
    script = (
        HEADER
        + f"""
torch.backends.mkldnn.enabled = False
for rows, inner, columns in {sizes}:
    x, w = torch.zeros(rows, inner).bfloat16(), torch.zeros(columns, inner).bfloat16()
    y = torch.ops.transformer_ops.linear(x, w)
    print(memory.stats().peak_in_use_bytes - memory.stats().in_use_bytes)
    del y
"""
    )
    found = [int(line) for line in run_script(script).splitlines()]
    assert found == [block_bytes(*size) for size in sizes]
    assert found[2:] == [2**23] * 4


@every_short_dtype
@pytest.mark.parametrize("onednn", [False, True])
def test_few_rows_are_not_worth_it(dtype: torch.dtype, onednn: bool) -> None:
    """A large matrix is read faster than it is converted."""

    def is_widened(rows: int) -> bool:
        x, w = torch.randn(rows, 256).to(dtype), torch.randn(64, 256).to(dtype)
        with torch.backends.mkldnn.flags(enabled=onednn), torch.profiler.profile() as profile:
            typed.linear(x, w)
        return "aten::copy_" in {event.name for event in profile.events()}

    found = [rows for rows in (1, 2, 3, 31, 32) if is_widened(rows)]
    assert found == [rows for rows in (1, 2, 3, 31, 32) if rows >= fewest_rows(dtype, onednn)]


def fewest_rows(dtype: torch.dtype, onednn: bool) -> int:
    processor = tops.processor()
    is_half = dtype is torch.float16
    if onednn and (processor.multiplies_float16 if is_half else processor.multiplies_bfloat16):
        return 1000  # never
    if onednn and not is_half and processor.level == "avx512":
        return 32  # oneDNN emulates bfloat16
    # An x86 processor without AVX2 converts float16 one number at a time.
    converts = processor.level != "default" or platform.machine() == "aarch64"
    return 3 if not is_half or converts else 1
