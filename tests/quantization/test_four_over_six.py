"""NVFP4 with the choice of "4 over 6": bytes against the formulas of TransformerEngine in plain
torch, and what makes use of them."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from helpers import every_device, explained
from plan_calls import plan_op
from torch import Tensor

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.plan.plan import Plan
from transformer_ops.quantization.quantizers import quantizer_for

ops = torch.ops.transformer_ops
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
TIES = (E2M1[1:] + E2M1[:-1]) / 2
FORMATS = [
    f"nvfp4 4over6{mode}{largest}{block}"
    for mode in ("", " mse")
    for largest in ("", " 448")
    for block in ("", " 16x1", " 16x16")
]
every_format = pytest.mark.parametrize("format", FORMATS)


# ---- the formulas


class Blocks(NamedTuple):
    codes: Tensor  # of the padded tensor, one a number
    scales: Tensor  # E4M3, for each row of 16 numbers
    tensor_scale: Tensor


def e2m1(scaled: Tensor) -> Tensor:
    """Codes to the nearest, ties to even; what is too large becomes 6, and NaN, too."""
    magnitude = scaled.abs().nan_to_num(nan=6.0)
    lower = torch.searchsorted(TIES, magnitude)
    upper = torch.searchsorted(TIES, magnitude, right=True)
    code = torch.where(lower % 2 == 1, upper, lower)
    return code + 8 * scaled.signbit()


def value_of(codes: Tensor) -> Tensor:
    return E2M1[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)


def by_formula(x: Tensor, square: bool, largest: float, squared: bool) -> Blocks:
    """The scales of blocks of 16 numbers of a row, or of 16 x 16 (`reference_nvfp4.py` of
    TransformerEngine)."""
    blocks = x.reshape(x.shape[0], -1, 16)
    amax = x.abs().max()
    block_amax = blocks.abs().amax(2)
    if square:
        of_square = block_amax.reshape(-1, 16, block_amax.shape[1]).amax(1)
        block_amax = of_square.repeat_interleave(16, 0)
    scale = torch.tensor(largest * 6) / amax
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where((amax > 0) & amax.isfinite(), scale, torch.ones(()))
    base = block_amax / 6 * scale
    found = []
    for stretch in (1.0, 1.5):
        byte = (base * stretch).clamp(max=448.0).to(torch.float8_e4m3fn)
        encode = (1 / (byte.float() * (1 / scale))).clamp(max=torch.finfo(torch.float32).max)
        codes = e2m1(blocks * encode.unsqueeze(2))
        back = value_of(codes) * byte.float().unsqueeze(2) * amax / (6 * largest)
        error = back - blocks
        error = error * error if squared else error.abs()
        total = torch.zeros_like(block_amax)
        for i in range(16):
            total = total + error[:, :, i]
        if square:
            rows = total.reshape(-1, 16, total.shape[1])
            for half in (8, 4, 2, 1):
                rows = rows[:, :half] + rows[:, half:]
            total = rows.repeat_interleave(16, 1).reshape(total.shape)
        found.append((codes, byte, total))
    (codes6, byte6, error6), (codes4, byte4, error4) = found
    takes_four = error4 < error6
    return Blocks(
        torch.where(takes_four.unsqueeze(2), codes4, codes6).reshape(x.shape),
        torch.where(takes_four, byte4.view(torch.uint8), byte6.view(torch.uint8)),
        scale,
    )


def expected(x: Tensor, format: str) -> tuple[Tensor, Tensor, float]:
    """Codes of the tensor, one a number, scales as `quantize` stores them, and the tensor's."""
    words = format.split()
    columns, square = words[-1] == "16x1", words[-1] == "16x16"
    rows = x.reshape(-1, x.shape[-1]).float()
    if columns:
        rows = rows.t()
    height, width = rows.shape
    padded = torch.nn.functional.pad(rows, (0, -width % 16, 0, -height % 16 if square else 0))
    largest = 448.0 if "448" in words else 256.0
    found = by_formula(padded.contiguous(), square, largest, "mse" in words)
    codes, scales = found.codes[:height, :width], found.scales
    if square:
        scales = scales[::16]
    if columns:
        codes, scales = codes.t(), scales.t()
    return codes.reshape(x.shape), scales.flatten(), found.tensor_scale.item()


def hard(rows: int, h: int, seed: int = 0) -> Tensor:
    """Blocks of many sizes, some of zeros, some of few different numbers."""
    torch.manual_seed(seed)
    x = torch.randn(rows, h) * torch.exp2(torch.randint(-9, 5, (rows, 1)).float())
    x[:, ::7] = (4 * x[:, ::7]).round() / 4
    x[rows // 3] = 0
    x[rows // 2, : h // 2] *= 1e-3
    return x


def special(value: float) -> Tensor:
    x = hard(35, 50)
    x[3, 7], x[20, 40] = value, -value
    return x


CASES = {
    "random": hard(64, 160),
    "odd": hard(37, 45),
    "one row": hard(3, 1, 1)[:1],
    "zeros": torch.zeros(20, 40),
    "one huge": special(3e38),
    "infinity": special(math.inf),
    "subnormal": 1e-40 * hard(34, 48),
    "least": torch.full((17, 33), 1e-45),
    "ties": torch.arange(64 * 64).reshape(64, 64) % 13 / 2.0 - 3,
    "three dimensions": hard(34, 48).reshape(2, 17, 48),
}


@every_format
@pytest.mark.parametrize("case", CASES)
@every_device
def test_bytes_of_the_formulas(format: str, case: str, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = CASES[case].to(dtype)
        codes, scales, tensor_scale = expected(x, format)
        got, stored = (t.cpu() for t in ops.quantize(x.to(device), format))
        pairs = torch.stack([got % 16, got // 16], -1).flatten(-2)[..., : x.shape[-1]]
        assert torch.equal(pairs.long(), codes)
        assert torch.equal(stored[:-4], scales)
        assert stored[-4:].clone().view(torch.float32) == 1 / torch.tensor(tensor_scale)
        # Without codes on the way, the same.
        name = str(dtype).removeprefix("torch.")
        back = ops.dequantize(got, stored, format, name, x.shape)
        assert torch.equal(ops.quantize_dequantize(x.to(device), format, name).cpu(), back)


@every_format
@every_device
def test_nan_stays_in_its_block(format: str, device: str) -> None:
    x = torch.ones(32, 32, device=device)
    x[3, 5] = math.nan
    back = ops.quantize_dequantize(x, format, "float32")
    assert back.isnan().sum() == (256 if format.endswith("16x16") else 16)
    assert back[3, 5].isnan() and (back[16:, 16:] - 1).abs().max() <= 0.1


def test_a_block_of_the_paper() -> None:
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([10.0, 20, 30, 40])
    assert torch.equal(ops.quantize_dequantize(x, "nvfp4 4over6", "float32").round(), x)
    assert ops.quantize_dequantize(x, "nvfp4", "float32")[0, 2] < 27


# ---- what it is good for


@pytest.mark.parametrize("block", ["", " 16x1", " 16x16"])
def test_errors_are_smaller(block: str) -> None:
    x = torch.randn(256, 512)

    def error(format: str, power: int) -> float:
        found = ops.quantize_dequantize(x, format + block, "float32")
        return (found - x).abs().pow(power).mean().item()

    # Among 256 normal numbers the largest one says little of the others.
    least, most = (0.99, 1.01) if "16x16" in block else (0.9, 0.96)
    assert least < error("nvfp4 4over6", 1) / error("nvfp4", 1) < most
    assert error("nvfp4 4over6 mse", 2) < error("nvfp4 4over6", 2)
    assert error("nvfp4 4over6 mse", 2) < (1.01 if "16x16" in block else 0.9) * error("nvfp4", 2)


@pytest.mark.parametrize(
    ("block", "wanted"), [("", (20.4, 21.1, 21.2)), (" 16x16", (19.1, 19.1, 19.1))]
)
def test_ratios_that_the_docs_name(block: str, wanted: tuple[float, ...]) -> None:
    """docs/quantization.md, in dB, of normal numbers."""
    x = torch.randn(1024, 1024)
    for name, ratio in zip(("nvfp4", "nvfp4 4over6", "nvfp4 4over6 mse"), wanted, strict=True):
        noise = ops.quantize_dequantize(x, name + block, "float32") - x
        found = 10 * (x.square().mean() / noise.square().mean()).log10().item()
        assert abs(found - ratio) < 0.1


@pytest.mark.parametrize("format", ["nvfp4 4over6", "nvfp4 4over6 mse 16x1", "nvfp4 4over6 16x16"])
def test_at_random(format: str) -> None:
    """By the scales of rounding to the nearest, and the mean is kept."""
    x = torch.randn(32, 48)
    _, scale = ops.quantize(x, format)
    ones = torch.full((32, 24), 0x22, dtype=torch.uint8)
    unit = ops.dequantize(ones, scale, format, "float32", x.shape)
    total = torch.zeros_like(x)
    for _ in range(400):
        found = ops.quantize_dequantize_stochastic(x, format, "float32")
        assert torch.isin((found / unit).abs().mul(4).round(), 4 * E2M1).all()
        total += found
    bound = 5 * 2 * unit / math.sqrt(400)
    assert ((total / 400 - x).abs() <= bound).all()


@every_device
@pytest.mark.parametrize("format", ["nvfp4 4over6", "nvfp4 4over6 mse 16x1", "nvfp4 4over6 16x16"])
def test_groups_are_tensors_of_their_own(format: str, device: str) -> None:
    x, sizes = hard(70, 40).to(device), [33, 0, 20]
    splits = torch.tensor(sizes, device=device)
    (got,) = plan_op("quantize_dequantize_groups")([x], splits, format, "float32")
    parts = [ops.quantize_dequantize(p, format, "float32") for p in x[:53].split(sizes)]
    assert torch.equal(got[:53], torch.cat(parts)) and not got[53:].any()


# ---- the recipe

RULES = {"none": (), "weights": ("weight",), "activations": ("input",), "all": ("input", "weight")}


@pytest.mark.parametrize("scope", RULES)
@pytest.mark.parametrize("uses_256", RULES)
@pytest.mark.parametrize("mode", ["MAE", "MSE"])
def test_formats_of_a_recipe(scope: str, uses_256: str, mode: str) -> None:
    recipe = recipes.NVFP4BlockScaling(
        nvfp4_4over6=scope, nvfp4_4over6_e4m3_use_256=uses_256, nvfp4_4over6_err_mode=mode
    )

    def format(tensor: str) -> str:
        if tensor not in RULES[scope]:
            return "nvfp4"
        return f"nvfp4 4over6{' mse' * (mode == 'MSE')}{' 448' * (tensor not in RULES[uses_256])}"

    assert recipe.operands == (format("input"), format("weight") + " 16x16", "nvfp4")
    assert recipe.key == ", ".join([*recipe.operands, "hadamard", "stochastic"])


def test_plans_of_a_recipe() -> None:
    block = tops.Sequential(tops.Linear(32, 48), tops.GELU(), tops.Linear(48, 16))
    recipe = recipes.NVFP4BlockScaling(nvfp4_4over6="all")
    with tops.autocast(recipe=recipe):
        y = block(torch.randn(32, 32, requires_grad=True))
        (plan,) = block.plans()
    y.sum().backward()
    assert plan.recipe == recipe.key and Plan.parse(plan.text) == plan
    # The transformed input by columns, too; gradients without the choice.
    for call in (
        'quantize_dequantize(x0, "nvfp4 4over6", ',
        'quantize_dequantize(p0.weight, "nvfp4 4over6 16x16", ',
        'quantize_dequantize.saved(g1, s0.weight, "nvfp4 4over6 16x16", ',
        'quantize_dequantize.saved(g1, t0.turned_input, "nvfp4 4over6 16x1", ',
        'quantize_dequantize_stochastic(g1, "nvfp4", ',
        'quantize_dequantize_stochastic(t0.turned_grad_output, "nvfp4 16x1", ',
    ):
        assert call in plan.text
    formats = "input nvfp4 4over6, weight nvfp4 4over6 16x16, output gradient nvfp4"
    assert formats in explained(block)


def test_weights_are_held_so() -> None:
    with tops.quantized_model_init(recipe=recipes.NVFP4BlockScaling(nvfp4_4over6="weights")):
        linear = tops.Linear(64, 32)
    weight: Any = linear.weight
    assert weight.format == "nvfp4 4over6 16x16"
    plain = weight.dequantize()
    with torch.no_grad():
        weight.mul_(2.0)
    assert weight.format == "nvfp4 4over6 16x16"
    assert torch.equal(weight.dequantize(), 2 * plain)


ARGUMENTS = list(itertools.product((False, True), (448, 256), ("MAE", "MSE")))


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_quantizers(arguments: tuple[bool, int, str]) -> None:
    columnwise, largest, mode = arguments
    quantizer = tops.NVFP4Quantizer(
        columnwise=columnwise,
        nvfp4_use_4over6=True,
        nvfp4_e4m3_max=largest,
        nvfp4_4over6_err_mode=mode,
    )
    assert quantizer.format in FORMATS and quantizer_for(quantizer.format) == quantizer
    x = torch.randn(32, 48)
    want = ops.quantize_dequantize(x, quantizer.format, "float32")
    assert torch.equal(quantizer(x).dequantize(), want)


def test_quantizers_of_an_op() -> None:
    op = tops.BasicLinear(16, 16)
    recipe = recipes.NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True)
    with tops.autocast(recipe=recipe):
        chosen = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}
        assert op.get_quantizer("forward", 0) == tops.NVFP4Quantizer(**chosen)
        assert op.get_quantizer("forward", 1) == tops.NVFP4Quantizer(True, **chosen)
        assert op.get_quantizer("backward", 0) == tops.NVFP4Quantizer(stochastic_rounding=True)


def test_errors() -> None:
    recipe, quantizer = recipes.NVFP4BlockScaling, tops.NVFP4Quantizer
    scopes = "'none', 'weights', 'activations', 'all'"
    for make, message in (
        (lambda: recipe(nvfp4_4over6="both"), rf"nvfp4_4over6 must be one of {scopes}, got 'both'"),
        (lambda: recipe(nvfp4_4over6=True), rf"nvfp4_4over6 must be one of {scopes}, got True"),
        (
            lambda: recipe(nvfp4_4over6_e4m3_use_256=256),
            rf"nvfp4_4over6_e4m3_use_256 must be one of {scopes}, got 256",
        ),
        (
            lambda: recipe(nvfp4_4over6_err_mode="mae"),
            "nvfp4_4over6_err_mode must be one of 'MAE', 'MSE', got 'mae'",
        ),
        (lambda: recipe(disable_rht="yes"), "disable_rht must be a bool, got 'yes'"),
        (lambda: quantizer(nvfp4_use_4over6="all"), "nvfp4_use_4over6 must be a bool, got 'all'"),
        (
            lambda: quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=240),
            "nvfp4_e4m3_max must be 448, or 256 with nvfp4_use_4over6, got 240",
        ),
        (
            lambda: quantizer(nvfp4_e4m3_max=256),
            "nvfp4_e4m3_max must be 448, or 256 with nvfp4_use_4over6, got 256",
        ),
        (
            lambda: quantizer(nvfp4_4over6_err_mode="RMS"),
            "nvfp4_4over6_err_mode must be 'MAE' or 'MSE', got 'RMS'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
