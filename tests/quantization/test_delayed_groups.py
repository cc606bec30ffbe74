"""Delayed scaling of what is no product of one weight: grouped products, and Quantize."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from plan_calls import plan_op
from test_delayed_scaling import SHORT, State, update
from test_grouped import experts, routed
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.plan.plan import Plan
from transformer_ops.quantization import reset_scales

GROUPS, WIDTH, OUT, ROWS = 3, 24, 20, 40
# The splits of each step; some groups have no rows, and some rows are in no group.
SPLITS = [[10, 30, 0], [0, 0, 5], [20, 0, 20], [1, 2, 3], [13, 13, 14]]


def grouped(single: bool = True, dtype: torch.dtype = torch.float64) -> tops.GroupedLinear:
    torch.manual_seed(0)
    options = {"single_grouped_weight": single}
    return tops.GroupedLinear(GROUPS, WIDTH, OUT, bias=False, dtype=dtype, **options)


def inputs(k: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(k)
    x, grad = torch.randn(ROWS, WIDTH, dtype=dtype), torch.randn(ROWS, OUT, dtype=dtype)
    splits = torch.tensor(SPLITS[k % len(SPLITS)])
    ends = splits.cumsum(0).tolist()
    for group, end in enumerate(ends):
        x[end - SPLITS[k % len(SPLITS)][group] : end] *= 10.0 ** (group - k % 2)
        grad[:end] *= 1e-2
    return x, splits, grad


def step(module: Any, k: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    x, splits, grad = inputs(k, dtype)
    x.requires_grad_()
    with tops.autocast(recipe=SHORT):
        y = module(x, splits)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], grad)]


def reference(x: Tensor, weight: Tensor, grad: Tensor, state: State) -> tuple[Tensor, ...]:
    """One group of a step: output and gradients."""
    rounded = state.round(weight, 1)
    if len(x) == 0:
        return grad, x, torch.zeros_like(weight)
    rows = state.round(x, 0)
    after = state.round(grad, 2)
    return rows @ rounded.t(), after @ rounded, after.t() @ rows


@pytest.mark.parametrize("single", [True, False])
def test_each_group_has_scales_of_its_own(single: bool) -> None:
    op, states = grouped(single), [State(SHORT) for _ in range(GROUPS)]
    weights = list(op.parameters()) if not single else list(op.weight.detach())
    for k in range(7):
        y, grad_x, *grad_weights = step(op, k)
        if single:
            grad_weights = list(grad_weights[0])
        x, splits, grad = inputs(k)
        parts = [t[: splits.sum()].split(splits.tolist()) for t in (x, grad, y, grad_x)]
        for group, state in enumerate(states):
            state.enter()
            scale = torch.stack(state.scale)
            torch.testing.assert_close(op.fp8_scale[:, group], scale, rtol=2e-7, atol=0)
            rows, own, *found = (part[group] for part in parts)
            want = reference(rows, weights[group].detach(), own, state)
            for a, b in zip([*found, grad_weights[group]], want, strict=True):
                assert (a - b).norm() <= 1e-6 * b.norm()
        assert not y[splits.sum() :].any() and not grad_x[splits.sum() :].any()
    assert op.fp8_scale.unique().numel() == 3 * GROUPS


def test_the_plan_of_groups() -> None:
    fuser = tops.OperationFuser([grouped()])
    x, splits, _ = inputs(0)
    with tops.autocast(recipe=SHORT):
        fuser(x.requires_grad_(), splits)
    text = str(fuser.plan())
    assert "states st0.fp8_amax st0.fp8_grad_amax st0.fp8_scale" in text
    call = (
        'st0.fp8_amax = quantize_dequantize_groups_scaled({}, st0.fp8_scale, {}, "e4m3", "float64")'
    )
    assert call.format("[x0]", "0, e0.splits") in text
    assert call.format("[p0.weight]", "1, none") in text
    assert str(Plan.parse(text)) == text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_groups_in_a_graph(backend: str, dtype: torch.dtype) -> None:
    one, other = grouped(dtype=dtype), grouped(dtype=dtype)
    fast = torch.compile(other, fullgraph=True, backend=backend)
    for k in range(4):
        x, splits, grad = inputs(k, dtype)
        x.requires_grad_()
        with tops.autocast(recipe=SHORT):
            want, y = one(x, splits), fast(x, splits)
        want_grads = torch.autograd.grad(want, [x, one.weight], grad)
        found = [y, *torch.autograd.grad(y, [x, other.weight], grad), other.fp8_scale]
        torch.testing.assert_close(found, [want, *want_grads, one.fp8_scale])
    assert one.fp8_scale.unique().numel() > GROUPS


def test_checkpoints_of_groups() -> None:
    op = grouped()
    for k in range(3):
        step(op, k)
    file = io.BytesIO()
    torch.save(op.state_dict(), file)
    file.seek(0)
    again = grouped()
    state = torch.load(file, weights_only=True)
    again.load_state_dict(state)
    assert again.fp8_scale.shape == (3, GROUPS)
    for a, b in zip(step(op, 3), step(again, 3), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(copy.deepcopy(op).fp8_amax_history, op.fp8_amax_history)
    fewer = tops.GroupedLinear(2, WIDTH, OUT, bias=False, single_grouped_weight=True)
    with pytest.raises(
        RuntimeError, match=r"must be fp8_scale, .* of one module, got tensors that"
    ):
        fewer.load_state_dict(state)
    reset_scales(op)
    assert not hasattr(op, "fp8_scale")


def test_experts_under_delayed_scaling() -> None:
    """A layer, whose ops take and hand on groups."""
    module = tops.Sequential(*experts(3, 64, 32))
    x, ids, probs = routed(20, 3, 2, 64)
    exact = module(x, ids, probs)
    for _ in range(3):
        with tops.autocast(recipe=SHORT):
            y = module(x.requires_grad_(), ids, probs)
        y.sum().backward()
    assert 0.001 < (y - exact).norm() / exact.norm() < 0.1


def test_quantizers_of_groups() -> None:
    op = grouped()
    for k in range(3):
        step(op, k)
    for group in range(GROUPS):
        for mode, i, place in (("forward", 0, 0), ("forward", 1, 1), ("backward", 0, 2)):
            found = op.get_quantizer(mode, (2 if mode == "forward" else 1) * group + i)
            assert torch.equal(found.scale, op.fp8_scale[place, group])
    assert op.get_quantizer("forward", 2 * GROUPS) is None
    assert op.get_quantizer("backward", GROUPS) is None


# ---- Quantize


@pytest.mark.parametrize(("forward", "backward"), [(True, False), (False, True), (True, True)])
def test_quantize(forward: bool, backward: bool) -> None:
    op, state = tops.Quantize(forward, backward), State(SHORT)
    module = tops.Sequential(op)
    for k in range(6):
        size = [1.0, 30.0, 0.2][k % 3]
        x, grad = size * torch.randn(5, 7), 1e-3 * size * torch.randn(5, 7)
        with tops.autocast(recipe=SHORT):
            y = module(x.requires_grad_())
        (found,) = torch.autograd.grad(y, x, grad)
        state.enter()
        torch.testing.assert_close(
            y.detach(), state.round(x.detach(), 0) if forward else x.detach()
        )
        torch.testing.assert_close(found, state.round(grad, 2) if backward else grad)
    update()
    state.enter()
    scales = torch.stack(state.scale)
    torch.testing.assert_close(op.fp8_scale, scales)
    # Scales of tensors that are not rounded stay 1.
    assert (scales != 1).tolist() == [forward, False, backward]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_quantize_in_a_graph(backend: str) -> None:
    one = tops.Sequential(tops.Quantize(True, True), tops.GELU())
    other = copy.deepcopy(one)
    fast = torch.compile(other, fullgraph=True, backend=backend)
    for k in range(4):
        x = 10.0**k * torch.randn(5, 7)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        with tops.autocast(recipe=SHORT):
            outputs = [run(leaf) for run, leaf in zip((one, fast), leaves, strict=True)]
        found = [
            (y.detach(), *torch.autograd.grad(y.square().sum(), leaf))
            for y, leaf in zip(outputs, leaves, strict=True)
        ]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
    assert torch.equal(one[0].fp8_scale, other[0].fp8_scale)


def test_quantize_resumes() -> None:
    module = nn.Sequential(tops.Quantize())
    for _ in range(2):
        with tops.autocast(recipe=SHORT):
            module(10 * torch.randn(4))
    again = nn.Sequential(tops.Quantize())
    again.load_state_dict(module.state_dict())
    assert torch.equal(again[0].fp8_amax_history, module[0].fp8_amax_history)
    assert again[0].get_quantizer("forward", 0).scale == module[0].fp8_scale[0]
    assert tops.Quantize(False).get_quantizer("forward", 0) is None


# ---- the op


def test_bad_arguments_of_the_rounding() -> None:
    run = plan_op("quantize_dequantize_groups_scaled")
    x, scale, splits = torch.randn(4, 6), torch.ones(3, 2), torch.tensor([2, 1])
    for arguments, text in (
        ((x, torch.ones(3), 0, splits, "e4m3", "float32"), r"scale must have shape \[3, 2\]"),
        ((x, scale, 3, splits, "e4m3", "float32"), "position must be 0, 1 or 2, got 3"),
        ((x, scale, 0, splits, "mx e4m3", "float32"), "format must have one scale"),
        ((x[None, None], scale, 0, None, "e4m3", "float32"), "input must have 2 or 3 dimensions"),
        ((x, scale, 0, torch.tensor([3, 2]), "e4m3", "float32"), "splits must add up to at most 4"),
    ):
        with pytest.raises(RuntimeError, match=rf"\[quantize_dequantize_groups_scaled\] {text}"):
            run([arguments[0]], *arguments[1:])
