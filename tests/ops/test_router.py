"""Router: choices, probabilities, the auxiliary loss, and a whole layer of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import leaf
from test_grouped import backends, experts, loop_over_experts
from torch import Tensor, nn
from torch.nn import functional as F

import transformer_ops as tops


def plain(
    x: Tensor, weight: Tensor, k: int, *, score: str, normalize: bool, balance: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x, weight)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    ids = (scores if balance is None else scores + balance).topk(k).indices
    probs = scores.gather(-1, ids)
    if normalize:
        probs = probs / probs.sum(-1, keepdim=True)
    shares = (scores / scores.sum(-1, keepdim=True)).flatten(0, -2).mean(0)
    counts = F.one_hot(ids.flatten(), len(weight)).to(x).mean(0)
    return ids, probs, len(weight) * (counts * shares).sum()


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("normalize", "balanced"), [(True, False), (False, True)])
def test_against_plain_torch(way: str, score: str, normalize: bool, balanced: bool) -> None:
    op = tops.Router(8, 5, 2, score=score, normalize=normalize, balanced=balanced).double()
    if balanced:
        op.balance.copy_(torch.tensor([0.5, 0, 0, -0.5, 0]))
    run = backends()[way](op)
    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    y, ids, probs, loss = run(x)
    exact = leaf(x)
    found = plain(exact, op.weight, 2, score=score, normalize=normalize, balance=op.balance)
    assert torch.equal(y, x) and ids.dtype == torch.int32 and not ids.requires_grad
    assert torch.equal(ids.long(), found[0])
    torch.testing.assert_close((probs, loss), found[1:])
    given = [torch.randn_like(t) for t in (y, probs, loss)]
    got = torch.autograd.grad([y, probs, loss], [x, op.weight], given)
    want = torch.autograd.grad([exact * 1, *found[1:]], [exact, op.weight], given)
    torch.testing.assert_close(got, want)


def test_each_output_alone_gives_its_gradient() -> None:
    op = tops.Router(8, 5, 2).double()
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    _, probs, loss = plain(x, op.weight, 2, score="softmax", normalize=True, balance=None)
    grad = torch.randn_like(probs)
    want = torch.autograd.grad(probs, [x, op.weight], grad, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(op(x)[2], [x, op.weight], grad), want)
    want = torch.autograd.grad(loss, [x, op.weight])
    torch.testing.assert_close(torch.autograd.grad(op(x)[3], [x, op.weight]), want)


def test_second_derivatives() -> None:
    op = tops.Router(4, 3, 2, score="sigmoid", balanced=True).double()
    op.balance.copy_(torch.tensor([1.0, 0, 0.5]))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y, _, probs, loss = torch.func.functional_call(op, {"weight": weight}, (x,))
        return y, probs, loss

    assert torch.autograd.gradcheck(run, (x, op.weight))
    assert torch.autograd.gradgradcheck(run, (x, op.weight))


def test_the_typed_op() -> None:
    x, weight = torch.randn(6, 8), torch.randn(5, 8)
    arguments = (x.requires_grad_(), weight.requires_grad_(), None, 2, "softmax", True)
    torch.library.opcheck(torch.ops.transformer_ops.router.default, arguments)
    for index, bad, text in (
        (0, x[:, :7], "input must have last dimension 8, got shape"),
        (1, weight[0], "weight must have 2 dimensions, got shape"),
        (2, torch.zeros(4), r"balance must have shape \[5\], got \[4\]"),
        (3, 6, r"top_k must lie in \[1, 5\], got 6"),
        (4, "tanh", "score must be softmax or sigmoid, got 'tanh'"),
    ):
        wrong: list[Any] = [*arguments]
        wrong[index] = bad
        with pytest.raises(RuntimeError, match=rf"\[router\] {text}"):
            torch.ops.transformer_ops.router(*wrong)


def layer(h: int, f: int, e: int, k: int) -> tops.Sequential:
    """norm, router, experts, residual."""
    fork = tops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False)
    router = tops.Router(h, e, k)
    for i, name in enumerate(("expert_ids", "weights", None)):
        router.set_extra_output_channel(i, name, output_to_caller=False)
    ops = experts(e, h, f)
    ops[0].set_extra_input_channel(0, "expert_ids").set_extra_input_channel(1, "weights")
    join = tops.AddExtraInput().set_extra_input_channel(0, "residual")
    return tops.Sequential(fork, tops.RMSNorm(h), router, *ops, join)


@pytest.mark.parametrize("way", ["eager", "aot_eager", "inductor"])
def test_a_whole_layer(way: str) -> None:
    module = layer(16, 8, 6, 2).double()
    run = backends()[way](module)
    x = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    names = dict(module.named_parameters())
    norm, route, up, down = names.values()

    def meaning(x: Tensor) -> Tensor:
        y = F.rms_norm(x, (16,), norm, 1e-5)
        ids, probs, _ = plain(y, route, 2, score="softmax", normalize=True, balance=None)
        y, ids, probs = (t.flatten(0, -2) for t in (y, ids, probs))
        return x + loop_over_experts(y, ids, probs, up, down).view_as(x)

    torch.testing.assert_close(run(x), meaning(x))
    grad = torch.randn_like(x)
    got = torch.autograd.grad(run(x), [x, *module.parameters()], grad)
    want = torch.autograd.grad(meaning(x), [x, *module.parameters()], grad)
    torch.testing.assert_close(got, want)


def test_second_derivatives_of_a_whole_layer() -> None:
    module = layer(4, 3, 3, 2).double()
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    names = dict(module.named_parameters())

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradgradcheck(run, (x, *names.values()))


def test_balance_is_a_buffer_that_chooses() -> None:
    op = tops.Router(8, 4, 1, balanced=True)
    assert set(op.state_dict()) == {"weight", "balance"} and not isinstance(
        op.balance, nn.Parameter
    )
    x = torch.randn(9, 8)
    before = op(x)[2]
    op.balance[3] = 10
    _, ids, probs, _ = op(x)
    assert ids.eq(3).all() and probs.shape == before.shape
