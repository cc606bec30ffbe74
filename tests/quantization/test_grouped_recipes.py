"""Recipes on grouped products: each group is rounded as a Linear of its own is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_near
from plan_calls import plan_op
from recipe_cases import RECIPES, Product, without_state
from test_grouped import experts, routed
from torch import Tensor

import transformer_ops as tops

SIZES = torch.tensor([40, 0, 3, 57])
ROWS = 104  # the last 4 in no group


def groups_of(rows: Tensor) -> list[Tensor]:
    return list(rows[:-4].split(SIZES.tolist()))


@without_state
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_group_is_rounded_as_one_linear(name: str, dtype: torch.dtype) -> None:
    """Sizes that no block divides: no block, and no scale, is of two groups."""
    options = {"single_grouped_weight": True, "single_grouped_bias": True}
    op = tops.GroupedLinear(4, 72, 50, **options).to(dtype)
    with torch.no_grad():
        op.weight[0] *= 100
        op.bias.normal_()
    x, grad = torch.randn(ROWS, 72).to(dtype), torch.randn(ROWS, 50).to(dtype)
    x[:40] *= 1000
    with tops.autocast(recipe=RECIPES[name]):
        y = op(x.requires_grad_(), SIZES)
    y.backward(grad)
    assert not y[-4:].any() and not x.grad[-4:].any()
    for group, rows in enumerate(groups_of(x)):
        if len(rows) == 0:
            assert not op.weight.grad[group].any()
            continue
        wide = [t.detach().double().requires_grad_() for t in (rows, op.weight[group])]
        meant = Product.apply(*wide, RECIPES[name], dtype)
        own = groups_of(grad)[group]
        meant.backward(own.double())
        bias = op.bias[group].double()
        found = (groups_of(y)[group], groups_of(x.grad)[group], op.weight.grad[group])
        for a, b in zip(found, (meant + bias, wide[0].grad, wide[1].grad), strict=True):
            size = b.abs().max().item()
            assert_near(a / size, b / size, dtype, "output and gradients", factor=4)
        # A sum is no product: of the gradient as it is.
        assert_near(op.bias.grad[group], own.double().sum(0), dtype, "bias", factor=4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_under_a_recipe(backend: str) -> None:
    """Eager and compiled, and what is kept is what is kept without a recipe."""
    module = tops.Sequential(*experts(3, 64, 32))
    x, ids, probs = routed(20, 3, 2, 64)
    tensors = [x, probs, *module.parameters()]
    run = module if backend == "eager" else torch.compile(module, fullgraph=True, backend=backend)
    exact = torch.autograd.grad(module(x, ids, probs).square().sum(), tensors)
    with tops.autocast(recipe=tops.recipe.MXFP8BlockScaling()):
        y = run(x, ids, probs)
        want = module(x, ids, probs)
    torch.testing.assert_close(y, want)
    (misses,) = {m.reason for m in module.plans()[0].near_misses if m.fusion == "moe_mlp"}
    assert misses == "op 1 takes rounded operands"
    found = torch.autograd.grad(y.square().sum(), tensors)
    for a, b in zip(found, exact, strict=True):
        error = float((a - b).norm() / b.norm())
        assert 0.001 < error < 0.15


def test_the_text_of_a_plan_with_groups() -> None:
    op = tops.GroupedLinear(4, 72, 50, bias=False, single_grouped_weight=True)
    fuser = tops.OperationFuser([op])
    with tops.autocast(recipe=tops.recipe.MXFP8BlockScaling()):
        fuser(torch.randn(ROWS, 72, requires_grad=True), SIZES)
    text = str(fuser.plan())
    assert 'quantize_dequantize_groups([p0.weight], none, "mx e4m3", "float32")' in text
    assert 'quantize_dequantize_groups([x0], e0.splits, "mx e4m3", "float32")' in text
    assert str(tops.Plan.parse(text)) == text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_groups(dtype: torch.dtype) -> None:
    """Under a Hadamard transform, too: no 16 rows that are turned are of two groups."""
    recipe = tops.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
    op = tops.GroupedLinear(4, 72, 50, bias=False, single_grouped_weight=True).to(dtype)
    x, grad = torch.randn(ROWS, 72).to(dtype), torch.randn(ROWS, 50).to(dtype)
    fuser = tops.OperationFuser([op])
    with tops.autocast(recipe=recipe):
        y = fuser(x.requires_grad_(), SIZES)
    y.backward(grad)
    assert str(fuser.plan()).count("hadamard_columns(") == 2
    for group, rows in enumerate(groups_of(x)):
        if len(rows) == 0:
            continue
        one = tops.BasicLinear(72, 50).to(dtype)
        one.weight.data.copy_(op.weight[group])
        leaf = rows.detach().requires_grad_()
        with tops.autocast(recipe=recipe):
            meant = one(leaf)
        meant.backward(groups_of(grad)[group])
        found = (groups_of(y)[group], groups_of(x.grad)[group], op.weight.grad[group])
        torch.testing.assert_close(found, (meant, leaf.grad, one.weight.grad))


def test_bad_arguments_of_the_rounding() -> None:
    run = plan_op("quantize_dequantize_groups")
    x = torch.randn(4, 6)
    for arguments, text in (
        (
            (x[None, None], None, "mx e4m3", "float32"),
            r"input must have 2 or 3 dimensions where there are no",
        ),
        ((x, torch.tensor([3, 2]), "mx e4m3", "float32"), "splits must add up to at most 4 rows"),
        ((x, torch.tensor([-1, 2]), "mx e4m3", "float32"), "splits must be at least 0, got -1"),
        ((x, torch.tensor([3]), "mx", "float32"), "format must be"),
        ((x, torch.tensor([3]), "mx e4m3", "int8"), "dtype must be"),
    ):
        with pytest.raises(RuntimeError, match=rf"\[quantize_dequantize_groups\] {text}"):
            run([arguments[0]], *arguments[1:])
    with pytest.raises(RuntimeError, match="input must be one tensor where there are splits"):
        run([x, x], torch.tensor([3]), "mx e4m3", "float32")
    with pytest.raises(RuntimeError, match=r"input must have 2 dimensions .*\[1, 4, 6\]"):
        run([x, x[None]], None, "mx e4m3", "float32")
    with pytest.raises(RuntimeError, match="input must be of one dtype, got Float and Double"):
        run([x, x.double()], None, "mx e4m3", "float32")
    at_random = plan_op("quantize_dequantize_groups_stochastic")
    with pytest.raises(RuntimeError, match="format must be floating, got 'int8 1x32'"):
        at_random([x], torch.tensor([3]), "int8 1x32", "float32")


@without_state
def test_one_group_with_a_weight_of_its_own(name: str) -> None:
    one, plain = tops.GroupedLinear(1, 64, 32), tops.Linear(64, 32)
    plain.load_state_dict({"weight": one.weight0, "bias": one.bias0})
    found = []
    for op, extra in ((one, [torch.tensor([48])]), (plain, [])):
        x = torch.linspace(-1, 2, 48 * 64).view(48, 64).requires_grad_()
        torch.manual_seed(0)
        with tops.autocast(recipe=RECIPES[name]):
            y = op(x, *extra)
        y.square().sum().backward()
        found.append((y, x.grad, *(p.grad for p in op.parameters())))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@without_state
def test_weights_of_several_dtypes(name: str) -> None:
    """They are rounded from the dtype of the product."""
    mixed, plain = tops.GroupedLinear(4, 72, 50), tops.GroupedLinear(4, 72, 50)
    with torch.no_grad():
        mixed.weight1.copy_(mixed.weight1.bfloat16())
    plain.load_state_dict(mixed.state_dict())
    mixed.weight1 = torch.nn.Parameter(mixed.weight1.bfloat16())
    x = torch.randn(ROWS, 72)
    for op in (mixed, plain):
        torch.manual_seed(0)
        with tops.autocast(recipe=RECIPES[name]):
            op(x, SIZES).square().sum().backward()
    assert mixed.weight1.grad.dtype == torch.bfloat16
    for a, b in zip(mixed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.to(a.dtype))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        tops.recipe.MXFP8BlockScaling(),
        tops.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
        tops.recipe.DelayedScaling(),
    ],
    ids=["mxfp8", "nvfp4", "delayed"],
)
def test_weights_of_both_layouts_are_rounded_alike(recipe: Any, compiled: bool) -> None:
    make = lambda single: tops.GroupedLinear(  # noqa: E731
        4, 72, 50, single_grouped_weight=single, single_grouped_bias=single
    )
    single, listed = make(True), make(False)
    listed.load_state_dict(single.state_dict())
    x, grad = torch.randn(ROWS, 72), torch.randn(ROWS, 50)
    found = []
    for op in (single, listed):
        run = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
        for _ in range(2):
            op.zero_grad()
            leaf = x.clone().requires_grad_()
            with tops.autocast(recipe=recipe):
                y = run(leaf, SIZES)
            y.backward(grad)
        grads = [p.grad for p in op.parameters()]
        if op is listed:
            grads = [torch.stack(grads[:4]), torch.stack(grads[4:])]
        found.append((y, leaf.grad, *grads))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
