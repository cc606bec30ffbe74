"""Attributes of ops that are set after their first call."""

from typing import Any

import numpy
import pytest
import torch
from torch import nn

import transformer_ops as tops

EDITS = [
    (lambda: tops.Dropout(0.5), "p", torch.tensor(0.0), 0.0),
    (lambda: tops.Dropout(0.5), "p", 0, 0.0),
    (lambda: tops.Dropout(0.5), "p", 1, 1.0),
    (lambda: tops.ConstantScale(1.0), "scale", torch.tensor(2), 2.0),
    (lambda: tops.ConstantScale(1.0), "scale", 2, 2.0),
    (lambda: tops.ConstantScale(1.0), "scale", numpy.float32(0.5), 0.5),
    (lambda: tops.ConstantScale(1.0), "scale", torch.ones((), dtype=torch.bfloat16), 1.0),
    (lambda: tops.LayerNorm(8), "eps", 0, 0.0),
    (lambda: tops.RMSNorm(8), "zero_centered_gamma", True, True),
    (lambda: tops.L2Normalization(), "eps", numpy.float64(0.1), 0.1),
    (lambda: tops.SwiGLU(), "glu_interleave_size", numpy.int64(2), 2),
    (lambda: tops.SwiGLU(glu_interleave_size=2), "glu_interleave_size", None, None),
    (lambda: tops.SiTUGLU(), "beta2", 3, 3.0),
    (lambda: tops.ClampedSwiGLU(), "alpha", -1, -1.0),
    (lambda: tops.Reshape((8, 4)), "shape", [2, -1], (2, -1)),
]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("make", "name", "value", "kept"), EDITS)
def test_an_attribute_is_converted_where_it_is_set(make, name, value, kept, before):
    op, want = make(), make()
    x = torch.randn(4, 8)
    if not before:
        op(x)
    setattr(op, name, value)
    found = getattr(op, name)
    assert found == kept and type(found) is type(kept)
    setattr(want, name, kept)
    torch.manual_seed(0)
    got = op(x)
    torch.manual_seed(0)
    torch.testing.assert_close(got, want(x))
    if name == "scale":
        torch.testing.assert_close(got, x * kept)


BAD_EDITS = [
    (lambda: tops.Dropout(0.5), "p", 1.5, r"p must be a number in \[0, 1\], got 1.5"),
    (lambda: tops.Dropout(0.5), "p", None, r"p must be a number in \[0, 1\], got None"),
    (lambda: tops.Dropout(0.5), "p", torch.rand(2), r"p must be a number in \[0, 1\], got tensor"),
    (
        lambda: tops.ConstantScale(1.0),
        "scale",
        nn.Parameter(torch.ones(())),
        "scale must be a finite number, got Parameter",
    ),
    (lambda: tops.ConstantScale(1.0), "scale", torch.ones((), device="meta"), "must be a finite"),
    (lambda: tops.LayerNorm(8), "zero_centered_gamma", 1, "must be a bool, got 1"),
    (lambda: tops.LayerNorm(8), "normalized_shape", 0, "must be an int >= 1, got 0"),
    (lambda: tops.SwiGLU(), "glu_interleave_size", 2**64, r"must be an int < 2\*\*63, got 18446"),
    (lambda: tops.Reshape((4, 8)), "shape", (2**64,), r"must be an int < 2\*\*63, got 18446"),
    (lambda: tops.Reshape((4, 8)), "shape", (-1, -1), "shape must have at most one -1"),
    (lambda: tops.Linear(8, 8), "in_features", -1, "must be an int >= 1, got -1"),
    (lambda: tops.AddExtraInput(), "in_place", 0, "must be a bool, got 0"),
]


@pytest.mark.parametrize(("make", "name", "value", "message"), BAD_EDITS)
def test_a_bad_attribute_leaves_the_old_one(make, name, value, message):
    op = make()
    inputs = [torch.randn(4, 8)] * (1 + op.basic_ops[0].num_extra_inputs)
    torch.manual_seed(0)
    old, want = getattr(op, name), op(*inputs)
    with pytest.raises(ValueError, match=rf"\[{type(op).__name__}\] .*{message}"):
        setattr(op, name, value)
    assert getattr(op, name) == old and name not in op._parameters
    torch.manual_seed(0)
    torch.testing.assert_close(op(*inputs), want)


def test_only_a_new_value_makes_plans_stale():
    op = tops.ConstantScale(0.0)

    def plan() -> Any:
        op(torch.ones(2))
        return op._own_group._group.last

    before = plan()
    op.scale = 0
    op.note = "no part of the plan"
    op.train()
    assert plan() is before
    op.scale = -0.0
    assert plan() is not before
    assert op(torch.ones(2)).signbit().all()


def test_a_deleted_attribute_is_missed():
    op = tops.Dropout(0.5)
    op(torch.ones(2))
    del op.p
    with pytest.raises(AttributeError, match="'p'"):
        op(torch.ones(2))


def test_training_is_what_counts_as_true():
    ones, dropout = torch.ones(1000), tops.Dropout(0.5).eval()
    torch.testing.assert_close(dropout(ones), ones)
    dropout.training = 1
    assert dropout.training is True and (dropout(ones) == 0).any()


def test_a_training_property_is_asked():
    class Scheduled(tops.Dropout):
        on = True

        @property
        def training(self):
            return self.on

        @training.setter
        def training(self, value):
            pass

    ones, op = torch.ones(1000), Scheduled(0.5)
    module = tops.Sequential(op, tops.Identity())
    assert (module(ones) == 0).any() and (op(ones) == 0).any()
    op.on = False
    torch.testing.assert_close(module(ones), ones)
    torch.testing.assert_close(op(ones), ones)


def test_a_reshape_that_does_not_fit_names_the_op():
    with pytest.raises(RuntimeError, match=r"\[Reshape\] shape '\[3, 5\]' .*\(op 1 of the"):
        tops.Sequential(tops.GELU(), tops.Reshape((3, 5)))(torch.randn(4, 8))
