"""Forward fusions with a residual: what they draw, save, hand out and leave alone."""

from contextlib import nullcontext

import pytest
import torch
from fusion_cases import forward_cases, residual_block
from helpers import saved_bytes
from test_fusions import near_misses, seeded, unfused

import transformer_ops as tops

RESIDUAL = [case for case in forward_cases() if case.extra_inputs]


def names(module):
    return [step.name for step in module.plans()[0].forward]


def called(ops, *inputs, autocast=False):
    """The module after a call, with the call's result."""
    module = tops.Sequential(*ops)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with context:
        output = module(*inputs)
    return module, output


# ---- bias, dropout, residual


def test_a_block_ends_in_one_pass():
    module, _ = called(residual_block(), torch.randn(4, 16))
    assert names(module) == ["MakeExtraOutput", "BasicLinear", "bias_dropout_add"]


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_the_mask_is_that_of_dropout_alone(p):
    ops = [tops.Bias(24), tops.Dropout(p), tops.AddExtraInput()]
    module = tops.Sequential(*ops)
    x, extra = torch.randn(2, 50, 24, dtype=torch.float64).unbind()
    output = seeded(module, x, extra)
    state = torch.get_rng_state()
    assert names(module) == ["bias_dropout_add"]
    with unfused():
        torch.testing.assert_close(output, seeded(module, x, extra))
    assert torch.equal(state, torch.get_rng_state())


def test_in_eval_mode_it_draws_and_keeps_nothing():
    module = tops.Sequential(tops.Bias(16), tops.Dropout(0.5), tops.AddExtraInput()).eval()
    x, extra = torch.randn(2, 10, 16, requires_grad=True).unbind()
    state = torch.get_rng_state()
    assert saved_bytes(module, x, extra) == 0
    assert names(module) == ["bias_add"]
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(module(x, extra), x + module[0].bias + extra)


def test_it_keeps_one_bit_an_element():
    module = tops.Sequential(tops.Bias(13), tops.Dropout(0.5), tops.AddExtraInput())
    x, extra = torch.randn(2, 7, 13, requires_grad=True).unbind()
    assert saved_bytes(module, x, extra) == (7 * 13 + 7) // 8


# ---- residual, norm


@pytest.mark.parametrize("norm", [tops.LayerNorm, tops.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_handed_out_and_kept_once(norm, dtype):
    module = tops.Sequential(tops.AddExtraInput(), tops.MakeExtraOutput(), norm(32))
    x, extra = torch.randn(2, 5, 32).to(dtype).requires_grad_().unbind()
    statistics = 2 if norm is tops.LayerNorm else 1
    element = torch.finfo(dtype).bits // 8
    assert saved_bytes(module, x, extra) == 5 * (32 * element + 4 * statistics)
    normed, total = module(x, extra)
    assert len(names(module)) == 1
    assert torch.equal(total, x + extra)
    with unfused():
        assert torch.equal(normed, module(x, extra)[0])


@pytest.mark.parametrize("norm", [tops.LayerNorm, tops.RMSNorm])
def test_a_post_norm_residual_is_handed_on(norm):
    """AddExtraInput, norm, MakeExtraOutput: the extra output is the norm's output itself."""
    module = tops.Sequential(tops.AddExtraInput(), norm(32), tops.MakeExtraOutput())
    x, extra = torch.randn(2, 5, 32, requires_grad=True).unbind()
    output, residual = module(x, extra)
    assert len(names(module)) == 2 and names(module)[0].startswith("add_")
    assert output.data_ptr() == residual.data_ptr()


def test_changing_the_kept_sum_is_an_error():
    module = tops.Sequential(tops.AddExtraInput(), tops.MakeExtraOutput(), tops.RMSNorm(16))
    normed, total = module(*torch.randn(2, 4, 16, requires_grad=True).unbind())
    with torch.no_grad():
        total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        normed.sum().backward()


# ---- all of them


@pytest.mark.parametrize("case", RESIDUAL, ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_only_what_in_place_names_may_change(case, in_place):
    ops = case.make()
    for op in ops:
        if isinstance(op, tops.AddExtraInput):
            op.in_place = in_place
    module = tops.Sequential(*ops)
    for dtype in (torch.float32, torch.bfloat16):
        module.to(dtype)
        inputs = case.inputs(torch.randn(6, 16).to(dtype))
        before = [t.clone() for t in [*inputs, *module.parameters()]]
        with torch.no_grad():
            output = seeded(module, *inputs)
        assert case.rule in names(module)
        after = [inputs[0], before[1] if in_place else inputs[1], *module.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        with unfused(), torch.no_grad():
            want = seeded(module, before[0], before[1])
        torch.testing.assert_close(output, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_nan_passes_a_scaled_product(scale):
    linear = tops.Linear(16, 16, bias=False)
    with torch.no_grad():
        linear.weight[3] = float("nan")
    extra = torch.randn(2, 16)
    module, output = called(
        [linear, tops.ConstantScale(scale), tops.AddExtraInput()], torch.randn(2, 16), extra
    )
    assert names(module) == ["linear_epilogue"]
    assert output.isnan().nonzero()[:, 1].tolist() == [3, 3]


class Twice(tops.BasicOperation):
    def op_forward(self, ctx, input_, **unused):
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


MISSES = [
    (
        "bias_dropout_add",
        lambda: [tops.Bias(16), tops.Dropout(0.5), tops.AddExtraInput()],
        (0, 1, 2),
    ),
    ("add_rms_norm", lambda: [tops.AddExtraInput(), tops.RMSNorm(16)], (0, 1)),
    (
        "add_layer_norm",
        lambda: [tops.AddExtraInput(), tops.MakeExtraOutput(), tops.LayerNorm(16)],
        (0, 1, 2),
    ),
    ("linear_epilogue", lambda: [tops.BasicLinear(16, 16), tops.AddExtraInput()], (0, 1)),
    ("linear_epilogue", lambda: [tops.Linear(16, 16), tops.AddExtraInput()], (0, 1, 2)),
    ("bias_add", lambda: [tops.Bias(16), tops.AddExtraInput()], (0, 1)),
    (
        "linear_epilogue",
        lambda: [tops.BasicLinear(16, 16), tops.ConstantScale(2.0), tops.AddExtraInput()],
        (0, 1, 2),
    ),
]
every_miss = pytest.mark.parametrize(("rule", "make", "ops"), MISSES)


@every_miss
def test_summands_of_different_dtypes(rule, make, ops):
    x, extra = torch.randn(2, 4, 16).unbind()
    module, output = called(make(), x, extra.double())
    reason = "the extra input is float64, and what it is added to float32"
    assert (ops, reason) in near_misses(module, rule)
    first = output[0] if isinstance(output, tuple) else output
    assert first.dtype == torch.float64


def test_a_summand_from_a_python_op():
    module, _ = called(
        [Twice(), tops.AddExtraInput(), tops.RMSNorm(16)], *torch.randn(2, 4, 16).unbind()
    )
    assert ((1, 2), "the dtype of a summand is not known") in near_misses(module, "add_rms_norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_under_autocast(dtype):
    """It fires where the norm computes in the sum's dtype, and says so where it does not."""
    inputs = torch.randn(2, 4, 16).to(dtype).unbind()
    module, output = called([tops.AddExtraInput(), tops.LayerNorm(16)], *inputs, autocast=True)
    assert output.dtype == torch.bfloat16
    if dtype == torch.bfloat16:
        assert names(module) == ["add_layer_norm"]
    else:
        reason = "the sum is float32, and autocast has the norm compute in bfloat16"
        assert near_misses(module, "add_layer_norm") == [((0, 1), reason)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_keeps_the_dtype_of_the_residual(dtype):
    x, extra = torch.randn(2, 4, 16).unbind()
    ops = [tops.Linear(16, 16), tops.Dropout(0.5), tops.AddExtraInput()]
    module = tops.Sequential(*ops)
    x, extra = x.requires_grad_(), extra.to(dtype).requires_grad_()

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            output = seeded(module, x, extra)
        return output, *torch.autograd.grad(output.sum(), [x, extra, *module.parameters()])

    got = run()
    assert names(module) == ["BasicLinear", "bias_dropout_add"]
    with unfused():
        want = run()
    assert got[0].dtype == dtype
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
