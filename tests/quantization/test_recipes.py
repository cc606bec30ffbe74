"""Recipes: products on quantized operands, against plain products of decoded ones."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch
from helpers import assert_equal, assert_near, saved_bytes
from op_cases import CASES, OpCase
from recipe_cases import (
    EVERY_RECIPE,
    RECIPES,
    Product,
    Recipe,
    assert_rounded,
    block,
    every_recipe,
    gradients_of,
    linear,
    outputs_and_gradients,
    refuses,
    rounded,
    rounds,
    settle,
    without_state,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.plan.plan import Plan
from transformer_ops.quantization import checkpoint_contexts, current_recipe

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@every_recipe
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_rounded_operands(name: str, dtype: torch.dtype) -> None:
    recipe = RECIPES[name]
    module, x, grad = linear(dtype)
    settle(recipe, module, x, grad)
    with tops.autocast(recipe=recipe):
        y = module(x.requires_grad_())
    # Wherever backward runs.
    y.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, *module.parameters())]
    meant = Product.apply(wide[0], wide[1], recipe, dtype) + wide[2]
    meant.backward(grad.double())
    found = (x, *module.parameters())
    assert_near(y, meant, dtype, "output", factor=4)
    for tensor, want in zip(found, wide, strict=True):
        assert tensor.grad.dtype == dtype
        size = want.grad.abs().max().item()
        assert_near(tensor.grad / size, want.grad / size, dtype, str(tuple(want.shape)), factor=4)


@every_recipe
def test_fused_steps_compute_what_single_ops_do(name: str) -> None:
    module = block()
    x, grad = torch.randn(40, 64), torch.randn(40, 64)
    parameters = list(module.parameters())

    def one_by_one(x: Tensor) -> Tensor:
        for op in module:
            x = op(x)
        return x

    settle(RECIPES[name], module, x, grad)
    with tops.autocast(recipe=RECIPES[name]):
        got = outputs_and_gradients(module, x, parameters, grad)
        want = outputs_and_gradients(one_by_one, x, parameters, grad)
    # A sum in another order may change a code.
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()
    exact = outputs_and_gradients(module, x, parameters, grad)
    error = (got[0] - exact[0]).norm() / exact[0].norm()
    assert 1e-3 < error < (0.3 if "nvfp4" in name else 0.08)


@every_recipe
def test_the_plan_names_its_formats(name: str) -> None:
    recipe = RECIPES[name]
    module = block(torch.bfloat16)
    with tops.autocast(recipe=recipe):
        module(torch.randn(8, 64).bfloat16().requires_grad_())
    plan = module.plans()[0]
    text = str(plan)
    assert f"recipe {recipe.key}\n" in text and plan.recipe == recipe.key
    assert Plan.parse(text) == plan
    of_input, of_weight, of_grad = recipe.operands
    # A tensor with one scale is rounded to the values of codes, which are exact in bfloat16.
    has_scale = name in ("current", "delayed") or "nvfp4" in name
    call = "quantize_values" if has_scale else "quantize_dequantize"
    lines = [
        f'{call}(p1.weight, "{of_weight}", "bfloat16")',
        # The norm rounds what it gives, where a scale does not follow from the whole tensor.
        f'quantize_values(x1, "{of_input}"'
        if has_scale
        else f'rms_norm.rounded(x0, p0.weight, [64], 1e-05, false, "{of_input}", "")',
    ]
    if name == "delayed":
        scaled = "rms_norm.rounded_by(x0, p0.weight, [64], 1e-05, false, st1.fp8_scale, 0, "
        lines = [
            f'quantize_values_scaled(p1.weight, st1.fp8_scale, 1, "{of_weight}", "bfloat16")',
            f'st1.fp8_amax = {scaled}"{of_input}", true)',
        ]
    for line in lines:
        assert line in text
    assert ("linear_scaled(" in text) == has_scale
    assert f'"{of_grad}"' in text
    assert f"formats of products: input {of_input}, weight {of_weight}" in str(module.explain())
    # Outside of the region nothing is left of it.
    module(torch.randn(8, 64).bfloat16())
    assert "recipe" not in str(module.plans()[0]) and "formats" not in str(module.explain())


def test_products_and_their_epilogues_stay_one_step() -> None:
    module = tops.Sequential(tops.Linear(64, 64), tops.GELU(), tops.Linear(64, 64, bias=False))
    with tops.autocast():
        module(torch.randn(8, 64, requires_grad=True))
    steps = [step.name for step in module.plans()[0].forward]
    assert steps[0] == "linear_bias_activation"
    module.bfloat16()
    with tops.autocast(recipe=RECIPES["current"]):
        module(torch.randn(8, 64).bfloat16().requires_grad_())
    steps = [step.name for step in module.plans()[0].forward]
    assert steps[0] == "linear_bias_activation"
    # The product runs in float32 there, and its epilogue with it.
    module.half()
    with tops.autocast(recipe=RECIPES["current"]):
        module(torch.randn(8, 64).half().requires_grad_())
    first = module.plans()[0].forward[0]
    assert first.name == "linear_bias_activation"
    assert 's2.input = cast(t0.wide_kept, "float16")' in str(module.plans()[0])


# ---- regions


def test_regions() -> None:
    module, x, _ = linear(torch.float32)
    exact = module(x)
    mx, current = RECIPES["mxfp8"], RECIPES["current"]
    with tops.autocast() as region:
        assert region.recipe == mx and current_recipe() == mx
        first = module(x)
        with tops.autocast(recipe=current):
            second = module(x)
            with tops.autocast(enabled=False):
                assert torch.equal(module(x), exact) and current_recipe() is None
            with region:
                assert torch.equal(module(x), first)
        assert torch.equal(module(x), first)
    assert not torch.equal(first, second) and not torch.equal(first, exact)
    assert torch.equal(module(x), exact) and current_recipe() is None
    with pytest.raises(ZeroDivisionError), tops.autocast():
        raise ZeroDivisionError
    assert current_recipe() is None
    # The value counts, not the object or its class.
    with tops.autocast(recipe=recipes.MXFP8BlockScaling()):
        module(x)
    with tops.autocast(recipe=recipes.MXFP8BlockScaling(recipes.Format.E5M2)):
        assert not torch.equal(module(x), first)


def test_a_region_is_that_of_its_thread() -> None:
    module, x, _ = linear(torch.float32)
    exact, found = module(x), []
    with tops.autocast():
        inside = module(x)
        thread = threading.Thread(target=lambda: found.append(module(x)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], exact) and not torch.equal(inside, exact)


def test_threads_may_share_a_region() -> None:
    region, entered, left = tops.autocast(), threading.Event(), threading.Event()
    found: list[Recipe | None] = []

    def run() -> None:
        with tops.autocast(recipe=RECIPES["block"]):
            with region:
                entered.set()
                left.wait(60)
            found.append(current_recipe())

    thread = threading.Thread(target=run)
    thread.start()
    with region:
        assert entered.wait(60)
    assert current_recipe() is None
    left.set()
    thread.join()
    assert found == [RECIPES["block"]]


def test_torch_autocast_within() -> None:
    module, x, grad = linear(torch.float32)
    low = copy.deepcopy(module).bfloat16()
    with tops.autocast(), torch.autocast("cpu", torch.bfloat16):
        y = module(x.requires_grad_())
    y.backward(grad.bfloat16())
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    with tops.autocast():
        z = low(x.detach().bfloat16())
    # The weight is rounded from its float32.
    assert (y - z).norm() <= 3e-2 * z.norm()
    assert module[0].weight.grad.dtype == torch.float32


def test_evaluation_and_frozen_tensors() -> None:
    module, x, grad = linear(torch.float32)
    with tops.autocast():
        want = outputs_and_gradients(module, x, list(module.parameters()), grad)
        with torch.no_grad():
            assert torch.equal(module(x), want[0])
        # Without the gradient of the input, and of the weight.
        found = torch.autograd.grad(module(x), list(module.parameters()), grad)
        assert_equal(found, want[2:])
        module.requires_grad_(False)
        x.requires_grad_()
        assert torch.equal(torch.autograd.grad(module(x), x, grad)[0], want[1])


def test_weights_that_accumulate() -> None:
    module = tops.Sequential(tops.Linear(72, 50, accumulate_into_main_grad=True))
    plain = tops.Sequential(tops.Linear(72, 50))
    plain.load_state_dict(module.state_dict())
    module[0].weight.main_grad = torch.ones(50, 72)
    x, grad = torch.randn(70, 72), torch.randn(70, 50)
    with tops.autocast():
        y, z = module(x), plain(x)
    y.backward(grad)
    z.backward(grad)
    torch.testing.assert_close(module[0].weight.main_grad, plain[0].weight.grad + 1)


def test_activation_checkpointing() -> None:
    module, x, grad = linear(torch.float32)
    x.requires_grad_()
    with tops.autocast():
        want = torch.autograd.grad(module(x), list(module.parameters()), grad)
        y = checkpoint(module, x, use_reentrant=False, context_fn=checkpoint_contexts)
    assert_equal(torch.autograd.grad(y, list(module.parameters()), grad), want)


# ---- memory


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_no_rounded_tensor_is_kept(backend: str) -> None:
    exact = block(torch.bfloat16)
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    kept = saved_bytes(exact, x)
    run: Any = exact
    if backend != "eager":
        run = torch.compile(exact, fullgraph=True, backend=backend)
    with tops.autocast():
        assert saved_bytes(run, x) <= kept


# ---- Quantize


@without_state
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_quantize(name: str, forward: bool, backward: bool) -> None:
    recipe = RECIPES[name]
    op = tops.Quantize(forward=forward, backward=backward)
    x, grad = torch.randn(9, 80, requires_grad=True), torch.randn(9, 80)
    with tops.autocast(recipe=recipe):
        y = op(x)
    want = rounded(x.detach(), recipe.operands[0]).float() if forward else x
    want_grad = rounded(grad, recipe.operands[2]).float() if backward else grad
    assert torch.equal(y, want)
    assert torch.equal(torch.autograd.grad(y, x, grad)[0], want_grad)
    assert torch.equal(op(x), x)
    # Between ops, and never passed over by a fusion.
    ops = [tops.Linear(80, 40, bias=False), tops.Quantize(forward, backward), tops.SiLU()]
    module = tops.Sequential(*ops)
    with tops.autocast(recipe=recipe):
        first = module(x)
        hidden = op(ops[0](x))
    torch.testing.assert_close(first, ops[2](hidden))


def test_quantize_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match=r"\[Quantize\] rounds_input must be a bool, got 1"):
        tops.Quantize(forward=1)  # type: ignore[arg-type]


# ---- every op


@pytest.mark.parametrize("name", EVERY_RECIPE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_op_under_every_recipe(case: OpCase, name: str) -> None:
    op, inputs = case.build(), case.inputs()
    exact = gradients_of(op, op, inputs, case.constants)
    with tops.autocast(recipe=EVERY_RECIPE[name]):
        if refuses(case, name):
            with pytest.raises(RuntimeError, match="recipe must have no delayed scales"):
                op(*inputs)
            return
        found = gradients_of(op, op, inputs, case.constants)
    assert all(map(torch.equal, found, exact)) != rounds(case)
    assert_rounded(found, exact, name)


# ---- formats by op and role


def test_a_custom_recipe() -> None:
    module = block()
    last = module[3]
    asked: list[recipes.QuantizerRole] = []

    def formats(role: recipes.QuantizerRole) -> str | None:
        asked.append(role)
        if role.module is last or role.tensor_type == "grad_output":
            return None
        return "mx e4m3"

    recipe = recipes.CustomRecipe(formats)
    x, grad = torch.randn(40, 64), torch.randn(40, 64)
    parameters = list(module.parameters())
    with tops.autocast(recipe=recipe):
        got = outputs_and_gradients(module, x, parameters, grad)
    exact = "exact, exact, exact"
    assert module.plans()[0].recipe == f"{exact}; 1: mx e4m3, mx e4m3, exact; 3: {exact}"
    assert {(role.module_type, role.tensor_type) for role in asked} == {
        ("linear", name) for name in ("input", "weight", "grad_output")
    }
    hidden = module[:1](x)
    weight = rounded(module[1].weight.detach(), "mx e4m3").float()
    hidden = rounded(hidden.detach(), "mx e4m3").float() @ weight.t()
    torch.testing.assert_close(got[0], module[2:](hidden))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with tops.autocast(recipe=recipe):
        torch.testing.assert_close(got, outputs_and_gradients(compiled, x, parameters, grad))
        text = str(module.explain())
    assert "op 1 input mx e4m3, weight mx e4m3, output gradient exact" in text
    for answer, message in ((3, "must return the name of a format"), ("fp8", "format must be one")):
        wrong = recipes.CustomRecipe(lambda role, answer=answer: answer)
        with tops.autocast(recipe=wrong), pytest.raises(RuntimeError, match=message):
            module(x)


def test_a_custom_recipe_sees_the_modules_of_each_of_two_equal_blocks() -> None:
    blocks = [block() for _ in range(4)]
    for other in blocks[1:]:
        other.load_state_dict(blocks[0].state_dict())
    rounds = {blocks[1][1], blocks[3][3]}
    recipe = recipes.CustomRecipe(lambda role: "mx e4m3" if role.module in rounds else None)
    x = torch.randn(40, 64)
    with tops.autocast(recipe=recipe):
        want = [module(x) for module in blocks]
        compiled = [torch.compile(module, fullgraph=True, backend="eager") for module in blocks]
        for call, y in zip(compiled, want, strict=True):
            torch.testing.assert_close(call(x), y)
    torch.testing.assert_close(want[0], want[2])
    assert not torch.equal(want[0], want[1]) and not torch.equal(want[1], want[3])


# ---- fusions of users


class Fused(tops.FusedOperation):
    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, **unused: Any) -> Any:
        return nn.functional.silu(input_ @ self.basic_ops[0].weight.t()), [(), ()]


@torch.no_grad()
def test_a_pattern_takes_no_quantized_product() -> None:
    module = tops.Sequential(tops.BasicLinear(32, 32), tops.SiLU())
    x = torch.randn(4, 32)
    with tops.autocast():
        want = module(x)
    with tops.register_forward_fusion(Fused, pattern=[tops.BasicLinear, tops.SiLU]):
        with tops.autocast():
            assert torch.equal(module(x), want)
            assert "op 0 takes rounded operands" in str(module.explain())
        assert module.plans()[0].recipe is not None
        module(x)
        assert module.plans()[0].forward[0].python is not None


def test_a_function_gets_the_formats() -> None:
    seen: list[Any] = []

    def look(ops: Any, *, recipe: Any = None, **unused: Any) -> Any:
        seen.append(recipe)
        return ops

    module, x, _ = linear(torch.float32)
    with tops.register_forward_fusion(look):
        module(x)
        with tops.autocast():
            module(x)
    assert seen == [None, "mx e4m3, mx e4m3, mx e4m3"]


# ---- errors


def test_errors() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: tops.autocast(recipe="mxfp8"), TypeError, r"\[autocast\] recipe must be one of"),
        (lambda: tops.autocast(1), TypeError, r"\[autocast\] enabled must be a bool, got 1"),
        (lambda: recipes.MXFP8BlockScaling(3), ValueError, "fp8_format must be one of Format"),
        (
            lambda: recipes.Float8BlockScaling(recipes.Format.E2M1),
            ValueError,
            r"\[Float8BlockScaling\] fp8_format must be one of Format.E4M3, Format.HYBRID",
        ),
        (lambda: recipes.CustomRecipe(3), TypeError, "qfactory must be a function of a role"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipes.MXFP8BlockScaling().fp8_format = recipes.Format.E5M2  # type: ignore[misc]


def test_second_derivatives_and_transforms_are_refused() -> None:
    module, x, _ = linear(torch.float32)
    x.requires_grad_()
    message = r"must run without a recipe, got the formats mx e4m3, mx e4m3, mx e4m3"
    with tops.autocast():
        with pytest.raises(NotImplementedError, match=message):
            torch.autograd.grad(module(x).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match=message):
            torch.func.vmap(module)(x)


def test_a_text_with_an_unknown_format() -> None:
    module, x, _ = linear(torch.float32)
    with tops.autocast():
        module(x)
    text = str(module.plans()[0])
    for wrong, message in (
        ("mx e4m3, mx e4m3", "formats must be 3"),
        ("fp3, exact, exact", "format must be one of"),
    ):
        with pytest.raises(RuntimeError, match=message):
            Plan.parse(text.replace("mx e4m3, mx e4m3, mx e4m3", wrong))
