"""Plain attributes that guards and fused ops in Python read of ops: calls see what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_ops as tops


def test_a_guard_sees_what_the_ops_are_now() -> None:
    def is_half(ops: list[Any]) -> str | None:
        scale = ops[1].scale
        return None if scale == 0.5 else f"scale is {scale}"

    class Half(tops.FusedOperation):
        def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
            return input_.relu() / 2, [(), ()], (input_,)

        def fuser_forward_save_ctx(self, ctxs: Any, input_: Tensor, saved: Any, **_: Any) -> None:
            ctxs[0].save_for_backward(*saved)

    module = tops.Sequential(tops.ReLU(), tops.ConstantScale(0.5))
    with tops.register_forward_fusion(Half, pattern=[tops.ReLU, tops.ConstantScale], guard=is_half):
        for scale, name in ((0.5, "Half"), (0.25, "ReLU"), (0.5, "Half")):
            module[1].scale = scale
            module(torch.randn(3, 6))
            assert module.plans()[0].forward[0].name == name


class Times(tops.BasicOperation):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        return input_ * self.factor

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return grad_output * self.factor, ()


class Scaled(tops.SiLU):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor


class Four(tops.FusedOperation):
    """Stateless: right for factors of 2 alone."""

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        return input_ * 4, [(), ()], ()

    def fuser_forward_save_ctx(self, ctxs: Any, input_: Tensor, saved: Any, **_: Any) -> None:
        return


@pytest.mark.parametrize("compiled", [False, True])
def test_a_guard_sees_the_attributes_of_python_ops(compiled: bool) -> None:
    def are_two(ops: list[Any]) -> str | None:
        return None if all(op.factor == 2 for op in ops) else "another factor"

    module = tops.Sequential(Times(2.0), Times(2.0))
    run = torch.compile(module, backend="aot_eager") if compiled else module
    x = torch.ones(3)
    with tops.register_forward_fusion(Four, pattern=[Times, Times], guard=are_two):
        for factor in (2.0, 3.0, 2.0, 0.5):
            module[0].factor = factor
            assert torch.equal(run(x), x * factor * 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_fused_op_reads_of_a_native_op_is_that_of_the_call(compiled: bool) -> None:
    class Mine(tops.FusedOperation):
        def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
            return input_ * self.basic_ops[0].factor, [()], (input_,)

        def fuser_forward_save_ctx(
            self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
        ) -> None:
            basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    module = tops.Sequential(Scaled(2.0))
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    x = torch.ones(3)
    with tops.register_forward_fusion(Mine, pattern=[Scaled]):
        for factor in (2.0, 5.0, 2.0):
            module[0].factor = factor
            assert torch.equal(run(x), x * factor)


def test_an_attribute_that_changes_nothing_keeps_the_plans() -> None:
    module = tops.Sequential(Times(2.0), Times(2.0))
    guard = lambda ops: None  # noqa: E731
    with tops.register_forward_fusion(Four, pattern=[Times, Times], guard=guard):
        module(torch.ones(3))
        plan = module.plans()[0]
        module[0].factor = 2.0
        module(torch.ones(3))
        assert module.plans()[0] is plan
