"""Op modules on their own: constructor errors, state, copies, and the rules for Python ops."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from transformer_ops import ops
from transformer_ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext

NAN, INF = math.nan, math.inf

# What each native op reports to the planner: (op, kind, attributes, parameter shapes).
NATIVE = [
    (lambda: ops.Identity(), "Identity", {}, {}),
    (lambda: ops.Reshape((-1, 4)), "Reshape", {"shape": [-1, 4]}, {}),
    (lambda: ops.Reshape([]), "Reshape", {"shape": []}, {}),
    (lambda: ops.ConstantScale(2), "ConstantScale", {"scale": 2.0}, {}),
    (lambda: ops.Bias(3), "Bias", {"size": 3}, {"bias": (3,)}),
    (
        lambda: ops.BasicLinear(3, 5),
        "BasicLinear",
        {"in_features": 3, "out_features": 5, "accumulate_into_main_grad": False},
        {"weight": (5, 3)},
    ),
    (
        lambda: ops.LayerNorm(4),
        "LayerNorm",
        {"normalized_shape": [4], "eps": 1e-5, "zero_centered_gamma": False},
        {"weight": (4,), "bias": (4,)},
    ),
    (
        lambda: ops.RMSNorm((2, 4), eps=0, zero_centered_gamma=True),
        "RMSNorm",
        {"normalized_shape": [2, 4], "eps": 0.0, "zero_centered_gamma": True},
        {"weight": (2, 4)},
    ),
    (lambda: ops.L2Normalization(), "L2Normalization", {"eps": 1e-6}, {}),
    *[
        (getattr(ops, kind), kind, {}, {})
        for kind in "GELU QGELU ReLU SReLU SiLU GLU GEGLU QGEGLU ReGLU SReGLU".split()
    ],
    (lambda: ops.SwiGLU(), "SwiGLU", {"glu_interleave_size": 0}, {}),
    (lambda: ops.SwiGLU(glu_interleave_size=32), "SwiGLU", {"glu_interleave_size": 32}, {}),
    (
        lambda: ops.SiTUGLU(),
        "SiTUGLU",
        {"glu_interleave_size": 0, "beta1": 4.0, "beta2": 25.0},
        {},
    ),
    (
        lambda: ops.ClampedSwiGLU(),
        "ClampedSwiGLU",
        {"glu_interleave_size": 0, "limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0},
        {},
    ),
    (lambda: ops.Dropout(0.25), "Dropout", {"p": 0.25}, {}),
    (lambda: ops.AddExtraInput(), "AddExtraInput", {"in_place": False}, {}),
    (lambda: ops.MakeExtraOutput(in_place=True), "MakeExtraOutput", {"in_place": True}, {}),
]
IDS = [f"{kind}-{index}" for index, (_, kind, _, _) in enumerate(NATIVE)]


@pytest.mark.parametrize(("make", "kind", "attributes", "shapes"), NATIVE, ids=IDS)
def test_native_op(make, kind, attributes, shapes):
    op = make()
    assert op._kind == kind
    assert op._attributes() == attributes
    assert [type(value) for value in op._attributes().values()] == [
        type(value) for value in attributes.values()
    ]
    assert {name: tuple(p.shape) for name, p in op.named_parameters()} == shapes
    assert op._parameter_names == tuple(shapes)
    assert [p is q for p, q in zip(op._parameter_tensors(), op.parameters(), strict=True)] == [
        True
    ] * len(shapes)
    assert set(op.state_dict()) == set(shapes)
    assert op.basic_ops == [op]
    assert not op.is_python and not op.is_fused_op and op._forward_style() is None
    assert type(op).__name__ in repr(op)


@pytest.mark.parametrize(("make", "kind", "attributes", "shapes"), NATIVE, ids=IDS)
def test_copies_drop_the_own_group(make, kind, attributes, shapes):
    op = make()
    op.__dict__["_own_group"] = lambda: None  # neither copied nor pickled
    op._channels_captured = True
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op)), loaded):
        assert twin._own_group is None and not twin._channels_captured
        assert twin._attributes() == attributes
        for mine, theirs in zip(op.parameters(), twin.parameters(), strict=True):
            assert mine is not theirs and torch.equal(mine, theirs)


def test_every_op_is_covered():
    covered = {kind for _, kind, _, _ in NATIVE} | {"Linear"}
    assert covered == set(ops.__all__)


BAD_ARGUMENTS = [
    (lambda: ops.Reshape((-1, -1)), r"\[Reshape\] shape must have at most one -1, got \(-1, -1\)"),
    (lambda: ops.Reshape((2, -2)), r"\[Reshape\] each size of shape must be an int >= -1, got -2"),
    (lambda: ops.Reshape((2.0,)), "each size of shape must be an int"),
    (lambda: ops.Reshape((True,)), "each size of shape must be an int"),
    (lambda: ops.Reshape(4), "shape must be a sequence of ints, got 4"),
    (lambda: ops.Reshape("12"), "shape must be a sequence of ints, got '12'"),
    (lambda: ops.Reshape((0, -1)), "shape must not have a -1 beside a 0"),
    *[
        (lambda value=value: ops.ConstantScale(value), "scale must be a finite number")
        for value in (NAN, INF, "2", None, True, torch.tensor(2.0))
    ],
    *[
        (lambda value=value: ops.Bias(value), r"\[Bias\] size must be an int >= 1, got ")
        for value in (0, -1, 2.0, True, None, "3", torch.tensor(3))
    ],
    (lambda: ops.Bias(3, dtype=torch.int64), r"\[Bias\] dtype must be one of float32, float16"),
    (lambda: ops.Bias(3, dtype=torch.complex64), "dtype must be one of .* got torch.complex64"),
    *[
        (
            lambda op=op, kwargs=kwargs: op(**{"in_features": 3, "out_features": 5, **kwargs}),
            rf"\[{op.__name__}\] {next(iter(kwargs))} must be ",
        )
        for op in (ops.BasicLinear, ops.Linear)
        for kwargs in (
            {"in_features": 0},
            {"out_features": -1},
            {"in_features": 1.5},
            {"out_features": False},
            {"accumulate_into_main_grad": 1},
            {"rng_state_tracker_function": 1},
            {"dtype": torch.int32},
        )
    ],
    (lambda: ops.Linear(3, 5, bias=None), r"\[Linear\] bias must be a bool, got None"),
    *[
        (
            lambda op=op, args=args, kwargs=kwargs: op(*args, **kwargs),
            rf"\[{op.__name__}\] .*{text}",
        )
        for op in (ops.LayerNorm, ops.RMSNorm)
        for args, kwargs, text in (
            ((0,), {}, "normalized_shape must be an int >= 1, got 0"),
            (((2, 0),), {}, "each size of normalized_shape must be an int >= 1, got 0"),
            (((),), {}, r"normalized_shape must have at least one size, got \(\)"),
            ((True,), {}, "normalized_shape must be an int >= 1, got True"),
            (("4",), {}, "normalized_shape must be an int >= 1, got '4'"),
            ((4,), {"eps": -1e-5}, "eps must be a finite number >= 0, got -1e-05"),
            ((4,), {"eps": NAN}, "eps must be a finite number >= 0, got nan"),
            ((4,), {"eps": INF}, "eps must be a finite number >= 0, got inf"),
            ((4,), {"eps": None}, "eps must be a finite number >= 0, got None"),
            ((4,), {"zero_centered_gamma": 1}, "zero_centered_gamma must be a bool, got 1"),
        )
    ],
    (lambda: ops.L2Normalization(eps=-1), r"\[L2Normalization\] eps must be a finite number >= 0"),
    (lambda: ops.L2Normalization(eps=NAN), "eps must be a finite number >= 0, got nan"),
    *[
        (
            lambda op=op, value=value: op(glu_interleave_size=value),
            rf"\[{op.__name__}\] glu_interleave_size must be an int >= 1, got {value}",
        )
        for op in (ops.SwiGLU, ops.SiTUGLU, ops.ClampedSwiGLU)
        for value in (0, -1, True, 2.0)
    ],
    *[
        (lambda name=name, value=value: ops.SiTUGLU(**{name: value}), f"{name} must be a finite")
        for name in ("beta1", "beta2")
        for value in (0, -1.0, NAN, INF, True)
    ],
    *[
        (lambda value=value: ops.ClampedSwiGLU(limit=value), "limit must be a finite number > 0")
        for value in (0, -7.0, NAN, INF)
    ],
    (lambda: ops.ClampedSwiGLU(alpha=NAN), "alpha must be a finite number"),
    (lambda: ops.ClampedSwiGLU(glu_linear_offset=INF), "glu_linear_offset must be a finite"),
    *[
        (
            lambda value=value: ops.Dropout(value),
            rf"\[Dropout\] p must be a number in \[0, 1\], got {value!r}",
        )
        for value in (-0.1, 1.5, NAN, INF, True, "0.5", None, 10**400)
    ],
    (lambda: ops.AddExtraInput(in_place=1), r"\[AddExtraInput\] in_place must be a bool, got 1"),
    (lambda: ops.MakeExtraOutput(in_place=None), r"\[MakeExtraOutput\] in_place must be a bool"),
]


@pytest.mark.parametrize(("make", "message"), BAD_ARGUMENTS)
def test_bad_constructor_argument(make, message):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        make()
    assert torch.equal(torch.get_rng_state(), state)


def test_arguments_beyond_the_catalogue_are_refused():
    for make in (
        lambda: ops.GELU(approximate="none"),
        lambda: ops.GLU(glu_interleave_size=2),
        lambda: ops.RMSNorm(4, bias=True),
        lambda: ops.Bias(4, None),
        lambda: ops.SwiGLU(2),
        lambda: ops.Linear(3, 5, tensor_parallel_mode="row"),
    ):
        with pytest.raises(TypeError):
            make()


def test_numpy_numbers_are_numbers():
    assert ops.Bias(np.int64(3))._attributes() == {"size": 3}
    assert type(ops.ConstantScale(np.float32(0.5)).scale) is float
    assert ops.Reshape(torch.Size([2, -1])).shape == (2, -1)


# Devices, dtypes, initialization.

WITH_PARAMETERS = [
    lambda **kw: ops.Bias(3, **kw),
    lambda **kw: ops.BasicLinear(3, 5, **kw),
    lambda **kw: ops.Linear(3, 5, **kw),
    lambda **kw: ops.LayerNorm(4, **kw),
    lambda **kw: ops.RMSNorm(4, **kw),
]


@pytest.mark.parametrize("make", WITH_PARAMETERS)
def test_device_and_dtype(make):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert {p.dtype for p in make(dtype=dtype).parameters()} == {dtype}
    with torch.device("meta"):
        op = make()
    assert all(p.is_meta for p in op.parameters())
    assert all(p.is_meta for p in make(device="meta").parameters())
    op.to_empty(device="cpu")
    op.reset_parameters()
    assert all(p.isfinite().all() for p in op.parameters())
    torch.set_default_dtype(torch.float64)
    try:
        assert {p.dtype for p in make().parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("make", WITH_PARAMETERS)
def test_made_under_inference_mode_it_can_still_train(make):
    with torch.inference_mode():
        op = make()
        op.reset_parameters()
    for p in op.parameters():
        assert type(p) is nn.Parameter and p.requires_grad and not p.is_inference()
        (p * p).sum().backward()


def test_start_values():
    assert torch.equal(ops.Bias(3).bias, torch.zeros(3))
    assert torch.equal(ops.Linear(2, 3).bias, torch.zeros(3))
    norm = ops.LayerNorm((2, 3))
    assert torch.equal(norm.weight, torch.ones(2, 3)) and torch.equal(norm.bias, torch.zeros(2, 3))
    assert torch.equal(ops.RMSNorm(3, zero_centered_gamma=True).weight, torch.zeros(3))
    for op in (ops.BasicLinear, ops.Linear):
        torch.manual_seed(0)
        ours = op(7, 5).weight
        torch.manual_seed(0)
        assert torch.equal(ours, nn.Linear(7, 5).weight)


@pytest.mark.parametrize("op", [ops.BasicLinear, ops.Linear])
def test_rng_state_tracker(op):
    tracker = Tracker()
    torch.manual_seed(1)
    tracked = op(7, 5, rng_state_tracker_function=lambda: tracker)
    torch.manual_seed(Tracker.seed)
    assert torch.equal(tracked.weight, op(7, 5).weight)
    assert tracker.forks == 1


class Tracker:
    seed = 1234

    def __init__(self):
        self.forks = 0

    def fork(self):
        self.forks += 1
        return SeededFork()


class SeededFork:
    def __enter__(self):
        self.state = torch.get_rng_state()
        torch.manual_seed(Tracker.seed)

    def __exit__(self, *exc):
        torch.set_rng_state(self.state)


# Linear: own parameters, views, state dict.


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
        ("_extra_state", torch.ones(3)),
        ("basic_ops.0._extra_state", torch.ones(3)),
        ("basic_ops.0.weight", torch.ones(5, 3)),  # beside a "weight"
        ("basic_ops.2.bias", torch.ones(5)),
    ):
        with pytest.raises(RuntimeError, match="Unexpected key"):
            linear.load_state_dict({**state, key: value})
    with pytest.raises(RuntimeError, match="Missing key"):
        linear.load_state_dict({"weight": state["weight"]})


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


# Rules for Python ops.


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
