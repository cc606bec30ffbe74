"""What guards and functions see of the ops, when they are asked again, and what explain() says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from user_fusions import Backward, JointSplit
from wrong_fusions import Slots

import transformer_ops as tops

PATTERN = [tops.BasicLinear, tops.SiLU]
X = torch.randn(3, 6)


def make(bias: bool = False, **attributes: Any) -> tops.Sequential:
    module = tops.Sequential(tops.Linear(6, 8, bias=bias), tops.SiLU())
    vars(module[0]).update(attributes)
    return module


def fires(module: tops.Sequential) -> bool:
    module(X)
    return module.plans()[0].forward[0].name == "Slots"


def misses(module: tops.Sequential) -> str:
    module(X)
    return " ".join(str(module.explain()).partition("nearly matched")[2].split())


def guarded(guard: Callable[[list[Any]], str | None]) -> tops.FusionHandle:
    return tops.register_forward_fusion(Slots, pattern=PATTERN, guard=guard)


# ---- parts


def test_parts_have_the_flags_and_attributes_of_their_linear() -> None:
    module = make(bias=True, tag="mine")
    product, bias = module[0].basic_ops
    assert isinstance(product, tops.BasicLinear) and isinstance(bias, tops.Bias)
    assert [type(op).__name__ for op in (product, bias)] == ["LinearProduct", "LinearBias"]
    assert product.owner is bias.owner is module[0] and product.owner.tag == "mine"
    assert module[1].owner is module[1]
    for mode in (False, True):
        module.train(mode)
        assert product.training is bias.training is mode
        assert Slots([product, module[1]]).training is mode
    view = tops.view(nn.Linear(6, 8).eval())
    assert not view.basic_ops[0].training


# ---- asked again


def train(module: Any, value: bool) -> None:
    module.train(value)


def tag(module: Any, value: bool) -> None:
    module[0].tag = value


def tag_of_an_op(module: Any, value: bool) -> None:
    module[1].tag = value


def widen(module: Any, value: bool) -> None:
    module[0].weight = nn.Parameter(torch.ones(9 if value else 8, 6))


def freeze(module: Any, value: bool) -> None:
    module[0].weight.requires_grad_(not value)


GUARDS: list[tuple[Callable[[Any, bool], None], Callable[[list[Any]], Any]]] = [
    (train, lambda ops: ops[0].training),
    (train, lambda ops: ops[1].training),
    (tag, lambda ops: getattr(ops[0].owner, "tag", False)),
    (tag_of_an_op, lambda ops: getattr(ops[1], "tag", False)),
    (widen, lambda ops: ops[0].weight.shape[0] == 9),
    (freeze, lambda ops: not ops[0].weight.requires_grad),
]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("edit", "reads"), GUARDS)
def test_a_guard_is_asked_again(edit: Any, reads: Any, compiled: bool) -> None:
    module, seen = make(), []

    def guard(ops: list[Any]) -> str | None:
        seen.append(bool(reads(ops)))
        return "no" if seen[-1] else None

    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    with guarded(guard):
        for value in (False, True, False):
            edit(module, value)
            # Another shape, so that compiled code is not found by the old one.
            assert run(X).shape[0] == 3
            assert value in seen
            if not compiled:
                assert fires(module) is not value


def test_train_and_eval_are_two_graphs() -> None:
    module, counter = make(), CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with guarded(lambda ops: "in training" if ops[0].training else None):
        for mode in (True, False, True, False):
            module.train(mode)
            compiled(X)
    assert counter.frame_count == 2


def test_a_guard_must_not_read_numbers() -> None:
    module = make()
    message = r"\[Slots\] a guard must not raise, got TypeError: it must not compute with tensors"
    with guarded(lambda ops: None if ops[0].weight.sum() else "zero"):
        with pytest.raises(RuntimeError, match=message):
            module(X)


# ---- what explain() says


def by_type(ops: list[Any], **unused: Any) -> Any:
    return [Slots(ops)] if type(ops[0]) is tops.BasicLinear else ops


def in_pairs(ops: list[Any], **unused: Any) -> Any:
    return [op for op, _ in ops]


def test_a_function_that_compares_types() -> None:
    told = "compare with isinstance, as these have subclasses: LinearProduct"
    with tops.register_forward_fusion(by_type):
        assert told in misses(make())


def test_a_function_that_unpacks_pairs() -> None:
    message = "cannot unpack .*; it is given a list of ops, without their indices"
    with tops.register_forward_fusion(in_pairs), pytest.raises(RuntimeError, match=message):
        make()(X)


def test_a_pattern_that_nearly_matched() -> None:
    idle = tops.Sequential(tops.BasicLinear(6, 8), tops.Dropout(0.0), tops.SiLU())
    other = tops.Sequential(tops.BasicLinear(6, 8), tops.GELU())
    both = tops.Sequential(tops.BasicLinear(6, 6), tops.SiLU(), *other)
    with tops.register_forward_fusion(Slots, pattern=PATTERN):
        assert "op 1 is Dropout, which does nothing now but has no entry in the pattern" in misses(
            idle
        )
        assert "Slots (forward) at 0-1: op 1 is GELU where it needs SiLU" in misses(other)
        # It fired, so what else it met is chance.
        assert "Slots" not in misses(both)


def test_the_loser_of_two_fusions() -> None:
    pattern = [tops.BasicLinear, tops.optional(tops.Bias), tops.SiLU]
    with (
        tops.register_forward_fusion(Slots, pattern=PATTERN),
        tops.register_forward_fusion(lambda ops: Slots(ops), pattern=pattern, name="second"),
    ):
        assert "second (forward) at 0-1: the ops are taken by Slots" in misses(make())


@pytest.mark.parametrize(
    ("register", "cls", "name"),
    [
        (tops.register_forward_fusion, Slots, "Slots (forward)"),
        (tops.register_backward_fusion, Backward, "Backward (backward)"),
        (tops.register_forward_backward_fusion, JointSplit, "JointSplit (joint)"),
    ],
)
def test_a_refusal_shows_where_no_gradient_is_needed(register: Any, cls: Any, name: str) -> None:
    with register(cls, pattern=PATTERN, guard=lambda ops: "not today"), torch.no_grad():
        assert f"{name} at 0-1: not today" in misses(make())
