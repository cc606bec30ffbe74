"""Products of pairs of NVFP4 codes, as plans for CUDA have them: decoded on the CPU, and on CUDA
where cuBLASLt has none. `pytest --emulate-cuda` runs them through the CUDA bodies as well, whose
codes and scales are read in the layout that cuBLASLt documents.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

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
from plan_calls import RUN_CALL, plan_op
from test_fp8_products import assert_near_in_16_bits, by_columns, products
from test_scaled_products import assert_near
from torch import Tensor

import transformer_ops as tops
from transformer_ops import _C
from transformer_ops.plan.plan import Plan
from transformer_ops.recipe import CustomRecipe, NVFP4BlockScaling, Recipe

o = torch.ops.transformer_ops

# Rows, input and output features; GPUs multiply codes of the first two, in forward of the third.
SIZES = [(64, 96, 160), (320, 160, 272), (7, 64, 16), (33, 80, 144), (5, 17, 9), (1, 1, 1)]
every_size = pytest.mark.parametrize("size", SIZES, ids=str)
weights = pytest.mark.parametrize("weight", ["nvfp4", "nvfp4 16x16"])


def numbers(*shape: int) -> Tensor:
    """In bfloat16, in which the codes times the scales of their blocks are exact; blocks differ."""
    x = torch.randn(*shape) * torch.logspace(-1, 1, shape[-1])
    return (x * torch.logspace(-1, 1, shape[-2]).unsqueeze(-1)).bfloat16()


def by_rows(*shape: int, format: str = "nvfp4") -> tuple[Tensor, Tensor, Tensor]:
    """Codes of what is summed along its rows, their scales, and all together in float64."""
    x = numbers(*shape)
    return (*o.quantize(x, format), o.quantize_dequantize(x, format, "float64"))


def along_columns(*shape: int, format: str = "nvfp4 16x1") -> tuple[Tensor, Tensor, Tensor]:
    """The same of what is summed along its columns."""
    x = numbers(*shape)
    return (*o.quantize_columns(x, format), o.quantize_dequantize(x, format, "float64"))


def of_columns(format: str) -> str:
    return "nvfp4 16x1" if format == "nvfp4" else format


@pytest.fixture
def no_nvfp4() -> Iterator[None]:
    """On a GPU before compute capability 10.0."""
    torch.ops.transformer_ops_emulated.set_multiplies_nvfp4(False)
    yield
    torch.ops.transformer_ops_emulated.set_multiplies_nvfp4(True)


# ---- codes


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


# ---- typed ops


@every_size
@weights
def test_forward(size: tuple[int, int, int], weight: str) -> None:
    rows, k, n = size
    x, x_scale, wide_x = by_rows(rows, k)
    w, w_scale, wide_w = by_rows(n, k, format=weight)
    scales, product = (x_scale, w_scale), wide_x @ wide_w.t()
    for a in (x, by_columns(x)):
        for b in (w, by_columns(w)):
            assert_near(o.linear_scaled(a, b, *scales), product)
    strided = tuple(torch.stack([scale, scale], 1)[:, 0] for scale in scales)
    assert_near(o.linear_scaled(x, w, *strided), product)
    size_of = product.abs().max()
    bias, extra = (size_of * torch.randn(n)).bfloat16(), (size_of * torch.randn(rows, n)).bfloat16()
    for e in (None, extra):
        for factor in (1.0, 0.5):
            got = o.linear_epilogue_scaled(x, w, bias, e, factor, *scales)
            want = factor * (product + bias.double()) + (0 if e is None else e.double())
            assert_near_in_16_bits(got, want)
    got, kept = o.linear_bias_activation_scaled(x, w, bias, "gelu", True, *scales)
    want = product + bias.double()
    assert_near_in_16_bits(kept, want)
    assert_near_in_16_bits(got, torch.nn.functional.gelu(want, approximate="tanh"))


@every_size
@weights
def test_backward(size: tuple[int, int, int], weight: str) -> None:
    rows, k, n = size
    g, g_scale, wide_g = by_rows(rows, n)
    w, w_scale, wide_w = along_columns(n, k, format=of_columns(weight))
    for b in (w, by_columns(w)):
        got, none = o.linear_backward_scaled(g, None, b, [True, False], g_scale, w_scale)
        assert_near(got, wide_g @ wide_w)
        assert none.numel() == 0 and none.dtype == torch.bfloat16
    g, g_scale, wide_g = along_columns(rows, n)
    x, x_scale, wide_x = along_columns(rows, k, format=of_columns(weight))
    got = o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)[1]
    assert_near(got, wide_g.t() @ wide_x)
    for dtype in (torch.float32, torch.bfloat16):
        buffer = torch.ones(n, k, dtype=dtype)
        o.linear_backward_scaled_into(g, x, None, [False, True], g_scale, x_scale, buffer, False)
        want = wide_g.t() @ wide_x + 1
        assert (buffer - want).abs().max() <= 2**-7 * want.abs().max()


@pytest.mark.parametrize("shape", [(1, 64), (2, 0, 64), (2, 3, 64), (2, 32, 64)], ids=str)
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    x, x_scale, wide_x = by_rows(*shape)
    w, w_scale, wide_w = by_rows(48, 64, format="nvfp4 16x16")
    got = o.linear_scaled(x, w, x_scale, w_scale)
    assert got.shape == (*shape[:-1], 48)
    if got.numel() > 0:
        assert_near(got, wide_x @ wide_w.t())
    g, g_scale, wide_g = by_rows(*shape)
    w, w_scale, wide_w = along_columns(64, 48, format="nvfp4 16x16")
    got = o.linear_backward_scaled(g, None, w, [True, False], g_scale, w_scale)[0]
    assert got.shape == (*shape[:-1], 48)
    if got.numel() > 0:
        assert_near(got, wide_g @ wide_w)


def test_a_sum_over_nothing() -> None:
    empty = [o.quantize(torch.zeros(rows, 0), "nvfp4") for rows in (4, 3)]
    (x, x_scale), (w, w_scale) = empty
    assert torch.equal(o.linear_scaled(x, w, x_scale, w_scale), torch.zeros(4, 3).bfloat16())
    (g, g_scale), (x, x_scale) = (
        o.quantize_columns(torch.zeros(0, h), "nvfp4 16x1") for h in (4, 3)
    )
    got = o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)[1]
    assert torch.equal(got, torch.zeros(4, 3).bfloat16())


@pytest.mark.parametrize("operand", ["x", "w"])
def test_a_block_that_is_no_number(operand: str) -> None:
    """Its scale is NaN, and so are the sums over it alone."""
    x, w = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    (x if operand == "x" else w)[3, 20] = float("nan")
    got = o.linear_scaled(*pairs_and_scales(x, w))
    lines = got.isnan().all(1 if operand == "x" else 0)
    assert lines[3] and got.isnan().sum() == 32


def pairs_and_scales(x: Tensor, w: Tensor) -> list[Tensor]:
    found = [o.quantize(x, "nvfp4"), o.quantize(w, "nvfp4")]
    return [codes for codes, _ in found] + [scale for _, scale in found]


def test_what_operands_must_be() -> None:
    x, scale, _ = by_rows(32, 64)
    w = torch.randn(48, 32).bfloat16()
    rule = r"must have a byte for each block of 16 or 16 x 16 codes of"
    name = r"\[linear_scaled\]"
    for wrong in (scale[:-1], scale[:64], scale.view(2, -1), torch.tensor(1.0), scale.float()):
        with pytest.raises(RuntimeError, match=rf"{name} left_scale (must|{rule} input)"):
            o.linear_scaled(x, x, wrong, scale)
    with pytest.raises(RuntimeError, match=rf"{name} right_scale {rule} weight, and 4 more, got n"):
        o.linear_scaled(x, x, scale, None)
    text = "must have pairs of codes where"
    with pytest.raises(RuntimeError, match=rf"{name} weight {text} input has such, got BFloat16"):
        o.linear_scaled(x, w, scale, None)
    with pytest.raises(RuntimeError, match=rf"{name} weight {text} input has such, got Byte"):
        o.linear_scaled(w, x, None, scale)
    with pytest.raises(RuntimeError, match=r"\[linear\] input must be float16, bfloat16, float32"):
        o.linear(x, x)
    name = r"\[linear_backward_scaled\]"
    g, g_scale, _ = along_columns(32, 48)
    y, y_scale, _ = along_columns(32, 64)
    plain = torch.randn(16, 48).bfloat16()
    with pytest.raises(RuntimeError, match=rf"{name} input {text} grad_output has such, got Byte"):
        o.linear_backward_scaled(plain, y, None, [False, True], None, y_scale)
    with pytest.raises(RuntimeError, match=rf"{name} right_scale {rule} input"):
        o.linear_backward_scaled(g, y, None, [False, True], g_scale, y_scale[1:])
    with pytest.raises(RuntimeError, match=rf"{name} left_scale {rule} grad_output"):
        o.linear_backward_scaled(g, y, None, [False, True], y_scale, y_scale)
    buffer = torch.zeros(48, 64)
    with pytest.raises(RuntimeError, match=r"\[linear_backward_scaled_into\] right_scale"):
        o.linear_backward_scaled_into(g, y, None, [False, True], g_scale, y_scale[1:], buffer, True)
    assert not buffer.any()


# ---- what CUDA's bodies ask cuBLASLt for


def asked(size: tuple[int, int, int]) -> list[str]:
    """By forward, with and without an epilogue, and by both gradients, as `NVFP4BlockScaling`."""
    rows, k, n = size
    x, x_scale, _ = by_rows(rows, k)
    w, w_scale, _ = by_rows(n, k, format="nvfp4 16x16")
    bias, extra = torch.randn(n).bfloat16(), torch.randn(rows, n).bfloat16()
    products()
    o.linear_scaled(x, w, x_scale, w_scale)
    o.linear_epilogue_scaled(x, w, bias, extra, 1.0, x_scale, w_scale)
    o.linear_bias_activation_scaled(x, w, bias, "gelu", True, x_scale, w_scale)
    g, g_scale, _ = by_rows(rows, n)
    w, w_scale, _ = along_columns(n, k, format="nvfp4 16x16")
    o.linear_backward_scaled(g, None, w, [True, False], g_scale, w_scale)
    g, g_scale, _ = along_columns(rows, n)
    x, x_scale, _ = along_columns(rows, k)
    o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)
    buffer = torch.zeros(n, k)
    o.linear_backward_scaled_into(g, x, None, [False, True], g_scale, x_scale, buffer, False)
    return products()


@pytest.mark.emulated
def test_codes_are_multiplied() -> None:
    assert asked((64, 96, 160)) == [
        "plain 64x160x96 nvfp4 nvfp4 -> bfloat16 factors",
        "bias 64x160x96 nvfp4 nvfp4 -> bfloat16 beta=1 factors",
        "gelu_aux_bias 64x160x96 nvfp4 nvfp4 -> bfloat16 factors",
        "plain 64x96x160 nvfp4 nvfp4 -> bfloat16 factors",
        "plain 160x96x64 nvfp4 nvfp4 -> bfloat16 factors",
        "plain 160x96x64 nvfp4 nvfp4 -> float32 beta=1 factors",
    ]


def decoded(m: int, k: int, n: int) -> list[str]:
    # If a size is odd, the last pair is half empty.
    even_k, even_m, even_n = (size + size % 2 for size in (k, m, n))
    return [
        f"plain {m}x{n}x{even_k} bfloat16 -> bfloat16",
        f"bias {m}x{n}x{even_k} bfloat16 -> bfloat16 beta=1",
        f"gelu_aux_bias {m}x{n}x{even_k} bfloat16 -> bfloat16",
        f"plain {m}x{k}x{even_n} bfloat16 -> bfloat16",
        f"plain {n}x{k}x{even_m} bfloat16 -> bfloat16",
        f"plain {n}x{k}x{even_m} bfloat16 -> float32 beta=1",
    ]


@pytest.mark.emulated
def test_elsewhere_they_are_decoded(no_nvfp4: None) -> None:
    assert asked((64, 96, 160)) == decoded(64, 96, 160)
    assert asked((33, 31, 24)) == decoded(33, 31, 24)


@pytest.mark.emulated
def test_of_other_sizes_they_are_decoded() -> None:
    # Sums over 80 input features, over 144 output features, over 33 rows; 40 output features.
    assert asked((64, 80, 160))[:3] == decoded(64, 80, 160)[:3]
    assert asked((64, 96, 144))[3] == decoded(64, 96, 144)[3]
    assert asked((33, 96, 160))[4:] == decoded(33, 96, 160)[4:]
    assert "nvfp4" in asked((33, 96, 160))[0]
    assert asked((64, 96, 40))[:3] == decoded(64, 96, 40)[:3]


@pytest.mark.emulated
@pytest.mark.parametrize("size", [(64, 96, 160), (5, 17, 9)], ids=str)
def test_decoded_products_are_right(size: tuple[int, int, int], no_nvfp4: None) -> None:
    for weight in ("nvfp4", "nvfp4 16x16"):
        test_forward(size, weight)
        test_backward(size, weight)


# ---- whole modules: the plan for CUDA, by the CPU's kernels or by emulated ones


def block(width: int = 64) -> tops.Sequential:
    return block_of(width, hidden=96)


AT_RANDOM = NVFP4BlockScaling()
RECIPES = [
    NVFP4BlockScaling(disable_stochastic_rounding=True),
    NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    CustomRecipe(lambda role: "nvfp4"),
    NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="all"),
]
every_recipe = pytest.mark.parametrize(
    "recipe", RECIPES, ids=["hadamard", "plain", "rows", "4over6"]
)


def test_the_plan_for_a_gpu() -> None:
    """What the planner writes for CUDA is in tests/cpp/fuser/test_lower_recipes.cpp."""
    text = str(on_cuda(block(), torch.randn(4, 64).bfloat16(), AT_RANDOM).plans()[0])
    assert str(Plan.parse(text)) == text
    for line in (
        '  t1.rounded_weight, t1.rounded_weight_scale = quantize(p1.weight, "nvfp4 16x16")\n',
        ' = quantize_columns.saved(g2, s1.weight, "nvfp4 16x16")\n',
        ' = quantize_columns_stochastic(t1.turned_grad_output, "nvfp4 16x1")\n',
    ):
        assert line in text, text
    assert "quantize_values" not in text


@every_recipe
@pytest.mark.parametrize(("rows", "width"), [(64, 64), (64, 80), (37, 41)])
def test_a_module(recipe: Recipe, rows: int, width: int, request: pytest.FixtureRequest) -> None:
    module = block(width)
    x = torch.randn(rows, width).bfloat16()
    want = step(module, x, recipe)
    emulated = request.config.getoption("--emulate-cuda") is not None
    if emulated:
        products()
    found = run_for_cuda(module, x, recipe)
    if emulated:
        lines = products()
        assert any("nvfp4" in line for line in lines) == (width != 41)
        # Sums over 80 columns are of decoded numbers.
        assert any("bfloat16 ->" in line for line in lines) == (width != 64)
    for got, right in zip(found, want, strict=True):
        assert got.dtype == right.dtype == torch.bfloat16 and got.shape == right.shape
        if emulated:
            assert (got - right).double().norm() <= 2**-5 * right.double().norm()
        else:
            assert torch.equal(got, right)


@pytest.mark.emulated
@pytest.mark.parametrize("width", [64, 41])
def test_elsewhere_a_module_computes_what_the_recipe_says(width: int, no_nvfp4: None) -> None:
    """The same operands, bit for bit, and the same random numbers."""
    for recipe in (*RECIPES, AT_RANDOM):
        module, x = block(width), torch.randn(64, width).bfloat16()
        torch.manual_seed(3)
        want = step(module, x, recipe)
        torch.manual_seed(3)
        for got, right in zip(run_for_cuda(module, x, recipe), want, strict=True):
            assert torch.equal(got, right)


@pytest.mark.emulated
def test_gradients_at_random_are_multiplied_as_codes() -> None:
    module, x = block(), torch.randn(64, 64).bfloat16()
    torch.manual_seed(3)
    want = step(module, x, AT_RANDOM)
    products()
    torch.manual_seed(3)
    found = run_for_cuda(module, x, AT_RANDOM)
    assert all("nvfp4 nvfp4" in line for line in products())
    for got, right in zip(found, want, strict=True):
        assert (got - right).double().norm() <= 0.35 * right.double().norm()


def test_no_host_reads_a_number() -> None:
    check_that_no_host_reads_a_number(block(), torch.randn(64, 64).bfloat16(), RECIPES[0])


def test_frozen_weights_are_encoded_once() -> None:
    module, x = block(), torch.randn(64, 64).bfloat16()
    text = str(on_cuda(module, x, RECIPES[0]).plans()[0])
    parameters = list(module.parameters())
    counts, results = [], []
    with tops.frozen_weights():
        for _ in range(2):
            with torch.profiler.profile() as profile:
                y = o.run_plan(text, x, [], parameters)[0]
                results.append([y, *torch.autograd.grad(y.float().square().sum(), parameters)])
            names = [event.name.split("::")[-1] for event in profile.events()]
            counts.append([names.count(name) for name in ("quantize", "run_call")])
    # Three inputs, weights and gradients by rows; three inputs and weights by columns.
    # Three of the calls of run_call compute values again.
    assert counts == [[9, 9], [6, 6]]
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_has_no_break(dynamic: bool) -> None:
    x = torch.randn(64, 64).bfloat16()
    check_that_compiled_code_has_no_break(block(), x, RECIPES[0], dynamic=dynamic, error=2**-5)


def test_one_exact_operand_has_values_beside_it() -> None:
    module = tops.Sequential(tops.Linear(32, 32, bias=False), tops.GELU()).bfloat16()
    recipe = CustomRecipe(lambda role: "nvfp4" if role.tensor_type == "input" else None)
    x = torch.randn(16, 32).bfloat16()
    plan = on_cuda(module, x, recipe).plans()[0]
    assert 'quantize_values(x0, "nvfp4", "bfloat16")' in str(plan)
    assert_near_in_norm(run_for_cuda(module, x, recipe), step(module, x, recipe))


# ---- what is said of it


def test_explain_says_which_gpus_multiply_it() -> None:
    module, x = block(), torch.randn(32, 64).bfloat16()
    step(module, x, AT_RANDOM)
    formats = (
        "formats of products: input nvfp4, weight nvfp4 16x16, output gradient nvfp4, both turned "
        "by a Hadamard transform for the weight's gradient, gradients rounded stochastically"
    )
    note = module.explain().groups[0].note
    assert note == f"{formats}; emulated, by products of decoded tensors"
    assert on_cuda(module, x, AT_RANDOM).explain().groups[0].note == (
        f"{formats}; codes of NVFP4 are multiplied, with CUDA 12.9 from compute capability 10.0 "
        "on, and where sums are over multiples of 32 and columns are multiples of 16; all else is "
        "emulated, by products of decoded tensors"
    )


# ---- on a GPU


@pytest.mark.cuda
@every_recipe
@pytest.mark.parametrize(("rows", "width"), [(64, 64), (64, 80), (37, 41)])
def test_a_gpu_has_the_cpus_numbers(recipe: Recipe, rows: int, width: int) -> None:
    module = block(width)
    x = torch.randn(rows, width).bfloat16()
    on_gpu = copy.deepcopy(module).cuda()
    want, got = step(module, x, recipe), step(on_gpu, x.cuda(), recipe)
    assert "= quantize_columns.saved(" in str(on_gpu.plans()[-1])
    assert_as_exact(got, want, exact_step(module, x))


@pytest.mark.cuda
def test_a_captured_step() -> None:
    # The Hadamard transform too makes its constants on the device.
    x = torch.randn(64, 64, device="cuda").bfloat16()
    check_a_captured_step(block().cuda(), x, RECIPES[0])
