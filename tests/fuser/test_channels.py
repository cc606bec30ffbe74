"""Named channels: checks of the setters, and the routing of a list of ops."""

import copy

import pytest
import torch
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops import ops
from transformer_ops.op import BasicOperation
from transformer_ops.op.channels import External, Routed, resolve_channels


class Split(BasicOperation):
    num_extra_inputs = 2
    num_extra_outputs = 2


def test_defaults_and_setters():
    op = Split()
    assert op._input_channels == (None, None)
    assert op._output_channels == ((None, True), (None, True))
    assert op.set_extra_input_channel(1, "a") is op
    assert op.set_extra_output_channel(0, "b", output_to_caller=False) is op
    assert op._input_channels == (None, "a")
    assert op._output_channels == (("b", False), (None, True))
    op.set_extra_input_channel(1, None).set_extra_output_channel(0, None)
    assert op._input_channels == (None, None) and op._output_channels[0] == (None, True)
    op.set_extra_output_channel(1, None, output_to_caller=False)  # nobody reads it
    assert op._output_channels[1] == (None, False)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (("input", 2, "a"), IndexError, r"extra input must be in \[0, 2\), got 2"),
        (("input", -1, "a"), IndexError, r"must be in \[0, 2\), got -1"),
        (("output", 2, "a"), IndexError, r"extra output must be in \[0, 2\), got 2"),
        (("input", True, "a"), TypeError, "must be an int, got True"),
        (("input", "0", "a"), TypeError, "must be an int, got '0'"),
        (("output", 1.0, "a"), TypeError, "must be an int, got 1.0"),
        (("input", 0, 3), TypeError, "name must be a str or None, got 3"),
        (("output", 0, b"a"), TypeError, "name must be a str or None, got b'a'"),
        (("input", 0, ""), ValueError, "name must not be empty"),
        (("output", 0, "a", 1), TypeError, "output_to_caller must be a bool, got 1"),
        (("output", 0, "a", None), TypeError, "output_to_caller must be a bool, got None"),
    ],
)
def test_misuse_is_an_error_and_changes_nothing(call, error, message):
    op = Split().set_extra_input_channel(0, "x").set_extra_output_channel(1, "y")
    before = op._input_channels, op._output_channels
    with pytest.raises(error, match=rf"\[Split\] .*{message}"):
        getattr(op, f"set_extra_{call[0]}_channel")(*call[1:])
    assert (op._input_channels, op._output_channels) == before


def test_an_op_without_extra_tensors_has_no_channel():
    with pytest.raises(IndexError, match=r"\[GELU\] .* must be in \[0, 0\), got 0"):
        ops.GELU().set_extra_input_channel(0, "a")


def test_bindings_are_fixed_once_captured():
    op = ops.AddExtraInput().set_extra_input_channel(0, "a")
    op._channels_captured = True
    with pytest.raises(RuntimeError, match=r"\[AddExtraInput\] channels must be set before"):
        op.set_extra_input_channel(0, "b")
    assert op._input_channels == ("a",)
    twin = copy.deepcopy(op)
    assert twin._input_channels == ("a",)
    assert twin.set_extra_input_channel(0, "b")._input_channels == ("b",)


def make(name=None, to_caller=True):
    return ops.MakeExtraOutput().set_extra_output_channel(0, name, to_caller)


def add(name=None):
    return ops.AddExtraInput().set_extra_input_channel(0, name)


def test_routing_without_channels():
    routing = resolve_channels([make(), ops.GELU(), Split(), add()])
    assert routing.inputs == ((), (), (External(0), External(1)), (External(2),))
    assert routing.visible_outputs == ((0, 0), (2, 0), (2, 1))
    assert routing.num_external_inputs == 3
    assert resolve_channels([]) == ((), (), 0)


def test_routing_with_channels():
    split = Split().set_extra_input_channel(0, "a").set_extra_output_channel(1, "b", False)
    routing = resolve_channels([add(), make("a"), split, add("b"), add("a"), add()])
    assert routing.inputs == (
        (External(0),),
        (),
        (Routed(1, 0), External(1)),
        (Routed(2, 1),),
        (Routed(1, 0),),
        (External(2),),
    )
    assert all(isinstance(routing.inputs[2][i], kind) for i, kind in enumerate((Routed, External)))
    assert routing.visible_outputs == ((1, 0), (2, 0))
    assert routing.num_external_inputs == 3


def test_an_op_may_appear_twice():
    consumer, producer = add("a"), make("a", False)
    routing = resolve_channels([producer, consumer, consumer])
    assert routing.inputs == ((), (Routed(0, 0),), (Routed(0, 0),))
    plain = add()
    assert resolve_channels([plain, plain]).inputs == ((External(0),), (External(1),))
    with pytest.raises(ValueError, match=r"'a' must have one producer, got op 0 .* and op 1"):
        resolve_channels([producer, producer])


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (lambda: [add("a")], r"'a' must have a producer before extra input 0 of op 0 .* got none"),
        (lambda: [add("a"), make("a")], r"extra input 0 of op 0 \(AddExtraInput\), got op 1"),
        (lambda: [make("a"), make("a"), add("a")], "must have one producer"),
        (
            lambda: [
                Split().set_extra_output_channel(0, "a").set_extra_output_channel(1, "a"),
            ],
            "must have one producer, got op 0",
        ),
        (
            lambda: [Split().set_extra_output_channel(0, "a").set_extra_input_channel(0, "a")],
            r"must have a producer before extra input 0 of op 0 \(Split\), got op 0",
        ),
    ],
)
def test_wrong_routing(pipeline, message):
    with pytest.raises(ValueError, match=rf"\[Sequential\] channel .*{message}"):
        resolve_channels(pipeline())


def wants(module: nn.Module, *extra: Tensor) -> str:
    """The error of a call."""
    with pytest.raises(ValueError) as error:
        module(torch.ones(2, 4), *extra)
    return str(error.value)


def test_errors_name_modules_as_the_user_wrote_them():
    linear = ops.Linear(4, 4)  # two basic ops
    assert wants(tops.Sequential(linear, add("r"))) == (
        "[Sequential] channel 'r' must have a producer before extra input 0 of op 1 "
        "(AddExtraInput), got none"
    )
    named = {"fc": linear, "add": add(), "fork": make("r", False), "join": add("r")}
    assert wants(tops.Sequential(named)) == (
        "[Sequential] extra inputs must be 1 for extra_input of op add (AddExtraInput), got 0; "
        "extra_input of op join (AddExtraInput) comes from channel 'r'"
    )
    within = tops.Sequential(nn.Identity(), tops.Residual(linear, add()), add())
    assert wants(within, *[torch.ones(2, 4)] * 3) == (
        "[Sequential] extra inputs must be 2 for extra_input of op 1.1 (AddExtraInput) and "
        "extra_input of op 2 (AddExtraInput), got 3"
    )
    assert wants(tops.OperationFuser([linear, add()])) == (
        "[OperationFuser] extra inputs must be 1 for extra_input of op 1 (AddExtraInput), got 0"
    )
    assert wants(add("r")) == "[AddExtraInput] extra inputs must be 1 for extra_input, got 0"


def test_bindings_survive_state_dict_and_device_moves():
    op = make("a", False).to(torch.float64)
    assert op._output_channels == (("a", False),) and not op.state_dict()
