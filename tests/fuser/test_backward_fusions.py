"""Backward fusions: what only they promise. `test_fusions.py` holds what all fusions do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusion_cases import before, inner_residual
from test_fusions import near_misses, unfused
from torch import Tensor

import transformer_ops as tops

NORMS = {"layer_norm_residual": tops.LayerNorm, "rms_norm_residual": tops.RMSNorm}


def follower(rule: str) -> tops.FusibleOperation:
    """The op that the rule takes together with the MakeExtraOutput before it."""
    return NORMS[rule](16) if rule in NORMS else tops.BasicLinear(16, 16)


every_residual = pytest.mark.parametrize("rule", [*NORMS, "linear_residual_scale"])


def step_names(module: Any) -> list[str]:
    return [step.name for step in module.plans()[0].backward]


def hidden_without_reader() -> tops.MakeExtraOutput:
    return tops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)


def frozen(op: Any, *names: str) -> Any:
    for name in names or [name for name, _ in op.named_parameters()]:
        op.get_parameter(name).requires_grad_(False)
    return op


# ---- where they fire


def test_a_gelu_block() -> None:
    block = [tops.LayerNorm(16), tops.Linear(16, 64), tops.GELU()]
    module = tops.Sequential(*inner_residual(*block, tops.Linear(64, 16), tops.Dropout(0.1)))
    module(torch.randn(3, 16))
    assert step_names(module)[1:-1] == [
        "layer_norm_residual",
        "BasicLinear",
        "linear_activation",
        "dropout_bias",
    ]


def test_a_llama_block() -> None:
    up, down = tops.Linear(16, 64, bias=False), tops.Linear(32, 16, bias=False)
    module = tops.Sequential(*inner_residual(tops.RMSNorm(16), up, tops.SwiGLU(), down))
    module(torch.randn(3, 16))
    assert step_names(module)[1:-1] == ["rms_norm_residual", "BasicLinear", "linear_glu"]


def test_the_residual_goes_with_the_scale() -> None:
    module = tops.Sequential(*inner_residual(tops.BasicLinear(16, 16), tops.ConstantScale(0.5)))
    module(torch.randn(3, 16))
    assert step_names(module)[1:-1] == ["linear_residual_scale"]


# ---- where they do not, and why


@every_residual
@pytest.mark.parametrize("reads", [True, False])
def test_a_residual_that_nobody_reads(rule: str, reads: bool) -> None:
    split = tops.MakeExtraOutput() if reads else hidden_without_reader()
    module = tops.Sequential(*before(split, follower(rule)))
    module(torch.randn(3, 16))
    assert (rule in step_names(module)) == reads
    misses = [((1, 2), "nobody reads the extra output")]
    found = [miss for miss in near_misses(module, rule) if miss[0][0] == 1]
    assert found == ([] if reads else misses)


@every_residual
def test_a_residual_without_gradient(rule: str) -> None:
    module = tops.Sequential(tops.MakeExtraOutput(), follower(rule))
    x = torch.randn(3, 16)
    module(x)
    assert ((0, 1), "its input needs no gradient") in near_misses(module, rule)
    module(x.requires_grad_())
    assert step_names(module) == [rule]


@pytest.mark.parametrize("op", [tops.SiLU, tops.SwiGLU, lambda: tops.Dropout(0.1)])
def test_bias_without_gradient(op: Any) -> None:
    rule = {"SiLU": "activation_bias", "SwiGLU": "glu_bias", "Dropout": "dropout_bias"}
    name = rule[type(op()).__name__]
    module = tops.Sequential(*before(frozen(tops.Bias(16)), op()))
    module(torch.randn(3, 16))
    assert ((1, 2), "the bias needs no gradient") in near_misses(module, name)
    module = tops.Sequential(tops.Bias(16), op())
    module(torch.randn(3, 16))
    assert ((0, 1), "the input of the bias needs no gradient") in near_misses(module, name)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_dropout_that_is_off(p: float, training: bool) -> None:
    module = tops.Sequential(*before(tops.Bias(16), tops.Dropout(p))).train(training)
    module(torch.randn(3, 16))
    assert near_misses(module, "dropout_bias") == [((1, 2), "the dropout is off")]
    module.train()[2].p = 0.5
    module(torch.randn(3, 16))
    assert "dropout_bias" in step_names(module)


def test_a_scale_of_zero_keeps_nan() -> None:
    module = tops.Sequential(tops.BasicLinear(16, 16), tops.ConstantScale(0.0))
    x = torch.randn(3, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(module(x), x, torch.full((3, 16), torch.nan))
    assert grad.isnan().all()
    (miss,) = near_misses(module, "linear_residual_scale")
    assert miss[1].startswith("the scale is 0")


# ---- gradients that are missing, unwanted, or of another dtype


@every_residual
@pytest.mark.parametrize("given", ["main", "extra", "both"])
def test_one_of_two_gradients(rule: str, given: str) -> None:
    module = tops.Sequential(*before(tops.MakeExtraOutput(), follower(rule)))
    x = torch.randn(5, 16, requires_grad=True)

    def gradients() -> tuple[Tensor | None, ...]:
        y, extra = module(x)
        loss = y.square().sum() * (given != "extra") + extra.square().sum() * (given != "main")
        if given != "both":
            loss = (extra if given == "extra" else y).square().sum()
        return torch.autograd.grad(loss, [x, *module.parameters()], allow_unused=True)

    got = gradients()
    assert rule in step_names(module)
    with unfused():
        want = gradients()
    torch.testing.assert_close(got, want)


@every_residual
@pytest.mark.parametrize("in_place", [False, True])
def test_the_given_gradients_stay_as_they_are(rule: str, in_place: bool) -> None:
    module = tops.Sequential(tops.MakeExtraOutput(in_place=in_place), follower(rule))
    x = torch.randn(5, 16, requires_grad=True)
    grads = [torch.randn(5, 16), torch.randn(5, 16)]
    copies = [grad.clone() for grad in grads]
    outputs = module(x)
    for _ in range(2):
        first = torch.autograd.grad(outputs, x, grads, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(outputs, x, grads)[0])
    assert all(map(torch.equal, grads, copies))


@every_residual
def test_frozen_parameters_get_no_gradient(rule: str) -> None:
    module = tops.Sequential(tops.MakeExtraOutput(), frozen(follower(rule)))
    x = torch.randn(5, 16, requires_grad=True)
    sum(t.sum() for t in module(x)).backward()
    (step,) = module.plans()[0].backward
    assert step.name == rule and "[true, false" in str(module.plans()[0])
    assert x.grad is not None and all(p.grad is None for p in module.parameters())


def test_half_frozen_layer_norm() -> None:
    for name in ("weight", "bias"):
        module = tops.Sequential(tops.MakeExtraOutput(), frozen(tops.LayerNorm(16), name))
        x = torch.randn(5, 16)
        (wanted,) = (p for p in module.parameters() if p.requires_grad)

        def gradients(module: Any = module, x: Tensor = x, wanted: Tensor = wanted) -> Any:
            leaf = x.clone().requires_grad_()
            outputs = module(leaf)
            return torch.autograd.grad(outputs, [leaf, wanted], [torch.ones_like(x)] * 2)

        got = gradients()
        assert step_names(module) == ["layer_norm_residual"]
        with unfused():
            want = gradients()
        torch.testing.assert_close(got, want)


@every_residual
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["group", "text"])
def test_under_autocast_the_residual_keeps_its_dtype(
    rule: str, residual_dtype: torch.dtype, way: str
) -> None:
    ops = before(tops.MakeExtraOutput(), follower(rule))
    fuser = tops.OperationFuser([tops.Identity(), *ops[1:]])
    x = torch.randn(5, 16, dtype=residual_dtype, requires_grad=True)
    leaves = [x, *(p for op in ops[1:] for p in op.parameters())]

    def gradients() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = fuser(x)
        if way == "text":
            text = str(fuser.plan())
            outputs = torch.ops.transformer_ops.run_plan(text, leaves[0], [], leaves[1:])
        torch.manual_seed(1)
        grads = [torch.randn_like(output) for output in outputs]
        assert [g.dtype for g in grads] == [torch.bfloat16, residual_dtype]
        return torch.autograd.grad(outputs, leaves, grads)

    got = gradients()
    assert rule in [step.name for step in fuser.plan().backward]
    with unfused():
        want = gradients()
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1.6e-2, atol=3e-2)
    # With no gradient from the main path, the residual's is not rounded.
    with torch.autocast("cpu", torch.bfloat16):
        outputs = fuser(x)
    given = torch.randn_like(outputs[1])
    (alone,) = torch.autograd.grad(outputs, x, [torch.zeros_like(outputs[0]), given])
    assert torch.equal(alone, given)


@every_residual
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_channel_from_a_wider_dtype(rule: str, wide: torch.dtype) -> None:
    """The residual's gradient comes in the dtype of the sum that it went into."""
    narrow = torch.float32 if wide == torch.float64 else torch.bfloat16
    split = hidden_without_reader()
    join = tops.AddExtraInput().set_extra_input_channel(0, "x")
    made = [tops.LayerNorm(16), split, follower(rule)]
    module = tops.Sequential(*made, tops.AddExtraInput(), join).to(narrow)
    x = torch.randn(5, 16, dtype=narrow)
    other = torch.randn(5, 16, dtype=wide)

    def gradients() -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (x, other)]
        output = module(*leaves)
        assert output.dtype == wide
        torch.manual_seed(1)
        return torch.autograd.grad(
            output, [*leaves, *module.parameters()], torch.randn_like(output)
        )

    got = gradients()
    assert rule in step_names(module)
    with unfused():
        want = gradients()
    tolerance = 3e-2 if narrow == torch.bfloat16 else 1e-5
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_main_grad(residual: bool, scale: bool) -> None:
    rule = "linear_residual_scale" if residual or scale else "BasicLinear"
    linear = tops.BasicLinear(16, 16, accumulate_into_main_grad=True)
    ops = [tops.MakeExtraOutput()] * residual + [linear] + [tops.ConstantScale(0.5)] * scale
    module = tops.Sequential(*before(*ops))
    x = torch.randn(5, 16)
    grads = []
    for fuse in (True, False):
        linear.weight.main_grad = torch.ones(16, 16)
        if fuse:
            outputs = module(x)
            assert rule in step_names(module)
        else:
            with unfused():
                outputs = module(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(t.square().sum() for t in outputs).backward()
        grads.append(linear.weight.main_grad)
    torch.testing.assert_close(*grads)
    assert not torch.equal(grads[0], torch.ones(16, 16))
