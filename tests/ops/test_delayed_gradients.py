"""Weight gradients that a backward leaves to `backward_dw()`."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import explained
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops

SPLITS = torch.tensor([3, 0, 5])


def pair(**options: Any) -> tuple[tops.GroupedLinear, tops.GroupedLinear]:
    """One that delays and one that does not, with the same parameters."""
    late = tops.GroupedLinear(3, 16, 8, delay_wgrad_compute=True, **options)
    plain = tops.GroupedLinear(3, 16, 8, **options)
    plain.load_state_dict(late.state_dict())
    return late, plain


def delaying(module: nn.Module) -> list[tops.GroupedLinear]:
    return [m for m in module.modules() if getattr(m, "delay_wgrad_compute", False)]


def check_equal(late: nn.Module, plain: nn.Module, run: Callable[[nn.Module], Tensor]) -> None:
    """Two backwards, then the weights; all gradients are those without the delay, bit by bit."""
    for module in (late, plain):
        module.zero_grad()
        for _ in range(2):
            run(module).sum().backward()
    got, want = dict(late.named_parameters()), dict(plain.named_parameters())
    waiting = [p for op in delaying(late) for n, p in op.named_parameters() if n[0] == "w"]
    assert waiting
    for name, parameter in got.items():
        if any(parameter is other for other in waiting):
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, want[name].grad), name
    for _ in range(2):
        for op in delaying(late):
            op.backward_dw()
    for name, parameter in got.items():
        assert torch.equal(parameter.grad, want[name].grad), name
        assert parameter.grad.dtype == parameter.dtype


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("options", [{"bias": False}, {}, {"scale_bias": True}], ids=str)
def test_gradients_are_those_without_a_delay(single: bool, options: dict[str, bool]) -> None:
    late, plain = pair(single_grouped_weight=single, **options)
    x = torch.randn(10, 16, requires_grad=True)
    extra = [SPLITS, torch.rand(10)] if "scale_bias" in options else [SPLITS]
    check_equal(late, plain, lambda op: op(x, *extra))
    found = [torch.autograd.grad(op(x, *extra).sum(), x)[0] for op in (late, plain)]
    assert torch.equal(*found)


REGIONS: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "mxfp8": lambda: tops.autocast(recipe=tops.recipe.MXFP8BlockScaling()),
    "float8": lambda: tops.autocast(recipe=tops.recipe.Float8CurrentScaling()),
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("options", [{}, {"saved": "int8"}, {"recompute": "none"}], ids=str)
def test_among_other_ops(region: str, options: dict[str, str]) -> None:
    """Behind an activation that is computed again, and under every kind of rounding."""

    def block(delay: bool) -> tops.Sequential:
        torch.manual_seed(0)
        ops = [
            tops.RMSNorm(64),
            tops.GroupedLinear(3, 64, 128, delay_wgrad_compute=delay),
            tops.SwiGLU(),
            tops.GroupedLinear(3, 64, 64, delay_wgrad_compute=delay),
        ]
        return tops.Sequential(*ops, **options)

    def run(module: nn.Module) -> Tensor:
        with REGIONS[region]():
            return module(x, SPLITS, SPLITS)

    x = torch.randn(10, 64)
    check_equal(block(True), block(False), run)


def test_backwards_are_finished_in_their_order() -> None:
    late, plain = pair(single_grouped_weight=True, bias=False)
    inputs = torch.randn(3, 8, 16).unbind(0)
    losses = [late(x, SPLITS).sum() for x in inputs]
    order = [2, 0, 1]
    for k in order:
        losses[k].backward()
    for k in order:
        late.weight.grad = None
        late.backward_dw()
        (want,) = torch.autograd.grad(plain(inputs[k], SPLITS).sum(), plain.weight)
        assert torch.equal(late.weight.grad, want)
    late.weight.grad = None
    late.backward_dw()  # nothing waits
    assert late.weight.grad is None
    plain.backward_dw()
    assert late.need_backward_dw() and not plain.need_backward_dw()


def test_the_plan_and_what_is_refused() -> None:
    ops = [
        tops.GroupedLinear(3, 16, 32, bias=False, delay_wgrad_compute=True),
        tops.ScaledSwiGLU(),
        tops.GroupedLinear(3, 16, 8, bias=False, delay_wgrad_compute=True),
    ]
    module = tops.Sequential(*ops)
    module(torch.randn(8, 16, requires_grad=True), SPLITS, torch.rand(8), SPLITS)
    text = str(module.plans()[0])
    assert (
        "t2.unused, [st2.delayed_wgrad0..2], [], t2.unused = grouped_linear_backward(g3, x2, "
        "s2.splits, none, none, none, false, true, [false, true, false, false])"
    ) in text
    assert "op 2 leaves the gradient of its weight for later" in explained(module)
    assert str(tops.Plan.parse(text)) == text
    with pytest.raises(RuntimeError, match="must update the state that is named"):
        tops.Plan.parse(text.replace("st2.delayed_wgrad0..2", "st2.main_grad0..2"))


@pytest.mark.parametrize("single", [True, False])
def test_main_grad(single: bool) -> None:
    options = {"bias": False, "single_grouped_weight": single, "accumulate_into_main_grad": True}
    late, plain = pair(**options)
    for op in (late, plain):
        for k, weight in enumerate(op.parameters()):
            weight.main_grad = torch.ones_like(weight)
            weight.overwrite_main_grad = k == 1
    x = torch.randn(8, 16)
    for op in (late, plain):
        op(x, SPLITS).sum().backward()
    assert all(bool((weight.main_grad == 1).all()) for weight in late.parameters())
    late.backward_dw()
    for a, b in zip(late.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.main_grad, b.main_grad) and a.grad is None
    first = next(late.parameters())
    first.grad_added_to_main_grad = False
    late(x, SPLITS).sum().backward()
    assert not first.grad_added_to_main_grad
    late.backward_dw()
    assert first.grad_added_to_main_grad and not first.grad.any()
    late(x, SPLITS).sum().backward()
    del first.main_grad
    with pytest.raises(RuntimeError, match="must have a main_grad"):
        late.backward_dw()
    first.main_grad = torch.zeros_like(first)
    late.backward_dw()
    assert bool(first.main_grad.any())


def test_a_buffer_that_does_not_fit_changes_no_other() -> None:
    late = tops.GroupedLinear(3, 16, 8, accumulate_into_main_grad=True, delay_wgrad_compute=True)
    weights = [late.weight0, late.weight1, late.weight2]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    late(torch.randn(8, 16), SPLITS).sum().backward()
    weights[1].main_grad = torch.zeros(7)
    with pytest.raises(
        RuntimeError, match=r"\[GroupedLinear\] weight1.main_grad must have shape \[8, 16\]"
    ):
        late.backward_dw()
    assert not weights[0].main_grad.any()
    weights[1].main_grad = torch.zeros_like(weights[1])
    late.backward_dw()
    once = weights[0].main_grad.clone()
    assert once.any()


def test_hooks_of_the_parameters_run() -> None:
    late, _ = pair()
    seen: list[str] = []
    late.weight1.register_hook(lambda grad: seen.append("hook") or 2 * grad)
    late.weight1.register_post_accumulate_grad_hook(lambda p: seen.append("after"))
    late.weight2.requires_grad_(False)
    late(torch.randn(8, 16), SPLITS).sum().backward()
    assert seen == []
    late.backward_dw()
    assert seen == ["hook", "after"] and late.weight2.grad is None


def test_a_weight_that_is_held_quantized() -> None:
    grads = []
    for delay in (True, False):
        torch.manual_seed(0)
        with tops.quantized_model_init(recipe=tops.recipe.MXFP8BlockScaling()):
            op = tops.GroupedLinear(
                2, 64, 32, bias=False, single_grouped_weight=True, delay_wgrad_compute=delay
            )
        op(torch.ones(4, 64), torch.tensor([1, 3])).sum().backward()
        assert (op.weight.grad is None) == delay
        op.backward_dw()
        grads.append(op.weight.grad)
    assert torch.equal(*grads)


def test_what_waits_is_freed() -> None:
    width = 256
    late = tops.GroupedLinear(3, width, width, bias=False, delay_wgrad_compute=True)
    module = tops.Sequential(tops.RMSNorm(width), late)
    x = torch.randn(1024, width)
    splits = torch.tensor([300, 400, 324])
    grad = torch.randn(1024, width)
    gc.collect()
    before = tops.memory.stats().in_use_bytes
    module(x, splits).backward(grad)
    # The input of the product, computed again; the gradient is the caller's.
    assert tops.memory.stats().in_use_bytes - before == 1024 * width * 4
    for copied in (copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        copied.backward_dw()
        assert next(copied.parameters()).grad is None
    late.backward_dw()
    late.zero_grad()
    assert tops.memory.stats().in_use_bytes == before


def test_errors_lose_nothing() -> None:
    late, _ = pair(single_grouped_weight=True, bias=False)
    x = torch.randn(8, 16)
    late(x, SPLITS).sum().backward()
    x.zero_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="input must not be modified in place before its"):
            late.backward_dw()
    late, _ = pair(single_grouped_weight=True, bias=False)
    x = torch.randn(8, 16)
    late(x, SPLITS).sum().backward()
    before, late.weight = late.weight, nn.Parameter(torch.zeros(2, 8, 16))
    with pytest.raises(RuntimeError, match=r"weight must have the shape \[3, 8, 16\]"):
        late.backward_dw()
    late.weight = before
    late.backward_dw()
    assert before.grad is not None
    with pytest.raises(RuntimeError, match="delay_wgrad_compute must be set before"):
        late.delay_wgrad_compute = False


def test_a_weight_that_is_computed() -> None:
    late, _ = pair(single_grouped_weight=True, bias=False)
    torch.nn.utils.parametrize.register_parametrization(late, "weight", nn.Softplus())
    with pytest.raises(RuntimeError, match="weight must be a parameter where its gradient"):
        late(torch.randn(8, 16), SPLITS)
    with torch.no_grad():
        late(torch.randn(8, 16), SPLITS)


def test_no_second_derivatives() -> None:
    late, _ = pair(bias=False)
    x = torch.randn(8, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True must find no weight"):
        torch.autograd.grad(late(x, SPLITS).sum(), x, create_graph=True)


@pytest.mark.parametrize("single", [True, False])
def test_compiled_code_breaks_its_graph(single: bool) -> None:
    late, plain = pair(single_grouped_weight=single)
    module = nn.Sequential(nn.ReLU())
    x = torch.randn(8, 16)
    fast = torch.compile(lambda op: module(op(x, SPLITS)), backend="aot_eager")
    check_equal(late, plain, fast)
    torch._dynamo.reset()
    whole = torch.compile(late, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="delay_wgrad_compute must be False"):
        whole(x, SPLITS)
    with torch.no_grad():
        assert torch.equal(whole(x, SPLITS), plain(x, SPLITS))


def test_the_text_of_a_plan_gives_autograd_the_gradient() -> None:
    """Where no module waits for `backward_dw()`."""
    late, plain = pair(single_grouped_weight=True, bias=False)
    x = torch.randn(8, 16)
    module = tops.Sequential(late)
    module(x, SPLITS)
    text = str(module.plans()[0])
    outputs = torch.ops.transformer_ops.run_plan(text, x, [SPLITS], [late.weight])
    outputs[0].sum().backward()
    plain(x, SPLITS).sum().backward()
    assert torch.equal(late.weight.grad, plain.weight.grad)


MASK = [True, True, False, False]  # gradients of input and weight


class TwiceTheGradient(tops.FusedOperation):
    """A product of groups with a backward in Python, which computes the gradient of the weight."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, splits, *weights, _, _ = basic_op_ctxs[0].saved_tensors
        grads = torch.ops.transformer_ops.grouped_linear_backward(
            grad_output, x, splits, weights, [], None, len(weights) == 1, True, MASK
        )
        return grads[0], [[2 * grad for grad in grads[1]]], [(None,)]


@pytest.mark.parametrize("single", [True, False])
def test_a_fusion_in_python_has_computed_it(single: bool) -> None:
    late, plain = pair(single_grouped_weight=single, bias=False)
    module, x = tops.Sequential(late), torch.randn(8, 16, requires_grad=True)
    with tops.register_backward_fusion(TwiceTheGradient, pattern=[tops.GroupedLinear]):
        module(x, SPLITS).sum().backward()
        assert module.plans()[0].backward[0].fused_op is not None
    plain(x, SPLITS).sum().backward()
    assert all(weight.grad is None for weight in late.parameters())
    late.backward_dw()
    for weight, other in zip(late.parameters(), plain.parameters(), strict=True):
        assert torch.equal(weight.grad, 2 * other.grad)
    late.backward_dw()  # nothing is left


def test_checkpointing_and_kept_graphs() -> None:
    late, plain = pair()
    x = torch.randn(8, 16, requires_grad=True)
    check_equal(late, plain, lambda op: checkpoint(op, x, SPLITS, use_reentrant=False))
    loss = late(x, SPLITS).sum()
    late.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    late.backward_dw()
    once = late.weight0.grad.clone()
    late.backward_dw()
    assert torch.equal(late.weight0.grad, 2 * once)
