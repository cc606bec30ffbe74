"""Products of FP8 codes with a scale for each block, as plans for CUDA have them: decoded on the
CPU, and on CUDA where cuBLASLt has none. `pytest --emulate-cuda` runs them through the CUDA
bodies as well, whose scales are read in the layout that cuBLASLt documents.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from cuda_plans import (
    assert_as_exact,
    assert_near_in_norm,
    check_a_captured_step,
    check_that_compiled_code_has_no_break,
    check_that_no_host_reads_a_number,
    exact_step,
    on_cuda,
    run_for_cuda,
    step,
)
from cuda_plans import block as block_of
from plan_calls import plan_op
from test_fp8_products import assert_near_in_16_bits, by_columns, products
from test_scaled_products import assert_near
from torch import Tensor

import transformer_ops as tops
from transformer_ops import _C
from transformer_ops.plan.plan import Plan
from transformer_ops.quantization import available
from transformer_ops.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Format,
    MXFP8BlockScaling,
    Recipe,
)

o = torch.ops.transformer_ops

# Rows, input and output features; GPUs multiply some codes of the first two with scales of 128, and
# those of the third with scales of 32.
SIZES = [(256, 640, 144), (132, 128, 256), (160, 96, 288), (6, 130, 24), (1, 128, 16)]
every_size = pytest.mark.parametrize("size", SIZES, ids=str)
pairs = pytest.mark.parametrize(
    "elements", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2")], ids=str
)


def codes(*shape: int, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, the scales of their blocks, and all together in float64."""
    x = torch.randn(*shape) * torch.logspace(-3, 3, shape[-1])
    x = (x * torch.logspace(-2, 2, shape[-2]).unsqueeze(-1) if len(shape) > 1 else x).bfloat16()
    found, scale = o.quantize(x, format)
    wide = o.dequantize(found, scale, format, "float64")
    # Exact in the dtype of the product that a device has which multiplies no codes.
    assert torch.equal(wide, o.dequantize(found, scale, format, "bfloat16").double())
    return found, scale, wide


@pytest.fixture
def no_blocks() -> Iterator[None]:
    """On a GPU that multiplies codes of one scale alone."""
    torch.ops.transformer_ops_emulated.set_multiplies_blocks(False)
    torch.ops.transformer_ops_emulated.set_multiplies_mx(False)
    yield
    torch.ops.transformer_ops_emulated.set_multiplies_blocks(True)
    torch.ops.transformer_ops_emulated.set_multiplies_mx(True)


def rows_of(element: str, blocks: str) -> str:
    """The format of an operand that is summed along its rows; `blocks`: 1x128, 128x128 or mx."""
    return f"mx {element}" if blocks == "mx" else f"{element} {blocks}"


def columns_of(element: str, blocks: str) -> str:
    """The format of an operand that is summed along its columns; `blocks`: 128x1, 128x128 or mx."""
    return f"mx {element} 32x1" if blocks == "mx" else f"{element} {blocks}"


# ---- typed ops


@pairs
@every_size
@pytest.mark.parametrize("weight", ["1x128", "128x128", "mx"])
def test_forward(elements: tuple[str, str], size: tuple[int, int, int], weight: str) -> None:
    rows, k, n = size
    own = "mx" if weight == "mx" else "1x128"
    x, x_scale, wide_x = codes(rows, k, format=rows_of(elements[0], own))
    w, w_scale, wide_w = codes(n, k, format=rows_of(elements[1], weight))
    scales = (x_scale, w_scale)
    product = wide_x @ wide_w.t()
    for a in (x, by_columns(x)):
        for b in (w, by_columns(w)):
            assert_near(o.linear_scaled(a, b, *scales), product)
    strided = tuple(by_columns(scale) for scale in scales)
    assert_near(o.linear_scaled(x, w, *strided), product)
    size_of = product.abs().max()
    bias, extra = (size_of * torch.randn(n)).bfloat16(), (size_of * torch.randn(rows, n)).bfloat16()
    for e in (None, extra):
        got = o.linear_epilogue_scaled(x, w, bias, e, 1.0, *scales)
        want = product + bias.double() + (0 if e is None else e.double())
        assert_near_in_16_bits(got, want)
    got, kept = o.linear_bias_activation_scaled(x, w, bias, "gelu", True, *scales)
    want = product + bias.double()
    assert_near_in_16_bits(kept, want)
    assert_near_in_16_bits(got, torch.nn.functional.gelu(want, approximate="tanh"))
    kept = o.linear_bias_glu_scaled(
        x, w, bias, "reglu", 0, 1.0, 1.0, 7.0, 1.702, 1.0, True, *scales
    )[1]
    assert_near_in_16_bits(kept, want)


@pairs
@every_size
@pytest.mark.parametrize("weight", ["128x1", "128x128", "mx"])
def test_backward(elements: tuple[str, str], size: tuple[int, int, int], weight: str) -> None:
    rows, k, n = size
    by_rows, by_columns = ("mx", "mx") if weight == "mx" else ("1x128", "128x1")
    g, g_scale, wide_g = codes(rows, n, format=rows_of(elements[0], by_rows))
    w, w_scale, wide_w = codes(n, k, format=columns_of(elements[1], weight))
    got, none = o.linear_backward_scaled(g, None, w, [True, False], g_scale, w_scale)
    assert_near(got, wide_g @ wide_w)
    assert none.numel() == 0 and none.dtype == torch.bfloat16
    g, g_scale, wide_g = codes(rows, n, format=columns_of(elements[0], by_columns))
    x, x_scale, wide_x = codes(rows, k, format=columns_of(elements[1], by_columns))
    got = o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)[1]
    assert_near(got, wide_g.t() @ wide_x)
    for dtype in (torch.float32, torch.bfloat16):
        buffer = torch.ones(n, k, dtype=dtype)
        o.linear_backward_scaled_into(g, x, None, [False, True], g_scale, x_scale, buffer, False)
        want = wide_g.t() @ wide_x + 1
        assert (buffer - want).abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize("shape", [(128,), (2, 0, 128), (2, 3, 128), (2, 64, 128)], ids=str)
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    x, x_scale, wide_x = codes(*shape, format="e4m3 1x128")
    w, w_scale, wide_w = codes(64, 128, format="e4m3 128x128")
    got = o.linear_scaled(x, w, x_scale, w_scale)
    assert got.shape == (*shape[:-1], 64)
    if got.numel() > 0:
        assert_near(got, wide_x @ wide_w.t())


def test_beside_other_operands() -> None:
    x, scale, wide = codes(32, 128, format="e4m3 1x128")
    w = torch.randn(64, 128).bfloat16()
    assert_near(o.linear_scaled(x, w, scale, None), wide @ w.double().t())
    assert_near(o.linear_scaled(w, x, None, scale), w.double() @ wide.t())
    one, factor = o.quantize_values(w, "e4m3", "float8_e4m3fn")
    want = wide @ (one.double() * factor.double()).t()
    assert_near(o.linear_scaled(x, one, scale, factor), want)


# Blocks that do not follow the sum, 128 x 128 on both sides, and of different formats.
@pytest.mark.parametrize(
    "formats",
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
def test_other_blocks_are_decoded(formats: tuple[str, str], request: pytest.FixtureRequest) -> None:
    x, x_scale, wide_x = codes(128, 256, format=formats[0])
    w, w_scale, wide_w = codes(128, 256, format=formats[1])
    emulated = request.config.getoption("--emulate-cuda") is not None
    if emulated:
        products()
    assert_near(o.linear_scaled(x, w, x_scale, w_scale), wide_x @ wide_w.t())
    if emulated:
        assert products() == ["plain 128x128x256 bfloat16 -> bfloat16"]


def test_what_scales_must_be() -> None:
    x, scale, _ = codes(32, 256, format="e4m3 1x128")
    w, one, g = torch.randn(64, 256).bfloat16(), torch.tensor(1.0), torch.randn(32, 64).bfloat16()
    rule = r"must be one float32 without dimensions, or one for each block of the codes of"
    for wrong in (scale[:31], scale[:, :1], scale.reshape(-1), torch.ones(32, 256)):
        with pytest.raises(RuntimeError, match=rf"\[linear_scaled\] left_scale {rule} input, got"):
            o.linear_scaled(x, w, wrong, None)
    with pytest.raises(RuntimeError, match=rf"\[linear_scaled\] right_scale {rule} weight, got"):
        o.linear_scaled(x, w, scale, torch.ones(64, 2))
    with pytest.raises(RuntimeError, match=r"\[linear_scaled\] left_scale must be one float32"):
        o.linear_scaled(x, w, scale.double(), None)
    with pytest.raises(RuntimeError, match=r"\[linear_scaled\] left_scale must be one float32"):
        o.linear_scaled(x, w, torch.tensor(127, dtype=torch.uint8), None)
    with pytest.raises(RuntimeError, match=rf"\[linear_scaled\] left_scale {rule} input, got"):
        o.linear_scaled(x, w, scale.byte(), None)
    name = r"\[linear_backward_scaled\]"
    with pytest.raises(RuntimeError, match=rf"{name} right_scale {rule} input, got"):
        o.linear_backward_scaled(g, x, None, [False, True], one, scale[1:])
    with pytest.raises(RuntimeError, match=rf"{name} left_scale {rule} grad_output, got"):
        o.linear_backward_scaled(g, x, None, [False, True], torch.ones(32, 1), scale)
    with pytest.raises(RuntimeError, match=rf"{name} output_mask must name one gradient"):
        o.linear_backward_scaled(g, x, w, [False, True], None, scale)
    buffer = torch.zeros(64, 256)
    with pytest.raises(RuntimeError, match=r"\[linear_backward_scaled_into\] right_scale"):
        o.linear_backward_scaled_into(g, x, None, [False, True], one, scale[1:], buffer, True)
    assert not buffer.any()


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


# ---- what CUDA's bodies ask cuBLASLt for


def asked(size: tuple[int, int, int], elements: tuple[str, str] = ("e4m3", "e4m3")) -> list[str]:
    """By forward, with and without an epilogue, and by both gradients, as `Float8BlockScaling`."""
    rows, k, n = size
    x, x_scale, _ = codes(rows, k, format=f"{elements[0]} 1x128")
    w, w_scale, _ = codes(n, k, format=f"{elements[1]} 128x128")
    g, g_scale, _ = codes(rows, n, format=f"{elements[0]} 1x128")
    bias, extra = torch.randn(n).bfloat16(), torch.randn(rows, n).bfloat16()
    products()
    o.linear_scaled(x, w, x_scale, w_scale)
    o.linear_epilogue_scaled(x, w, bias, extra, 1.0, x_scale, w_scale)
    o.linear_bias_activation_scaled(x, w, bias, "gelu", True, x_scale, w_scale)
    o.linear_backward_scaled(g, None, w, [True, False], g_scale, w_scale)
    x, x_scale, _ = codes(rows, k, format=f"{elements[1]} 128x1")
    g, g_scale, _ = codes(rows, n, format=f"{elements[0]} 128x1")
    o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)
    buffer = torch.zeros(n, k)
    o.linear_backward_scaled_into(g, x, None, [False, True], g_scale, x_scale, buffer, False)
    return products()


@pytest.mark.emulated
def test_codes_are_multiplied() -> None:
    # Sums are of full precision forward, too: cuBLASLt has no others with scales of blocks.
    assert asked((128, 256, 384)) == [
        "plain 128x384x256 e4m3/1x128 e4m3/128x128 -> bfloat16",
        "bias 128x384x256 e4m3/1x128 e4m3/128x128 -> bfloat16 beta=1",
        "gelu_aux_bias 128x384x256 e4m3/1x128 e4m3/128x128 -> bfloat16",
        "plain 128x256x384 e4m3/1x128 e4m3/128x128 -> bfloat16",
        "plain 384x256x128 e4m3/1x128 e4m3/1x128 -> bfloat16",
        "plain 384x256x128 e4m3/1x128 e4m3/1x128 -> float32 beta=1",
    ]
    found = asked((256, 128, 128), ("e5m2", "e4m3"))
    assert found[3:5] == [
        "plain 256x128x128 e5m2/1x128 e4m3/128x128 -> bfloat16",
        "plain 128x128x256 e5m2/1x128 e4m3/1x128 -> bfloat16",
    ]


@pytest.mark.emulated
def test_codes_of_mx_are_multiplied() -> None:
    x, x_scale, _ = codes(64, 96, format="mx e5m2")
    w, w_scale, _ = codes(160, 96, format="mx e4m3")
    products()
    o.linear_scaled(x, w, x_scale, w_scale)
    g, g_scale, _ = codes(64, 160, format="mx e4m3")
    w, w_scale, _ = codes(160, 96, format="mx e4m3 32x1")
    o.linear_backward_scaled(g, None, w, [True, False], g_scale, w_scale)
    g, g_scale, _ = codes(64, 160, format="mx e5m2 32x1")
    x, x_scale, _ = codes(64, 96, format="mx e4m3 32x1")
    o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)
    assert products() == [
        "plain 64x160x96 e5m2/mx e4m3/mx -> bfloat16",
        "plain 64x96x160 e4m3/mx e4m3/mx -> bfloat16",
        "plain 160x96x64 e5m2/mx e4m3/mx -> bfloat16",
    ]
    for rows, k, n in ((64, 80, 160), (64, 96, 144), (48, 96, 160)):
        x, x_scale, _ = codes(rows, k, format="mx e4m3")
        w, w_scale, _ = codes(n, k, format="mx e4m3")
        o.linear_scaled(x, w, x_scale, w_scale)
        assert products() == [f"plain {rows}x{n}x{k} bfloat16 -> bfloat16"]


# The numbers are neither subnormal nor infinite.
@pytest.mark.parametrize(("byte", "size"), [(0, 4.0), (1, 4.0), (254, 2**-5), (255, 1.0)])
def test_scales_of_mx_at_their_ends(byte: int, size: float) -> None:
    x, w = (torch.full((32, 32), number).to(torch.float8_e4m3fn) for number in (size, 1.0))
    scale = torch.full((32, 1), byte, dtype=torch.uint8)
    one = torch.full((32, 1), 127, dtype=torch.uint8)
    wide = o.dequantize(x, scale, "mx e4m3", "float64") @ w.double().t()
    got = o.linear_scaled(x, w, scale, one).double()
    torch.testing.assert_close(got, wide, rtol=0, atol=0, equal_nan=True)


def decoded(m: int, k: int, n: int) -> list[str]:
    return [
        f"plain {m}x{n}x{k} bfloat16 -> bfloat16",
        f"bias {m}x{n}x{k} bfloat16 -> bfloat16 beta=1",
        f"gelu_aux_bias {m}x{n}x{k} bfloat16 -> bfloat16",
        f"plain {m}x{k}x{n} bfloat16 -> bfloat16",
        f"plain {n}x{k}x{m} bfloat16 -> bfloat16",
        f"plain {n}x{k}x{m} bfloat16 -> float32 beta=1",
    ]


@pytest.mark.emulated
def test_elsewhere_they_are_decoded(no_blocks: None) -> None:
    assert asked((128, 256, 384)) == decoded(128, 256, 384)


@pytest.mark.emulated
def test_of_other_sizes_they_are_decoded() -> None:
    # Sums over 200 input features, over 200 output features, over 200 rows; 130 rows.
    assert asked((128, 200, 128))[:3] == decoded(128, 200, 128)[:3]
    assert asked((128, 128, 200))[:4] == decoded(128, 128, 200)[:4]
    assert asked((200, 128, 128))[4:] == decoded(200, 128, 128)[4:]
    assert "e4m3" in asked((200, 128, 128))[0]
    assert asked((130, 128, 128)) == decoded(130, 128, 128)
    assert asked((128, 128, 128), ("e5m2", "e5m2")) == decoded(128, 128, 128)


@pytest.mark.emulated
def test_decoded_products_are_right(no_blocks: None) -> None:
    test_forward(("e4m3", "e4m3"), (256, 640, 144), "128x128")
    test_backward(("e4m3", "e4m3"), (256, 640, 144), "128x128")
    test_forward(("e4m3", "e4m3"), (256, 640, 144), "mx")
    test_backward(("e4m3", "e4m3"), (256, 640, 144), "mx")


# ---- whole modules: the plan for CUDA, by the CPU's kernels or by emulated ones


def block(width: int = 128) -> tops.Sequential:
    return block_of(width, hidden=256)


RECIPES = [
    Float8BlockScaling(),
    Float8BlockScaling(fp8_format=Format.HYBRID),
    MXFP8BlockScaling(),
    MXFP8BlockScaling(fp8_format=Format.HYBRID),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.key)


def test_the_plan_for_a_gpu() -> None:
    """What the planner writes for CUDA is in tests/cpp/fuser/test_lower.cpp."""
    text = str(on_cuda(block(), torch.randn(4, 128).bfloat16(), RECIPES[0]).plans()[0])
    assert str(Plan.parse(text)) == text
    line = '  t1.rounded_weight, t1.rounded_weight_scale = quantize(p1.weight, "e4m3 128x128")\n'
    assert line in text and "quantize_dequantize" not in text
    scales = "t1.rounded_input_scale, t1.rounded_weight_scale"
    assert re.search(rf"= linear_bias_activation_scaled\(.*, {scales}\)\n", text)


@every_recipe
@pytest.mark.parametrize("width", [128, 80])
def test_a_module(recipe: Recipe, width: int, request: pytest.FixtureRequest) -> None:
    module = block(width)
    x = torch.randn(128, width).bfloat16()
    want = step(module, x, recipe)
    emulated = request.config.getoption("--emulate-cuda") is not None
    if emulated:
        products()
    found = run_for_cuda(module, x, recipe)
    if emulated:
        lines = products()
        is_mx = isinstance(recipe, MXFP8BlockScaling)
        blocks = "e4m3/mx e4m3/mx" if is_mx else "e4m3/1x128 e4m3/128x128"
        assert any(blocks in line for line in lines)
        # Sums over 80 columns are of decoded numbers.
        assert any("bfloat16 ->" in line for line in lines) == (width == 80)
    assert_near_in_norm(found, want)


@pytest.mark.emulated
def test_elsewhere_a_module_computes_what_the_recipe_says(no_blocks: None) -> None:
    """The same operands, bit for bit."""
    for recipe in RECIPES:
        module, x = block(), torch.randn(128, 128).bfloat16()
        want = step(module, x, recipe)
        for got, right in zip(run_for_cuda(module, x, recipe), want, strict=True):
            assert torch.equal(got, right)


def test_no_host_reads_a_number() -> None:
    check_that_no_host_reads_a_number(block(), torch.randn(128, 128).bfloat16(), RECIPES[0])


def test_frozen_weights_are_encoded_once() -> None:
    module, x = block(), torch.randn(128, 128).bfloat16()
    text = str(on_cuda(module, x, RECIPES[0]).plans()[0])
    parameters = list(module.parameters())
    counts, results = [], []
    with tops.frozen_weights():
        for _ in range(2):
            with torch.profiler.profile() as profile:
                y = o.run_plan(text, x, [], parameters)[0]
                results.append([y, *torch.autograd.grad(y.float().square().sum(), parameters)])
            names = [event.name.split("::")[-1] for event in profile.events()]
            counts.append([names.count("quantize"), names.count("run_call")])
    # Three inputs and three gradients, along both dimensions; three weights, whose blocks are the
    # same along both.
    # run_call encodes three saved inputs, and computes three values again.
    assert counts == [[12, 6], [9, 6]]
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_has_no_break(dynamic: bool) -> None:
    x = torch.randn(128, 128).bfloat16()
    check_that_compiled_code_has_no_break(block(), x, RECIPES[0], dynamic=dynamic)


def test_one_exact_operand_has_numbers_beside_it() -> None:
    module = tops.Sequential(tops.Linear(128, 32, bias=False), tops.GELU()).bfloat16()
    recipe = CustomRecipe(lambda role: "e4m3 1x128" if role.tensor_type == "input" else None)
    x = torch.randn(16, 128).bfloat16()
    assert "_scaled" not in str(on_cuda(module, x, recipe).plans()[0])
    for got, want in zip(run_for_cuda(module, x, recipe), step(module, x, recipe), strict=True):
        assert torch.equal(got, want)


# ---- what is said of it


def test_explain_says_what_is_emulated() -> None:
    module, x = block(), torch.randn(32, 128).bfloat16()
    step(module, x, RECIPES[0])
    formats = "input e4m3 1x128, weight e4m3 128x128, output gradient e4m3 1x128"
    note = module.explain().groups[0].note
    assert note == f"formats of products: {formats}; emulated, by products of decoded tensors"
    assert on_cuda(module, x, RECIPES[0]).explain().groups[0].note == (
        f"formats of products: {formats}; codes with a scale for each block are multiplied in FP8, "
        "with CUDA 12.9 on compute capability 9.0, and where sums are over multiples of 128, rows "
        "are multiples of 4 and columns of 16; all else is emulated, by products of decoded tensors"
    )


def test_explain_says_which_gpus_multiply_mxfp8() -> None:
    module = on_cuda(block(), torch.randn(32, 128).bfloat16(), MXFP8BlockScaling())
    assert module.explain().groups[0].note == (
        "formats of products: input mx e4m3, weight mx e4m3, output gradient mx e4m3; codes of "
        "MXFP8 are multiplied, with CUDA 12.9 from compute capability 10.0 on, and where sizes are "
        "multiples of 32; all else is emulated, by products of decoded tensors"
    )


def test_saved_codes_are_no_product() -> None:
    module = tops.Sequential(tops.Linear(64, 64), tops.GELU(), tops.Linear(64, 64), saved="fp8")
    module(torch.randn(4, 64).requires_grad_())
    assert "quantize(" in str(module.plans()[0])
    assert "multiplied" not in str(module.explain())


CHECKS = {
    "fp8_block_scaling": ((9, 0), (10, 0), "compute capability must be 9.0, got 10.0"),
    "mxfp8": ((10, 0), (9, 0), "compute capability must be at least 10.0, got 9.0"),
    "nvfp4": ((10, 0), (9, 0), "compute capability must be at least 10.0, got 9.0"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_which_device_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, reason = CHECKS[name]
    is_available = getattr(tops, f"is_{name}_available")
    emulated = "recipes are emulated, by products of decoded tensors"
    assert is_available("cpu") is True
    assert is_available("cpu", return_reason=True) == (True, f"on the CPU {emulated}")
    text = "device must be CPU or CUDA, got meta"
    assert is_available("meta", return_reason=True) == (False, text)
    info = SimpleNamespace(CUDA=None)
    monkeypatch.setattr(available, "build_info", lambda: info)
    found, said = is_available("cuda", return_reason=True)
    assert not found and "must be built with TRANSFORMER_OPS_CUDA=ON" in said
    info.CUDA = {"toolkit": "13.0", "architectures": "9.0a"}
    capability = [wrong]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    assert is_available("cuda", return_reason=True) == (False, f"{reason}: {emulated}")
    capability[0] = right
    assert is_available("cuda:0", return_reason=True) == (True, "")
    info.CUDA = {"toolkit": "12.8", "architectures": "9.0a"}
    text = f"the CUDA toolkit must be at least 12.9, got 12.8: {emulated}"
    assert is_available("cuda", return_reason=True) == (False, text)


# ---- on a GPU


@pytest.mark.cuda
@every_recipe
@pytest.mark.parametrize("width", [128, 80])
def test_a_gpu_has_the_cpus_numbers(recipe: Recipe, width: int) -> None:
    module = block(width)
    x = torch.randn(128, width).bfloat16()
    on_gpu = copy.deepcopy(module).cuda()
    want, got = step(module, x, recipe), step(on_gpu, x.cuda(), recipe)
    assert "= quantize(p1.weight, " in str(on_gpu.plans()[-1])
    assert_as_exact(got, want, exact_step(module, x))


@pytest.mark.cuda
def test_a_captured_step() -> None:
    module, x = block().cuda(), torch.randn(128, 128, device="cuda").bfloat16()
    check_a_captured_step(module, x, RECIPES[0])
