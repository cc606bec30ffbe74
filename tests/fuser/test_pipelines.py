"""Random models of the fuzzers, the same in every run: numbers, text, compiled code, threads."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fuzz.compare import gradients
from fuzz.models import Features, Model, random_model
from fuzz.pipelines import compiled, make_trial, run_seed
from helpers import as_tuple, assert_near, leaf, strided
from torch import Tensor

import transformer_ops as tops

COUNT = 60
SHAPES = ((5,), (), (3, 4), (0,), (2, 0), (2, 1, 3))


def make_model(seed: int, dtype: torch.dtype = torch.float64) -> Model:
    """One group of up to 8 native ops."""
    torch.manual_seed(seed)
    shapes = (SHAPES[seed % len(SHAPES)],)
    return random_model(random.Random(seed), Features(), longest=8, batches=shapes, dtype=dtype)


def by_text(group: tops.OperationFuser):
    """The group's last plan, printed, parsed and run."""

    def call(*sources: Tensor):
        every = [t for op in group._basic_ops for t in op._parameter_tensors()]
        parameters = [t for t in every if t is not None]
        text = str(group.plan())
        return tuple(
            torch.ops.transformer_ops.run_plan(text, sources[0], list(sources[1:]), parameters)
        )

    return call


def assert_plan_text(plan: tops.Plan) -> None:
    again = tops.Plan.parse(str(plan))
    assert again == plan and str(again) == str(plan)
    assert [s.ops for s in again.forward] == [s.ops for s in plan.forward]
    covered = [op for step in plan.forward for op in step.ops]
    assert covered == list(range(len(plan.ops)))
    assert [op for step in plan.backward for op in step.ops] == covered


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(COUNT))
def test_numbers_and_text(seed, dtype):
    model, generator = make_model(seed, dtype), torch.Generator().manual_seed(seed)
    module = model.module
    sources = [torch.randn(shape).to(dtype).requires_grad_() for shape in model.shapes]
    if seed % 3 == 1:
        sources = [strided(tensor) for tensor in sources]
    exact = [leaf(tensor, torch.float64) for tensor in sources]
    weights = {name: leaf(p, torch.float64) for name, p in model.all_parameters().items()}
    wanted = model.meaning(exact, weights)
    grads = [
        torch.ones(()).expand(o.shape)
        if seed % 4 == 2
        else torch.randn(o.shape, generator=generator)
        for o in wanted
    ]
    exact_grads = [grad.double() for grad in grads]
    want = [*wanted, *gradients(wanted, [*exact, *weights.values()], exact_grads)]

    def run(call):
        outputs = as_tuple(call(*sources))
        leaves = [*sources, *module.parameters()]
        return [*outputs, *gradients(outputs, leaves, [grad.to(dtype) for grad in grads])]

    got = run(module)
    factor = {torch.float64: 100, torch.float32: 50, torch.bfloat16: 1}[dtype]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if b is None:
            assert a is None or not a.any(), i
            continue
        size = b.abs().max().item() if b.numel() else 1.0
        if dtype == torch.bfloat16:
            # Roundings pile up over 8 ops: the error against the size of the tensor.
            assert (a.double() - b).abs().le(0.1 * size + 0.05).all(), f"result {i}"
        else:
            assert_near(a / max(1, size), b / max(1, size), dtype, f"result {i}", factor=factor)
    (group,) = module._groups()
    assert_plan_text(group.plan())
    for i, (a, b) in enumerate(zip(run(by_text(group)), got, strict=True)):
        assert (a is None) == (b is None), i
        if a is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), f"the text differs in result {i}"


@pytest.mark.parametrize("seed", range(0, COUNT, 3))
def test_every_way_to_run_and_differentiate(seed):
    """Partly frozen, twice differentiated, one gradient at a time, and others."""
    assert run_seed(seed) > 0


@pytest.mark.parametrize("seed", range(0, COUNT, 6))
def test_under_compile(seed):
    torch.manual_seed(seed)
    trial = make_trial(random.Random(seed), seed, Features())
    assert compiled(trial, dynamic=False) > 0


def test_many_threads_at_once():
    """Threads that share modules, plan, run and go backward at the same time."""
    shared = [make_model(seed) for seed in range(8)]

    def work(index: int) -> list[Tensor]:
        model, generator = shared[index % len(shared)], torch.Generator().manual_seed(index)
        # Different batches and grad modes make different plans and shapes.
        rows = 2 + index // len(shared) % 3
        sources = [
            torch.randn((rows, *shape), generator=generator, dtype=torch.float64)
            for shape in model.shapes
        ]
        for tensor in sources:
            tensor.requires_grad_(index % 2 == 0)
        results: list[Any] = []
        for _ in range(5):
            outputs = as_tuple(model.module(*sources))
            leaves = [t for t in (*sources, *model.module.parameters()) if t.requires_grad]
            results += gradients(outputs, leaves, [torch.ones_like(o) for o in outputs])
            with torch.no_grad():
                results += as_tuple(model.module(*sources))
        return results

    alone = [work(index) for index in range(48)]
    with ThreadPoolExecutor(12) as pool:
        for want, got in zip(alone, pool.map(work, range(48)), strict=True):
            for a, b in zip(got, want, strict=True):
                assert a is None if b is None else torch.equal(a, b)
