"""Products of codes in FP8, as plans for CUDA have them: decoded on the CPU, and on CUDA where
cuBLASLt has none. `pytest --emulate-cuda` runs them through the CUDA bodies as well.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from cuda_plans import (
    DTYPES,
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
from test_scaled_products import assert_near
from torch import Tensor

import transformer_ops as tops
from transformer_ops import _C
from transformer_ops.quantization import available
from transformer_ops.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, Recipe

o = torch.ops.transformer_ops

# Rows, input and output features; a GPU multiplies codes of the first.
SIZES = [(32, 48, 64), (6, 20, 24)]
pairs = pytest.mark.parametrize(
    "formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")], ids=str
)
every_size = pytest.mark.parametrize("size", SIZES, ids=str)


def codes(*shape: int, format: str = "e4m3") -> tuple[Tensor, Tensor, Tensor]:
    """Codes, their scale, and both together in float64."""
    x = torch.randn(*shape).bfloat16()
    found, scale = o.quantize_values(x, format, DTYPES[format])
    return found, scale, found.double() * scale.double()


def by_columns(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def products() -> list[str]:
    """What cuBLASLt was asked for since the last call, where it is emulated."""
    return torch.ops.transformer_ops_emulated.products()


@pytest.fixture
def no_codes() -> Iterator[None]:
    """On a GPU before compute capability 8.9."""
    torch.ops.transformer_ops_emulated.set_multiplies_codes(False)
    yield
    torch.ops.transformer_ops_emulated.set_multiplies_codes(True)


# ---- typed ops


@pairs
@every_size
def test_forward(formats: tuple[str, str], size: tuple[int, int, int]) -> None:
    rows, k, n = size
    x, x_scale, wide_x = codes(rows, k, format=formats[0])
    w, w_scale, wide_w = codes(n, k, format=formats[1])
    bias, extra = torch.randn(n).bfloat16(), torch.randn(rows, n).bfloat16()
    product = wide_x @ wide_w.t()
    for a in (x, by_columns(x)):
        for b in (w, by_columns(w)):
            assert_near(o.linear_scaled(a, b, x_scale, w_scale), product)
    assert_near(o.linear_scaled(x, w, None, None), x.double() @ w.double().t())
    assert_near(o.linear_scaled(x, w, x_scale, None), wide_x @ w.double().t())
    for e in (None, extra):
        for scale in (1.0, 0.5):
            got = o.linear_epilogue_scaled(x, w, bias, e, scale, x_scale, w_scale)
            want = scale * (product + bias.double()) + (0 if e is None else e.double())
            # A residual may be added to a product that was rounded.
            error = 2 * torch.finfo(torch.bfloat16).eps * (product.abs() + extra.abs()).max()
            assert got.dtype == torch.bfloat16 and (got.double() - want).abs().max() <= error
    for name in ("gelu", "relu"):
        got, kept = o.linear_bias_activation_scaled(x, w, bias, name, True, x_scale, w_scale)
        act = {"gelu": lambda y: torch.nn.functional.gelu(y, approximate="tanh")}
        want = act.get(name, torch.relu)(product + bias.double())
        assert_near_in_16_bits(got, want)
        if name == "gelu":
            assert_near_in_16_bits(kept, product + bias.double())
    got, kept = o.linear_bias_glu_scaled(
        x, w, bias, "reglu", 0, 1.0, 1.0, 7.0, 1.702, 1.0, True, x_scale, w_scale
    )
    assert_near_in_16_bits(kept, product + bias.double())


def assert_near_in_16_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() <= 2**-7 * want.abs().max()


@pairs
@every_size
def test_backward(formats: tuple[str, str], size: tuple[int, int, int]) -> None:
    rows, k, n = size
    g, g_scale, wide_g = codes(rows, n, format=formats[0])
    w, w_scale, wide_w = codes(n, k, format=formats[1])
    x, x_scale, wide_x = codes(rows, k, format=formats[1])
    got, none = o.linear_backward_scaled(g, None, w, [True, False], g_scale, w_scale)
    assert_near(got, wide_g @ wide_w)
    assert none.numel() == 0 and none.dtype == torch.bfloat16
    got = o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)[1]
    assert_near(got, wide_g.t() @ wide_x)
    for dtype in (torch.float32, torch.bfloat16):
        buffer = torch.ones(n, k, dtype=dtype)
        o.linear_backward_scaled_into(g, x, None, [False, True], g_scale, x_scale, buffer, False)
        want = wide_g.t() @ wide_x + 1
        assert (buffer - want).abs().max() <= 2**-7 * want.abs().max()


def test_codes_and_numbers_together() -> None:
    x, scale, wide = codes(32, 48)
    w = torch.randn(64, 48).bfloat16()
    assert_near(o.linear_scaled(x, w, scale, None), wide @ w.double().t())
    assert_near(o.linear_scaled(w, x, None, scale), w.double() @ wide.t())
    g = torch.randn(32, 64).bfloat16()
    got = o.linear_backward_scaled(g, x, None, [False, True], None, scale)[1]
    assert_near(got, g.double().t() @ wide)


@pytest.mark.parametrize("shape", [(48,), (2, 0, 48), (2, 3, 48)])
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    x, x_scale, wide_x = codes(*shape)
    w, w_scale, wide_w = codes(64, 48)
    got = o.linear_scaled(x, w, x_scale, w_scale)
    assert got.shape == (*shape[:-1], 64)
    if got.numel() > 0:
        assert_near(got, wide_x @ wide_w.t())


def test_what_operands_must_be() -> None:
    x, scale, _ = codes(32, 48)
    w, g = torch.randn(64, 48), torch.randn(32, 64)
    for call in (
        lambda: o.linear(x, x),
        lambda: o.linear(w.bfloat16(), x),
        lambda: o.linear_backward(x, None, x.t(), [True, False]),
        lambda: o.linear_backward(g.bfloat16(), x, None, [False, True]),
        lambda: o.linear_backward(g.bfloat16(), None, codes(64, 48)[0], [True, False]),
    ):
        with pytest.raises(RuntimeError, match=r"must be float16, bfloat16, float32 or float64"):
            call()
    # The product of codes is bfloat16.
    with pytest.raises(RuntimeError, match=r"\[linear_scaled\] input must have the weight's dtype"):
        o.linear_scaled(x, w, scale, None)
    with pytest.raises(RuntimeError, match=r"\[linear_epilogue_scaled\] bias must have dtype BFl"):
        o.linear_epilogue_scaled(x, x, torch.ones(32), None, 1.0, scale, scale)
    text = r"\[linear_backward_scaled\] input must have dtype Float"
    with pytest.raises(RuntimeError, match=text):
        o.linear_backward_scaled(g, x, None, [False, True], None, scale)


# ---- what CUDA's bodies ask cuBLASLt for


def asked(formats: tuple[str, str], size: tuple[int, int, int]) -> list[str]:
    """By forward, with and without an epilogue, and by both gradients."""
    rows, k, n = size
    x, x_scale, _ = codes(rows, k, format=formats[0])
    w, w_scale, _ = codes(n, k, format=formats[1])
    g, g_scale, _ = codes(rows, n, format=formats[0])
    bias, extra = torch.randn(n).bfloat16(), torch.randn(rows, n).bfloat16()
    products()
    o.linear_scaled(x, w, x_scale, w_scale)
    o.linear_epilogue_scaled(x, w, bias, extra, 1.0, x_scale, w_scale)
    o.linear_bias_activation_scaled(x, w, bias, "gelu", True, x_scale, w_scale)
    o.linear_backward_scaled(g, None, w, [True, False], g_scale, w_scale)
    o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)
    buffer = torch.zeros(n, k)
    o.linear_backward_scaled_into(g, x, None, [False, True], g_scale, x_scale, buffer, False)
    return products()


@pytest.mark.emulated
def test_codes_are_multiplied() -> None:
    assert asked(("e4m3", "e4m3"), (32, 48, 64)) == [
        "plain 32x64x48 e4m3 e4m3 -> bfloat16 fast",
        "bias 32x64x48 e4m3 e4m3 -> bfloat16 beta=1 fast",
        "gelu_aux_bias 32x64x48 e4m3 e4m3 -> bfloat16 fast",
        # Sums of gradients are exact.
        "plain 32x48x64 e4m3 e4m3 -> bfloat16",
        "plain 64x48x32 e4m3 e4m3 -> bfloat16",
        "plain 64x48x32 e4m3 e4m3 -> float32 beta=1",
    ]
    assert asked(("e5m2", "e4m3"), (5, 48, 64))[3] == "plain 5x48x64 e5m2 e4m3 -> bfloat16"


DECODED = [
    "plain {m}x{n}x{k} bfloat16 -> bfloat16",
    "bias {m}x{n}x{k} bfloat16 -> bfloat16 beta=1",
    "gelu_aux_bias {m}x{n}x{k} bfloat16 -> bfloat16",
    "plain {m}x{k}x{n} bfloat16 -> bfloat16",
    "plain {n}x{k}x{m} bfloat16 -> bfloat16",
    "plain {n}x{k}x{m} bfloat16 -> float32 beta=1",
]


def decoded(m: int, k: int, n: int) -> list[str]:
    return [row.format(m=m, k=k, n=n) for row in DECODED]


@pytest.mark.emulated
def test_elsewhere_their_values_are(no_codes: None) -> None:
    assert asked(("e4m3", "e4m3"), (32, 48, 64)) == decoded(32, 48, 64)


@pytest.mark.emulated
def test_of_other_sizes_their_values_are() -> None:
    assert asked(("e4m3", "e4m3"), (32, 48, 72))[:3] == decoded(32, 48, 72)[:3]
    assert asked(("e4m3", "e4m3"), (32, 40, 64))[:3] == decoded(32, 40, 64)[:3]
    # A gradient of the weight sums over rows.
    assert asked(("e4m3", "e4m3"), (24, 48, 64))[4:] == decoded(24, 48, 64)[4:]
    assert asked(("e5m2", "e5m2"), (32, 48, 64))[4:] == decoded(32, 48, 64)[4:]


@pytest.mark.emulated
def test_values_multiply_as_codes_do(no_codes: None) -> None:
    test_forward(("e5m2", "e4m3"), (32, 48, 64))
    test_backward(("e5m2", "e4m3"), (32, 48, 64))


# ---- codes instead of values


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


# ---- whole modules: the plan for CUDA, by the CPU's kernels or by emulated ones


def block(width: int = 64) -> tops.Sequential:
    return block_of(width, hidden=96)


RECIPES = [Float8CurrentScaling(), DelayedScaling(amax_history_len=1)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("width", [64, 40])
def test_a_module(recipe: Recipe, width: int, request: pytest.FixtureRequest) -> None:
    module = block(width)
    x = torch.randn(32, width).bfloat16()
    step(module, x, recipe)  # delayed scales are of an earlier step
    want = step(copy.deepcopy(module), x, recipe)
    step(module, x, recipe)
    emulated = request.config.getoption("--emulate-cuda") is not None
    if emulated:
        products()
    found = run_for_cuda(module, x, recipe)
    if emulated:
        lines = products()
        assert any("e4m3 e4m3" in line for line in lines)
        # A product with 40 columns does not use codes.
        assert any("e5m2 e4m3" in line for line in lines)
        assert any("bfloat16 ->" in line for line in lines) == (width == 40)
    assert_near_in_norm(found, want)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_no_host_reads_a_number(recipe: Recipe) -> None:
    check_that_no_host_reads_a_number(block(), torch.randn(32, 64).bfloat16(), recipe)


def test_compiled_code_has_no_break() -> None:
    x = torch.randn(32, 64).bfloat16()
    check_that_compiled_code_has_no_break(block(), x, Float8CurrentScaling())


def test_one_exact_operand_has_values_beside_it() -> None:
    """Not codes: both operands are of one dtype, or decoded."""
    module = tops.Sequential(tops.Linear(32, 32, bias=False), tops.GELU()).bfloat16()
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    recipe = CustomRecipe(lambda role: "e4m3" if role.tensor_type == "input" else None)
    want = step(module, x, recipe)
    assert "float8" not in str(on_cuda(module, x, recipe).plans()[0])
    assert_near_in_norm(run_for_cuda(module, x, recipe), want)


# ---- what is said of it


def test_explain_says_what_is_emulated() -> None:
    module, recipe = block(), Float8CurrentScaling()
    x = torch.randn(32, 64).bfloat16()
    step(module, x, recipe)
    formats = "formats of products: input e4m3, weight e4m3, output gradient e5m2"
    note = module.explain().groups[0].note
    assert note == f"{formats}; emulated, by products of decoded tensors"
    assert on_cuda(module, x, recipe).explain().groups[0].note == (
        f"{formats}; codes are multiplied in FP8, from compute capability 8.9 on and where sizes "
        "are multiples of 16; all else is emulated, by products of decoded tensors"
    )


def test_which_device_has_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated = "recipes are emulated, by products of decoded tensors"
    assert tops.is_fp8_available("cpu") is True
    assert tops.is_fp8_available("cpu", return_reason=True) == (True, f"on the CPU {emulated}")
    text = "device must be CPU or CUDA, got meta"
    assert tops.is_fp8_available("meta", return_reason=True) == (False, text)
    if not torch.cuda.is_available():
        assert tops.is_fp8_available(return_reason=True) == (True, f"on the CPU {emulated}")

    info = SimpleNamespace(CUDA=None)
    monkeypatch.setattr(available, "build_info", lambda: info)
    found, reason = tops.is_fp8_available("cuda", return_reason=True)
    assert not found and "must be built with TRANSFORMER_OPS_CUDA=ON" in reason
    info.CUDA = {"toolkit": "13.0", "architectures": "9.0a"}
    capability = [(8, 6)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    text = f"compute capability must be at least 8.9, got 8.6: {emulated}"
    assert tops.is_fp8_available("cuda", return_reason=True) == (False, text)
    for capability[0] in ((8, 9), (9, 0), (10, 0), (12, 1)):
        assert tops.is_fp8_available("cuda:0", return_reason=True) == (True, "")


# ---- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("width", [64, 40])
def test_a_gpu_has_the_cpus_numbers(recipe: Recipe, width: int) -> None:
    module = block(width)
    x = torch.randn(32, width).bfloat16()
    step(module, x, recipe)
    on_gpu = copy.deepcopy(module).cuda()
    want, got = step(module, x, recipe), step(on_gpu, x.cuda(), recipe)
    assert '"float8_e4m3fn"' in str(on_gpu.plans()[-1])
    assert_as_exact(got, want, exact_step(module, x))


@pytest.mark.cuda
def test_a_captured_step() -> None:
    module, x = block().cuda(), torch.randn(32, 64, device="cuda").bfloat16()
    check_a_captured_step(module, x, Float8CurrentScaling())
