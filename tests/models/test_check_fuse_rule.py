"""check_fuse_rule accepts a right rule for `fuse`, and says what is wrong with others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.testing import check_fuse_rule

pytestmark = pytest.mark.takes(seconds=30)

X = torch.linspace(-1, 1, 64).reshape(4, 16).sin() * 2
STATEMENTS = "R = H + self.any_down(torch.relu(self.any_up(self.any_norm(H))))"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.up(y)
        y = torch.relu(y)
        y = self.down(y)
        return x + y


class WithoutSelf(Block):
    def forward(this, x: Tensor) -> Tensor:
        y = this.up(this.norm(x))
        return x + this.down(torch.relu(y))


def parts(module: Any, names: dict[str, str]) -> list[Any]:
    return [tops.view(getattr(module, names[name])) for name in ("norm", "up", "down")]


def residual(*ops: Any) -> list[Any]:
    fork = tops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    return [fork, *ops, tops.AddExtraInput().set_extra_input_channel(0, "x")]


def right(module: Any, names: dict[str, str]) -> list[Any]:
    norm, up, down = parts(module, names)
    return residual(norm, up, tops.ReLU(), down)


def another_activation(module: Any, names: dict[str, str]) -> list[Any]:
    norm, up, down = parts(module, names)
    return residual(norm, up, tops.ReLU(), tops.GELU(), down)


def no_activation(module: Any, names: dict[str, str]) -> list[Any]:
    norm, up, down = parts(module, names)
    return residual(norm, up, down)


def no_residual(module: Any, names: dict[str, str]) -> list[Any]:
    norm, up, down = parts(module, names)
    return [norm, up, tops.ReLU(), down]


def no_channel(module: Any, names: dict[str, str]) -> list[Any]:
    return [*no_residual(module, names), tops.AddExtraInput()]


def copied_weights(module: Any, names: dict[str, str]) -> list[Any]:
    norm, up, _ = parts(module, names)
    down = tops.Linear(32, 16)
    down.load_state_dict(module.down.state_dict())
    return residual(norm, up, tops.ReLU(), down)


def float32_only(module: Any, names: dict[str, str]) -> list[Any]:
    norm, up, down = parts(module, names)
    scale = 1 if module.up.weight.dtype == torch.float32 else 2
    return residual(norm, up, tops.ReLU(), tops.ConstantScale(scale), down)


def only_in_training(module: Any, names: dict[str, str]) -> list[Any]:
    norm, up, down = parts(module, names)
    return residual(norm, up, tops.ReLU(), *[tops.GELU()] * (not module.training), down)


def raising(module: Any, tensor: Tensor) -> bool:
    raise KeyError("boom")


def refusing(module: Any, names: dict[str, str]) -> list[Any]:
    raise tops.FuseSkip("too small")


def check(make: Any, when: Any = None, statements: str = STATEMENTS) -> Any:
    rule = tops.register_fuse_rule("mine", statements, make, when=when)
    try:
        return check_fuse_rule(rule, Block(), X)
    finally:
        rule.remove()


def test_a_right_rule() -> None:
    report = check(right)
    assert not report.not_tried and not report.not_fused
    assert "ops: the model (Block)" in str(report)
    few = check(right, when=lambda module, tensor: tensor.dim() == 2)
    assert "one dimension" in few.not_fused and "eager" not in few.not_fused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (another_activation, "eager: output differs"),
        (no_activation, "eager: output differs"),
        (no_residual, "eager: output differs"),
        (no_channel, "got Block: the rule mine gave ops with 1 extra inputs for statements with 0"),
        (copied_weights, "gradient of parameter down.weight differs"),
        (float32_only, "float64: output differs"),
        (only_in_training, "eval: output differs"),
        (refusing, "the rule must fuse a part of Block, got Block: too small"),
        (lambda module, names: 3, "got Block: the rule mine gave int 3 in place of ops"),
        (lambda module, names: module.head, "raised AttributeError"),
    ],
)
def test_a_wrong_rule(make: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=rf"^\[mine\] .*{message}"):
        check(make)


def test_a_condition() -> None:
    with pytest.raises(AssertionError, match=r"\[mine\] when must be true for the inputs"):
        check(right, when=lambda module, tensor: False)
    with pytest.raises(AssertionError, match=r"when of the rule mine must not raise, got KeyError"):
        check(right, when=raising)
    rule = tops.register_fuse_rule("mine", STATEMENTS, right, when=raising)
    block = Block()
    tops.fuse(block, rules=[rule])
    message = "[fuse] when of the rule mine must not raise, got KeyError: 'boom'"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        block(X)


@pytest.mark.parametrize(
    ("statements", "found", "wanted"),
    [
        (STATEMENTS.replace("relu", "tanh"), "torch.relu", "torch.tanh"),
        (STATEMENTS.replace("H + ", "2 * H + "), "x", "2 * H"),
        (STATEMENTS.replace("any_norm", "ln"), "self.norm", "self.ln"),
        (STATEMENTS.replace("any_up(", "any_up(0, "), "self.up(self.norm(x))", "self.any_up(0, "),
    ],
)
def test_the_nearest_statements(statements: str, found: str, wanted: str) -> None:
    message = (
        r"^\[mine\] the rule must fuse a part of Block, got lines \d+-\d+ of Block.forward, which "
        rf"have '{re.escape(found)}' where the rule has '{re.escape(wanted)}"
    )
    with pytest.raises(AssertionError, match=message):
        check(right, statements=statements)


def test_self_may_have_another_name() -> None:
    rule = tops.register_fuse_rule("mine", STATEMENTS, right)
    assert len(check_fuse_rule(rule, WithoutSelf(), X).tried) > 100


def test_no_statements() -> None:
    rule = tops.register_fuse_rule("mine", STATEMENTS, right)
    with pytest.raises(AssertionError, match="a part of Linear, got no statements of its kind"):
        check_fuse_rule(rule, nn.Linear(16, 16), X)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, Block(), X), TypeError, "rule must be a FuseRule or its name, got int 3"),
        (("norm", Block, X), TypeError, "model must be an nn.Module"),
        (("norm", Block()), TypeError, "inputs must be tensors, one at least"),
        (("norm", Block(), [1.0]), TypeError, "inputs must be tensors"),
    ],
)
def test_wrong_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"\[check_fuse_rule\] {message}"):
        check_fuse_rule(*arguments)
    with pytest.raises(ValueError, match=r"\[fuse\] rules must be some of"):
        check_fuse_rule("nobody", Block(), X)
