"""Calls that leave a compiled graph: why, as `fullgraph=True` says, and the numbers without it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from user_fusions import JointSingle, JointSplit, ScaleShift, SingleSquare

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=15)

SPLITS = torch.tensor([1, 3])


class Row(NamedTuple):
    """A call that leaves the graph."""

    make: Callable[[], Any]
    reason: str
    call: Callable[[Any, Tensor], Any] = lambda module, x: module(x)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class WithTensor(JointSplit):
    """A fused op that holds a tensor."""

    def __init__(self, basic_ops: list[tops.BasicOperation]) -> None:
        super().__init__(basic_ops)
        self.table = torch.ones(1)


class OwnForward(tops.GELU):
    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        return 2 * super().forward(input, *extra_inputs, **kwargs)


def product() -> tops.Sequential:
    return tops.Sequential(tops.Linear(6, 6, bias=False), tops.SiLU())


def fused_by(op: type) -> Callable[[], AbstractContextManager[Any]]:
    pattern = [tops.BasicLinear, tops.SiLU]
    return lambda: tops.register_forward_backward_fusion(op, pattern=pattern)


def hooked() -> tops.OperationFuser:
    gelu = tops.GELU()
    gelu.register_forward_hook(lambda module, given, output: 2 * output)
    return tops.OperationFuser([tops.Linear(6, 6), gelu])


def parametrized() -> tops.Sequential:
    op = ScaleShift(6)
    nn.utils.parametrize.register_parametrization(op, "weight", nn.Softplus())
    return tops.Sequential(op)


def marked() -> tops.Sequential:
    module = tops.Sequential(tops.Linear(6, 6, accumulate_into_main_grad=True))
    weight: Any = module[0].weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(6, 6), False
    return module


def quantized() -> tops.Sequential:
    with tops.quantized_model_init(recipe=tops.recipe.Float8CurrentScaling()):
        return tops.Sequential(tops.Linear(6, 6), ScaleShift(6))


def quantized_product() -> tops.Sequential:
    with tops.quantized_model_init(recipe=tops.recipe.Float8CurrentScaling()):
        return product()


def set_within(module: Any, x: Tensor) -> Any:
    module.eval()
    return module(x)


@contextmanager
def delayed_scaling() -> Iterator[None]:
    with tops.autocast(recipe=tops.recipe.DelayedScaling()):
        yield


PAIR = "forward must be the split pair {0}_compute and {0}_save_ctx .*, got the single method {0}"
ROWS = {
    "single": Row(
        lambda: tops.Sequential(tops.Linear(6, 6), SingleSquare()),
        rf"\[SingleSquare\] {PAIR.format('op_forward')}\)",
    ),
    "single, alone": Row(SingleSquare, rf"\[SingleSquare\] {PAIR.format('op_forward')}\)"),
    "single, fused": Row(
        product,
        rf"\[JointSingle\] {PAIR.format('fuser_forward')}\)",
        around=fused_by(JointSingle),
    ),
    "fused op with a tensor": Row(
        product,
        r"\[WithTensor\] a fused op must leave its tensors .*, got its own table\)",
        around=fused_by(WithTensor),
    ),
    "delayed weight gradient": Row(
        lambda: tops.GroupedLinear(2, 6, 6, delay_wgrad_compute=True),
        r"\[GroupedLinear\] delay_wgrad_compute must be False .*, got True\)",
        lambda module, x: module(x, SPLITS),
    ),
    "parametrized": Row(
        parametrized,
        # The class is one that torch makes.
        r"\[ParametrizedScaleShift\] the parameters .* must not be parametrized .* of weight\)",
    ),
    "marked": Row(
        marked, r"\[Linear\] weight must have no grad_added_to_main_grad .*, got one: .*\)"
    ),
    "quantized": Row(
        quantized,
        r"\[ScaleShift\] weights must be plain .* with Python steps .*, got .* format e4m3\)",
    ),
    "quantized, fused": Row(
        quantized_product,
        r"\[JointSplit\] weights must be plain .* with Python steps .*, got .* format e4m3\)",
        around=fused_by(JointSplit),
    ),
    "set within": Row(
        lambda: tops.Sequential(ScaleShift(6)),
        r"\[ScaleShift\] training must be set outside of compiled code, got another value .*\)",
        set_within,
    ),
    "hooks": Row(
        hooked, r"\[GELU\] a member of an OperationFuser .* must have no hooks, got some; .*\)"
    ),
    "own forward": Row(
        lambda: tops.OperationFuser([tops.Linear(6, 6), OwnForward()]),
        r"\[OwnForward\] a member of an OperationFuser .* must have no forward of its own, .*\)",
    ),
    "scales elsewhere": Row(
        lambda: tops.OperationFuser(tops.Linear(6, 6).basic_ops),
        r"\[Linear\] a module with scales must be called itself .*, got its basic ops, .*\)",
        around=delayed_scaling,
    ),
}


def numbers(module: Any, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Output, gradient of the input, and of the weights wherever they go."""
    x = x.clone().requires_grad_()
    weights = [p for op in getattr(module, "_ops", [module]) for p in op.parameters()]
    for weight in weights:
        weight.grad = None
    output = call(x)
    output.square().sum().backward()
    for op in getattr(module, "modules", list)():
        if isinstance(op, tops.GroupedLinear):
            op.backward_dw()
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    gradients += [w.main_grad.clone() for w in weights if hasattr(w, "main_grad")]
    assert gradients or not weights
    for weight in weights:
        if hasattr(weight, "main_grad"):
            weight.main_grad.zero_()
    assert x.grad is not None
    return [output.detach(), x.grad, *gradients]


@pytest.mark.parametrize("name", ROWS)
def test_an_error_says_which_op_and_why(name: str) -> None:
    row = ROWS[name]
    module, x = row.make(), torch.randn(4, 6)

    def call(x: Tensor) -> Any:
        return row.call(module, x)

    with row.around():
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"\(reason: {row.reason}"):
            torch.compile(call, backend="aot_eager", fullgraph=True)(x)
        want = numbers(module, call, x)
        torch._dynamo.reset()
        found = numbers(module, torch.compile(call, backend="aot_eager"), x)
    torch.testing.assert_close(found, want)


def test_a_reason_is_that_of_its_own_call() -> None:
    """Two calls that leave their graphs for different reasons, one after the other."""
    x = torch.randn(4, 6)
    for name in ("single", "hooks", "single, alone", "marked"):
        module = ROWS[name].make()
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=ROWS[name].reason):
            torch.compile(module, backend="eager", fullgraph=True)(x)


def test_every_call_that_leaves_a_graph_gives_its_reason() -> None:
    from transformer_ops.compile import groups

    for function in (groups._run_outside, groups._call_outside):
        assert function._torchdynamo_disable_msg is groups._reason  # type: ignore[attr-defined]


class Counter(tops.BasicOperation):
    """Counts its calls in a buffer; `count` says how."""

    def __init__(self, count):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.count = count

    def op_forward_compute(self, input_, **unused):
        self.count(self, input_)
        return input_ * 2, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
        pass

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


def in_place(op, x):
    op.n += 1


def by_assignment(op, x):
    op.n = op.n + 1


def as_attribute(op, x):
    op.last = x


def by_item(op, x):
    op.scale = x.sum().item()


def by_condition(op, x):
    if x.sum() > 0:
        op.n += 1


@pytest.mark.parametrize("count", [in_place, by_assignment, as_attribute, by_item, by_condition])
def test_a_compiled_op_that_changes_its_state(count):
    module = tops.Sequential(tops.Linear(4, 4), Counter(count))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 4)
    buffer = module[1].n
    if count is in_place:
        for _ in range(3):
            compiled(x).sum().backward()
        assert buffer == 3
    else:
        with pytest.raises(RuntimeError, match=r"\[Counter\] (n|last|methods) .*must .*, got "):
            compiled(x)
    assert module[1].n is buffer and "last" not in vars(module[1])
    module[1].count = in_place
    module(x).sum().backward()
    torch.save(module[1].state_dict(), io.BytesIO())
