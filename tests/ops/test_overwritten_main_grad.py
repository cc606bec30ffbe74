"""`overwrite_main_grad`: the first gradient of a backward pass is written, the others are added."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops


class Twice(nn.Module):
    """A block that uses one weight twice, in one group, in two groups, or by two calls."""

    def __init__(self, layout: str, accumulates: bool) -> None:
        super().__init__()
        self.layout = layout
        a, b = (linear(accumulates) for _ in range(2))
        b.weight = a.weight
        self.weight = a.weight
        if layout == "one group":
            self.parts = nn.ModuleList([tops.Sequential(a, tops.GELU(), b)])
        elif layout == "two groups":
            self.parts = nn.ModuleList([tops.Sequential(a), tops.Sequential(tops.GELU(), b)])
        else:
            self.parts = nn.ModuleList([tops.Sequential(a, tops.GELU())] * 2)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def linear(accumulates: bool) -> tops.BasicLinear:
    return tops.BasicLinear(16, 16, accumulate_into_main_grad=accumulates)


LAYOUTS = ("one group", "two groups", "called twice")


def pair(layout: str) -> tuple[Twice, Twice]:
    """One that overwrites what is in its buffer, and one whose gradient goes to `.grad`."""
    own, plain = (Twice(layout, accumulates) for accumulates in (True, False))
    plain.load_state_dict(own.state_dict())
    own.weight.main_grad = torch.full((16, 16), 7.0)
    own.weight.overwrite_main_grad = True
    return own, plain


def compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(module, fullgraph=True, backend="aot_eager")


def inductor(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(module, fullgraph=True)


def by_parts(module: nn.Module, use_reentrant: bool) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        for part in module.parts:
            x = checkpoint(part, x, use_reentrant=use_reentrant)
        return x

    return call


def reentrant(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Each part runs in a backward pass of its own, inside that of the loss."""
    return by_parts(module, use_reentrant=True)


def reentrant_and_plain(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: module(reentrant(module)(x))


def nested(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=True)

    def outer(x: Tensor) -> Tensor:
        return inner(inner(x))

    return lambda x: module(checkpoint(outer, module(x), use_reentrant=True))


def non_reentrant(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return by_parts(module, use_reentrant=False)


def as_it_is(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return module


def in_graphs(module: nn.Module, which: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """The first part, the last one, or each is compiled by itself."""
    parts = [
        torch.compile(part, backend="aot_eager", fullgraph=True) if i in which else part
        for i, part in enumerate(module.parts)
    ]

    def call(x: Tensor) -> Tensor:
        for part in parts:
            x = part(x)
        return x

    return call


def graph_for_each(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return in_graphs(module, (0, 1))


def graph_behind_eager(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return in_graphs(module, (1,))


def graph_before_eager(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return in_graphs(module, (0,))


GRAPHS = [compiled, inductor, graph_behind_eager]
WAYS = [*GRAPHS, as_it_is, reentrant, reentrant_and_plain, nested, non_reentrant]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_weight_that_is_used_twice(layout: str, way: Any) -> None:
    own, plain = pair(layout)
    call, other = way(own), plain if way in GRAPHS else way(plain)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(5, 16, requires_grad=True)
        plain.weight.grad = None
        call(x).square().sum().backward()
        other(x).square().sum().backward()
        torch.testing.assert_close(own.weight.main_grad, plain.weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", [graph_for_each, graph_before_eager])
def test_a_graph_says_what_wrote_between_its_forward_and_its_backward(way: Any) -> None:
    own, _ = pair("two groups")
    x = torch.randn(5, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        way(own)(x).sum().backward()


def test_a_pass_that_failed_is_over() -> None:
    own, plain = pair("two groups")
    x = torch.randn(5, 16, requires_grad=True)

    def fail(_: Tensor) -> None:
        raise ValueError("stop")

    # Behind the second part, whose gradient is written.
    middle = own.parts[0](x)
    handle = middle.register_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        own.parts[1](middle).sum().backward()
    handle.remove()
    own(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(own.weight.main_grad, plain.weight.grad)


def test_threads_have_passes_of_their_own() -> None:
    pairs = [pair("two groups") for _ in range(4)]
    inputs = [torch.randn(5, 16, requires_grad=True) for _ in pairs]

    def train(module: nn.Module, x: Tensor) -> None:
        for _ in range(10):
            module(x).square().sum().backward()

    threads = [
        threading.Thread(target=train, args=(own, x))
        for (own, _), x in zip(pairs, inputs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (own, plain), x in zip(pairs, inputs, strict=True):
        plain(x).square().sum().backward()
        torch.testing.assert_close(own.weight.main_grad, plain.weight.grad)


def test_a_graph_made_in_another_pass_is_no_part_of_it() -> None:
    """Here in a hook, and run after that pass."""
    own, plain = pair("one group")
    x = torch.randn(5, 16, requires_grad=True)
    made: list[Tensor] = []

    def hook(_: Tensor) -> None:
        with torch.enable_grad():
            made.append(own(x).square().sum())

    y = own(x)
    y.register_hook(hook)
    y.square().sum().backward()
    made[0].backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(own.weight.main_grad, plain.weight.grad)


SPLITS = torch.tensor([3, 0, 5])


def grouped_pair(**options: Any) -> tuple[list[tops.GroupedLinear], list[tops.GroupedLinear]]:
    torch.manual_seed(0)
    options |= {"bias": False}
    own = [tops.GroupedLinear(3, 16, 16, accumulate_into_main_grad=True, **options) for _ in "ab"]
    plain = [tops.GroupedLinear(3, 16, 16, bias=False) for _ in "ab"]
    for ops in (own, plain):
        for name in ("weight0", "weight2"):
            setattr(ops[1], name, getattr(ops[0], name))
    for op, other in zip(own, plain, strict=True):
        other.load_state_dict(op.state_dict())
    for weight in (w for op in own for w in op.parameters()):
        weight.main_grad = torch.full((16, 16), 7.0)
        weight.overwrite_main_grad = True
    return own, plain


def check_grouped(own: list[tops.GroupedLinear], plain: list[tops.GroupedLinear]) -> None:
    for op, other in zip(own, plain, strict=True):
        for weight, want in zip(op.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(weight.main_grad, want.grad)


def test_some_weights_of_a_list_are_used_twice() -> None:
    own, plain = grouped_pair()
    x = torch.randn(8, 16)
    for ops in (own, plain):
        ops[1](ops[0](x, SPLITS), SPLITS).square().sum().backward()
    check_grouped(own, plain)


def test_delayed_gradients_belong_to_the_pass_that_left_them() -> None:
    own, plain = grouped_pair(delay_wgrad_compute=True)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(8, 16)
        for ops in (own, plain):
            for weight in (w for op in ops for w in op.parameters()):
                weight.grad = None
            ops[1](ops[0](x, SPLITS), SPLITS).square().sum().backward()
    # The gradients of the first pass come first, and each pass has another order of the ops.
    for op in (own[0], own[1], own[1], own[0]):
        op.backward_dw()
    check_grouped(own, plain)


def test_delayed_gradients_of_an_earlier_pass_come_too_late() -> None:
    own, _ = grouped_pair(delay_wgrad_compute=True)
    for _ in range(2):
        own[1](own[0](torch.randn(8, 16), SPLITS), SPLITS).sum().backward()
    own[0].backward_dw()
    own[0].backward_dw()
    before = own[1].weight0.main_grad.clone()
    with pytest.raises(RuntimeError, match="must come in the order of their backward passes"):
        own[1].backward_dw()
    assert torch.equal(own[1].weight0.main_grad, before)
