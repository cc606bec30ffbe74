"""Linear and the views of it that are its basic ops."""

import copy
import pickle

import torch
from torch import nn

from transformer_ops import ops


def views(linear):
    product, bias = linear.basic_ops
    assert isinstance(product, ops.BasicLinear) and isinstance(bias, ops.Bias)
    return product, bias


def assert_views_follow(linear):
    product, bias = views(linear)
    assert product._parameter_owner is linear and bias._parameter_owner is linear
    assert product.weight is linear.weight and bias.bias is linear.bias
    assert product._parameter_tensors()[0] is linear.weight
    assert next(iter(bias.parameters())) is linear.bias


def test_linear_views():
    linear = ops.Linear(3, 5, accumulate_into_main_grad=True)
    product, bias = views(linear)
    assert_views_follow(linear)
    assert dict(product.named_parameters()).keys() == {"weight"}
    assert dict(bias.named_parameters(prefix="x")).keys() == {"x.bias"}
    assert product._kind == "BasicLinear" and bias._kind == "Bias"
    assert product._attributes() == {
        "in_features": 3,
        "out_features": 5,
        "accumulate_into_main_grad": True,
    }
    assert bias._attributes() == {"size": 5}
    assert not product.is_python and not linear.is_python and not linear.is_fused_op
    assert linear.basic_ops[0] is product and linear.basic_ops[1] is bias
    assert "BasicLinear(in_features=3, out_features=5" in repr(product)
    # Nothing but the Linear owns or registers anything.
    assert list(linear.children()) == [] and list(product.children()) == []
    assert set(dict(linear.named_parameters())) == {"weight", "bias"}
    assert not product.state_dict() and not bias._parameters


def test_linear_without_bias():
    linear = ops.Linear(3, 5, bias=False)
    assert linear.bias is None
    assert [type(op).__mro__[2] for op in linear.basic_ops] == [ops.BasicLinear]
    assert set(linear.state_dict()) == {"weight"}
    assert nn.Linear(3, 5, bias=False).load_state_dict(linear.state_dict())


def test_views_see_a_replaced_parameter():
    linear = ops.Linear(3, 5)
    product, bias = views(linear)
    linear.weight = nn.Parameter(torch.ones(5, 3))
    assert_views_follow(linear)
    product.weight = nn.Parameter(torch.zeros(5, 3))  # through the view
    bias.bias = nn.Parameter(torch.ones(5))
    assert_views_follow(linear)
    assert torch.equal(linear.weight, torch.zeros(5, 3)) and not product._parameters
    state = {"weight": torch.ones(5, 3), "bias": torch.ones(5)}
    linear.load_state_dict(state, assign=True)
    assert_views_follow(linear)
    assert product.weight.data_ptr() == state["weight"].data_ptr()
    linear.to(torch.float64)
    assert product.weight.dtype == bias.bias.dtype == torch.float64
    product.reset_parameters()
    bias.reset_parameters()
    assert torch.equal(linear.bias, torch.zeros(5, dtype=torch.float64))


def test_views_with_tied_weights_and_functional_call():
    first, second = ops.Linear(4, 4), ops.Linear(4, 4)
    second.weight = first.weight
    assert views(first)[0].weight is views(second)[0].weight
    swapped = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}
    seen = []
    first.forward = lambda: seen.append(first.basic_ops[0].weight)
    torch.func.functional_call(first, swapped, ())
    assert seen[0] is swapped["weight"]


def test_views_see_a_parametrization():
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    linear = ops.Linear(3, 5)
    nn.utils.parametrize.register_parametrization(linear, "weight", Double())
    original = linear.parametrizations.weight.original
    assert torch.equal(views(linear)[0].weight, 2 * original)
    assert torch.equal(views(linear)[0]._parameter_tensors()[0], 2 * original)
    twin = copy.deepcopy(linear)
    assert views(twin)[0]._parameter_owner is twin
    with torch.no_grad():
        twin.parametrizations.weight.original.zero_()
    assert not views(twin)[0].weight.any() and views(linear)[0].weight.any()


def test_copies_of_a_linear_have_views_of_their_own():
    linear = ops.Linear(3, 5)
    before = views(linear)
    block = nn.Sequential(linear, linear)
    twins = copy.deepcopy(block)
    assert twins[0] is twins[1] and twins[0] is not linear
    shallow = copy.copy(linear)
    for twin in (twins[0], pickle.loads(pickle.dumps(linear)), shallow):
        assert_views_follow(twin)
        assert views(twin)[0] is not before[0]
    assert views(linear) == before
    held_together = copy.deepcopy([before, linear])
    assert views(held_together[1])[0] is held_together[0][0]
