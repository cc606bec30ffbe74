"""What the recipe of NVFP4 does beyond rounding: a Hadamard transform, and rounding at random."""

from __future__ import annotations

import pytest
import torch
from helpers import assert_equal, explained
from plan_calls import plan_op
from torch import Tensor

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.plan.plan import Plan

ops = torch.ops.transformer_ops
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def turned(rows: Tensor) -> Tensor:
    """By Sylvester's construction, in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = matrix * torch.tensor(SIGNS, dtype=torch.float64) / 4
    whole = len(rows) // 16 * 16
    blocks = rows[:whole].double().unflatten(0, (-1, 16))
    return torch.cat([(matrix @ blocks).flatten(0, 1), rows[whole:].double()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 7, 16, 40])
def test_the_transform(rows: int, dtype: torch.dtype) -> None:
    x, grad = torch.randn(rows, 24).to(dtype), torch.randn(rows, 8).to(dtype)
    found = ops.hadamard_columns(grad, x)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    assert found.dtype == wide and found.shape == x.shape
    torch.testing.assert_close(found.double(), turned(x), atol=1e-5, rtol=1e-5)
    # The product over the rows is the same.
    product = ops.hadamard_columns(grad, grad).double().t() @ found.double()
    torch.testing.assert_close(product, grad.double().t() @ x.double(), atol=1e-4, rtol=1e-4)


def test_rows_are_the_leading_dimensions() -> None:
    x = torch.randn(4, 10, 24)
    found = ops.hadamard_columns(x, x)
    assert torch.equal(found.flatten(0, 1), ops.hadamard_columns(x, x.flatten(0, 1)))


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4 16x1", "mx e4m3", "e5m2"])
def test_rounding_at_random_keeps_the_mean(format: str) -> None:
    x = torch.randn(32, 64)
    nearest = ops.quantize_dequantize(x, format, "float32")
    draws = torch.stack(
        [ops.quantize_dequantize_stochastic(x, format, "float32") for _ in range(400)]
    )
    low, high = draws.amin(0), draws.amax(0)
    # Each number becomes one of the two around it, and the nearest one is among them.
    for draw in draws[:20]:
        assert ((draw == low) | (draw == high)).all()
    assert ((nearest == low) | (nearest == high)).all()
    inside = (low <= x) & (x <= high)
    assert inside.float().mean() > 0.95  # but those beyond the largest number of a block
    gap = (high - low).clamp_min(1e-30)
    error = ((draws.mean(0) - x) / gap)[inside].abs()
    # The deviation of the mean of 400 draws is 0.025 of the gap at most.
    assert error.max() < 0.125 and error.mean() < 0.03
    assert (nearest - x)[inside].abs().mean() > 4 * (draws.mean(0) - x)[inside].abs().mean()


def test_numbers_of_the_format_stay() -> None:
    x = torch.tensor([[0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0] * 2])
    for _ in range(5):
        found = ops.quantize_dequantize_stochastic(x, "nvfp4", "float32")
        torch.testing.assert_close(found, x, rtol=1e-6, atol=0)
    assert ops.quantize_dequantize_stochastic(x * float("nan"), "nvfp4", "float32").isnan().all()


def test_the_generator_of_torch_repeats_it() -> None:
    x = torch.randn(32, 64)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(ops.quantize_dequantize_stochastic(x, "nvfp4", "float32"))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4 16x1", "nvfp4 16x16", "e4m3"])
def test_threads_do_not_change_it(format: str) -> None:
    x, splits = torch.randn(500, 300), torch.tensor([100, 0, 100, 300])
    x[100:200] = x[:100]
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        one = ops.quantize_dequantize_stochastic(x, format, "float32")
        (groups,) = plan_op("quantize_dequantize_groups_stochastic")([x], splits, format, "float32")
        found.append((one, groups, ops.hadamard_columns(x, x)))
    for other in found[1:]:
        assert_equal(found[0], other)
    # Groups draw numbers of their own.
    assert not torch.equal(found[0][1][:100], found[0][1][100:200])


@pytest.mark.parametrize("format", ["nvfp4", "mx e4m3", "e5m2"])
def test_what_is_too_large_becomes_the_largest(format: str) -> None:
    x = torch.rand(64, 64) * 2 - 1
    x[:, 0], x[:, 1] = torch.inf, -torch.inf
    nearest = ops.quantize_dequantize(x, format, "float32")
    for _ in range(10):
        found = ops.quantize_dequantize_stochastic(x, format, "float32")
        assert torch.equal(found[:, :2], nearest[:, :2]) and found[:, 2:].isfinite().all()


def gradients(model: tops.Sequential, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    model(x).backward(grad)
    assert x.grad is not None
    return x.grad, model[0].weight.grad


def test_the_weight_s_gradient_is_that_of_turned_operands() -> None:
    model = tops.Sequential(tops.BasicLinear(32, 48))
    x, grad = torch.randn(40, 32), torch.randn(40, 48)
    recipe = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
    with tops.autocast(recipe=recipe):
        of_input, of_weight = gradients(model, x, grad)
    plain = recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    with tops.autocast(recipe=plain):
        assert torch.equal(of_input, gradients(model, x, grad)[0])

    def rounded(tensor: Tensor) -> Tensor:
        wide = ops.hadamard_columns(tensor, tensor)
        return ops.quantize_dequantize(wide, "nvfp4 16x1", "float32").double()

    wanted = rounded(grad).t() @ rounded(x)
    torch.testing.assert_close(of_weight.double(), wanted, atol=1e-4, rtol=1e-4)
    exact = grad.double().t() @ x.double()
    assert 0.01 < (of_weight.double() - exact).norm() / exact.norm() < 0.2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_the_whole_recipe(backend: str) -> None:
    model = tops.Sequential(tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32))
    x, grad = torch.randn(40, 32), torch.randn(40, 32)
    recipe = recipes.NVFP4BlockScaling()
    assert recipe.key == "nvfp4, nvfp4 16x16, nvfp4, hadamard, stochastic"
    assert recipe != recipes.NVFP4BlockScaling(disable_rht=True)
    run = torch.compile(model, backend=backend, fullgraph=True)
    runs = []
    for call in (model, run):
        torch.manual_seed(1)
        model.zero_grad()
        with tops.autocast(recipe=recipe):
            call(x).backward(grad)
        runs.append([p.grad.clone() for p in model.parameters()])
    if backend == "aot_eager":
        for a, b in zip(*runs, strict=True):
            torch.testing.assert_close(a, b)
    model.zero_grad()
    model(x).backward(grad)
    for a, b in zip(runs[1], [p.grad for p in model.parameters()], strict=True):
        assert (a - b).norm() < 0.4 * b.norm()


def test_the_plan_says_so() -> None:
    model = tops.Sequential(tops.Linear(32, 64), tops.GELU(), tops.Quantize(backward=True))
    with tops.autocast(recipe=recipes.NVFP4BlockScaling()):
        model(torch.randn(16, 32, requires_grad=True))
    plan = model.plans()[0]
    assert Plan.parse(plan.text) == plan and plan.recipe == recipes.NVFP4BlockScaling().key
    assert plan.text.count("hadamard_columns(") == 2
    assert plan.text.count("quantize_dequantize_stochastic(") == 3
    told = explained(model)
    assert "both turned by a Hadamard transform for the weight's gradient" in told
    assert "gradients rounded stochastically" in told


def test_integers_cannot_be_rounded_at_random() -> None:
    with pytest.raises(RuntimeError, match="format must be floating, got 'int8 1x32'"):
        ops.quantize_dequantize_stochastic(torch.randn(2, 32), "int8 1x32", "float32")
