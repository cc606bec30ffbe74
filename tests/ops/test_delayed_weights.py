"""Weights held in FP8 with one scale: numbers of their format are written exactly."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.recipe import DelayedScaling, Format

QuantizedTensor = tops.QuantizedTensor
FORMATS = {"e4m3": Format.HYBRID, "e5m2": Format.E5M2}
ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
every_format = pytest.mark.parametrize("format", FORMATS)


def numbers(format: str) -> Tensor:
    """All that codes stand for with a scale of 1, as a matrix; 0 for NaN and infinities."""
    values = torch.arange(256, dtype=torch.uint8).view(ELEMENTS[format]).float()
    return torch.where(values.isfinite(), values, 0).view(8, 32)


def held(
    format: str, rows: int = 8, columns: int = 32, dtype: torch.dtype = torch.float32
) -> tops.BasicLinear:
    torch.manual_seed(0)
    with tops.quantized_model_init(recipe=DelayedScaling(fp8_format=FORMATS[format])):
        op = tops.BasicLinear(columns, rows, dtype=dtype)
    assert isinstance(op.weight, QuantizedTensor) and op.weight.format == format
    return op


def raw(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, QuantizedTensor)
    return tensor.codes.view(torch.uint8)


def is_power_of_two(scale: Tensor) -> bool:
    return bool(torch.frexp(scale).mantissa == 0.5)


WRITES: dict[str, Callable[[tops.BasicLinear, Tensor], object]] = {
    "copy_": lambda op, x: op.weight.copy_(x),
    "copy_ of float64": lambda op, x: op.weight.copy_(x.double()),
    "add_": lambda op, x: op.weight.zero_().add_(x),
    "out=": lambda op, x: torch.mul(x, 1, out=op.weight),
    "foreach": lambda op, x: torch._foreach_copy_([op.weight], [x]),
    "state dict": lambda op, x: op.load_state_dict({"weight": x}),
    "quantized of another format": lambda op, x: op.weight.copy_(
        QuantizedTensor.quantize(x, "e5m2 1x128" if "e5m2" in op.weight.format else "mx e4m3")
    ),
}


@every_format
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_numbers_of_the_format_stay_what_they_are(format: str, write: str) -> None:
    """Every code, for every largest magnitude that a tensor of them may have."""
    op, values = held(format), numbers(format)
    for most in values.abs().unique()[1:]:
        x = torch.where(values.abs() <= most, values, 0)
        for exponent in (-90, -9, 0, 3, 90):
            WRITES[write](op, x * 2.0**exponent)
            assert torch.equal(op.weight.dequantize(), x * 2.0**exponent), (most, exponent)
            assert op.weight.format == format and is_power_of_two(op.weight.scale)


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_in_16_bits(format: str, dtype: torch.dtype) -> None:
    op, values = held(format, dtype=dtype), numbers(format).to(dtype)
    op.weight.copy_(values)
    assert torch.equal(op.weight.dequantize(), values)
    assert torch.equal(op.weight.to(torch.float64), values.double())
    for value in values[:2].flatten().tolist():
        assert (op.weight.fill_(value) == value).all()


@torch.no_grad()
def test_other_numbers_have_the_scale_of_the_largest_magnitude() -> None:
    weight = held("e4m3").weight
    for value, scale in ((448.0, 1), (480.0, 2), (224.0, 0.5), (0.0, 1)):
        weight.fill_(value)
        assert weight.scale == scale and (weight == value).all()
    for value in (3.3, 0.1, 449.0):
        weight.fill_(value)
        torch.testing.assert_close(weight.scale, torch.tensor(value / 448))
        torch.testing.assert_close(weight.detach().dequantize(), torch.full((8, 32), value))
    for x in (torch.randn(8, 32), torch.where(torch.eye(8, 32) > 0, torch.inf, 1.0)):
        weight.copy_(x)
        want = QuantizedTensor.quantize(x, "e4m3")
        assert torch.equal(raw(weight), raw(want)) and weight.scale == want.scale
    weight.copy_(torch.where(torch.eye(8, 32) > 0, torch.nan, 1.0))
    assert torch.equal(weight.isnan(), torch.eye(8, 32) > 0)


@torch.no_grad()
def test_numbers_of_a_given_scale_are_written_as_they_are() -> None:
    """A checkpoint whose codes were made with a scale of 1 has such numbers."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = held("e4m3", 32, 32, dtype).weight
        quantizer = tops.Float8Quantizer(torch.ones(()), torch.zeros(()))
        quantized = quantizer(torch.rand(32, 32, dtype=dtype))
        plain = quantized.dequantize()
        weight.copy_(plain)
        assert torch.equal(weight.dequantize(), plain)
        weight.uniform_()
        weight.copy_(quantized)
        assert torch.equal(raw(weight), raw(quantized)) and weight.scale == 1


@every_format
@torch.no_grad()
def test_copies_between_quantized_tensors_take_codes(format: str) -> None:
    """Also between formats that differ in how a scale is made."""
    for own, other in ((format, format), (format, f"{format} pow2"), (f"{format} pow2", format)):
        target = QuantizedTensor.quantize(torch.randn(8, 32), own)
        source = QuantizedTensor.quantize(torch.randn(8, 32), other)
        target.copy_(source)
        assert torch.equal(raw(target), raw(source)) and target.scale == source.scale
        assert target.format == own


@every_format
def test_state_dicts_and_copies(format: str) -> None:
    op, other = held(format), held(format)
    with torch.no_grad():
        op.weight.normal_()
    file = io.BytesIO()
    torch.save(op.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    through_numbers = held(format)
    plain = nn.Linear(32, 8, bias=False)
    plain.load_state_dict(op.state_dict())
    through_numbers.load_state_dict(plain.state_dict())
    twins = (other, through_numbers, copy.deepcopy(op), pickle.loads(pickle.dumps(op)))
    for twin in twins:
        assert isinstance(twin.weight, QuantizedTensor) and twin.weight.format == format
        assert torch.equal(raw(twin.weight), raw(op.weight)) and twin.weight is not op.weight
        torch.testing.assert_close(twin.weight, op.weight, rtol=1e-6, atol=0)
    codes, scale = raw(op.weight).clone(), op.weight.scale.clone()
    op.to(torch.bfloat16)
    assert op.weight.dtype == torch.bfloat16 and op.weight.format == format
    assert torch.equal(raw(op.weight), codes) and op.weight.scale == scale


def make_block() -> tops.Sequential:
    torch.manual_seed(0)
    with tops.quantized_model_init(recipe=DelayedScaling()):
        return tops.Sequential(
            tops.RMSNorm(32), tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32, bias=False)
        )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_compiled_writes(backend: str) -> None:
    weight, twin = held("e4m3").weight, held("e4m3").weight
    write = torch.compile(lambda to, x: to.copy_(x), fullgraph=True, backend=backend)
    late = torch.where(torch.arange(256).view(8, 32) < 200, 1.0, 1.1)
    for x in (numbers("e4m3"), torch.randn(8, 32), late):
        write(weight, x)
        twin.copy_(x)
        assert torch.equal(raw(weight), raw(twin)) and weight.scale == twin.scale


@pytest.mark.parametrize("compiled", [False, True])
def test_training(compiled: bool) -> None:
    model, recipe = make_block(), DelayedScaling(amax_history_len=4)
    run = torch.compile(model, fullgraph=True, backend="inductor") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with tops.autocast(recipe=recipe):
            loss = (run(x) - y).square().mean()
        loss.backward()
        assert type(model[1].weight.grad) is Tensor
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_a_step_written_from_master_weights() -> None:
    """What an optimizer that keeps its own float32 weights copies in is rounded once."""
    weight = make_block()[1].weight
    master = torch.randn(64, 32)
    with torch.no_grad():
        weight.copy_(master)
    error = (weight.detach().dequantize() - master).abs() / master.abs()
    assert error[master.abs() > 1e-3].max() <= 1 / 16


def test_a_product_may_have_such_operands() -> None:
    custom = tops.recipe.CustomRecipe(lambda role: "e4m3 pow2")
    op, x = tops.BasicLinear(32, 8), torch.randn(4, 32)
    with torch.no_grad(), tops.autocast(recipe=custom):
        y = op(x)
        assert op.get_quantizer("forward", 0) == tops.Float8CurrentScalingQuantizer(
            force_pow_2_scales=True
        )
    operands = (QuantizedTensor.quantize(t, "e4m3 pow2").dequantize() for t in (x, op.weight))
    left, right = operands
    torch.testing.assert_close(y, left @ right.detach().t())
