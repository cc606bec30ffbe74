"""Typed ops called by hand: any strides, no features, and one clear error for what does not fit."""

from __future__ import annotations

import pytest
import torch
from helpers import off_the_grid, strided
from plan_calls import plan_op
from torch import Tensor
from torch.nn import functional as F

import transformer_ops as tops

o = torch.ops.transformer_ops


def column(size: int) -> Tensor:
    """A column of a matrix, as of an augmented weight."""
    return torch.randn(size, 9)[:, 8]


# ---- arguments that are not contiguous


@pytest.mark.parametrize("make", [column, lambda size: torch.tensor([5.0]).expand(size), strided])
@pytest.mark.parametrize("last", [tops.SwiGLU, tops.AddExtraInput, tops.GELU, tops.ReLU, None])
def test_a_bias_of_any_strides(make, last):
    bias = make(torch.randn(16)) if make is strided else make(16)
    ops = [tops.Linear(8, 16), *([last()] if last else [])]
    module, plain = tops.Sequential(*ops), tops.Sequential(*ops)
    module[0].bias = torch.nn.Parameter(bias)
    inputs = [torch.randn(4, 8), *([torch.randn(4, 16)] if last is tops.AddExtraInput else [])]
    got = module(*inputs)
    got.sum().backward()
    grads = [parameter.grad.clone() for parameter in module.parameters()]
    plain[0].bias = torch.nn.Parameter(bias.detach().clone(memory_format=torch.contiguous_format))
    plain.zero_grad()
    want = plain(*inputs)
    want.sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grads, [parameter.grad for parameter in plain.parameters()])


def rows_of_a_wider_one(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], -1)[:, : tensor.shape[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [rows_of_a_wider_one, Tensor.t, off_the_grid])
def test_products_read_their_factors_without_a_copy(dtype, layout):
    """What is declared `any_strides` reaches the body as it is."""
    x, w = (layout(torch.randn(64, 64, dtype=dtype)) for _ in range(2))
    with torch.profiler.profile() as profile:
        got = o.linear(x, w)
    torch.testing.assert_close(got, F.linear(x, w), rtol=2e-2, atol=2e-1)
    if dtype is torch.bfloat16 and not tops.processor().multiplies_bfloat16:
        return  # they run in float32 there
    assert "aten::copy_" not in {event.name for event in profile.events()}


# ---- no rows, no features


@pytest.mark.parametrize("lead", [(2, 3), (0, 3), (2, 0), (4,), (0,), ()])
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0), (5, 4)])
def test_products_without_features(lead, sizes):
    width, out = sizes
    x, w, b = torch.randn(*lead, width), torch.randn(out, width), torch.randn(out)
    extra, grad = torch.randn(*lead, out), torch.randn(*lead, out)
    want = F.linear(x, w)
    torch.testing.assert_close(o.linear(x, w), want)
    torch.testing.assert_close(o.linear_epilogue(x, w, b, None, 1.0), want + b)
    torch.testing.assert_close(o.linear_epilogue(x, w, None, extra, 1.0), want + extra)
    torch.testing.assert_close(o.linear_epilogue(x, w, b, extra, 1.0), want + b + extra)
    torch.testing.assert_close(o.linear_epilogue(x, w, b, extra, 2.0), 2 * (want + b) + extra)
    rows, rows_x = grad.reshape(-1, out or 1)[:, :out], x.reshape(-1, width or 1)[:, :width]
    wanted = [grad @ w, torch.zeros(out, width)]
    if out and width:
        wanted[1] = rows.t() @ rows_x
    for got in (
        o.linear_backward(grad, x, w, [True, True]),
        o.linear_residual_scale_backward(grad, None, x, w, 1.0, [True, True]),
        o.bias_linear_backward(grad, x, w, [True] * 3)[:2],
        o.linear_residual_scale_backward(grad, torch.zeros_like(x), x, w, 1.0, [True, True]),
    ):
        torch.testing.assert_close(list(got), wanted)
    kept = torch.randn(*lead, width)
    grads = o.linear_activation_backward(grad, kept, w, "silu", [True, True, False])
    torch.testing.assert_close(grads[0], grad @ w * slope(kept))


def slope(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(F.silu(x).sum(), x)
    return found


def test_modules_without_features():
    module = tops.Linear(8, 4, bias=False)
    module.weight = torch.nn.Parameter(torch.empty(4, 0))
    y = module(torch.empty(2, 3, 0))
    assert torch.equal(y, torch.zeros(2, 3, 4))


def test_a_scale_of_zero_hides_no_nan():
    x, w = torch.full((2, 4), torch.nan), torch.ones(3, 4)
    grad = torch.full((2, 3), torch.inf)
    for extra in (None, torch.ones(2, 4)):
        ones = torch.ones(2, 4)
        for got in o.linear_residual_scale_backward(grad, extra, ones, w, 0.0, [True, True]):
            assert got.isnan().all()
    for bias in (None, torch.ones(3)):
        for extra in (None, torch.ones(2, 3)):
            assert o.linear_epilogue(x, w, bias, extra, 0.0).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e5, 1e300, float("inf"), float("nan")])
def test_a_scale_that_the_dtype_does_not_hold(dtype, scale):
    x, w = torch.full((2, 4), 2.0**-12, dtype=dtype), torch.eye(4, dtype=dtype) + 1
    start, grad = torch.ones(2, 4, dtype=dtype), torch.full((2, 4), 2.0**-12, dtype=dtype)
    near = {"rtol": 2e-2, "atol": 1e-6, "equal_nan": True}
    want = F.linear(x, w) * scale + start
    torch.testing.assert_close(o.linear_epilogue(x, w, None, start, scale), want, **near)
    product = F.linear(x, w)
    torch.testing.assert_close(o.linear_epilogue(x, w, None, None, scale), product * scale, **near)
    scaled = grad * scale
    for residual, sum_ in [(None, scaled @ w), (start, scaled @ w + start)]:
        got = o.linear_residual_scale_backward(grad, residual, x, w, scale, [True, True])
        torch.testing.assert_close(list(got), [sum_, scaled.t() @ x], **near)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("extra", [False, True])
def test_a_scale_of_a_bias_that_cancels_out(dtype, extra):
    """The sum of product and bias is scaled, not each of them."""
    large = torch.finfo(dtype).max / 8
    x, w = torch.ones(2, 4, dtype=dtype), torch.full((3, 4), large / 4, dtype=dtype)
    bias = torch.full((3,), -large, dtype=dtype)
    start = torch.ones(2, 3, dtype=dtype) if extra else None
    want = torch.full((2, 3), float(extra), dtype=dtype)
    assert torch.equal(o.linear_epilogue(x, w, bias, start, 100.0), want)


# ---- one clear error, on meta tensors too

r = torch.randn
BIG = 2**63 - 1
BAD = {
    "None": (lambda: o.linear(r(2, 4), None), "[linear] weight must be a tensor, got None"),
    "a mask of one": (
        lambda: o.linear_backward(r(2, 5), r(2, 4), r(5, 4), [True]),
        "[linear_backward] output_mask must have 2 elements, got 1",
    ),
    "an empty mask": (
        lambda: o.linear_backward(r(2, 5), r(2, 4), r(5, 4), []),
        "[linear_backward] output_mask must have 2 elements, got 0",
    ),
    "a mask of none of three": (
        lambda: o.layer_norm_residual_backward(
            r(2, 4), r(2, 4), r(2, 4), r(2), r(2), r(4), [4], 1e-5, False, []
        ),
        "[layer_norm_residual_backward] output_mask must have 3 elements, got 0",
    ),
    "0-d gradient": (
        lambda: o.linear_backward(r(()), r(64), r(33, 64), [True, True]),
        "[linear_backward] grad_output must have at least 1 dimension, got 0",
    ),
    "another weight": (
        lambda: o.linear_backward(r(2, 4), r(2, 5), r(4, 5, 1), [True, True]),
        "[linear_backward] weight must have shape [4, *], got [4, 5, 1]",
    ),
    "another input": (
        lambda: o.linear_backward(r(2, 4), r(3, 5), r(4, 5), [True, True]),
        "[linear_backward] input must have shape [2, 5], got [3, 5]",
    ),
    "integers": (
        lambda: o.linear_backward(r(2, 4).long(), r(2, 5).long(), r(4, 5).long(), [True, True]),
        "[linear_backward] grad_output must be float16, bfloat16, float32 or float64, got Long",
    ),
    "float8": (
        lambda: o.linear_residual_scale_backward(
            r(2, 4).to(torch.float8_e4m3fn),
            None,
            *(t.to(torch.float8_e4m3fn) for t in (r(2, 5), r(4, 5))),
            2.0,
            [True, True],
        ),
        "[linear_residual_scale_backward] grad_output must be float16, bfloat16, float32 or ",
    ),
    "another activated": (
        lambda: o.activation_linear_backward(r(4096, 4), r(1, 8), r(4, 8), "relu", [True, False]),
        "[activation_linear_backward] activated must have shape [4096, 8], got [1, 8]",
    ),
    "silu before a product": (
        lambda: o.activation_linear(r(3, 8), r(5, 8), "silu"),
        "[activation_linear] activation must be relu or srelu, got 'silu'",
    ),
    "gelu before a product, backward": (
        lambda: o.activation_linear_backward(r(3, 5), r(3, 8), r(5, 8), "gelu", [True, True]),
        "[activation_linear_backward] activation must be relu or srelu, got 'gelu'",
    ),
    "an unknown activation": (
        lambda: o.linear_bias_activation(r(2, 4), r(5, 4), r(5), "elu", True),
        "[linear_bias_activation] activation must be one of gelu, exact_gelu, qgelu, relu, srelu, "
        "silu, got 'elu'",
    ),
    "an unknown GLU": (
        lambda: o.glu_bias_backward(r(2, 4), r(2, 8), "glue", 0, 1.0, 1.0, 1.0, 1.0, 0.0),
        "[glu_bias_backward] glu must be one of glu, geglu,",
    ),
    "a block of 2^63 - 1": (
        lambda: o.swiglu(r(2, 4), BIG),
        f"[swiglu] glu_interleave_size must lie in [0, {BIG // 2}] (0 for halves), got {BIG}",
    ),
    "0-d input of a norm": (
        lambda: plan_op("recompute_l2_normalization")(r(()), r(()), r(())),
        "[recompute_l2_normalization] input must have at least 1 dimension, got 0",
    ),
    "integers to cast": (
        lambda: plan_op("recompute_cast")(r(2).long(), r(2)),
        "[recompute_cast] grad_output must be float16, bfloat16, float32 or float64, got Long",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_clear_error(case, device):
    call, text = BAD[case]
    with torch.device(device), pytest.raises(RuntimeError) as caught:
        call()
    assert str(caught.value).startswith(text)


def test_tensors_on_two_devices():
    text = r"^\[linear\] tensors must be on one device, got cpu and meta for weight"
    with pytest.raises(RuntimeError, match=text):
        o.linear(r(2, 4), r(3, 4, device="meta"))


def test_memory_that_is_gone():
    x = torch.randn(4, 8)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"^\[gelu\] input must have its memory, got a storage"):
        o.gelu(x)


def test_a_huge_block_in_a_module():
    module = tops.SwiGLU(glu_interleave_size=BIG)
    with pytest.raises(RuntimeError, match=r"^\[SwiGLU\] glu_interleave_size must lie in"):
        module(torch.randn(2, 4))


# ---- main_grad


@pytest.mark.parametrize("kind", ["expanded", "the weight", "a part of the input"])
def test_main_grad_has_memory_of_its_own(kind):
    memory = torch.randn(2 * 8 + 5 * 8)
    grad, x, w = torch.randn(2, 5), memory[:16].view(2, 8), torch.randn(5, 8)
    bad = {"expanded": torch.zeros(8).expand(5, 8), "the weight": w}
    bad["a part of the input"] = memory[8:48].view(5, 8)
    before = [t.clone() for t in (memory, w)]
    with pytest.raises(RuntimeError, match=r"^\[linear_backward_into\] main_grad must .*, got "):
        o.linear_backward_into(grad, x, w, [True, True], bad[kind], False)
    assert torch.equal(memory, before[0]) and torch.equal(w, before[1])


def test_main_grad_beside_the_input():
    """Neighbours in one storage do not overlap."""
    memory = torch.randn(2 * 8 + 5 * 8)
    grad, x, w = torch.randn(2, 5), memory[:16].view(2, 8), torch.randn(5, 8)
    want = grad.t() @ x
    o.linear_backward_into(grad, x, w, [True, True], memory[16:].view(5, 8), True)
    torch.testing.assert_close(memory[16:].view(5, 8), want)


def test_statistics_of_rows_without_elements():
    """Not what happened to be in memory."""
    x, w = torch.empty(3, 0), torch.empty(0)
    rstd = torch.full((3,), torch.inf)
    for _ in range(3):
        assert torch.equal(
            o.rms_norm(x, w, list(w.shape), 0.0, False)[1].nan_to_num(nan=torch.inf), rstd
        )
        assert torch.equal(
            o.layer_norm(x, w, w, list(w.shape), 0.0, False)[2].nan_to_num(nan=torch.inf), rstd
        )
