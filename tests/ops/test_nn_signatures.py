"""Calls that torch.nn takes mean the same here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import transformer_ops as tops
from transformer_ops import ops

# (name of the class, positional arguments, keyword arguments) of torch.nn and here.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Linear", (4, 4, True), {}),
    ("Linear", (4, 6, False, "cpu", torch.float64), {}),
    ("LayerNorm", (4, 1e-2), {}),
    ("LayerNorm", (4, 1e-2, False), {}),
    ("LayerNorm", (4, 1e-2, True, False, "cpu", torch.float64), {}),
    ("LayerNorm", ([2, 4],), {"bias": False}),
    ("RMSNorm", (4, 1e-2), {}),
    ("RMSNorm", ([2, 4], None, False), {}),
    ("RMSNorm", (4, None, True, "cpu", torch.float64), {}),
    ("GELU", ("none",), {}),
    ("GELU", (), {"approximate": "tanh"}),
    ("ReLU", (False,), {}),
    ("SiLU", (), {"inplace": False}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS, ids=str)
def test_the_same_call_means_the_same(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    theirs, ours = getattr(nn, name)(*args, **kwargs), getattr(tops, name)(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert parameter.dtype == other.dtype
    dtype = next((p.dtype for p in ours.parameters()), torch.float32)
    x = torch.randn(3, 2, 4, dtype=dtype)
    torch.testing.assert_close(ours(x), theirs(x))


def test_dropout_has_the_default_of_nn() -> None:
    assert tops.Dropout().p == nn.Dropout().p
    assert repr(tops.Dropout(0.1, True)) == repr(nn.Dropout(0.1, True))


MAKERS: dict[str, Callable[..., tops.BasicOperation]] = {
    "ReLU": tops.ReLU,
    "SiLU": tops.SiLU,
    "Dropout": lambda inplace: tops.Dropout(0.0, inplace),
}
every_maker = pytest.mark.parametrize("name", MAKERS)


@every_maker
def test_in_place_where_nobody_sees_it(name: str) -> None:
    x, bias = torch.randn(3, 8), tops.Bias(8)
    for before in ([bias], [bias, tops.Identity(), tops.Dropout(0.0)]):
        got = tops.Sequential(*before, MAKERS[name](inplace=True))(x)
        assert torch.equal(got, tops.Sequential(*before, MAKERS[name](inplace=False))(x))


@every_maker
def test_in_place_would_overwrite_what_others_read(name: str) -> None:
    x = torch.randn(3, 8)
    want = x.clone()
    message = rf"\[{name}\] inplace=True must follow an op that makes its input, got "
    for make in (
        lambda op: op,
        lambda op: tops.Sequential(op, tops.Bias(8)),
        lambda op: tops.Sequential(tops.Identity(), op),
        lambda op: tops.Sequential(nn.Identity(), op),
        lambda op: tops.Sequential(tops.Bias(8), tops.Residual(op)),
    ):
        with pytest.raises(ValueError, match=message):
            make(MAKERS[name](inplace=True))(x)
    assert torch.equal(x, want)
    with pytest.raises(ValueError, match=rf"\[{name}\] inplace must be a bool, got 1"):
        MAKERS[name](inplace=1)


@pytest.mark.parametrize("name", [n for n in ops.__all__ if isinstance(getattr(ops, n), type)])
def test_a_docstring_gives_shapes_and_errors(name: str) -> None:
    text = getattr(ops, name).__doc__ or ""
    assert "→" in text or "Shapes" in text
    assert "rais" in text.lower() or "rrors" in text
