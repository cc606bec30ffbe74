"""frozen_weights(): each weight is rounded once in a region, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_equal
from plan_calls import called
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_ops as tops
from transformer_ops.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

# Formats of a weight's columns and rows differ in the first alone.
ONE_FORMAT = [
    Float8CurrentScaling(),
    DelayedScaling(amax_history_len=4),
    Float8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
]
RECIPES = [MXFP8BlockScaling(), *ONE_FORMAT]


def named(recipe: Recipe) -> str:
    return type(recipe).__name__


class Counter(TorchDispatchMode):
    """Counts the roundings of tensors of some shapes."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, values = called(func, args) if func.namespace == "transformer_ops" else ("", [])
        if "quantize_dequantize" in name:
            rounded = [value for value in values if isinstance(value, Tensor | list)]
            rounded = rounded[1 if name.endswith(".saved") else 0]
            tensors = rounded if isinstance(rounded, list) else [rounded]
            self.count += tuple(tensors[0].shape) in self.shapes
        return func(*args, **(kwargs or {}))


def make() -> nn.Module:
    """Two groups of ops, and two products with the same weight."""
    torch.manual_seed(0)
    first, second = tops.Linear(64, 96), tops.Linear(64, 96)
    second.weight = first.weight
    module = nn.Sequential(
        tops.Sequential(first, tops.SwiGLU(), tops.Linear(48, 64)),
        nn.Tanh(),
        tops.Sequential(second, tops.GELU()),
    )
    return module


WEIGHTS = ((96, 64), (64, 48))


def microbatches(module: nn.Module, recipe: Recipe | None, steps: int = 3) -> list[Tensor]:
    outputs = []
    for k in range(steps):
        torch.manual_seed(k)
        x = torch.randn(5, 64)
        with tops.autocast(recipe is not None, recipe):
            y = module(x)
        outputs.append(y.detach())
        y.pow(2).sum().backward()
    return outputs


def state(module: nn.Module) -> list[Tensor]:
    """As it is now: a region of delayed scaling changes all modules of the process."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    states = [value for name, value in module.state_dict().items() if "fp8_" in name]
    return [tensor.clone() for tensor in (*gradients, *states)]


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_it_computes_the_same_and_rounds_less(recipe: Recipe) -> None:
    plain, module = make(), make()
    # The tied weight has scales of its own in each op under delayed scaling, which are new ones in
    # each region of it where they change.
    with Counter(*WEIGHTS) as before:
        wanted = microbatches(plain, recipe) + state(plain)
    with Counter(*WEIGHTS) as counter, tops.frozen_weights():
        got = microbatches(module, recipe) + state(module)
    assert_equal(got, wanted)
    # Three products; the first needs no gradient of its input.
    assert before.count == 3 * (3 + 2)
    if not isinstance(recipe, DelayedScaling):
        assert counter.count == (2 if recipe in ONE_FORMAT else 4)
    else:
        # Three calls of each; two find what the same scale gave before.
        assert counter.count == 3 * 3 - 2
    # And outside as ever.
    with Counter(*WEIGHTS) as counter:
        microbatches(module, recipe, 1)
    assert counter.count == 3 + 2


def test_microbatches_of_a_region_of_delayed_scaling() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    plain, module = make(), make()
    with tops.autocast(recipe=recipe):
        wanted = microbatches(plain, recipe) + state(plain)
    with Counter(*WEIGHTS) as counter, tops.frozen_weights(), tops.autocast(recipe=recipe):
        got = microbatches(module, recipe) + state(module)
    assert_equal(got, wanted)
    assert counter.count == 3


def test_several_recipes_and_none_in_a_region() -> None:
    plain, module = make(), make()
    delayed = next(r for r in RECIPES if isinstance(r, DelayedScaling))
    order = [*RECIPES, None, delayed, *RECIPES]
    wanted = [y for recipe in order for y in microbatches(plain, recipe, 1)] + state(plain)
    with tops.frozen_weights(), tops.frozen_weights():
        got = [y for recipe in order for y in microbatches(module, recipe, 1)] + state(module)
    assert_equal(got, wanted)


@pytest.mark.parametrize("is_single", [True, False])
def test_groups_of_experts(is_single: bool) -> None:
    def run(module: nn.Module) -> list[Tensor]:
        splits = torch.tensor([3, 0, 4])
        for k in range(3):
            torch.manual_seed(k)
            with tops.autocast():
                y = module(torch.randn(7, 64), splits)
            y.pow(2).sum().backward()
        return state(module)

    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(tops.GroupedLinear(3, 64, 32, single_grouped_weight=is_single))
    wanted = run(modules[0])
    with Counter((3, 32, 64) if is_single else (32, 64)) as counter, tops.frozen_weights():
        assert_equal(run(modules[1]), wanted)
    assert counter.count == 1


def test_one_weight_of_a_list_that_changes_or_is_replaced() -> None:
    module, x, splits = tops.GroupedLinear(3, 64, 32), torch.randn(7, 64), torch.tensor([3, 0, 4])
    with torch.no_grad(), tops.frozen_weights(), tops.autocast():
        before = module(x, splits)
        module.weight2 = nn.Parameter(module.weight2 * 3)
        with Counter((32, 64)) as counter:
            after = module(x, splits)
        assert counter.count == 1
        assert torch.equal(before[:3], after[:3]) and not torch.equal(before[3:], after[3:])
        module.weight1.mul_(2)
        with pytest.raises(RuntimeError, match=r"\[GroupedLinear\] weight1 must not be modified"):
            module(x, splits)


def test_backward_after_the_region() -> None:
    plain, module, recipe, x = make(), make(), MXFP8BlockScaling(), torch.randn(5, 64)
    with tops.autocast(recipe=recipe):
        plain(x).sum().backward()
        with tops.frozen_weights():
            y = module(x)
    with Counter(*WEIGHTS) as counter:
        y.sum().backward()
    assert counter.count == 2
    assert_equal(state(module), state(plain))


def test_a_step_between_regions() -> None:
    plain, module = make(), make()
    for model in (plain, module):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            if model is module:
                with tops.frozen_weights():
                    microbatches(model, MXFP8BlockScaling())
            else:
                microbatches(model, MXFP8BlockScaling())
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(list(module.parameters()), list(plain.parameters()))


def test_a_weight_that_changes_within_is_an_error() -> None:
    module, recipe = make(), MXFP8BlockScaling()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with pytest.raises(
        RuntimeError,
        match=r"\[Linear\] weight must not be modified within frozen_weights\(\), got "
        r"version 2 where it was rounded at version 1",
    ):
        with tops.frozen_weights():
            microbatches(module, recipe)
            optimizer.step()
            microbatches(module, recipe)
    # The region is left, and so is what it kept.
    with Counter(*WEIGHTS) as counter:
        microbatches(module, recipe, 1)
    assert counter.count == 5


def test_a_weight_that_is_put_in_the_place_of_another() -> None:
    plain, module, recipe = make(), make(), MXFP8BlockScaling()

    def run(model: Any) -> list[Tensor]:
        outputs = microbatches(model, recipe, 1)
        linear = model[0][2]
        linear.weight = nn.Parameter(2 * linear.weight.detach())
        outputs += microbatches(model, recipe, 1)
        linear.weight.data = 3 * linear.weight.detach()
        return outputs + microbatches(model, recipe, 1)

    wanted = run(plain)
    with tops.frozen_weights():
        assert_equal(run(module), wanted)


# Writes to the memory of a parameter, and whether torch counts them.
WRITES: dict[str, tuple[Callable[[Tensor], object], bool]] = {
    "in place": (lambda weight: weight.detach().mul_(2), True),
    "data": (lambda weight: weight.data.mul_(2), False),
    "numpy": (
        lambda weight: np.multiply(weight.detach().numpy(), 2, weight.detach().numpy()),
        False,
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_torch_does_not_count_is_not_noticed(name: str) -> None:
    """As docs/quantization.md says: the product is that of the weight before."""
    write, is_counted = WRITES[name]
    linear, x = tops.Linear(64, 32, bias=False), torch.randn(8, 64)
    with tops.autocast(recipe=MXFP8BlockScaling()):
        with tops.frozen_weights():
            before = linear(x)
            write(linear.weight)
            if is_counted:
                with pytest.raises(RuntimeError, match="weight must not be modified within"):
                    linear(x)
            else:
                assert torch.equal(linear(x), before)
        # A power of two changes no rounding.
        assert torch.equal(linear(x), 2 * before)


def test_weights_made_at_each_call_round_as_ever() -> None:
    modules = [make(), make()]
    for module in modules:
        nn.utils.parametrizations.weight_norm(module[0][2], "weight")  # type: ignore[index]
    wanted = microbatches(modules[0], MXFP8BlockScaling())
    with tops.frozen_weights():
        assert_equal(microbatches(modules[1], MXFP8BlockScaling()), wanted)


def test_inference_and_training_share_a_region() -> None:
    plain, module, x = make(), make(), torch.randn(5, 64)
    wanted = microbatches(plain, MXFP8BlockScaling())
    with tops.frozen_weights():
        with torch.inference_mode(), tops.autocast():
            module(x)
        with torch.no_grad(), tops.autocast():
            module(x)
        assert_equal(microbatches(module, MXFP8BlockScaling()), wanted)
    assert_equal(state(module), state(plain))


def test_a_region_counts_for_its_thread() -> None:
    module, counts = make(), []

    def run() -> None:
        with Counter(*WEIGHTS) as counter:
            microbatches(module, MXFP8BlockScaling(), 1)
        counts.append(counter.count)

    with tops.frozen_weights():
        for _ in range(2):
            run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert counts == [4, 0, 5]
    with pytest.raises(RuntimeError, match=r"\[frozen_weights\] region must be left by the thread"):
        tops.frozen_weights().__exit__()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_within", [False, True])
def test_compiled_code_is_right(backend: str, is_within: bool) -> None:
    plain, module, recipe = make(), make(), MXFP8BlockScaling()

    def call(x: Tensor) -> Any:
        if is_within:
            with tops.frozen_weights():
                return module(x)
        return module(x)

    compiled: Any = torch.compile(call, fullgraph=True, backend=backend)
    x, optimizer = torch.randn(5, 64), torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        with tops.autocast(recipe=recipe), tops.frozen_weights():
            with torch.no_grad():
                for a, b in zip(plain.parameters(), module.parameters(), strict=True):
                    a.copy_(b)
            y, z = compiled(x), plain(x)
        torch.testing.assert_close(y, z)
        y.sum().backward()
        optimizer.step()
