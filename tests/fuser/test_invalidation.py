"""What an edit of one module makes stale: the plans of its own groups, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_ops as tops


def block() -> tops.Sequential:
    return tops.Sequential(tops.Linear(6, 6), tops.GELU(), tops.Dropout(0.5))


def last_plan(module: tops.Sequential) -> Any:
    (group,) = module._groups()
    return group._group.last


def test_an_attribute_touches_the_plans_of_its_own_group_alone() -> None:
    x = torch.randn(3, 6)
    edited, other = block(), block()
    edited(x), other(x)
    before = last_plan(edited), last_plan(other)
    edited[2].p = 0.25
    edited(x), other(x)
    assert last_plan(edited) is not before[0]
    assert last_plan(other) is before[1]
    assert "p=0.25" in str(edited.plans()[0])


def test_plans_can_be_looked_at_between_an_edit_and_the_next_call() -> None:
    module = block()
    module(torch.randn(3, 6))
    module[2].p = 0.25
    assert "p=0.5" in str(module.plans()[0])


def test_every_group_that_shares_the_op_is_touched() -> None:
    x = torch.randn(3, 6)
    dropout = tops.Dropout(0.5)
    alone, first = tops.Sequential(tops.GELU(), dropout), tops.Sequential(tops.SiLU(), dropout)
    second = tops.OperationFuser([tops.ReLU(), dropout])
    for call in (alone, first, second, dropout):
        call(x)
    dropout.p = 0.0
    assert torch.equal(dropout(x), x)
    torch.testing.assert_close(alone(x), torch.nn.functional.gelu(x, approximate="tanh"))
    torch.testing.assert_close(first(x), torch.nn.functional.silu(x))
    torch.testing.assert_close(second(x), torch.relu(x))


@pytest.mark.parametrize("make", [block, lambda: tops.Dropout(0.5)], ids=["block", "op"])
def test_an_attribute_recompiles_its_own_module_alone(make: Any) -> None:
    x = torch.randn(3, 6)
    edited, other = make(), make()
    counters = [CompileCounterWithBackend("aot_eager") for _ in range(2)]
    compiled = [
        torch.compile(module, backend=counter, fullgraph=True)
        for module, counter in zip((edited, other), counters, strict=True)
    ]
    for call in compiled:
        call(x)
    dropout = edited if isinstance(edited, tops.Dropout) else edited[2]
    dropout.p = 0.0
    found = [call(x) for call in compiled]
    assert [counter.frame_count for counter in counters] == [2, 1]
    assert torch.equal(found[0], compiled[0](x))  # nothing is drawn any more
    assert not torch.equal(found[1], compiled[1](x))


def test_a_registered_fusion_touches_all() -> None:
    x = torch.randn(3, 6)
    modules = [block(), block()]
    for module in modules:
        module(x)
    before = [last_plan(module) for module in modules]
    with tops.register_forward_fusion(lambda ops, **unused: ops):
        for module, plan in zip(modules, before, strict=True):
            module(x)
            assert last_plan(module) is not plan
