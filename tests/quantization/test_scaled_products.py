"""Products of operands that come as values of codes, and the scales of those beside them."""

from __future__ import annotations

import pytest
import torch
from plan_calls import plan_op
from torch import Tensor

import transformer_ops as tops
from transformer_ops import _C
from transformer_ops.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, Recipe

o = torch.ops.transformer_ops

ROWS, IN, OUT = 6, 32, 24
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def values(*shape: int, dtype: torch.dtype) -> Tensor:
    """Values of E4M3 codes, which are exact in both dtypes."""
    name = str(dtype).removeprefix("torch.")
    return o.quantize_values(torch.randn(*shape), "e4m3", name)[0]


def assert_near(got: Tensor, want: Tensor) -> None:
    """One rounding to the dtype, and what an accumulator in float32 loses."""
    error = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=error, atol=error * want.abs().max().item())


# ---- typed ops


@dtypes
@pytest.mark.parametrize("scales", [(0.37, 2.5), (None, 0.003), (1e3, None), (None, None)])
class TestOps:
    def operands(self, scales, dtype, *shapes):
        """Two operands, their scales, and both together in float64."""
        torch.manual_seed(0)
        operands = [values(*shape, dtype=dtype) for shape in shapes]
        factors = [None if scale is None else torch.tensor(scale) for scale in scales]
        wide = [
            tensor.double() * (1 if factor is None else factor.double())
            for tensor, factor in zip(operands, factors, strict=True)
        ]
        return operands, factors, wide

    def test_forward(self, scales, dtype):
        (x, w), factors, (wide_x, wide_w) = self.operands(scales, dtype, (ROWS, IN), (OUT, IN))
        bias, extra = torch.randn(OUT).to(dtype), torch.randn(ROWS, OUT).to(dtype)
        product = wide_x @ wide_w.t()
        assert_near(o.linear_scaled(x, w, *factors), product)
        for b in (None, bias):
            for e in (None, extra):
                for scale in (1.0, 0.5):
                    want = scale * (product if b is None else product + b.double())
                    # In 16 bits a residual is added to a product that was rounded.
                    got = o.linear_epilogue_scaled(x, w, b, e, scale, *factors)
                    if e is None:
                        assert_near(got, want)
                        continue
                    error = (got.double() - want - e.double()).abs().max()
                    assert error <= 2 * torch.finfo(dtype).eps * (want.abs() + e.abs()).max()
        got, kept = o.linear_bias_activation_scaled(x, w, bias, "relu", True, *factors)
        assert_near(got, (product + bias.double()).relu())
        assert kept.dtype == torch.uint8
        got, kept = o.linear_bias_glu_scaled(
            x, w, bias, "reglu", 0, 1.0, 1.0, 7.0, 1.702, 1.0, True, *factors
        )
        assert_near(kept, product + bias.double())

    def test_backward(self, scales, dtype):
        (g, w), factors, (wide_g, wide_w) = self.operands(scales, dtype, (ROWS, OUT), (OUT, IN))
        got, none = o.linear_backward_scaled(g, None, w, [True, False], *factors)
        assert_near(got, wide_g @ wide_w)
        assert none.numel() == 0
        (g, x), factors, (wide_g, wide_x) = self.operands(scales, dtype, (ROWS, OUT), (ROWS, IN))
        got = o.linear_backward_scaled(g, x, None, [False, True], *factors)[1]
        assert_near(got, wide_g.t() @ wide_x)
        buffer = torch.ones(OUT, IN)
        o.linear_backward_scaled_into(g, x, None, [False, True], *factors, buffer, False)
        error = (buffer - 1 - wide_g.t() @ wide_x).abs().max()
        assert error <= 2 * torch.finfo(dtype).eps * (wide_g.t() @ wide_x).abs().max() + 1e-6

    @pytest.mark.parametrize("scale", [1.0, -0.25])
    def test_backward_with_a_residual(self, scales, dtype, scale):
        residual = torch.randn(ROWS, IN).to(dtype)
        (g, w), factors, (wide_g, wide_w) = self.operands(scales, dtype, (ROWS, OUT), (OUT, IN))
        backward = o.linear_residual_scale_backward_scaled
        product = scale * (wide_g @ wide_w)
        got = backward(g, None, None, w, scale, [True, False], *factors)[0]
        assert_near(got, product)
        got = backward(g, residual, None, w, scale, [True, False], *factors)[0]
        size = (product.abs() + residual.abs()).max()
        error = (got.double() - product - residual.double()).abs().max()
        assert error <= 2 * torch.finfo(dtype).eps * size
        (g, x), factors, (wide_g, wide_x) = self.operands(scales, dtype, (ROWS, OUT), (ROWS, IN))
        got = backward(g, None, x, None, scale, [False, True], *factors)[1]
        assert_near(got, scale * (wide_g.t() @ wide_x))


@dtypes
def test_factors_that_float32_does_not_hold(dtype, request):
    x, w = (
        torch.tensor([[448.0], [0.0], [float("nan")]]).to(dtype),
        torch.tensor([[448.0]]).to(dtype),
    )
    tiny, huge = torch.tensor(1e-30), torch.tensor(1e30)
    small = o.linear_scaled(x, w, tiny, tiny)
    assert small[:2].abs().max() == 0 and small[2].isnan()
    large = o.linear_scaled(x, w, huge, huge)
    assert large[0].isinf() and large[2].isnan()
    if request.config.getoption("--emulate-cuda"):
        # One float32 in device memory, which is infinite here.
        assert large[1].isnan()
        return
    assert large[1] == 0
    # Two such factors whose product is an ordinary number.
    assert_near(o.linear_scaled(x[:1], w, tiny, huge), torch.tensor([[448.0**2]]).double())
    # 2^-9 is the smallest code of E4M3.
    least = torch.full((1, 1), 2.0**-9, dtype=dtype)
    factor = torch.tensor(2.0**70)
    assert o.linear_scaled(least, least, factor, factor).item() == 2.0**122
    factor = torch.tensor(2.0**-66)
    assert o.linear_scaled(w, w, factor, factor).item() == 448.0**2 * 2.0**-132


def test_what_a_scale_must_be():
    x, w = torch.ones(2, 4), torch.ones(3, 4)
    one = torch.tensor(1.0)
    for wrong in (torch.ones(1), torch.tensor(1), torch.tensor(1.0).double()):
        with pytest.raises(
            RuntimeError,
            match=r"\[linear_scaled\] right_scale must be one float32 without dimensions",
        ):
            o.linear_scaled(x, w, one, wrong)
    with pytest.raises(RuntimeError, match=r"input must have at least the exponents of bfloat16"):
        o.linear_scaled(x.half(), w.half(), one, one)


# ---- values of codes

formats = pytest.mark.parametrize("format", ["e4m3", "e5m2", "nvfp4", "nvfp4 16x1", "nvfp4 16x16"])


@formats
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-20, 1e20, 0.0, float("nan")])
def test_values_times_scale_are_the_rounded_numbers(format, dtype, size):
    x = (torch.randn(40, 72) * size).to(dtype)
    got, scale = o.quantize_values(x, format, "bfloat16")
    exact, same = o.quantize_values(x, format, "float64")
    assert got.dtype == torch.bfloat16 and scale.dtype == torch.float32 and scale.dim() == 0
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=0, equal_nan=True)
    assert scale == same
    want = o.quantize_dequantize(x, format, "float64")
    torch.testing.assert_close(exact * scale.double(), want, rtol=1e-6, atol=0, equal_nan=True)
    for pair in zip(
        (got, scale), plan_op("quantize_values.saved")(x, x, format, "bfloat16"), strict=True
    ):
        torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)


@formats
def test_values_by_their_meaning(format):
    """What runs on devices without a body of its own."""
    x = torch.randn(40, 72)
    got = o.quantize_values(x, format, "bfloat16")
    for pair in zip(got, _C.decomposition("quantize_values", (x, format, "bfloat16")), strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=0)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_values_by_a_given_scale(place):
    x, scale = torch.randn(40, 72), torch.tensor([3.0, 0.1, 70.0])
    arguments = (x, scale, place, "e4m3", "bfloat16")
    got, decodes, amax = plan_op("quantize_values_scaled")(*arguments)
    want, same = o.quantize_dequantize_scaled(x, scale, place, "e4m3", "float32")
    torch.testing.assert_close(got.float() * decodes, want, rtol=1e-6, atol=0)
    assert amax == same == x.abs().max() and decodes == 1 / scale[place]
    for other in (
        _C.decomposition("quantize_values_scaled", arguments),
        plan_op("quantize_values_scaled.saved")(x, *arguments),
    ):
        for a, b in zip((got, decodes, amax), other, strict=False):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_values_rounded_at_random_are_next_to_the_number():
    x = torch.randn(64, 64)
    values, scale = plan_op("quantize_values_stochastic")(x, "nvfp4", "bfloat16")
    up_or_down = values.double() * scale.double()
    nearest = o.quantize_dequantize(x, "nvfp4", "float64")
    # A step of E2M1 is at most a third of the largest number of its block.
    assert (up_or_down - nearest).abs().max() <= x.abs().max() / 3 * 1.1
    assert (up_or_down != nearest).any()
    assert not torch.equal(values, plan_op("quantize_values_stochastic")(x, "nvfp4", "bfloat16")[0])


def test_formats_without_a_scale_of_the_tensor_are_refused():
    for name in ("quantize_values", "quantize_values_stochastic"):
        text = rf"\[{name}\] format must have a scale of the tensor, got 'mx e4m3'"
        with pytest.raises(RuntimeError, match=text):
            plan_op(name)(torch.randn(2, 32), "mx e4m3", "bfloat16")


# ---- whole modules


def gradients(module: tops.Sequential, x: Tensor, recipe: Recipe) -> list[Tensor]:
    module.zero_grad()
    with tops.autocast(recipe=recipe):
        y = module(x)
    y.sum().backward()
    return [y, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling(amax_history_len=1)])
def test_a_weight_that_accumulates(recipe):
    """Into `main_grad`, in the product itself."""

    def block(accumulates: bool) -> tops.Sequential:
        first = tops.Linear(32, 48, accumulate_into_main_grad=accumulates)
        return tops.Sequential(first, tops.GELU(), tops.Linear(48, 32)).bfloat16()

    module, plain = block(True), block(False)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(8, 32).bfloat16()
    module[0].weight.main_grad = torch.zeros(48, 32)
    for _ in range(2):  # the second step has the scales of the first
        module[0].weight.main_grad.zero_()
        gradients(module, x, recipe)
        want = gradients(plain, x, recipe)[1]
    found = module[0].weight.main_grad
    torch.testing.assert_close(found, want.float(), rtol=2**-7, atol=1e-6)
    assert "linear_backward_scaled" in str(module.plans()[0])


def test_one_operand_may_be_exact():
    module = tops.Sequential(tops.Linear(32, 32, bias=False), tops.GELU()).bfloat16()
    x = torch.randn(8, 32).bfloat16().requires_grad_()
    recipe = CustomRecipe(lambda role: "e4m3" if role.tensor_type == "input" else None)
    got = gradients(module, x, recipe)
    values, scale = o.quantize_values(x.detach(), "e4m3", "bfloat16")
    want = values.double() * scale.double() @ module[0].weight.double().t()
    want = torch.nn.functional.gelu(want.bfloat16(), approximate="tanh")
    torch.testing.assert_close(got[0], want, rtol=2**-6, atol=2**-6)
    text = str(module.plans()[0])
    assert "linear_scaled(t0.rounded_input, p0.weight, t0.rounded_input_scale, none)" in text


def test_compiled_code_has_no_break():
    module = tops.Sequential(tops.Linear(32, 48), tops.GELU(), tops.Linear(48, 32)).bfloat16()
    x, recipe = torch.randn(8, 32).bfloat16(), Float8CurrentScaling()
    want = gradients(module, x, recipe)
    got = gradients(torch.compile(module, fullgraph=True), x, recipe)
    for pair in zip(got, want, strict=True):
        torch.testing.assert_close(*pair, rtol=2**-7, atol=1e-3)
