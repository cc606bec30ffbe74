"""Weight gradients of a GroupedLinear that go into `main_grad`: one for all groups, or one each."""

from __future__ import annotations

import pytest
import torch
from test_grouped import backends

import transformer_ops as tops
from transformer_ops.op import BasicOperation

o = torch.ops.transformer_ops


@pytest.mark.parametrize("overwrite", [False, True])
def test_accumulation_into_main_grad(overwrite: bool) -> None:
    options = {"bias": False, "single_grouped_weight": True}
    op = tops.GroupedLinear(3, 16, 8, accumulate_into_main_grad=True, **options).bfloat16()
    plain = tops.GroupedLinear(3, 16, 8, **options).bfloat16()
    plain.load_state_dict(op.state_dict())
    x, sizes = torch.randn(12, 16).bfloat16(), torch.tensor([3, 0, 5])
    op.weight.main_grad = torch.ones(3, 8, 16)
    op.weight.overwrite_main_grad = overwrite
    grad = torch.randn(12, 8).bfloat16()
    op(x, sizes).backward(grad)
    (want,) = torch.autograd.grad(plain(x, sizes), plain.weight, grad)
    assert op.weight.grad is None
    near = {"rtol": 1.6e-2, "atol": 1e-2}
    torch.testing.assert_close(op.weight.main_grad, want.float() + (not overwrite), **near)


def test_one_parameter_for_two_groups() -> None:
    """Its gradients add up in its buffer, which no product fills for both."""
    x, sizes = torch.randn(12, 16), torch.tensor([3, 4, 5])
    op, plain = (tops.GroupedLinear(3, 16, 8, accumulate_into_main_grad=k) for k in (True, False))
    plain.load_state_dict(op.state_dict())
    for each in (op, plain):
        each.weight1 = each.weight0
    op.weight0.main_grad = torch.zeros(8, 16)
    op.weight2.main_grad = torch.zeros(8, 16)
    for each in (op, plain):
        each(x, sizes).square().sum().backward()
    torch.testing.assert_close(op.weight0.main_grad, plain.weight0.grad)
    torch.testing.assert_close(op.weight2.main_grad, plain.weight2.grad)


def test_buffers_that_share_memory_are_refused() -> None:
    x, grad, sizes = torch.randn(12, 16), torch.randn(12, 8), torch.tensor([7, 5])
    weights = list(torch.randn(2, 8, 16))
    flat = torch.zeros(2 * 8 * 16 + 16)
    apart = [flat[:128].view(8, 16), flat[144:].view(8, 16)]
    shared = [flat[:128].view(8, 16), flat[112:240].view(8, 16)]
    schema = o.grouped_linear_backward_into.default._schema
    given = {"grad_output": grad, "input": x, "splits": sizes, "weight": weights}
    given |= {"output_mask": [False, True, False, False], "overwrite": True}
    given |= {"single_grouped_weight": False, "single_grouped_bias": False}
    run = lambda buffers: o.grouped_linear_backward_into(  # noqa: E731
        **{a.name: given.get(a.name, [] if a.name == "bias" else None) for a in schema.arguments}
        | {"main_grad": buffers}
    )
    run(apart)
    torch.testing.assert_close(apart[0], grad[:7].T @ x[:7])
    for buffers in (shared, [apart[0], apart[0]]):
        with pytest.raises(
            RuntimeError, match="main_grad must be a separate buffer for each weight"
        ):
            run(buffers)


def test_accumulation_into_a_main_grad_for_each_group() -> None:
    op = tops.GroupedLinear(3, 16, 8, accumulate_into_main_grad=True)
    plain = tops.GroupedLinear(3, 16, 8)
    plain.load_state_dict(op.state_dict())
    x, sizes = torch.randn(12, 16), torch.tensor([3, 4, 5])
    with pytest.raises(RuntimeError, match="weight0 must have a main_grad to accumulate into"):
        op(x, sizes)
    weights = [op.weight0, op.weight1, op.weight2]
    for weight in weights:
        weight.main_grad = torch.ones(8, 16)
    op.weight1.overwrite_main_grad = True
    op.weight2.requires_grad_(False)
    grad = torch.randn(12, 8)
    op(x, sizes).backward(grad)
    plain(x, sizes).backward(grad)
    torch.testing.assert_close(op.weight0.main_grad, plain.weight0.grad + 1)
    torch.testing.assert_close(op.weight1.main_grad, plain.weight1.grad)
    torch.testing.assert_close(op.weight2.main_grad, torch.ones(8, 16))
    assert all(weight.grad is None for weight in weights)
    for k in range(3):
        assert torch.equal(getattr(op, f"bias{k}").grad, getattr(plain, f"bias{k}").grad)
    weights[0].grad_added_to_main_grad = False
    op(x, sizes).backward(grad)
    assert weights[0].grad_added_to_main_grad and not weights[0].grad.any()
    torch.testing.assert_close(op.weight0.main_grad, 2 * plain.weight0.grad + 1)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_main_grad_for_each_group_in_a_graph(backend: str, frozen: bool) -> None:
    op = tops.GroupedLinear(3, 16, 8, bias=False, accumulate_into_main_grad=True)
    plain = tops.GroupedLinear(3, 16, 8, bias=False)
    plain.load_state_dict(op.state_dict())
    x, sizes, grad = torch.randn(12, 16), torch.tensor([3, 4, 5]), torch.randn(12, 8)
    for weight in op.parameters():
        weight.main_grad = torch.ones(8, 16)
    op.weight1.requires_grad_(not frozen)
    plain(x, sizes).backward(grad)
    compiled = torch.compile(op, fullgraph=True, backend=backend)
    for calls in (1, 2):
        compiled(x, sizes).backward(grad)
        for k, weight in enumerate(op.parameters()):
            want = 0 if frozen and k == 1 else calls * getattr(plain, f"weight{k}").grad
            torch.testing.assert_close(weight.main_grad, 1 + want + torch.zeros(8, 16))
            assert weight.grad is None
    for weight in op.parameters():
        weight.overwrite_main_grad = True
    compiled(x, sizes).backward(grad)
    torch.testing.assert_close(op.weight2.main_grad, plain.weight2.grad)


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
@pytest.mark.parametrize("single", [False, True])
def test_errors_name_the_op_and_its_weight(way: str, single: bool) -> None:
    op = tops.GroupedLinear(3, 16, 8, accumulate_into_main_grad=True, single_grouped_weight=single)
    x, sizes = torch.randn(12, 16), torch.tensor([3, 4, 5])
    name = "weight" if single else "weight1"
    weight = getattr(op, name)
    for other in op.parameters():
        if other is not weight:
            other.main_grad = torch.zeros_like(other)
    run = backends()[way](tops.Sequential(tops.GELU(), op))
    with pytest.raises(
        Exception, match=rf"\[GroupedLinear\] {name} must have a main_grad to accumulate into"
    ):
        run(x, sizes)
    weight.main_grad = torch.zeros(8, 15)
    with pytest.raises(
        Exception, match=rf"\[GroupedLinear\] {name}.main_grad must have shape .*16\] and hold"
    ):
        run(x, sizes)


def test_the_names_of_a_list_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call makes none, nor asks for all of a list's tensors at each of them; an edit does."""
    op = tops.GroupedLinear(3, 16, 8, bias=False, accumulate_into_main_grad=True)
    x, sizes = torch.randn(12, 16), torch.tensor([3, 9, 0])
    for weight in op.parameters():
        weight.main_grad = torch.zeros(8, 16)
    op(x, sizes).sum().backward()
    made: list[str] = []
    names_in = BasicOperation._names_in

    def noted(op: BasicOperation, parameter: str) -> tuple[str, ...]:
        made.append(parameter)
        return names_in(op, parameter)

    monkeypatch.setattr(BasicOperation, "_names_in", noted)
    op(x, sizes).sum().backward()
    assert made == []
    op.num_groups = 2
    del op.weight2
    op(x, sizes[:2]).sum().backward()
    assert made
    want = x[3:].sum(0).expand(8, 16)
    torch.testing.assert_close(op.weight1.main_grad, 3 * want)
