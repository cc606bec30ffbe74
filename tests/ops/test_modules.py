"""Op modules on their own: what they tell the planner, which arguments there are, start values."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from op_cases import CASES, NAMES
from torch import nn

from transformer_ops import _C, ops

KEEPS = {"activation_recompute_in_mlp": False}
GROUPED = {
    "num_groups": 2,
    "in_features": 3,
    "out_features": 5,
    "accumulate_into_main_grad": False,
    "delay_wgrad_compute": False,
}
# What each native op reports to the planner: (op, kind, attributes, parameter shapes).
NATIVE = [
    (lambda: ops.Identity(), "Identity", {}, {}),
    (lambda: ops.Quantize(), "Quantize", {"rounds_input": True, "rounds_grad_output": False}, {}),
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
    (lambda: ops.GELU("none"), "ExactGELU", {}, {}),
    (lambda: ops.LayerScale(4, 0.1), "LayerScale", {"size": 4}, {"gamma": (4,)}),
    (lambda: ops.DropPath(1), "DropPath", {"p": 1.0}, {}),
    (lambda: ops.GEGLU(approximate="none"), "ExactGEGLU", {}, {}),
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
    (
        lambda: ops.GroupedLinear(2, 3, 5, single_grouped_weight=True, single_grouped_bias=True),
        "GroupedLinear",
        {**GROUPED, "single_grouped_weight": True, "single_grouped_bias": True},
        {"weight": (2, 5, 3), "bias": (2, 5)},
    ),
    (
        lambda: ops.GroupedLinear(2, 3, 5),
        "GroupedLinear",
        {**GROUPED, "single_grouped_weight": False, "single_grouped_bias": False},
        {"weight0": (5, 3), "weight1": (5, 3), "bias0": (5,), "bias1": (5,)},
    ),
    (lambda: ops.ScaledSwiGLU(), "ScaledSwiGLU", {**KEEPS, "glu_interleave_size": 0}, {}),
    (
        lambda: ops.ScaledSiTUGLU(beta1=2),
        "ScaledSiTUGLU",
        {**KEEPS, "glu_interleave_size": 0, "beta1": 2.0, "beta2": 25.0},
        {},
    ),
    (
        lambda: ops.ScaledClampedQGeGLU(glu_interleave_size=8, activation_recompute_in_mlp=True),
        "ScaledClampedQGeGLU",
        {
            "activation_recompute_in_mlp": True,
            "glu_interleave_size": 8,
            "limit": 7.0,
            "alpha": 1.702,
            "glu_linear_offset": 1.0,
        },
        {},
    ),
    (ops.ScaledSReLU, "ScaledSReLU", KEEPS, {}),
    (
        lambda: ops.Dispatch(4, first_expert=2, local_experts=2),
        "Dispatch",
        {"num_experts": 4, "first_expert": 2, "local_experts": 2},
        {},
    ),
    (ops.Combine, "Combine", {}, {}),
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
    assert op._tensor_names() == tuple(shapes)
    assert [p is q for p, q in zip(op._parameter_tensors(), op.parameters(), strict=True)] == [
        True
    ] * len(shapes)
    assert set(op.state_dict()) == set(shapes)
    assert op.basic_ops == [op]
    assert not op.is_python and not op.is_fused_op and op._forward_style() is None
    assert type(op).__name__ in repr(op)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_declared_names(case):
    """What the module says is what the declaration lists, each under its own name."""
    for op in case.make().basic_ops:
        row = _C.declaration(op._kind)
        # One that is None is left out, where it may be.
        left_out = [n for n in op._optional_attributes if getattr(op, n) is None]
        assert list(op._attributes()) == [n for n in row["attributes"] if n not in left_out]
        assert list(op._parameter_names) == row["parameters"]
        # The last ones may be absent where they may be None.
        absent = row["extra_inputs"][op.num_extra_inputs :]
        assert set(absent) <= set(row["optional"])
        assert op.num_extra_outputs == len(row["extra_outputs"])


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_copies_drop_the_own_group(case):
    op = case.make()
    op.__dict__["_own_group"] = lambda: None  # neither copied nor pickled
    op._channels_captured = True
    buffer = io.BytesIO()
    torch.save(op, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op)), loaded):
        assert twin._own_group is None
        assert not getattr(twin, "_channels_captured", False)
        pairs = zip(op.basic_ops, twin.basic_ops, strict=True)
        assert all(mine._attributes() == theirs._attributes() for mine, theirs in pairs)
        for mine, theirs in zip(op.parameters(), twin.parameters(), strict=True):
            assert mine is not theirs and torch.equal(mine, theirs)


def test_every_op_has_a_row():
    """`op_cases.py` is the list from which all generic tests take their ops."""
    private = {"ReduceGradient"}  # a part of Linear
    # Its main output is its input, and a row has no choices that must not change between a
    # tensor and its neighbours: test_router.py compares ids, probabilities, loss, gradients.
    elsewhere = {"Router"}
    rows = {type(case.make()).__name__ for case in CASES}
    assert rows | elsewhere == set(ops.__all__) | private and not rows & elsewhere


def test_arguments_beyond_the_catalogue_are_refused():
    for make in (
        lambda: ops.GLU(glu_interleave_size=2),  # type: ignore[call-arg]
        lambda: ops.RMSNorm(4, bias=True),  # type: ignore[call-arg]
        lambda: ops.Bias(4, None),
        lambda: ops.SwiGLU(2),
        lambda: ops.Linear(3, 5, userbuffers_options={}),  # type: ignore[call-arg]
        lambda: ops.AllReduce(reduce_in_backward=True),  # type: ignore[call-arg]
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
