"""Quantizers, and which of them an op has."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.quantization.quantizers import quantizer_for

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("quantizer", "format"),
    [
        (tops.Float8CurrentScalingQuantizer(E5M2), "e5m2"),
        (tops.Float8CurrentScalingQuantizer(E4M3, force_pow_2_scales=True), "e4m3 pow2"),
        (tops.Float8BlockQuantizer(), "e4m3 1x128"),
        (tops.Float8BlockQuantizer(E5M2, columnwise=True), "e5m2 128x1"),
        (tops.Float8BlockQuantizer(block_scaling_dim=2), "e4m3 128x128"),
        (tops.MXFP8Quantizer(), "mx e4m3"),
        (tops.MXFP8Quantizer(E5M2, columnwise=True), "mx e5m2 32x1"),
        (tops.NVFP4Quantizer(), "nvfp4"),
        (tops.NVFP4Quantizer(columnwise=True), "nvfp4 16x1"),
        (tops.NVFP4Quantizer(with_2d_quantization=True), "nvfp4 16x16"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_formats(quantizer: Any, format: str) -> None:
    assert quantizer.format == format and quantizer_for(format) == quantizer
    x = torch.randn(33, 64, dtype=torch.bfloat16)
    found, want = quantizer(x), tops.QuantizedTensor.quantize(x, format)
    assert isinstance(found, tops.QuantizedTensor) and found.dtype == x.dtype
    assert torch.equal(found.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(found.scale, want.scale)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_given_scale(dtype: torch.dtype) -> None:
    x = torch.randn(33, 64)
    x[0, :3] = torch.tensor([1e9, -1e9, float("nan")])
    amax = torch.tensor(3.0)
    found = tops.Float8Quantizer(torch.tensor(7.3), amax, dtype)(x)
    largest = torch.finfo(dtype).max
    # Torch's cast after a clamp rounds in the same way.
    want = (x * 7.3).clamp(-largest, largest).to(dtype)
    assert torch.equal(found.codes.view(torch.uint8), want.view(torch.uint8))
    assert found.scale == 1 / torch.tensor(7.3) and amax.isnan()
    tops.Float8Quantizer(torch.ones(1), amax.fill_(0), dtype)(torch.tensor([[2.0, -5.0]]))
    assert amax == 5


NVFP4 = [
    tops.NVFP4Quantizer(stochastic_rounding=True),
    tops.NVFP4Quantizer(columnwise=True, stochastic_rounding=True),
    tops.NVFP4Quantizer(with_2d_quantization=True, stochastic_rounding=True),
    tops.NVFP4Quantizer(columnwise=True, with_rht=True),
    tops.NVFP4Quantizer(columnwise=True, with_rht=True, stochastic_rounding=True),
    # The transform is not applied by rows, nor to square blocks.
    tops.NVFP4Quantizer(with_rht=True),
    tops.NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
    tops.NVFP4Quantizer(with_2d_quantization=True, with_rht=True),
    tops.NVFP4Quantizer(with_2d_quantization=True, columnwise=True, with_rht=True),
]


@pytest.mark.parametrize("quantizer", NVFP4, ids=lambda quantizer: str(quantizer))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nvfp4_turned_and_at_random(quantizer: Any, dtype: torch.dtype) -> None:
    """What the steps of a recipe make of the tensor, bit for bit."""
    ops = torch.ops.transformer_ops
    x = torch.randn(2, 20, 48, dtype=dtype)
    x[0, :, 16:31], x[1] = 0, 1e-3 * x[1]
    x[0, 0, 0], x[1, 19, 47] = 300, -0.0
    torch.manual_seed(3)
    found = quantizer(x)
    assert found.dtype == dtype and found.shape == x.shape and found.format == quantizer.format
    turns = quantizer.with_rht and quantizer.columnwise
    numbers = ops.hadamard_columns(x, x) if turns else x
    torch.manual_seed(3)
    how = "_stochastic" if quantizer.stochastic_rounding else ""
    name = str(dtype).removeprefix("torch.")
    want = getattr(ops, f"quantize_dequantize{how}")(numbers, quantizer.format, name)
    assert torch.equal(found.dequantize(), want)
    assert quantizer.stochastic_rounding != torch.equal(
        found.codes, tops.QuantizedTensor.quantize(numbers, quantizer.format).codes
    )


def test_nvfp4_at_random_of_what_is_no_number() -> None:
    x = torch.zeros(32, 32)
    quantizer = tops.NVFP4Quantizer(stochastic_rounding=True)
    assert not quantizer(x).dequantize().any()
    x[0, 0], x[20, 20] = torch.nan, torch.inf
    nearest = tops.NVFP4Quantizer()(x).dequantize()
    torch.testing.assert_close(quantizer(x).dequantize(), nearest, equal_nan=True, rtol=0, atol=0)


def test_a_product_of_turned_tensors() -> None:
    x, grad = torch.randn(64, 32), torch.randn(64, 16)
    quantizer = tops.NVFP4Quantizer(columnwise=True, with_rht=True)
    got = quantizer(grad).dequantize().t() @ quantizer(x).dequantize()
    exact = grad.t() @ x
    assert 0.01 < (got - exact).norm() / exact.norm() < 0.2


def test_of_an_op_under_nvfp4() -> None:
    op = tops.BasicLinear(16, 16)
    with tops.autocast(recipe=recipes.NVFP4BlockScaling()):
        assert op.get_quantizer("forward", 0) == tops.NVFP4Quantizer(with_rht=True)
        assert op.get_quantizer("forward", 1) == tops.NVFP4Quantizer(with_2d_quantization=True)
        assert op.get_quantizer("backward", 0) == tops.NVFP4Quantizer(
            with_rht=True, stochastic_rounding=True
        )
    exact = recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    with tops.autocast(recipe=exact):
        assert op.get_quantizer("forward", 0) == tops.NVFP4Quantizer()
        assert op.get_quantizer("backward", 0) == tops.NVFP4Quantizer()
    with tops.autocast(recipe=recipes.NVFP4BlockScaling()):
        assert tops.Quantize().get_quantizer("forward", 0) == tops.NVFP4Quantizer(with_rht=True)


def test_of_an_op_by_columns_under_nvfp4() -> None:
    """What the product takes for the gradient of the weight."""
    op = tops.BasicLinear(32, 48)
    recipe = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    x, grad = torch.randn(64, 32, requires_grad=True), torch.randn(64, 48)
    with tops.autocast(recipe=recipe):
        op(x).backward(grad)
        of_input, of_grad = op.get_quantizer("forward", 0), op.get_quantizer("backward", 0)
    assert isinstance(of_input, tops.NVFP4Quantizer) and isinstance(of_grad, tops.NVFP4Quantizer)
    by_columns = [dataclasses.replace(q, columnwise=True) for q in (of_grad, of_input)]
    rounded = [q(t.detach()).dequantize() for q, t in zip(by_columns, (grad, x), strict=True)]
    torch.testing.assert_close(op.weight.grad, rounded[0].t() @ rounded[1])


def test_of_an_op() -> None:
    op, last = tops.BasicLinear(8, 8), tops.Linear(8, 8).basic_ops[0]
    with tops.autocast(recipe=recipes.Float8BlockScaling()):
        assert op.get_quantizer("forward", 0) == tops.Float8BlockQuantizer()
        assert op.get_quantizer("forward", 1) == tops.Float8BlockQuantizer(block_scaling_dim=2)
        assert op.get_quantizer("backward", 0) == tops.Float8BlockQuantizer()
        assert op.get_quantizer("forward", 2) is op.get_quantizer("backward", 1) is None
        assert tops.GELU().get_quantizer("forward", 0) is None
        quantize = tops.Quantize(forward=False, backward=True)
        assert quantize.get_quantizer("forward", 0) is None
        assert quantize.get_quantizer("backward", 0) == tops.Float8BlockQuantizer()
    # The op returns the quantizer of the last region.
    assert last.get_quantizer("forward", 0) == tops.Float8BlockQuantizer()
    answers = {"input": "mx e5m2", "weight": None, "grad_output": "int8 1x32"}
    custom = recipes.CustomRecipe(lambda role: answers[role.tensor_type])
    with tops.autocast(recipe=custom):
        assert op.get_quantizer("forward", 0) == tops.MXFP8Quantizer(E5M2)
        assert op.get_quantizer("forward", 1) is op.get_quantizer("backward", 0) is None
    with pytest.raises(ValueError, match=r"mode must be 'forward' or 'backward', got 'both'"):
        op.get_quantizer("both", 0)


def test_under_delayed_scaling() -> None:
    module = tops.Linear(8, 8)
    op, x = module.basic_ops[0], torch.randn(4, 8)
    for _ in range(2):
        with tops.autocast(recipe=recipes.DelayedScaling()):
            y = module(x)
        y.sum().backward()
    for mode, i, place, dtype in (("forward", 0, 0, E4M3), ("backward", 0, 2, E5M2)):
        found = op.get_quantizer(mode, i)
        assert found.scale == module.fp8_scale[place] and found.fp8_dtype == dtype
    # It counts as a call does.
    assert op.get_quantizer("forward", 0)(10 * x).format == "e4m3"
    assert module.fp8_amax[0] == (10 * x).abs().max()


def test_errors() -> None:
    one = torch.ones(())
    for make, message in (
        (lambda: tops.MXFP8Quantizer(torch.float16), "fp8_dtype must be torch.float8_e4m3fn or"),
        (lambda: tops.Float8BlockQuantizer(block_scaling_dim=3), "block_scaling_dim must be 1 or"),
        (lambda: tops.Float8BlockQuantizer(E4M3, True), "block_scaling_dim must be 1 or 2, got T"),
        (lambda: tops.NVFP4Quantizer("e2m1"), "with_2d_quantization must be a bool, got 'e2m1'"),
        (lambda: tops.MXFP8Quantizer(E4M3, 1), "columnwise must be a bool, got 1"),
        (lambda: tops.Float8CurrentScalingQuantizer(E4M3, 1), "force_pow_2_scales must be a bool"),
        (lambda: tops.NVFP4Quantizer(with_rht="yes"), "with_rht must be a bool, got 'yes'"),
        (lambda: tops.Float8Quantizer(1.0, one), "scale must be a float32 tensor of one number"),
        (lambda: tops.Float8Quantizer(one, torch.ones(2)), "amax must be a float32 tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
