"""Codes that products on CUDA take. `pytest --emulate-cuda` encodes with CUDA's kernels as well."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_plans import DTYPES
from plan_calls import RUN_CALL, plan_op
from torch import Tensor

from transformer_ops import _C

o = torch.ops.transformer_ops


# ---- codes of FP8 instead of their values


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 7), (40, 72)], ids=str)
def test_codes_are_those_of_quantize(format: str, dtype: torch.dtype, shape: tuple) -> None:
    x = torch.randn(shape).to(dtype)
    want, scale = o.quantize(x, format)
    calls = (
        o.quantize_values(x, format, DTYPES[format]),
        plan_op("quantize_values.saved")(x, x, format, DTYPES[format]),
        _C.decomposition("quantize_values", (x, format, DTYPES[format])),
    )
    for got, decodes in calls:
        assert got.dtype == want.dtype and decodes.dim() == 0 and decodes == scale
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("size", [1.0, 0.0, float("nan")])
def test_codes_by_a_given_scale(place: int, size: float) -> None:
    x, scale = torch.randn(40, 72) * size, torch.tensor([3.0, 0.1, 70.0])
    values = plan_op("quantize_values_scaled")(x, scale, place, "e5m2", "float32")
    arguments = (x, scale, place, "e5m2", "float8_e5m2")
    for found in (
        plan_op("quantize_values_scaled")(*arguments),
        plan_op("quantize_values_scaled.saved")(x, *arguments),
        _C.decomposition("quantize_values_scaled", arguments),
    ):
        assert found[0].dtype == torch.float8_e5m2
        for got, want in zip(found, values, strict=False):
            torch.testing.assert_close(got.float(), want, rtol=0, atol=0, equal_nan=True)


def test_codes_of_another_format_are_refused() -> None:
    x = torch.randn(4, 32)
    for format, dtype in (("e4m3", "float8_e5m2"), ("nvfp4", "float8_e5m2"), ("e5m2", "float8")):
        text = rf"\[quantize_values\] dtype must be that of a product, or .* got '{dtype}' for"
        with pytest.raises(RuntimeError, match=text):
            o.quantize_values(x, format, dtype)


@pytest.mark.parametrize("format", ["e4m3 1x128", "e5m2 128x1", "e4m3 128x128", "nvfp4"])
def test_quantize_in_backward(format: str) -> None:
    x = torch.randn(40, 130)
    want = o.quantize(x, format)
    for got in (
        plan_op("quantize.saved")(torch.ones(1), x, format),
        _C.decomposition("quantize.saved", (torch.ones(1), x, format)),
    ):
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- codes of NVFP4, in pairs


def pairs_of_rows(codes: Tensor, rows: int, h: int) -> Tensor:
    """What `quantize` has as pairs of columns."""
    each = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)[..., :h].reshape(rows, h)
    each = torch.cat([each, each.new_zeros(rows % 2, h)])
    return each[::2] | each[1::2] << 4


@pytest.mark.parametrize(
    "format", ["nvfp4 16x1", "nvfp4 16x16", "nvfp4 4over6 16x1", "nvfp4 4over6 mse 16x16"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (32, 48), (2, 9, 7), (3, 40, 72), (0, 5), (5, 0)])
def test_pairs_of_rows(format: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    rows, h = math.prod(shape[:-1]), shape[-1]
    codes, scale = o.quantize(x, format)
    want = pairs_of_rows(codes, rows, h)
    for got in (
        o.quantize_columns(x, format),
        plan_op("quantize_columns.saved")(torch.ones(1), x, format),
        _C.decomposition("quantize_columns", (x, format)),
    ):
        assert torch.equal(got[0], want) and torch.equal(got[1], scale)


def test_codes_at_random() -> None:
    x = torch.randn(64, 48)
    for format in ("nvfp4", "nvfp4 16x1", "nvfp4 16x16", "nvfp4 4over6 16x1"):
        codes, scale = plan_op("quantize_stochastic")(x, format)
        assert torch.equal(scale, o.quantize(x, format)[1])
        nearest = o.quantize_dequantize(x, format, "float64")
        found = o.dequantize(codes, scale, format, "float64")
        # A step of E2M1 is at most a third of the largest number of its block.
        assert (found - nearest).abs().max() <= x.abs().max() / 3 * 1.1
        assert (found != nearest).any()
        assert not torch.equal(codes, plan_op("quantize_stochastic")(x, format)[0])
        if format == "nvfp4":
            continue
        torch.manual_seed(1)
        codes, scale = plan_op("quantize_stochastic")(x, format)
        torch.manual_seed(1)
        got = plan_op("quantize_columns_stochastic")(x, format)
        assert torch.equal(got[0], pairs_of_rows(codes, 64, 48)) and torch.equal(got[1], scale)


def test_the_mean_of_codes_at_random() -> None:
    x = torch.randn(32, 16)
    total = torch.zeros(32, 16, dtype=torch.float64)
    for _ in range(400):
        total += o.dequantize(*plan_op("quantize_stochastic")(x, "nvfp4"), "nvfp4", "float64")
    nearest = (o.quantize_dequantize(x, "nvfp4", "float64") - x).abs().mean()
    assert (total / 400 - x).abs().mean() <= nearest / 4


@pytest.mark.parametrize("shape", [(32, 48), (2, 9, 7)], ids=str)
def test_what_compilers_know_of_codes(shape: tuple[int, ...]) -> None:
    """Sizes, and that nothing is written."""
    x, test_utils = torch.randn(shape), ("test_schema", "test_faketensor")
    for name in ("quantize_columns", "quantize_columns_stochastic", "quantize_stochastic"):
        for format in ("nvfp4 16x1", "nvfp4 16x16"):
            call = plan_op(name).arguments(x, format)
            torch.library.opcheck(RUN_CALL.default, call, test_utils=test_utils)


def test_other_formats_are_refused() -> None:
    x = torch.randn(4, 32)
    for name in ("quantize_columns", "quantize_columns_stochastic"):
        for format in ("nvfp4", "mx e4m3 32x1"):
            text = rf"\[{name}\] format must be of NVFP4 with blocks of 16 rows, got '{format}'"
            with pytest.raises(RuntimeError, match=text):
                plan_op(name)(x, format)
        with pytest.raises(RuntimeError, match=rf"\[{name}\] input must have at least 1 dimension"):
            plan_op(name)(x.sum(), "nvfp4 16x1")
    with pytest.raises(RuntimeError, match=r"\[quantize_stochastic\] format must be of NVFP4, got"):
        plan_op("quantize_stochastic")(x, "e4m3")
