"""Inputs and parameters that are tensors of a class of their own."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import transformer_ops as tops


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


class Tagged(torch.Tensor):
    """Has the default `__torch_function__` of a subclass, and counts what it sees."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs)


class Mixed(tops.BasicOperation):
    """A Python op."""

    def op_forward(self, ctx, input_):
        return input_ * 2

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


PIPELINES = {
    "lone op": (tops.GELU, gelu),
    "group": (lambda: tops.Sequential(tops.ReLU(), tops.GELU()), lambda x: gelu(x.relu())),
    "groups": (lambda: tops.Sequential(tops.GELU(), nn.Tanh()), lambda x: gelu(x).tanh()),
    "python op": (lambda: tops.Sequential(Mixed(), tops.GELU()), lambda x: gelu(2 * x)),
    "fuser": (lambda: tops.OperationFuser([tops.GELU(), Mixed()]), lambda x: 2 * gelu(x)),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("make", "meaning"), PIPELINES.values(), ids=PIPELINES)
def test_a_tensor_subclass_comes_back(make, meaning, again):
    data, module = torch.randn(4, 8), make()
    if again:
        module(data)
    x = data.clone().as_subclass(Tagged).requires_grad_()
    Tagged.seen.clear()
    y = module(x)
    assert type(y) is Tagged and "run_group" in Tagged.seen
    plain = data.clone().requires_grad_()
    want = meaning(plain)
    torch.testing.assert_close(y.as_subclass(torch.Tensor), want)
    y.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(x.grad.as_subclass(torch.Tensor), plain.grad)


def test_a_parameter_that_is_a_tensor_subclass():
    x, linear = torch.randn(4, 8), tops.Linear(8, 8)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Tagged))
    assert type(linear(x)) is Tagged is type(nn.functional.linear(x, linear.weight))
    y, extra = tops.Sequential(linear, tops.MakeExtraOutput())(x)
    assert type(y) is type(extra) is Tagged


def test_a_subclass_that_refuses_says_so():
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func.__name__ == "run_group":
                return NotImplemented
            return super().__torch_function__(func, types, args, kwargs)

    with pytest.raises(TypeError, match=r"run_group"):
        tops.GELU()(torch.randn(4, 8).as_subclass(Refusing))
