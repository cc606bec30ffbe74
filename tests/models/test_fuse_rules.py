"""Rules of the user's own for `fuse`, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fuse_models import GatedMLP, Model, RootNorm
from torch import Tensor, nn

import transformer_ops as tops


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y * 2
        return y


class Tripling(Doubling):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y * 3
        return y


STATEMENTS = """
H = self.any_norm(H)
H = H * 2
"""


class DoublingInPlace(Doubling):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x * 2
        return x


@pytest.fixture
def rule() -> Any:
    def make(module: Any, names: dict[str, str]) -> list[nn.Module]:
        return [tops.view(getattr(module, names["norm"])), tops.ConstantScale(2.0)]

    return tops.register_fuse_rule("doubling", STATEMENTS, make)


def test_a_rule_of_the_users(rule: tops.FuseRule) -> None:
    layer, x = DoublingInPlace(), torch.randn(3, 16)
    want = layer(x)
    report = tops.fuse(layer, rules=["doubling"])
    torch.testing.assert_close(layer(x), want)
    assert [row.rule for row in report.fused] == ["doubling"]
    # Other names of local variables than the pattern has, and another function.
    assert len(tops.fuse(Doubling()).fused) == 1
    assert not tops.fuse(Tripling()).rows


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (3, "gave int 3 in place of ops"),
        ([], "gave an empty list"),
        ([4], "gave int 4 in place of op 0"),
    ],
)
def test_a_rule_that_answers_nonsense(answer: Any, reason: str) -> None:
    rule = tops.register_fuse_rule("nonsense", STATEMENTS, lambda *_: answer)
    layer, x = DoublingInPlace(), torch.randn(3, 16)
    want = layer(x)
    report = tops.fuse(layer, rules=[rule])
    assert torch.equal(layer(x), want) and reason in report.skipped[0].reason


def test_a_refusal_is_found_out_once() -> None:
    model, made = DoublingInPlace(), []

    def make(*_: Any) -> Any:
        made.append(1)
        raise tops.FuseSkip("no")

    rule = tops.register_fuse_rule("refusing", STATEMENTS, make)
    report = tops.fuse(model, rules=[rule])
    model(torch.randn(2, 16))
    before = len(made)
    for _ in range(5):
        model(torch.randn(2, 16))
    assert len(made) == before and report.skipped[0].reason == "no"


def test_a_rule_that_raises() -> None:
    def make(*_: Any) -> Any:
        raise AttributeError("no such thing")

    tops.register_fuse_rule("raises", STATEMENTS, make)
    layer, x = DoublingInPlace(), torch.randn(3, 16)
    want = layer(x)
    report = tops.fuse(layer, rules=["raises"])
    assert torch.equal(layer(x), want)
    reason = report.skipped[0].reason
    assert reason == "the rule raises raised AttributeError: no such thing"


def test_a_wrong_rule_is_seen() -> None:
    tops.register_fuse_rule("wrong", STATEMENTS, lambda m, n: [tops.view(m.norm)])
    layer, x = DoublingInPlace(), torch.randn(3, 16)
    want = layer(x)
    tops.fuse(layer, rules=["wrong"])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(layer(x), want)


def test_a_source_that_cannot_be_read() -> None:
    names: dict[str, Any] = {"nn": nn, "RootNorm": RootNorm, "GatedMLP": GatedMLP}
    exec(
        "class Layer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.mlp = RootNorm(16), GatedMLP(16, 24)\n"
        "    def forward(self, x):\n"
        "        r = x\n        x = self.norm(x)\n        x = self.mlp(x)\n        x = r + x\n"
        "        return x\n",
        names,
    )
    layer = names["Layer"]()
    assert "Layer" not in {row.kind for row in tops.fuse(layer).rows}
    assert layer(torch.randn(2, 16)).shape == (2, 16)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: tops.fuse(3), TypeError, "[fuse] model must be an nn.Module, got int"),
        (lambda: tops.fuse(Model(), rules=["llama"]), ValueError, "[fuse] rules must be some of"),
        (lambda: tops.fuse(nn.Softplus(), strict=True), ValueError, "got nothing to fuse"),
        (
            lambda: tops.register_fuse_rule("new", "H = (", lambda *_: []),
            ValueError,
            "[fuse] statements must be Python",
        ),
        (
            lambda: tops.register_fuse_rule("new", "R = X", lambda *_: []),
            ValueError,
            "[fuse] statements must read an H and compute one value, which the last one assigns or "
            "returns, got 'R = X'",
        ),
        (
            lambda: tops.register_fuse_rule("residual", "R = H", lambda *_: []),
            ValueError,
            "[fuse] name must be new, got 'residual'",
        ),
    ],
)
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": 3}, "name must be a str, got int 3"),
        ({"statements": None}, "statements must be a str or a list of str, got None"),
        ({"statements": []}, "statements must be a str or a list of str, got list"),
        ({"statements": [STATEMENTS, 3]}, "statements must be a str or a list of str, got int 3"),
        ({"make": "relu"}, "make must be callable, got str 'relu'"),
        ({"method": print}, "method must be a str, got builtin_function_or_method"),
        ({"when": 3}, "when must be callable or None, got int 3"),
    ],
)
def test_arguments_of_a_wrong_type(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"name": "drawn", "statements": STATEMENTS, "make": lambda *_: []}
    with pytest.raises(TypeError, match=re.escape(f"[register_fuse_rule] {message}")):
        tops.register_fuse_rule(**(given | changed))
    with pytest.raises(TypeError, match=re.escape("[fuse] rules must be a list of rules or names")):
        tops.fuse(Model(), rules=3)  # type: ignore[arg-type]
