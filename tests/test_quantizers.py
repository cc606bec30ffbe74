"""Quantizers, and which of them an op has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.quantizers import quantizer_for

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("quantizer", "format"),
    [
        (tops.Float8CurrentScalingQuantizer(E5M2), "e5m2"),
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
    # Of torch's cast, which rounds alike, after a clamp.
    want = (x * 7.3).clamp(-largest, largest).to(dtype)
    assert torch.equal(found.codes.view(torch.uint8), want.view(torch.uint8))
    assert found.scale == 1 / torch.tensor(7.3) and amax.isnan()
    tops.Float8Quantizer(torch.ones(1), amax.fill_(0), dtype)(torch.tensor([[2.0, -5.0]]))
    assert amax == 5


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
    # That of the last region.
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
        (lambda: tops.Float8Quantizer(1.0, one), "scale must be a float32 tensor of one number"),
        (lambda: tops.Float8Quantizer(one, torch.ones(2)), "amax must be a float32 tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
