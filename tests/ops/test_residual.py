"""Residual: the same ops, plans and numbers as the three that it stands for."""

from __future__ import annotations

import collections
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_compile import compiled
from torch import Tensor, nn
from user_fusions import gradients

import transformer_ops as tops


def by_hand(*ops: Any, channel: str = "residual") -> list[Any]:
    """What a Residual is short for."""
    fork = tops.MakeExtraOutput().set_extra_output_channel(0, channel, output_to_caller=False)
    return [fork, *ops, tops.AddExtraInput().set_extra_input_channel(0, channel)]


class Mixer(nn.Module):
    """A module of the user's, as attention is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def mlp() -> list[Any]:
    return [tops.RMSNorm(16), tops.Linear(16, 64), tops.SwiGLU(), tops.Linear(32, 16)]


def attention() -> list[Any]:
    return [tops.LayerNorm(16), Mixer(), tops.Linear(16, 16)]


# (with Residual, by hand), of the same ops.
ROWS: dict[str, Callable[[], tuple[list[Any], list[Any]]]] = {
    "one": lambda: (lambda ops: ([tops.Residual(*ops)], by_hand(*ops)))(mlp()),
    "two in a row": lambda: (
        lambda a, b: (
            [tops.Residual(*a), tops.Residual(b)],
            [*by_hand(*a), *by_hand(*b, channel="second")],
        )
    )(mlp(), mlp()),
    "nested": lambda: (
        lambda a, b: (
            [tops.GELU(), tops.Residual(*a, tops.Residual(collections.OrderedDict(b=b)))],
            [tops.GELU(), *by_hand(*a, *by_hand(b, channel="inner"))],
        )
    )(mlp(), tops.Linear(16, 16)),
    "a plain module inside": lambda: (
        lambda a, b: (
            [tops.Residual(*a), tops.Residual(*b)],
            [*by_hand(*a), *by_hand(*b, channel="second")],
        )
    )(attention(), mlp()),
    "with an extra input": lambda: (
        lambda a: ([tops.Residual(*a, tops.AddExtraInput())], by_hand(*a, tops.AddExtraInput()))
    )(mlp()),
}
every_row = pytest.mark.parametrize("name", ROWS)


def pair(name: str) -> tuple[tops.Sequential, tops.Sequential, list[Tensor]]:
    short, long = ROWS[name]()
    inputs = [torch.randn(3, 16, requires_grad=True) for _ in range(1 + ("extra" in name))]
    return tops.Sequential(*short), tops.Sequential(*long), inputs


def texts(module: tops.Sequential) -> list[str]:
    return [str(plan) for plan in module.plans()]


@every_row
def test_the_same_plans_and_numbers(name: str) -> None:
    short, long, inputs = pair(name)
    for got, want in zip(gradients(short, *inputs), gradients(long, *inputs), strict=True):
        assert torch.equal(got, want)
    assert texts(short) == texts(long)


@every_row
def test_fullgraph(name: str) -> None:
    short, long, inputs = pair(name)
    fast, counter = compiled(short)
    torch.testing.assert_close(gradients(fast, *inputs), gradients(long, *inputs))
    assert counter.frame_count == 1
    # The compiled code notices an edit of what is inside.
    residual = short[-1]
    residual.append(tops.ConstantScale(0.5))
    torch.testing.assert_close(fast(*inputs), short(*inputs))
    assert residual[-1] is not None and not torch.equal(short(*inputs), long(*inputs))


@every_row
def test_copies(name: str) -> None:
    short, _, inputs = pair(name)
    want = short(*inputs)
    twins = [copy.deepcopy(short)]
    if "plain" not in name:
        twins.append(pickle.loads(pickle.dumps(short)))
    for twin in twins:
        assert torch.equal(twin(*inputs), want)
        assert texts(twin) == texts(short)


def test_alone() -> None:
    ops, x = mlp(), torch.randn(3, 16)
    residual = tops.Residual(*ops)
    want = tops.Sequential(*by_hand(*ops))(x)
    assert torch.equal(residual(x), want)
    torch.testing.assert_close(want, x + tops.Sequential(*ops)(x))
    assert [*residual] == ops and len(residual) == 4 and residual[1] is ops[1]
    assert list(residual.state_dict()) == list(nn.Sequential(*ops).state_dict())
    part = residual[:1]
    assert type(part) is tops.Residual
    torch.testing.assert_close(part(x), x + ops[0](x))


def test_one_residual_twice() -> None:
    ops, x = mlp(), torch.randn(3, 16)
    residual = tops.Residual(*ops)
    got = tops.Sequential(residual, residual)(x)
    torch.testing.assert_close(got, residual(residual(x)))


def test_edits_are_seen() -> None:
    x = torch.randn(3, 16)
    module = tops.Sequential(tops.GELU(), tops.Residual(tops.Linear(16, 16)))
    module(x)
    linear = module[1][0]
    for edit in (
        lambda: module[1].append(tops.SiLU()),
        lambda: module[1].__setitem__(0, tops.Bias(16)),
        lambda: module[1].insert(0, Mixer()),
        lambda: module[1].pop(0),
    ):
        edit()
        y = module[0](x)
        torch.testing.assert_close(module(x), y + nn.Sequential(*module[1])(y))
    assert linear not in list(module.modules())


def test_hooks_and_a_forward_of_its_own() -> None:
    x, seen = torch.randn(3, 16), []
    module = tops.Sequential(tops.GELU(), tops.Residual(*mlp()))
    want = module(x)
    assert len(module.plans()) == 1
    handle = module[1].register_forward_hook(lambda m, args, out: seen.append(out))
    torch.testing.assert_close(module(x), want)
    assert torch.equal(seen[0], module(x))
    handle.remove()
    module(x)
    assert len(seen) == 2 and len(module.plans()) == 1
    module[1].forward = lambda a: 2 * a
    torch.testing.assert_close(module(x), 2 * module[0](x))


def test_policies() -> None:
    x, ops = torch.randn(3, 16, requires_grad=True), mlp()
    module = tops.Sequential(tops.GELU(), tops.Residual(*ops), recompute="none")
    module(x)
    (plan,) = module.plans()
    want = tops.Sequential(tops.GELU(), *by_hand(*ops), recompute="none")
    want(x)
    assert [str(plan)] == texts(want)
    # One that was given other policies keeps them: the plan around has no place for them.
    module = tops.Sequential(tops.GELU(), tops.Residual(*ops, recompute="none"))
    torch.testing.assert_close(module(x), want(x))
    assert len(module.plans()[0].forward) == 1 and "recompute" not in texts(module[1])[0]
    module[1].recompute = "cheap"
    module(x)
    assert "recompute_rms_norm" in texts(module)[0]


def test_op_kwargs_reach_an_op_inside() -> None:
    class Times(tops.BasicOperation):
        def op_forward(self, ctx: Any, input_: Tensor, *, by: float = 1.0, **_: Any) -> Tensor:
            return input_ * by

        def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
            return grad_output, ()

    x, times = torch.randn(3, 16), Times()
    module = tops.Sequential(tops.Bias(16), tops.Residual(times))
    torch.testing.assert_close(module(x, op_kwargs={times: {"by": 2.0}}), 3 * x)
    with pytest.raises(ValueError, match="op_kwargs keys must be fusible ops"):
        module(x, op_kwargs={1: {"by": 2.0}})


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"\[Residual\] modules must be at least one, got none"):
        tops.Residual()
    with pytest.raises(TypeError, match=r"modules must be nn.Modules, got int"):
        tops.Residual(3)
    with pytest.raises(TypeError, match=r"\[Residual\] got an unexpected .*'in_place'"):
        tops.Residual(tops.GELU(), in_place=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="recompute must be"):
        tops.Residual(tops.GELU(), recompute="no")
    module, residual = tops.Sequential(tops.GELU()), tops.Residual(tops.GELU())
    for add in (lambda: module + residual, lambda: module.extend(residual)):
        with pytest.raises(TypeError, match="got a Residual: write"):
            add()
    assert len(module.extend([residual])) == 2


def test_a_list_of_modules() -> None:
    ops, x = mlp(), torch.randn(3, 16)
    assert torch.equal(tops.Sequential(ops)(x), tops.Sequential(*ops)(x))
    assert torch.equal(tops.Residual(tuple(ops))(x), tops.Residual(*ops)(x))
    named = tops.Sequential(collections.OrderedDict(norm=ops[0], up=ops[1]))
    assert [name for name, _ in named.named_children()] == ["norm", "up"]
