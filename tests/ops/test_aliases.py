"""Outputs that are views of inputs, and outputs that no loss uses: as in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import transformer_ops as tops

IDLE = {
    "Identity": (lambda: tops.Identity(), lambda: nn.Identity()),
    "Dropout in eval": (lambda: tops.Dropout(0.1).eval(), lambda: nn.Dropout(0.1).eval()),
    "Dropout of 0": (lambda: tops.Dropout(0.0), lambda: nn.Dropout(0.0)),
    "Reshape": (lambda: tops.Reshape((-1, 2)), lambda: nn.Unflatten(1, (4, 2))),
    "a group of them": (
        lambda: tops.Sequential(tops.Identity(), tops.Dropout(0.0)),
        lambda: nn.Identity(),
    ),
}


@pytest.mark.parametrize("make, plain", IDLE.values(), ids=IDLE)
def test_what_follows_an_idle_op_may_work_in_place(make, plain):
    grads = []
    torch.manual_seed(0)
    start = torch.randn(4, 8)
    for module in (make(), plain()):
        x = start.clone().requires_grad_()
        y = module(x * 1)
        y.relu_()
        y.square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("make, plain", IDLE.values(), ids=IDLE)
def test_in_place_on_a_leaf_raises_as_in_plain_torch(make, plain):
    for module in (make(), plain()):
        x = torch.randn(4, 8, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            module(x).relu_()


def branches() -> tops.Sequential:
    return tops.Sequential(
        tops.Linear(8, 8), tops.MakeExtraOutput(), tops.Linear(8, 8), tops.GELU()
    )


class Plain(nn.Module):
    """The same in plain torch."""

    def __init__(self, twin: tops.Sequential) -> None:
        super().__init__()
        self.twin = twin

    def forward(self, x):
        first, second = self.twin[0], self.twin[2]
        extra = nn.functional.linear(x, first.weight, first.bias)
        hidden = nn.functional.linear(extra, second.weight, second.bias)
        return nn.functional.gelu(hidden, approximate="tanh"), extra


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=["main", "extra", "both"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_parameters_of_an_unused_branch_get_no_gradient(used, create_graph):
    module = branches()
    x = torch.randn(4, 8, requires_grad=True)
    wanted = [x, *module.parameters()]
    found = []
    for way in (module, Plain(module)):
        outputs = way(x)
        loss = sum(outputs[i].square().sum() for i in used)
        grads = torch.autograd.grad(loss, wanted, create_graph=create_graph, allow_unused=True)
        found.append(grads)
    for got, expected in zip(*found, strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got, expected)


def test_an_unused_branch_inside_a_fused_backward_step():
    """MakeExtraOutput and the Linear behind it are one step of backward."""
    module = tops.Sequential(tops.MakeExtraOutput(), tops.Linear(8, 8, bias=False))
    x = torch.randn(4, 8, requires_grad=True)
    _, extra = module(x)
    assert [step.name for step in module.plans()[0].backward] == ["linear_residual_scale"]
    grads = torch.autograd.grad(extra.sum(), [x, module[1].weight], allow_unused=True)
    torch.testing.assert_close(grads[0], torch.ones_like(x))
    assert grads[1] is None


def test_double_backward_where_an_output_is_unused():
    module = branches().double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    wanted = [x, *module.parameters()]
    found = []
    for way in (module, Plain(module)):
        first = torch.autograd.grad(way(x)[0].square().sum(), wanted, create_graph=True)
        penalty = sum(grad.square().sum() for grad in first)
        found.append(torch.autograd.grad(penalty, wanted, allow_unused=True))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


def test_an_unused_extra_output_of_half_precision():
    module = branches().to(torch.bfloat16)
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    _, extra = module(x)
    extra.sum().backward()
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True]
    assert x.grad.dtype == torch.bfloat16


def test_an_output_before_all_that_needs_a_gradient_needs_none():
    module = tops.Sequential(tops.MakeExtraOutput(), tops.GELU(), tops.Linear(8, 8))
    output, extra = module(torch.randn(4, 8))
    assert output.requires_grad and not extra.requires_grad
    output.sum().backward()


def test_compiled_autograd_of_a_group_with_an_unused_output():
    module = branches()
    x = torch.randn(4, 8)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        module(x)[1].sum().backward()
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True]


def test_compiled_autograd_tells_programs_apart():
    """Two groups of the same sizes: the graph of one must not serve the other."""
    x = torch.randn(4, 8)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for scale in (2.0, 3.0, 2.0):
            y = x.clone().requires_grad_()
            tops.Sequential(tops.ConstantScale(scale), tops.ConstantScale(2.0))(y).sum().backward()
            torch.testing.assert_close(y.grad, torch.full_like(x, 2 * scale))


class Doubled(tops.BasicOperation):
    """A Python op, so that Python walks the plan."""

    def op_forward(self, ctx, input_):
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


@pytest.mark.parametrize("last", [tops.GELU, Doubled])
def test_leaves_do_not_share_the_memory_of_their_gradients(last):
    """Reshape's gradient is a view of the one that AddExtraInput hands to both of its inputs."""
    module = tops.Sequential(tops.Reshape((-1, 8)), tops.AddExtraInput(), last())
    x, extra = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    loss = module(x, extra).square().sum()
    want = torch.autograd.grad(loss, [x, extra], retain_graph=True)
    for _ in range(2):
        loss.backward(retain_graph=True)
    torch.testing.assert_close([x.grad, extra.grad], [2 * grad for grad in want])


def test_a_gradient_that_the_caller_gives_is_not_taken():
    module = tops.Sequential(tops.Reshape((-1, 8)), tops.AddExtraInput())
    x, extra = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    given = torch.ones(4, 8)
    for _ in range(2):
        module(x, extra).backward(given)
    torch.testing.assert_close(given, torch.ones(4, 8))
    torch.testing.assert_close(x.grad, torch.full((4, 8), 2.0))
