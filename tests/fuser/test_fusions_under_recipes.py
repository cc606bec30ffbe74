"""Fusions of products fire under a recipe as without one, and give the numbers of the ops alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from checks import unfused
from recipe_cases import RECIPES
from torch import Tensor, nn

import transformer_ops as tops

ROWS, IN, OUT = 48, 64, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Row(NamedTuple):
    make: Callable[[], list[nn.Module]]
    forward: tuple[str, ...]  # names of the steps, in the order of their ops
    backward: tuple[str, ...]
    extras: int = 0


def product() -> tops.BasicLinear:
    return tops.BasicLinear(IN, OUT)


FORK, ADD = tops.MakeExtraOutput, tops.AddExtraInput
ROWS_OF_TESTS = {
    "residual": Row(
        lambda: [FORK(), product()], ("MakeExtraOutput", "BasicLinear"), ("linear_residual_scale",)
    ),
    "scale": Row(
        lambda: [product(), tops.ConstantScale(0.5)],
        ("linear_epilogue",),
        ("linear_residual_scale",),
    ),
    "residual and scale": Row(
        lambda: [FORK(), product(), tops.ConstantScale(-2.0)],
        ("MakeExtraOutput", "linear_epilogue"),
        ("linear_residual_scale",),
    ),
    "bias": Row(lambda: [tops.Linear(IN, OUT)], ("linear_epilogue",), ("bias_linear",)),
    "bias and residual": Row(
        lambda: [tops.Linear(IN, OUT), ADD()],
        ("linear_epilogue",),
        ("bias_linear", "AddExtraInput"),
        extras=1,
    ),
    "scale and residual": Row(
        lambda: [product(), tops.ConstantScale(0.5), ADD()],
        ("linear_epilogue",),
        ("linear_residual_scale", "AddExtraInput"),
        extras=1,
    ),
    "gelu": Row(
        lambda: [tops.Linear(IN, OUT), tops.GELU()],
        ("linear_bias_activation",),
        ("BasicLinear", "activation_bias"),
    ),
    "relu": Row(
        lambda: [tops.Linear(IN, OUT), tops.ReLU()],
        ("linear_bias_activation",),
        ("BasicLinear", "activation_bias"),
    ),
    "swiglu": Row(
        lambda: [tops.Linear(IN, OUT), tops.SwiGLU()],
        ("linear_bias_glu",),
        ("BasicLinear", "glu_bias"),
    ),
}
every_row = pytest.mark.parametrize("row", ROWS_OF_TESTS.values(), ids=ROWS_OF_TESTS)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def module_of(row: Row, dtype: torch.dtype) -> tops.Sequential:
    torch.manual_seed(0)
    return tops.Sequential(*row.make()).to(dtype)


def step(
    row: Row, module: Callable[..., object], parameters: list[Tensor], recipe: str
) -> list[Tensor]:
    """Outputs, and gradients of inputs and parameters."""
    torch.manual_seed(1)
    dtype = parameters[0].dtype
    x = torch.randn(ROWS, IN).to(dtype).requires_grad_()
    extras = [torch.randn(ROWS, OUT).to(dtype).requires_grad_() for _ in range(row.extras)]
    with tops.autocast(recipe=RECIPES[recipe]):
        found = module(x, *extras)
    outputs = list(found) if isinstance(found, tuple) else [found]
    grads = [torch.randn(output.shape).to(dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [x, *extras, *parameters], grads)]


def steps(row: Row, module: tops.Sequential, recipe: str) -> list[Tensor]:
    """The results of the third of three equal steps, when delayed scales have settled."""
    for _ in range(2):
        step(row, module, list(module.parameters()), recipe)
    return step(row, module, list(module.parameters()), recipe)


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    """But for where sums are rounded to the dtype."""
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        most = 3 * torch.finfo(want.dtype).eps * want.abs().max().item()
        torch.testing.assert_close(got, want, rtol=0, atol=most)


@every_dtype
@every_recipe
@every_row
def test_fused_and_unfused_agree(row: Row, recipe: str, dtype: torch.dtype) -> None:
    fused, alone = module_of(row, dtype), module_of(row, dtype)
    found = steps(row, fused, recipe)
    plan = fused.plans()[0]
    assert plan.recipe is not None
    assert tuple(step.name for step in plan.forward) == row.forward
    assert tuple(step.name for step in plan.backward) == row.backward
    with unfused():
        wanted = steps(row, alone, recipe)
        assert all(len(step.ops) == 1 for step in alone.plans()[0].backward)
    assert_same(found, wanted)


@every_recipe
@pytest.mark.parametrize("name", ["residual and scale", "bias and residual"])
def test_compiled(name: str, recipe: str) -> None:
    row = ROWS_OF_TESTS[name]
    eager, module = module_of(row, torch.bfloat16), module_of(row, torch.bfloat16)
    wanted = steps(row, eager, recipe)
    for _ in range(2):
        step(row, module, list(module.parameters()), recipe)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_same(step(row, compiled, list(module.parameters()), recipe), wanted)


@every_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_gradients_in_main_grad(recipe: str, dtype: torch.dtype) -> None:
    def make(accumulate: bool) -> tops.Sequential:
        torch.manual_seed(0)
        weight = tops.BasicLinear(IN, OUT, accumulate_into_main_grad=accumulate)
        return tops.Sequential(FORK(), weight, tops.ConstantScale(0.5)).to(dtype)

    plain, module = make(False), make(True)
    weight = module[1].weight
    weight.main_grad = torch.zeros(OUT, IN)  # type: ignore[attr-defined]
    x = torch.randn(ROWS, IN).to(dtype)
    for each in (plain, module):
        with tops.autocast(recipe=RECIPES[recipe]):
            outputs = each(x.clone().requires_grad_())
        sum(output.float().pow(2).sum() for output in outputs).backward()
    assert [step.name for step in module.plans()[0].backward] == ["linear_residual_scale"]
    want = plain[1].weight.grad
    assert want is not None
    most = 3 * torch.finfo(dtype).eps * want.abs().max().item()
    torch.testing.assert_close(weight.main_grad.to(dtype), want, rtol=0, atol=most)


@pytest.mark.parametrize("scale", [0.3, 0.0, 2.0**40])
def test_a_scale_that_rounding_sees(scale: float) -> None:
    """The gradient is scaled, then rounded: in the other order the numbers would be others."""
    module = tops.Sequential(FORK(), product(), tops.ConstantScale(scale))
    with tops.autocast():
        outputs = module(torch.randn(ROWS, IN, requires_grad=True))
    sum(output.sum() for output in outputs).backward()
    plan = module.plans()[0]
    assert [step.name for step in plan.backward] == ["linear_residual_scale", "ConstantScale"]


def test_what_is_refused_says_why() -> None:
    module = tops.Sequential(tops.ReLU(), product(), tops.GELU(), product())
    with tops.autocast():
        module(torch.randn(ROWS, IN, requires_grad=True))
    reasons = {miss.fusion: miss.reason for miss in module.plans()[0].near_misses}
    assert reasons["activation_linear"] == "op 1 takes rounded operands"
    assert reasons["linear_activation"] == "op 3 takes rounded operands"


def test_a_parsed_plan_runs_the_same() -> None:
    row = ROWS_OF_TESTS["residual and scale"]
    module = module_of(row, torch.float16)
    steps(row, module, "current")
    text = str(module.plans()[0])
    assert str(tops.Plan.parse(text)) == text
