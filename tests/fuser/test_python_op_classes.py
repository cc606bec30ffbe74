"""What classes of Python ops must define."""

import copy

import pytest
import torch
from torch import nn

from transformer_ops import ops
from transformer_ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext


def split_pair(family):
    return {
        f"{family}_forward_compute": lambda self, input_, **kw: None,
        f"{family}_forward_save_ctx": lambda self, *args, **kw: None,
    }


def single(family):
    return {f"{family}_forward": lambda self, *args, **kw: None}


BASES = [BasicOperation, FusedOperation, ops.GELU]
FAMILIES = ["op", "fuser"]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_a_pair_is_a_type_error(base, family):
    for name, method in split_pair(family).items():
        with pytest.raises(TypeError, match=rf"\[Half\] .* must have both .* got only {name}"):
            type("Half", (base,), {name: method})
        mixin = type("Mixin", (), {name: method})
        with pytest.raises(TypeError, match=r"\[Half\]"):
            type("Half", (mixin, base), {})


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_pair_and_single_in_one_body_is_a_type_error(base, family):
    pair = split_pair(family)
    with pytest.raises(TypeError, match=r"\[Both\] class body must define"):
        type("Both", (base,), {**pair, **single(family)})
    parent = type("Parent", (base,), pair)
    for name, method in pair.items():
        with pytest.raises(TypeError, match=r"\[Both\] class body must define"):
            type("Both", (parent,), {name: method, **single(family)})


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_most_derived_style_wins(base, family):
    parent = type("Parent", (base,), split_pair(family))
    assert parent._forward_style(family) == "split"
    for name, method in split_pair(family).items():
        child = type("Child", (parent,), {name: method})
        assert child._forward_style(family) == "split"
    replaced = type("Replaced", (parent,), single(family))
    assert replaced._forward_style(family) == "single"
    again = type("Again", (replaced,), split_pair(family))
    assert again._forward_style(family) == "split"
    half_again = type("HalfAgain", (replaced,), dict([next(iter(split_pair(family).items()))]))
    assert half_again._forward_style(family) == "split"
    assert type("Plain", (replaced,), {})._forward_style(family) == "single"
    other = "op" if family == "fuser" else "fuser"
    assert parent._forward_style(other) is None


def test_a_mixin_may_bring_the_other_half():
    compute, save = ({name: method} for name, method in split_pair("op").items())
    mixin = type("Mixin", (), compute)
    assert type("Whole", (mixin, BasicOperation), save)._forward_style() == "split"


def test_both_families_may_stand_in_one_class():
    body = {**split_pair("op"), **single("fuser")}
    cls = type("Both", (BasicOperation,), body)
    assert cls._forward_style("op") == "split" and cls._forward_style("fuser") == "single"
    assert cls._python_forward == ("fuser", "single") and cls._forward_style() == "single"
    child = type("Child", (cls,), single("op"))
    assert child._python_forward == ("op", "single")
    extra = type("Extra", (cls,), {**single("op"), "num_extra_inputs": 1})
    assert extra._python_forward == ("fuser", "single")


def test_is_python():
    assert type("A", (ops.GELU,), single("op"))().is_python
    assert type("B", (ops.GELU,), {"op_backward": lambda *args: None})().is_python
    plain = type("C", (ops.GELU,), {"extra_repr": lambda self: ""})()
    assert not plain.is_python and plain._kind == "GELU"
    mixin = type("Late", (), single("op"))
    assert not type("D", (ops.GELU, mixin), {})().is_python
    parametrized = ops.Linear(2, 2)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    assert not parametrized.is_python
    assert not parametrized.basic_ops[0].is_python


def test_parameter_tensors_of_a_parametrized_python_op():
    class Scale(BasicOperation):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.shift = nn.Parameter(torch.zeros(()))

        def op_backward(self, ctx, grad_output):
            raise NotImplementedError

    op = Scale()
    assert [p is q for p, q in zip(op._parameter_tensors(), op.parameters(), strict=True)]
    nn.utils.parametrize.register_parametrization(op, "scale", nn.Tanh())
    shift, scale = op._parameter_tensors()
    assert shift is op.shift and torch.equal(scale, torch.ones(()).tanh())


def test_fused_operation():
    basic = [ops.GELU(), ops.Bias(3)]
    fused = FusedOperation(basic)
    assert fused.basic_ops == basic and fused.is_fused_op
    assert not fused.supports_forward and not fused.supports_backward
    assert not list(fused.parameters()) and not fused.state_dict()
    forward_only = type("F", (FusedOperation,), split_pair("fuser"))(basic)
    assert forward_only.supports_forward and not forward_only.supports_backward
    backward_only = type("B", (FusedOperation,), {"fuser_backward": lambda *args: None})(basic)
    assert not backward_only.supports_forward and backward_only.supports_backward
    assert "GELU, Bias" in repr(fused)
    twin = copy.deepcopy(fused)
    assert twin.basic_ops[1] is not basic[1]


def test_fused_operation_errors():
    with pytest.raises(ValueError, match=r"\[FusedOperation\] basic_ops must not be empty"):
        FusedOperation([])
    for bad in (
        None,
        ops.GELU(),
        [nn.GELU()],
        [ops.Linear(2, 2)],
        [FusedOperation([ops.GELU()])],
    ):
        with pytest.raises(TypeError, match=r"\[FusedOperation\] basic_ops must"):
            FusedOperation(bad)


def test_missing_methods_say_so():
    with pytest.raises(NotImplementedError, match=r"\[BasicOperation\] op_forward must be defined"):
        BasicOperation().op_forward(
            OperationContext(),
            torch.ones(1),
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
        )
    with pytest.raises(NotImplementedError, match=r"\[FusibleOperation\] basic_ops"):
        _ = FusibleOperation().basic_ops
