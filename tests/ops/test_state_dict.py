"""State of op modules: what a state dict holds, and which ones are refused."""

import copy
import io

import pytest
import torch
from torch import nn

import transformer_ops as tops
from transformer_ops import ops
from transformer_ops.op import BasicOperation


def test_state_dict_is_that_of_nn_linear():
    ours, theirs = ops.Linear(3, 5), nn.Linear(3, 5)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    nn.init.ones_(ours.bias)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(theirs.bias, torch.ones(5))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_reference_state_dict(bias, nested):
    linear = ops.Linear(3, 5, bias=bias)
    module = nn.Sequential(ops.GELU(), linear) if nested else linear
    prefix = "1." if nested else ""
    empty = torch.empty(0, dtype=torch.uint8)
    state = {
        prefix + "basic_ops.0.weight": torch.ones(5, 3),
        prefix + "basic_ops.0._extra_state": empty,
    }
    if bias:
        state[prefix + "basic_ops.1.bias"] = torch.ones(5)
        state[prefix + "basic_ops.1._extra_state"] = empty
    if nested:
        state["0._extra_state"] = empty
    keys = set(state)
    module.load_state_dict(state, strict=True)
    assert set(state) == keys
    assert torch.equal(linear.weight, torch.ones(5, 3))
    assert not bias or torch.equal(linear.bias, torch.ones(5))


def test_surplus_keys_are_errors():
    linear = ops.Linear(3, 5)
    state = linear.state_dict()
    for key, value in (
        ("other", torch.ones(1)),
        ("_extra_state", torch.ones(3)),
        ("basic_ops.0._extra_state", torch.ones(3)),
        ("basic_ops.0.weight", torch.ones(5, 3)),  # beside a "weight"
        ("basic_ops.2.bias", torch.ones(5)),
    ):
        with pytest.raises(RuntimeError, match="Unexpected key"):
            linear.load_state_dict({**state, key: value})
    with pytest.raises(RuntimeError, match="Missing key"):
        linear.load_state_dict({"weight": state["weight"]})


@pytest.mark.parametrize("state", [torch.ones(3, dtype=torch.uint8), io.BytesIO(b"pickled")])
def test_a_pickled_state_says_the_way(state):
    linear = ops.Linear(3, 5)
    for module, prefix in ((linear, "basic_ops.0."), (nn.Sequential(ops.GELU()), "0.")):
        key = prefix + "_extra_state"
        given = {**module.state_dict(), key: state}
        with pytest.raises(
            RuntimeError, match=rf'"{key} \(state must be tensors, .* leave the ent'
        ):
            module.load_state_dict(given)
        # Where torch is asked to let it pass, it is the plain key.
        assert module.load_state_dict(given, strict=False).unexpected_keys == [key]
        assert key in given


def test_state_dict_of_another_shape_changes_nothing():
    for op, name in ((ops.Linear(3, 5), "bias"), (ops.LayerNorm(4), "bias")):
        before = copy.deepcopy(op.state_dict())
        state = {key: value + 1 for key, value in before.items()}
        state[name] = torch.zeros(7)
        with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
            op.load_state_dict(state)
        for key, value in op.state_dict().items():
            assert torch.equal(value, before[key])


def test_a_user_op_keeps_its_extra_state():
    class Stateful(BasicOperation):
        count = 0

        def get_extra_state(self):
            return self.count

        def set_extra_state(self, state):
            self.count = state

    op, twin = Stateful(), Stateful()
    op.count = 3
    twin.load_state_dict(op.state_dict(), strict=True)
    assert twin.count == 3


def transpose(state_dict, prefix, *unused):
    state_dict[prefix + "weight"] = state_dict[prefix + "weight"].T


@pytest.mark.parametrize("make", [tops.Linear, nn.Linear])
def test_pre_hooks_run_before_shapes_are_checked(make):
    for nested in (True, False):
        linear = make(3, 5)
        module = tops.Sequential(linear, tops.GELU()) if nested else linear
        linear._register_load_state_dict_pre_hook(transpose)
        state = module.state_dict()
        name = next(key for key in state if key.endswith("weight"))
        state[name] = torch.ones(3, 5)
        module.load_state_dict(state)
        assert torch.equal(linear.weight, torch.ones(5, 3))
        state[name] = torch.ones(3, 4)
        with pytest.raises(RuntimeError, match=r"size mismatch for .*weight"):
            module.load_state_dict(state)
        assert torch.equal(linear.weight, torch.ones(5, 3))


def test_a_pre_hook_of_a_parent_may_edit_what_a_child_loads():
    inner = tops.Sequential(nn.Linear(3, 5), tops.Linear(5, 5))
    module = tops.Sequential(inner)
    inner._register_load_state_dict_pre_hook(
        lambda state, prefix, *unused: transpose(state, prefix + "0.")
    )
    state = module.state_dict()
    state["0.0.weight"] = torch.ones(3, 5)
    module.load_state_dict(state)
    assert torch.equal(inner[0].weight, torch.ones(5, 3))


def test_a_sequential_loads_what_plain_torch_loads():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()))
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

        def forward(self, x):
            return x * self.scale

    module = tops.Sequential(Odd(), nn.LazyLinear(4))
    state = {"0.scale": torch.ones(1), "1.weight": torch.ones(4, 3), "1.bias": torch.ones(4)}
    nn.Sequential(Odd(), nn.LazyLinear(4)).load_state_dict(state)
    module.load_state_dict(state)
    assert module[0].scale == 1 and module[1].weight.shape == (4, 3)
