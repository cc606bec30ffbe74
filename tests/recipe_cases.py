"""Recipes for tests, their references in plain torch, and modules to run them on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import OpCase, run_seeded
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops import recipe as recipes

Recipe = recipes.Recipe
RECIPES: dict[str, Recipe] = {
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp8 hybrid": recipes.MXFP8BlockScaling(recipes.Format.HYBRID),
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=1),
    "block": recipes.Float8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    "nvfp4 4over6": recipes.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all"
    ),
}
# This includes recipes that draw random numbers, and those with tensors in different formats or
# unquantized.
EVERY_RECIPE: dict[str, Recipe] = {
    **RECIPES,
    "nvfp4 at random": recipes.NVFP4BlockScaling(),
    "custom": recipes.CustomRecipe(
        lambda role: {"input": "mx e4m3", "grad_output": "e5m2 1x128"}.get(role.tensor_type)
    ),
}
every_recipe = pytest.mark.parametrize("name", RECIPES)
without_state = pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])


def rounded(tensor: Tensor, format: str) -> Tensor:
    """Rounds in float64, in which the numbers of all formats are exact except for a float scale."""
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    codes, scale = torch.ops.transformer_ops.quantize(tensor, format)
    name = str(wide).removeprefix("torch.")
    return torch.ops.transformer_ops.dequantize(codes, scale, format, name, tensor.shape).double()


def by_columns(matrix: Tensor, format: str) -> Tensor:
    """Rounds with the blocks of a row along the columns, if the format has such blocks."""
    is_square = "128x128" in format or "16x16" in format
    flat = matrix.reshape(-1, matrix.shape[-1])
    turned = flat if is_square else flat.t().contiguous()
    found = rounded(turned, format)
    return (found if is_square else found.t()).reshape(matrix.shape)


class Product(torch.autograd.Function):
    """x W^T of float64 tensors with numbers of `dtype`, as a recipe computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.dtype = recipe, dtype
        of_input, of_weight, _ = recipe.operands
        return rounded(x.to(dtype), of_input) @ rounded(weight.to(dtype), of_weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x, weight), dtype = ctx.saved_tensors, ctx.dtype
        of_input, of_weight, of_grad = ctx.recipe.operands
        grad = grad.to(dtype)
        grad_input = rounded(grad, of_grad) @ by_columns(weight.to(dtype), of_weight)
        rows = by_columns(grad, of_grad).flatten(0, -2)
        return (
            grad_input,
            rows.t() @ by_columns(x.to(dtype), of_input).flatten(0, -2),
            None,
            None,
        )


def outputs_and_gradients(run: Any, x: Tensor, parameters: list[Tensor], grad: Tensor) -> Any:
    x = x.detach().requires_grad_()
    y = run(x)
    return y, *torch.autograd.grad(y, [x, *parameters], grad)


def settle(recipe: Recipe, run: Any, x: Tensor, grad: Tensor) -> None:
    """Runs a step on the same tensors first: delayed scales are then those of current scaling."""
    if isinstance(recipe, recipes.DelayedScaling):
        with tops.autocast(recipe=recipe):
            y = run(x.detach().requires_grad_())
        wanted = [p for p in run.parameters() if p.requires_grad]
        torch.autograd.grad(y, wanted, grad)


def linear(dtype: torch.dtype, bias: bool = True, rows: int = 70) -> tuple[Any, Tensor, Tensor]:
    """A Linear, an input and a gradient, with sizes that no block divides."""
    module = tops.Sequential(tops.Linear(72, 50, bias=bias)).to(dtype)
    return module, torch.randn(2, rows, 72).to(dtype), torch.randn(2, rows, 50).to(dtype)


def mlp() -> list[nn.Module]:
    return [
        tops.RMSNorm(64),
        tops.Linear(64, 256, bias=False),
        tops.SwiGLU(),
        tops.Linear(128, 64),
        tops.Dropout(0.0),
    ]


def block(dtype: torch.dtype = torch.float32, **policies: Any) -> tops.Sequential:
    torch.manual_seed(1)
    return tops.Sequential(*mlp(), **policies).to(dtype)


def gradients_of(
    run: Any, op: Any, inputs: list[Tensor], has_constants: bool = False
) -> list[Tensor]:
    """The outputs and all gradients of the call, from the same generator state. Constants are all
    inputs but the first one; they have no gradient."""
    given = inputs[:1] if has_constants else inputs
    leaves = [t for t in (*given, *op.parameters()) if t.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    found = run_seeded(run, *inputs)
    outputs = list(found) if isinstance(found, tuple) else [found]
    sums = [t for t in outputs if t.requires_grad]
    torch.manual_seed(1)
    grads = torch.autograd.grad(
        sums, leaves, [torch.randn_like(t) for t in sums], allow_unused=True
    )
    return [t.detach().double() for t in (*outputs, *grads) if t is not None]


def rounds(case: OpCase) -> bool:
    """Whether a recipe changes what the op computes. Heads with their losses stay exact."""
    return not case.name.startswith("LinearCrossEntropy") and case.name.startswith(
        ("BasicLinear", "GroupedLinear", "Linear", "PackedLinear", "Quantize")
    )


def refuses(case: OpCase, name: str) -> bool:
    """Whether the op raises an error under the recipe of that name."""
    return name == "delayed" and case.name.startswith("PackedLinear")


def assert_rounded(found: list[Tensor], exact: list[Tensor], name: str) -> None:
    """Checks that results are as close as the formats of the recipe allow."""
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= (0.35 if "nvfp4" in name else 0.15) * b.norm()
