"""Recipes in graphs: compiled, exported, and packaged by AOTInductor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import as_tuple, assert_equal
from op_cases import CASES, OpCase, run_seeded
from recipe_cases import (
    EVERY_RECIPE,
    RECIPES,
    assert_rounded,
    block,
    every_recipe,
    gradients_of,
    linear,
    outputs_and_gradients,
    refuses,
    rounds,
    settle,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.quantization import current_recipe
from transformer_ops.quantization.quantized_tensor import QuantizedTensor
from transformer_ops.quantization.scales import owners_of_scales

pytestmark = pytest.mark.takes(seconds=80)

all_recipes = pytest.mark.parametrize("name", EVERY_RECIPE)
# Their graphs differ from those of others by the names of formats alone.
LIKE_OTHERS = {"mxfp8 hybrid", "block", "nvfp4 4over6"}
each_kind_of_recipe = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in LIKE_OTHERS else ()) for n in EVERY_RECIPE],
)


class EveryOp(nn.Module):
    """All that run under a recipe in one graph: hundreds of small ones would take minutes to
    trace."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.recipe = recipe
        self.ops = nn.ModuleList(case.build() for case in CASES)

    def forward(self, inputs: list[list[Tensor]]) -> list[Tensor]:
        return self.run(inputs, lambda case: not refuses(case, self.recipe))

    def run(self, inputs: list[list[Tensor]], wanted: Callable[[OpCase], bool]) -> list[Tensor]:
        calls = zip(CASES, self.ops, inputs, strict=True)
        found = [as_tuple(op(*given)) for case, op, given in calls if wanted(case)]
        return [output for outputs in found for output in outputs]


def of_every_op(run: Any, parameters: Any, inputs: list[list[Tensor]]) -> dict[str, Tensor]:
    """Outputs and gradients by what they are of."""
    leaves = dict(parameters.named_parameters())
    for case, given in zip(CASES, inputs, strict=True):
        leaves |= {f"{case.name}: {i}": t for i, t in enumerate(given) if t.requires_grad}
    outputs = run_seeded(run, inputs)
    sums = [t for t in outputs if t.requires_grad]
    torch.manual_seed(1)
    sent = [torch.randn_like(t) for t in sums]
    grads = torch.autograd.grad(sums, list(leaves.values()), sent, allow_unused=True)
    found = {f"output {i}": t for i, t in enumerate(outputs)} | dict(
        zip(leaves, grads, strict=True)
    )
    return {name: t.detach().double() for name, t in found.items() if t is not None}


# ---- compiled


@each_kind_of_recipe
def test_every_op_compiled(name: str) -> None:
    module, inputs = EveryOp(name), [case.inputs() for case in CASES]
    exact = of_every_op(module, module, inputs)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with tops.autocast(recipe=EVERY_RECIPE[name]):
        got, want = (of_every_op(run, module, inputs) for run in (compiled, module))
    if name != "nvfp4 at random":  # whose numbers a graph draws in another order
        torch.testing.assert_close(got, want)
    assert_rounded(list(got.values()), list(exact.values()), name)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@every_recipe
def test_fullgraph(name: str, backend: str) -> None:
    module = block()
    x, grad = torch.randn(40, 64), torch.randn(40, 64)
    parameters = list(module.parameters())
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    settle(RECIPES[name], module, x, grad)
    with tops.autocast(recipe=RECIPES[name]):
        got = outputs_and_gradients(compiled, x, parameters, grad)
        want = outputs_and_gradients(module, x, parameters, grad)
    torch.testing.assert_close(got, want)


def test_one_compilation_a_recipe() -> None:
    module, x, _ = linear(torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for _ in range(2):
        compiled(x)
        for recipe in RECIPES.values():
            with tops.autocast(recipe=recipe):
                assert torch.equal(compiled(x), module(x))
            with tops.autocast(recipe=dataclasses.replace(recipe)):
                compiled(x)
    assert counter.frame_count == 1 + len(RECIPES)


def test_a_region_within_a_graph() -> None:
    module, x, _ = linear(torch.float32)
    recipe = RECIPES["block"]

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = module(x)
        with tops.autocast(recipe=recipe):
            second = module(x)
        return first, second, module(x)

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert_equal(got, run(x))
    assert current_recipe() is None


# ---- exported


@each_kind_of_recipe
def test_every_op_exported(name: str) -> None:
    """What is drawn at random is drawn by each run of the program, from torch's generator."""
    module, inputs = EveryOp(name), [case.inputs() for case in CASES]
    with tops.autocast(recipe=EVERY_RECIPE[name]):
        want = of_every_op(module, module, inputs)
        program = export(module, (inputs,)).module()
    # The recipe is part of the program.
    got = of_every_op(program, program, inputs)
    assert got.keys() == want.keys()
    assert [key for key, t in want.items() if not torch.equal(got[key], t)] == []


@pytest.mark.parametrize(
    ("name", "strict"),
    [*((name, False) for name in EVERY_RECIPE), ("mxfp8", True), ("delayed", True)],
)
def test_export_with_a_dynamic_batch(name: str, strict: bool) -> None:
    module, x, _ = linear(torch.float32)
    batch = ({0: Dim("batch", min=2, max=64)},)
    with torch.no_grad(), tops.autocast(recipe=EVERY_RECIPE[name]):
        module(x)
        program = export(module, (x,), dynamic_shapes=batch, strict=strict)
        lowered = program.run_decompositions()
        for rows in (2, 7):
            x = torch.randn(rows, 70, 72)
            want = module(x)
            assert torch.equal(program.module()(x), want)
            assert torch.equal(lowered.module()(x), want)


@all_recipes
@pytest.mark.parametrize("saved", ["fp8", "int8"])
def test_export_with_saved_formats(name: str, saved: str) -> None:
    module, x = block(saved=saved), torch.randn(40, 64)
    with tops.autocast(recipe=EVERY_RECIPE[name]):
        want = gradients_of(module, module, [x])
        program = export(module, (x,))
    assert f"\nsaved {saved}\n" in str(program.graph)
    run = program.module()
    assert_equal(gradients_of(run, run, [x]), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_recipe
def test_a_decomposed_program_loses_no_gradient_silently(name: str, dtype: torch.dtype) -> None:
    """Its rounded operands have none, nor have products of codes: a call that wants it raises."""
    module, x, grad = linear(dtype)
    with tops.autocast(recipe=RECIPES[name]):
        module(x)
        want = module(x)
        lowered = export(module, (x,)).run_decompositions().module()
    parameters = dict(lowered.named_parameters())
    with pytest.raises(
        NotImplementedError,
        match=r"\[\w+\] (input|weight|tensors) must not require a gradient, because none passes",
    ):
        lowered(x)
    with torch.no_grad():
        assert torch.equal(lowered(x), want)
    parameters["0.weight"].requires_grad_(False)
    if any("_scaled" in str(n.target) and "linear" in str(n.target) for n in lowered.graph.nodes):
        with pytest.raises(NotImplementedError, match=r"\[linear\w+\] bias must not require"):
            lowered(x)
    else:
        lowered(x).backward(grad)
        torch.testing.assert_close(parameters["0.bias"].grad, grad.flatten(0, 1).sum(0))
    parameters["0.bias"].requires_grad_(False)
    assert torch.equal(lowered(x), want)


def test_an_export_makes_no_scales() -> None:
    module, x, _ = linear(torch.float32)
    recipe = recipes.DelayedScaling(amax_history_len=3)
    message = r"\[Linear\] scales must be made before torch.export, by .*, got none"
    for strict in (False, True):
        with tops.autocast(recipe=recipe), pytest.raises(Exception, match=message):
            export(module, (x,), strict=strict)
    assert not hasattr(module[0], "fp8_scale") and not owners_of_scales(recipe.key)


# ---- packaged


def rounds_under(name: str, case: OpCase) -> bool:
    return rounds(case) and not refuses(case, name)


class EveryRecipe(EveryOp):
    """Several recipes in one graph, too, for what they change; and weights that are held as
    codes."""

    def __init__(self, names: list[str]) -> None:
        super().__init__("")
        self.names = names
        formats = ("mx e4m3", "nvfp4 16x16", "e4m3 128x128", "e5m2", "int8 1x32")
        self.held = nn.ModuleList(tops.Linear(64, 32) for _ in formats)
        for op, format in zip(self.held, formats, strict=True):
            held = QuantizedTensor.quantize(op.weight, format)
            op.weight = nn.Parameter(held, requires_grad=False)

    def forward(self, inputs: list[list[Tensor]], rows: Tensor) -> list[Tensor]:
        found = [op(rows) for op in self.held]
        for name in self.names:
            taken = functools.partial(rounds_under, name)
            with tops.autocast(recipe=EVERY_RECIPE[name]):
                found += self.run(inputs, taken)
        with tops.autocast():
            found += self.run(inputs, lambda case: not rounds(case))
        return found


@pytest.mark.parametrize(
    "names",
    [
        [name for name in EVERY_RECIPE if name not in LIKE_OTHERS],
        pytest.param(sorted(LIKE_OTHERS), marks=pytest.mark.slow),
    ],
    ids=["each kind", "like others"],
)
def test_every_op_packaged(names: list[str], tmp_path: Path) -> None:
    module = EveryRecipe(names).eval()
    given = ([case.inputs() for case in CASES], torch.randn(5, 64))
    with torch.no_grad():
        # The region of delayed scaling must lie around what is traced.
        with tops.autocast(recipe=EVERY_RECIPE["delayed"]):
            want, exported = module(*given), export(module, given)
        torch.export.save(exported, tmp_path / "program.pt2")
        program = torch.export.load(tmp_path / "program.pt2")
        path = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(tmp_path / "package.pt2"),
            inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
        )
        package = torch._inductor.aoti_load_package(path)
        for run in (program.module(), package):
            assert_equal(run(*given), want)
