"""Training under recipes as scripts do it: every recipe, kind of activation checkpointing and place
of the region, straight and resumed, against the plain run, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpointing import WAYS, Run, plain, within
from helpers import assert_equal
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.quantization import checkpoint_contexts, make_scales

pytestmark = pytest.mark.takes(seconds=40)

DELAYED = recipes.DelayedScaling(amax_history_len=3)
RECIPES: dict[str, recipes.Recipe] = {
    "mxfp8": recipes.MXFP8BlockScaling(),
    "current": recipes.Float8CurrentScaling(),
    "delayed": DELAYED,
    "block": recipes.Float8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
STEPS, RESUMED = 4, 2


class Model(nn.Module):
    """Two blocks and a head. `way` calls a block, `region()` surrounds it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(self._block() for _ in range(2)))
        self.head = tops.Linear(32, 16)
        self.way: Run = plain
        self.region: Callable[[], Any] | None = None

    @staticmethod
    def _block() -> tops.Sequential:
        return tops.Sequential(
            tops.LayerNorm(32), tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.way(self.blocks, x, self.region))


# In compiled code a context function must give dispatch modes.
COMPILED = ("non-reentrant", "contexts", "selective", "both contexts")


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 32, generator=generator) * [1.0, 8.0, 0.5, 3.0][step]
    return x, torch.randn(24, 16, generator=generator)


def train(
    model: Model, recipe: recipes.Recipe, steps: range, *, is_inside: bool, compiled: bool = False
) -> list[Tensor]:
    """Outputs, gradients and, at the end, the state of the model."""
    region = functools.partial(tops.autocast, recipe=recipe)
    model.region = region if is_inside else None
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    found: list[Tensor] = []
    for step in steps:
        x, grad = batch(step)
        x.requires_grad_()
        model.zero_grad()
        torch.manual_seed(step)  # for what rounds at random
        # The head needs a region of its own where the blocks have theirs.
        y = within(region, run)(x)
        y.backward(grad)
        assert x.grad is not None
        found += [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(1e-3 * parameter.grad)
    states = model.state_dict().values()
    return [tensor.clone() for tensor in (*found, *states)]


@functools.cache
def wanted(name: str, is_inside: bool) -> list[Tensor]:
    return train(Model(), RECIPES[name], range(STEPS), is_inside=is_inside)


every_recipe = pytest.mark.parametrize("name", RECIPES)
every_place = pytest.mark.parametrize("is_inside", [False, True], ids=["outside", "inside"])
# A region of delayed scaling inside of these is refused.
REFUSED = {("delayed", "reentrant"), ("delayed", "nested")}


@every_place
@pytest.mark.parametrize("way", WAYS)
@every_recipe
def test_a_checkpoint_changes_nothing(name: str, way: str, is_inside: bool) -> None:
    model = Model()
    model.way = WAYS[way]
    if is_inside and (name, way) in REFUSED:
        with pytest.raises(RuntimeError, match=r"a region of DelayedScaling must not be entered"):
            train(model, RECIPES[name], range(1), is_inside=True)
        return
    found = train(model, RECIPES[name], range(STEPS), is_inside=is_inside)
    assert_equal(found, wanted(name, is_inside))


# Recipes without a state and without random numbers differ by their formats alone.
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=pytest.mark.slow if is_alike else ())
        for name in RECIPES
        for way in COMPILED
        for is_alike in [name in ("mxfp8", "block") and way != "non-reentrant"]
    ],
)
def test_a_checkpoint_in_compiled_code_changes_nothing(name: str, way: str) -> None:
    model = Model()
    model.way = WAYS[way]
    found = train(model, RECIPES[name], range(STEPS), is_inside=False, compiled=True)
    assert_equal(found, wanted(name, False))


@every_place
@pytest.mark.parametrize("way", ["plain", "non-reentrant", "compiled"])
@every_recipe
def test_a_resumed_run_goes_on_as_it_would_have(name: str, way: str, is_inside: bool) -> None:
    recipe = RECIPES[name]
    models = Model(), Model()
    for model in models:
        model.way = {"plain": plain, "compiled": plain}.get(way) or WAYS[way]
    go = functools.partial(train, is_inside=is_inside, compiled=way == "compiled")
    go(models[0], recipe, range(RESUMED))
    models[1].load_state_dict(models[0].state_dict())
    found = go(models[1], recipe, range(RESUMED, STEPS))
    # What the region before did to the scales of the first model is in the state dict.
    count = len(found)
    assert_equal(found, wanted(name, is_inside)[-count:])


# ---- several microbatches


@pytest.mark.parametrize("way", ["non-reentrant", "contexts", "sequential"])
@every_place
def test_forwards_before_their_backwards(way: str, is_inside: bool) -> None:
    """Pipelines do this: each second run has the scales of its own first run."""
    found: list[Tensor] = []
    for model in (Model(), Model()):
        model.way = plain if not found else WAYS[way]
        region = functools.partial(tops.autocast, recipe=DELAYED)
        model.region = region if is_inside else None
        found.append(torch.cat([g.flatten() for g in interleaved(within(region, model), model)]))
    assert torch.equal(*found)


def interleaved(run: Run, model: Model) -> list[Tensor]:
    outputs: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        x, grad = batch(step)
        outputs.append((run(x.requires_grad_()), grad))
        if step >= 2:
            y, grad = outputs.pop(0)
            y.backward(grad)
    for y, grad in outputs:
        y.backward(grad)
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_backward_in_a_region_of_another_recipe() -> None:
    """The region around backward is not that of the first run."""
    for way in ("reentrant", "non-reentrant", "contexts"):
        model, (x, grad) = Model(), batch(0)
        model.way = WAYS[way]
        y = model(x.requires_grad_())
        with tops.autocast(recipe=RECIPES["mxfp8"]):
            y.backward(grad)
        exact = Model()
        exact(x).backward(grad)
        for a, b in zip(model.parameters(), exact.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


# ---- what is refused


@pytest.mark.parametrize("second", ["current", None])
def test_a_second_run_with_another_region(second: str | None) -> None:
    block, (x, _) = Model().blocks[0], batch(0)
    chosen: list[recipes.Recipe | None] = [RECIPES["mxfp8"]]

    def run(x: Tensor) -> Tensor:
        with tops.autocast(chosen[0] is not None, chosen[0]):
            y: Tensor = block(x)
            return y

    y = checkpoint(run, x.requires_grad_(), use_reentrant=False)
    chosen[0] = None if second is None else RECIPES[second]
    with pytest.raises(
        RuntimeError, match=r"must enter the regions of its first run, got .* had MX"
    ):
        y.sum().backward()


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("is_cached", [False, True], ids=["new", "compiled before"])
# The gradients of NVFP4 are rounded at random.
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "nvfp4"])
def test_compiled_code_in_a_checkpoint(name: str, is_cached: bool, is_reentrant: bool) -> None:
    block, (x, _) = Model().blocks[0], batch(0)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=graphs, fullgraph=True)
    x.requires_grad_()
    if is_cached:
        plain = checkpoint(compiled, x, use_reentrant=is_reentrant)
        torch.autograd.grad(plain.sum(), x) if not is_reentrant else plain.sum().backward()
    contexts: tuple[dict[str, Any], ...] = ({}, {"context_fn": checkpoint_contexts})
    for context in contexts:
        if context and is_reentrant:
            continue
        x.grad = None
        with tops.autocast(recipe=RECIPES[name]):
            y = checkpoint(compiled, x, use_reentrant=is_reentrant, **context)
            want = block(x)
        count = graphs.frame_count
        y.sum().backward()
        # The first run of a reentrant checkpoint is without gradients.
        assert graphs.frame_count - count == is_reentrant
        assert torch.equal(x.grad, torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_scales_that_change_before_the_second_run(is_compiled: bool, is_reentrant: bool) -> None:
    block, (x, _) = Model().blocks[0], batch(0)
    called = torch.compile(block, backend="aot_eager", fullgraph=True) if is_compiled else block
    x.requires_grad_()
    region = functools.partial(tops.autocast, recipe=DELAYED)
    with region():
        block(x * 9).sum().backward()
    x.grad = None
    with region():
        y = checkpoint(called, x, use_reentrant=is_reentrant)
        want = block(x)
    with region():
        block(x * 5)
    magnitudes = [block[1].fp8_amax.clone(), block[1].fp8_amax_history.clone()]
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(want.sum(), x)[0])
    if not is_reentrant:  # whose magnitudes of forward are those of its second run
        assert torch.equal(block[1].fp8_amax, magnitudes[0])
    assert torch.equal(block[1].fp8_amax_history, magnitudes[1])
    assert (block[1].fp8_grad_amax[2] > 0).all()


def test_scales_never_change_during_a_backward_pass() -> None:
    model, (x, grad) = Model(), batch(0)
    train(model, DELAYED, range(2), is_inside=False)
    make_scales(model, DELAYED)  # nothing to make
    before = {k: v.clone() for k, v in model.state_dict().items() if k.endswith("fp8_scale")}
    entered = []

    class Enters(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad(), pytest.raises(RuntimeError, match="in a backward pass"):
                with tops.autocast(recipe=DELAYED):
                    entered.append(grad)
            return grad

    with tops.autocast(recipe=RECIPES["mxfp8"]):
        Enters.apply(model(x)).backward(grad)
    assert not entered
    for name, scale in before.items():
        assert torch.equal(model.state_dict()[name], scale)
