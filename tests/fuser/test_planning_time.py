"""The first call of a long Sequential takes time in proportion to its length."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=40)

SHORT, LONG = 800, 12800
# Times of one machine, and one process: quadratic parts made the ratio 2 to 9.
MOST = 1.7


class Halved(tops.BasicOperation):
    def op_forward_compute(
        self, input_: Tensor, **unused: object
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return input_ / 2, (input_,)

    def op_forward_save_ctx(
        self,
        ctx: tops.OperationContext,
        input_: Tensor,
        tensors_to_save: tuple[Tensor, ...],
        **unused: object,
    ) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(
        self, ctx: tops.OperationContext, grad_output: Tensor
    ) -> tuple[Tensor, tuple[()]]:
        return grad_output / 2, ()


def products(i: int) -> list[nn.Module]:
    return [tops.Linear(4, 4), tops.GELU(), tops.Linear(4, 4), tops.GELU()]


def residuals(i: int) -> list[nn.Module]:
    begin, end = tops.MakeExtraOutput(), tops.AddExtraInput()
    begin.set_extra_output_channel(0, f"residual {i}", output_to_caller=False)
    end.set_extra_input_channel(0, f"residual {i}")
    return [begin, tops.RMSNorm(4), tops.Linear(4, 4), end]


def seen_outputs(i: int) -> list[nn.Module]:
    return [tops.MakeExtraOutput(), tops.GELU(), tops.MakeExtraOutput(), tops.GELU()]


def plain_modules(i: int) -> list[nn.Module]:
    begin, norm, _, end = residuals(i)
    return [begin, norm, nn.Identity(), end]


def joint_steps(i: int) -> list[nn.Module]:
    return [op for _ in range(2) for op in (tops.ReLU(), tops.Linear(4, 4, bias=False))]


def python_steps(i: int) -> list[nn.Module]:
    return [Halved(), tops.GELU(), Halved(), tops.GELU()]


RECIPES: dict[str, tops.recipe.Recipe | None] = {
    "exact": None,
    "mxfp8": tops.recipe.MXFP8BlockScaling(),
    "delayed": tops.recipe.DelayedScaling(amax_history_len=2),
}
MAKERS = (seen_outputs, plain_modules, joint_steps, python_steps, products, residuals)
CASES: list[Any] = [(make, "exact") for make in MAKERS]
CASES += [(residuals, "mxfp8"), (products, "delayed")]
CASES += [
    pytest.param(residuals, "delayed", marks=pytest.mark.slow),
    pytest.param(products, "mxfp8", marks=pytest.mark.slow),
]


@pytest.fixture
def no_collections() -> None:
    """The collector of Python looks at all objects that there are, ever more of them."""
    gc.collect()
    gc.disable()


def first_call(make: Callable[[int], list[nn.Module]], recipe: str, length: int) -> float:
    """Seconds of this process for each op."""
    module = tops.Sequential(*(op for i in range(length // 4) for op in make(i)))
    x = torch.randn(2, 4, requires_grad=True)
    chosen = RECIPES[recipe]
    region: AbstractContextManager[None] = nullcontext()
    if chosen is not None:
        region = tops.autocast(recipe=chosen)
    with region:
        begin = time.process_time()
        module(x)
        return (time.process_time() - begin) / length


@pytest.mark.parametrize(("make", "recipe"), CASES)
def test_a_first_call_takes_time_in_proportion(
    make: Callable[[int], list[nn.Module]], recipe: str, no_collections: None
) -> None:
    first_call(make, recipe, SHORT)  # what a process loads once
    for _ in range(3):
        short = min(first_call(make, recipe, SHORT) for _ in range(3))
        long = first_call(make, recipe, LONG)
        if long < MOST * short:
            return
    pytest.fail(f"an op of {LONG} took {long / short:.1f} times as long as one of {SHORT}")
