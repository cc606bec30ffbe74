"""Ops that do nothing at the moment: built-in fusions pass over them, in every mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import unfused
from helpers import saved_bytes
from test_fusions import near_misses
from torch import Tensor

import transformer_ops as tops

IDLE: dict[str, Callable[[], tops.FusibleOperation]] = {
    "Identity": tops.Identity,
    "Dropout p=0": lambda: tops.Dropout(0.0),
    "Dropout in eval": lambda: tops.Dropout(0.5).eval(),
    "a scale of 1": lambda: tops.ConstantScale(1.0),
}
every_idle = pytest.mark.parametrize("idle", IDLE.values(), ids=IDLE)


def steps(module: tops.Sequential, pass_name: str = "forward") -> list[tuple[str, tuple[int, ...]]]:
    return [(step.name, step.ops) for step in getattr(module.plans()[0], pass_name)]


def results(
    module: Callable[..., Any], parameters: list[Tensor], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Output and all gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    output = module(*leaves)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    return output, *torch.autograd.grad(output, [*leaves, *parameters], weights)


def check(module: tops.Sequential, *inputs: Tensor) -> None:
    """Eager and compiled calls against the ops one by one."""
    parameters = list(module.parameters())
    with unfused():
        want = results(module, parameters, *inputs)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for function in (module, compiled):
        torch.testing.assert_close(
            results(function, parameters, *inputs), want, rtol=1e-5, atol=1e-5
        )


@every_idle
def test_a_product_with_its_epilogue(idle: Callable[[], tops.FusibleOperation]) -> None:
    module = tops.Sequential(tops.Linear(16, 16), idle(), tops.AddExtraInput())
    inputs = torch.randn(2, 5, 16).unbind()
    check(module, *inputs)
    module(*inputs)
    assert steps(module) == [("linear_epilogue", (0, 1, 2, 3))]


@every_idle
def test_in_backward(idle: Callable[[], tops.FusibleOperation]) -> None:
    made = [tops.LayerNorm(16), tops.Linear(16, 24), idle(), tops.GELU(), idle()]
    module = tops.Sequential(*made, tops.BasicLinear(24, 16))
    x = torch.randn(5, 16)
    check(module, x)
    module(x)
    assert steps(module)[1] == ("linear_bias_activation", (1, 2, 3, 4))
    # The last product's gradient passes the activation and the bias in one step.
    assert steps(module, "backward")[2] == ("linear_activation", (2, 3, 4, 5, 6))
    plain = tops.Sequential(*(op for op in module if type(op) is not type(made[2])))
    assert saved_bytes(module, x) == saved_bytes(plain, x)


@every_idle
def test_in_a_joint_fusion(idle: Callable[[], tops.FusibleOperation]) -> None:
    module = tops.Sequential(tops.ReLU(), idle(), tops.BasicLinear(16, 8))
    check(module, torch.randn(5, 16))
    module(torch.randn(5, 16))
    expected = [("activation_linear", (0, 1, 2))]
    assert steps(module) == steps(module, "backward") == expected


@every_idle
@pytest.mark.parametrize("norm", [tops.LayerNorm, tops.RMSNorm])
def test_a_residual_that_goes_on(idle: Callable[[], tops.FusibleOperation], norm: Any) -> None:
    split = tops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    join = tops.AddExtraInput().set_extra_input_channel(0, "x")
    made = [tops.AddExtraInput(), idle(), split, idle(), norm(16), tops.SiLU(), join]
    module = tops.Sequential(*made)
    inputs = torch.randn(2, 5, 16, requires_grad=True).unbind()
    check(module, *inputs)
    module(*inputs)
    name = "layer_norm" if norm is tops.LayerNorm else "rms_norm"
    assert steps(module)[0] == (f"add_{name}", (0, 1, 2, 3, 4))
    assert (f"{name}_residual", (2, 3, 4)) in steps(module, "backward")


def test_plans_in_training_and_in_eval() -> None:
    module = tops.Sequential(tops.Linear(16, 16), tops.Dropout(0.5), tops.AddExtraInput())
    inputs = torch.randn(2, 5, 16, requires_grad=True).unbind()
    for _ in range(2):
        module.train()(*inputs)
        assert steps(module) == [("BasicLinear", (0,)), ("bias_dropout_add", (1, 2, 3))]
        assert steps(module, "backward")[1] == ("dropout_bias", (1, 2))
        module.eval()(*inputs)
        assert steps(module) == [("linear_epilogue", (0, 1, 2, 3))]
        assert steps(module, "backward")[0] == ("bias_linear", (0, 1))
        check(module, *inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_eval_under_autocast(dtype: torch.dtype) -> None:
    """A product takes no residual of another dtype, the pass after it does."""
    module = tops.Sequential(tops.Linear(16, 16), tops.Dropout(0.5), tops.AddExtraInput()).eval()
    x, extra = torch.randn(5, 16), torch.randn(5, 16).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = module(x, extra)
        with unfused():
            want = module(x, extra)
    assert got.dtype == want.dtype == dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        module(x, extra)
    fused = dtype == torch.bfloat16
    expected = ["linear_epilogue"] if fused else ["BasicLinear", "bias_dropout_add"]
    assert [name for name, _ in steps(module)] == expected


def test_none_before_the_first_or_after_the_last() -> None:
    module = tops.Sequential(tops.Identity(), tops.Linear(16, 16), tops.Identity(), tops.Dropout(0))
    module(torch.randn(5, 16))
    assert [ops for _, ops in steps(module)] == [(0,), (1, 2), (3,), (4,)]


def test_near_misses_name_the_op_behind_them() -> None:
    module = tops.Sequential(tops.BasicLinear(16, 16), tops.Identity(), tops.LayerNorm(16))
    module(torch.randn(5, 16))
    reason = "op 2 is LayerNorm where it needs Bias or ConstantScale or AddExtraInput"
    assert near_misses(module, "linear_epilogue") == [((0, 1, 2), reason)]


def test_an_op_with_a_hook_is_not_passed_over() -> None:
    seen = []
    idle = tops.Identity()
    idle.register_forward_hook(lambda *_: seen.append(1))
    module = tops.Sequential(tops.BasicLinear(16, 16), idle, tops.AddExtraInput())
    module(*torch.randn(2, 5, 16).unbind())
    assert seen == [1]
    assert all(len(step.ops) == 1 for plan in module.plans() for step in plan.forward)


def test_a_fusion_that_a_user_gave_an_idle_op_keeps_it() -> None:
    class Mine(tops.FusedOperation):
        def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
            return input_.clone(), [()], ()

        def fuser_forward_save_ctx(self, *args: Any, **unused: Any) -> None:
            pass

    def fuse(ops: list[Any], **unused: Any) -> list[Any]:
        return [Mine([op]) if isinstance(op, tops.Identity) else op for op in ops]

    module = tops.Sequential(tops.BasicLinear(16, 16), tops.Identity(), tops.AddExtraInput())
    with tops.register_forward_fusion(fuse):
        module(*torch.randn(2, 5, 16).unbind())
        assert [name for name, _ in steps(module)] == ["BasicLinear", "Mine", "AddExtraInput"]
    module(*torch.randn(2, 5, 16).unbind())
    assert [name for name, _ in steps(module)] == ["linear_epilogue"]


def test_a_scale_of_one_hands_on_and_may_change() -> None:
    module = tops.Sequential(tops.ConstantScale(1.0))
    x = torch.randn(5, 16)
    assert module(x).data_ptr() == x.data_ptr()
    module[0].scale = 2.0
    assert torch.equal(module(x), 2 * x)


@pytest.mark.parametrize("idle", [tops.Dropout(0.0), tops.Identity(), tops.ConstantScale(1.0)])
@pytest.mark.parametrize("activation", [tops.ReLU(), tops.SReLU(), tops.GELU(), tops.SiLU()])
def test_second_derivatives_look_past_them(idle, activation):
    """What the Linear keeps is the output of the activation, whose input nobody keeps."""
    linear = tops.Linear(16, 16).double()
    x = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)

    def second(*ops: torch.nn.Module) -> tuple[torch.Tensor, ...]:
        wanted = [x, *linear.parameters()]
        output = tops.Sequential(*ops)(x)
        grads = torch.autograd.grad(output.square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in grads), wanted)

    torch.testing.assert_close(second(activation, idle, linear), second(activation, linear))
