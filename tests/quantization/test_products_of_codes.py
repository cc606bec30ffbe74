"""Products of codes, as plans for CUDA have them: decoded on the CPU, and on CUDA where cuBLASLt
has none. `pytest --emulate-cuda` runs them through the CUDA bodies as well, whose codes and scales
are read in the layout that cuBLASLt documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cuda_plans import DTYPES
from test_scaled_products import assert_near
from torch import Tensor

o = torch.ops.transformer_ops
Size = tuple[int, int, int]
Pair = tuple[str, str]

# Rows, input and output features. GPUs multiply codes with one scale of the first size; codes with
# scales of 128 of the first two, those with scales of 32 of the third; codes of NVFP4 of the first
# two, and in forward of the third.
SIZES = {
    "fp8": [(32, 48, 64), (6, 20, 24)],
    "blocks": [(256, 640, 144), (132, 128, 256), (160, 96, 288), (6, 130, 24), (1, 128, 16)],
    "nvfp4": [(64, 96, 160), (320, 160, 272), (7, 64, 16), (33, 80, 144), (5, 17, 9), (1, 1, 1)],
}
SIZES["mx"] = SIZES["blocks"]


@dataclass(frozen=True)
class Formats:
    """The formats of both operands of each of the products of a Linear."""

    family: str
    forward: Pair  # input and weight
    of_input: Pair  # output gradient and weight
    of_weight: Pair  # output gradient and input

    def __str__(self) -> str:
        return f"{self.family}: {', '.join(self.forward)}"


def fp8(a: str, b: str) -> Formats:
    return Formats("fp8", (a, b), (a, b), (a, b))


def blocks(a: str, b: str, square: bool = True) -> Formats:
    rows, columns = ("128x128", "128x128") if square else ("1x128", "128x1")
    return Formats(
        "blocks",
        (f"{a} 1x128", f"{b} {rows}"),
        (f"{a} 1x128", f"{b} {columns}"),
        (f"{a} 128x1", f"{b} 128x1"),
    )


def mx(a: str, b: str) -> Formats:
    a, b = f"mx {a}", f"mx {b}"
    return Formats("mx", (a, b), (a, f"{b} 32x1"), (f"{a} 32x1", f"{b} 32x1"))


def nvfp4(square: bool = True) -> Formats:
    rows, columns = ("nvfp4 16x16", "nvfp4 16x16") if square else ("nvfp4", "nvfp4 16x1")
    return Formats("nvfp4", ("nvfp4", rows), ("nvfp4", columns), ("nvfp4 16x1", columns))


PAIRS = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")]
FORMATS = [
    *(fp8(*pair) for pair in (*PAIRS, ("e4m3", "e5m2"))),
    *(blocks(*pair, square) for pair in PAIRS for square in (False, True)),
    *(mx(*pair) for pair in PAIRS),
    *(nvfp4(square) for square in (False, True)),
]
# One of each family.
FIRST = [fp8("e4m3", "e4m3"), blocks("e4m3", "e4m3"), mx("e4m3", "e4m3"), nvfp4()]
every_format_and_size = pytest.mark.parametrize(
    ("formats", "size"), [(f, size) for f in FORMATS for size in SIZES[f.family]], ids=str
)


def codes(*shape: int, format: str, columns: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, their scale or the scales of their blocks, and all together in float64. With
    `columns`, a byte of NVFP4 has the codes of two rows, for a sum along the columns."""
    x, several = torch.randn(*shape), len(shape) > 1
    if format in DTYPES:
        found, scale = o.quantize_values(x.bfloat16(), format, DTYPES[format])
        return found, scale, found.double() * scale.double()
    # Blocks differ, and the codes times the scales of their blocks are exact in bfloat16.
    of_rows, of_columns = (2, 3) if not format.startswith("nvfp4") else (1, 1)
    x = x * torch.logspace(-of_columns, of_columns, shape[-1])
    x = x * torch.logspace(-of_rows, of_rows, shape[-2]).unsqueeze(-1) if several else x
    x = x.bfloat16()
    if format.startswith("nvfp4"):
        encode = o.quantize_columns if columns else o.quantize
        return (*encode(x, format), o.quantize_dequantize(x, format, "float64"))
    found, scale = o.quantize(x, format)
    wide = o.dequantize(found, scale, format, "float64")
    # Exact in the dtype of the product that a device has which multiplies no codes.
    assert torch.equal(wide, o.dequantize(found, scale, format, "bfloat16").double())
    return found, scale, wide


def by_columns(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def strided(scale: Tensor) -> Tensor:
    return torch.stack([scale, scale], -1)[..., 0]


def assert_near_in_16_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() <= 2**-7 * want.abs().max()


def products() -> list[str]:
    """What cuBLASLt was asked for since the last call, where it is emulated."""
    return torch.ops.transformer_ops_emulated.products()


# ---- numbers


@every_format_and_size
def test_forward(formats: Formats, size: Size) -> None:
    rows, k, n = size
    x, x_scale, wide_x = codes(rows, k, format=formats.forward[0])
    w, w_scale, wide_w = codes(n, k, format=formats.forward[1])
    scales, product = (x_scale, w_scale), wide_x @ wide_w.t()
    for a in (x, by_columns(x)):
        for b in (w, by_columns(w)):
            assert_near(o.linear_scaled(a, b, *scales), product)
    assert_near(o.linear_scaled(x, w, *map(strided, scales)), product)
    if formats.family == "fp8":
        assert_near(o.linear_scaled(x, w, None, None), x.double() @ w.double().t())
        assert_near(o.linear_scaled(x, w, x_scale, None), wide_x @ w.double().t())
    size_of = product.abs().max()
    bias, extra = (size_of * torch.randn(n)).bfloat16(), (size_of * torch.randn(rows, n)).bfloat16()
    want = product + bias.double()
    for e in (None, extra):
        for factor in (1.0, 0.5):
            got = o.linear_epilogue_scaled(x, w, bias, e, factor, *scales)
            assert_near_in_16_bits(got, factor * want + (0 if e is None else e.double()))
    got, kept = o.linear_bias_activation_scaled(x, w, bias, "gelu", True, *scales)
    assert_near_in_16_bits(kept, want)
    assert_near_in_16_bits(got, torch.nn.functional.gelu(want, approximate="tanh"))
    got, kept = o.linear_bias_activation_scaled(x, w, bias, "relu", True, *scales)
    assert_near_in_16_bits(got, want.relu())
    if n % 2 == 0:
        numbers = (0, 1.0, 1.0, 7.0, 1.702, 1.0, True)
        kept = o.linear_bias_glu_scaled(x, w, bias, "reglu", *numbers, *scales)[1]
        assert_near_in_16_bits(kept, want)


@every_format_and_size
def test_backward(formats: Formats, size: Size) -> None:
    rows, k, n = size
    g, g_scale, wide_g = codes(rows, n, format=formats.of_input[0])
    w, w_scale, wide_w = codes(n, k, format=formats.of_input[1], columns=True)
    for b in (w, by_columns(w)):
        got, none = o.linear_backward_scaled(g, None, b, [True, False], g_scale, w_scale)
        assert_near(got, wide_g @ wide_w)
        assert none.numel() == 0 and none.dtype == torch.bfloat16
    g, g_scale, wide_g = codes(rows, n, format=formats.of_weight[0], columns=True)
    x, x_scale, wide_x = codes(rows, k, format=formats.of_weight[1], columns=True)
    got = o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)[1]
    assert_near(got, wide_g.t() @ wide_x)
    for dtype in (torch.float32, torch.bfloat16):
        buffer = torch.ones(n, k, dtype=dtype)
        o.linear_backward_scaled_into(g, x, None, [False, True], g_scale, x_scale, buffer, False)
        want = wide_g.t() @ wide_x + 1
        assert (buffer - want).abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize("formats", FIRST, ids=str)
@pytest.mark.parametrize("shape", [(1,), (2, 0), (2, 3), (2, 64), ()], ids=str)
def test_any_number_of_rows(formats: Formats, shape: tuple[int, ...]) -> None:
    if formats.family == "nvfp4" and not shape:
        return  # whose pairs are in a matrix
    for pair, columns in ((formats.forward, False), (formats.of_input, True)):
        left, left_scale, wide_left = codes(*shape, 128, format=pair[0])
        # Both products sum over 128 and give 64 numbers a row.
        right, right_scale, wide_right = codes(
            *((128, 64) if columns else (64, 128)), format=pair[1], columns=columns
        )
        if columns:
            mask = [True, False]
            got = o.linear_backward_scaled(left, None, right, mask, left_scale, right_scale)[0]
        else:
            got = o.linear_scaled(left, right, left_scale, right_scale)
        assert got.shape == (*shape, 64)
        if got.numel() > 0:
            assert_near(got, wide_left @ (wide_right if columns else wide_right.t()))


@pytest.mark.parametrize("format", ["e4m3", "e4m3 1x128"])
def test_codes_and_numbers_together(format: str) -> None:
    x, scale, wide = codes(32, 128, format=format)
    w = torch.randn(64, 128).bfloat16()
    assert_near(o.linear_scaled(x, w, scale, None), wide @ w.double().t())
    assert_near(o.linear_scaled(w, x, None, scale), w.double() @ wide.t())
    one, factor = o.quantize_values(w, "e4m3", "float8_e4m3fn")
    want = wide @ (one.double() * factor.double()).t()
    assert_near(o.linear_scaled(x, one, scale, factor), want)
    g = torch.randn(32, 64).bfloat16()
    got = o.linear_backward_scaled(g, x, None, [False, True], None, scale)[1]
    assert_near(got, g.double().t() @ wide)


# Blocks that do not follow the sum, 128 x 128 on both sides, and of different formats.
@pytest.mark.parametrize(
    "pair",
    [
        ("e4m3 128x1", "e4m3 1x128"),
        ("e4m3 1x128", "e4m3 128x1"),
        ("e4m3 128x128", "e4m3 128x128"),
        ("mx e4m3 32x1", "mx e4m3"),
        ("mx e4m3", "mx e4m3 32x1"),
        ("mx e4m3", "e4m3 1x128"),
    ],
    ids=str,
)
def test_other_blocks_are_decoded(pair: Pair, request: pytest.FixtureRequest) -> None:
    x, x_scale, wide_x = codes(128, 256, format=pair[0])
    w, w_scale, wide_w = codes(128, 256, format=pair[1])
    emulated = request.config.getoption("--emulate-cuda") is not None
    if emulated:
        products()
    assert_near(o.linear_scaled(x, w, x_scale, w_scale), wide_x @ wide_w.t())
    if emulated:
        assert products() == ["plain 128x128x256 bfloat16 -> bfloat16"]


# The numbers are neither subnormal nor infinite.
@pytest.mark.parametrize(("byte", "size"), [(0, 4.0), (1, 4.0), (254, 2**-5), (255, 1.0)])
def test_scales_of_mx_at_their_ends(byte: int, size: float) -> None:
    x, w = (torch.full((32, 32), number).to(torch.float8_e4m3fn) for number in (size, 1.0))
    scale = torch.full((32, 1), byte, dtype=torch.uint8)
    one = torch.full((32, 1), 127, dtype=torch.uint8)
    wide = o.dequantize(x, scale, "mx e4m3", "float64") @ w.double().t()
    got = o.linear_scaled(x, w, scale, one).double()
    torch.testing.assert_close(got, wide, rtol=0, atol=0, equal_nan=True)


def test_a_sum_over_nothing() -> None:
    empty = [o.quantize(torch.zeros(rows, 0), "nvfp4") for rows in (4, 3)]
    (x, x_scale), (w, w_scale) = empty
    assert torch.equal(o.linear_scaled(x, w, x_scale, w_scale), torch.zeros(4, 3).bfloat16())
    (g, g_scale), (x, x_scale) = (
        o.quantize_columns(torch.zeros(0, h), "nvfp4 16x1") for h in (4, 3)
    )
    got = o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)[1]
    assert torch.equal(got, torch.zeros(4, 3).bfloat16())


@pytest.mark.parametrize("operand", [0, 1])
def test_a_block_that_is_no_number(operand: int) -> None:
    """Its scale is NaN, and so are the sums over it alone."""
    x = [torch.randn(32, 64).bfloat16() for _ in range(2)]
    x[operand][3, 20] = float("nan")
    (left, left_scale), (right, right_scale) = (o.quantize(t, "nvfp4") for t in x)
    got = o.linear_scaled(left, right, left_scale, right_scale)
    assert got.isnan().all(1 - operand)[3] and got.isnan().sum() == 32


# ---- what operands must be


def refuses(text: str, name: str, *arguments: Any) -> None:
    with pytest.raises(RuntimeError, match=text):
        getattr(o, name)(*arguments)


def test_what_codes_must_be() -> None:
    x, scale, _ = codes(32, 48, format="e4m3")
    w, g = torch.randn(64, 48), torch.randn(32, 64)
    of_weight = [False, True]
    text = r"must be float16, bfloat16, float32 or float64"
    refuses(text, "linear", x, x)
    refuses(text, "linear", w.bfloat16(), x)
    refuses(text, "linear_backward", x, None, x.t(), [True, False])
    refuses(text, "linear_backward", g.bfloat16(), x, None, of_weight)
    square = codes(64, 48, format="e4m3")[0]
    refuses(text, "linear_backward", g.bfloat16(), None, square, [True, False])
    # The product of codes is bfloat16.
    name = "linear_scaled"
    refuses(rf"\[{name}\] input must have the weight's dtype", name, x, w, scale, None)
    name, bias = "linear_epilogue_scaled", torch.ones(32)
    text = rf"\[{name}\] bias must have dtype BFl"
    refuses(text, name, x, x, bias, None, 1.0, scale, scale)
    name = "linear_backward_scaled"
    refuses(rf"\[{name}\] input must have dtype Float", name, g, x, None, of_weight, None, scale)


def test_what_scales_of_blocks_must_be() -> None:
    x, scale, _ = codes(32, 256, format="e4m3 1x128")
    w, one, g = torch.randn(64, 256).bfloat16(), torch.tensor(1.0), torch.randn(32, 64).bfloat16()
    rule = r"must be one float32 without dimensions, or one for each block of the codes of"
    name, of_weight = "linear_scaled", [False, True]
    for wrong in (scale[:31], scale[:, :1], scale.reshape(-1), torch.ones(32, 256), scale.byte()):
        refuses(rf"\[{name}\] left_scale {rule} input, got", name, x, w, wrong, None)
    text = rf"\[{name}\] right_scale {rule} weight, got"
    refuses(text, name, x, w, scale, torch.ones(64, 2))
    for wrong in (scale.double(), torch.tensor(127, dtype=torch.uint8)):
        refuses(rf"\[{name}\] left_scale must be one float32", name, x, w, wrong, None)
    name = "linear_backward_scaled"
    text = rf"\[{name}\] right_scale {rule} input, got"
    refuses(text, name, g, x, None, of_weight, one, scale[1:])
    text = rf"\[{name}\] left_scale {rule} grad_output, got"
    refuses(text, name, g, x, None, of_weight, torch.ones(32, 1), scale)
    text = rf"\[{name}\] output_mask must name one gradient"
    refuses(text, name, g, x, w, of_weight, None, scale)
    name, buffer = "linear_backward_scaled_into", torch.zeros(64, 256)
    text = rf"\[{name}\] right_scale"
    refuses(text, name, g, x, None, of_weight, one, scale[1:], buffer, True)
    assert not buffer.any()


def test_what_pairs_of_codes_must_be() -> None:
    x, scale, _ = codes(32, 64, format="nvfp4")
    w = torch.randn(48, 32).bfloat16()
    rule = r"must have a byte for each block of 16 or 16 x 16 codes of"
    name, of_weight = "linear_scaled", [False, True]
    for wrong in (scale[:-1], scale[:64], scale.view(2, -1), torch.tensor(1.0), scale.float()):
        refuses(rf"\[{name}\] left_scale (must|{rule} input)", name, x, x, wrong, scale)
    refuses(rf"\[{name}\] right_scale {rule} weight, and 4 more, got n", name, x, x, scale, None)
    text = "must have pairs of codes where"
    refuses(rf"\[{name}\] weight {text} input has such, got BFloat16", name, x, w, scale, None)
    refuses(rf"\[{name}\] weight {text} input has such, got Byte", name, w, x, None, scale)
    refuses(r"\[linear\] input must be float16, bfloat16, float32", "linear", x, x)
    name = "linear_backward_scaled"
    g, g_scale, _ = codes(32, 48, format="nvfp4 16x1", columns=True)
    y, y_scale, _ = codes(32, 64, format="nvfp4 16x1", columns=True)
    plain = torch.randn(16, 48).bfloat16()
    wrong = rf"\[{name}\] input {text} grad_output has such, got Byte"
    refuses(wrong, name, plain, y, None, of_weight, None, y_scale)
    wrong = rf"\[{name}\] right_scale {rule} input"
    refuses(wrong, name, g, y, None, of_weight, g_scale, y_scale[1:])
    refuses(
        rf"\[{name}\] left_scale {rule} grad_output", name, g, y, None, of_weight, y_scale, y_scale
    )
    name, buffer = "linear_backward_scaled_into", torch.zeros(48, 64)
    text = rf"\[{name}\] right_scale"
    refuses(text, name, g, y, None, of_weight, g_scale, y_scale[1:], buffer, True)
    assert not buffer.any()
