"""GroupedLinear that writes its output and the gradient of its input into the caller's tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import transformer_ops as tops
from transformer_ops import _C

SPLITS = torch.tensor([4, 0, 5])


def grouped(**given: Any) -> tops.GroupedLinear:
    return tops.GroupedLinear(3, 8, 16, **given)


def buffers(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "output": torch.full((10, 16), 7.0, dtype=dtype),
        "grad_input": torch.full((10, 8), 7.0, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "given",
    [
        {"single_grouped_weight": True, "single_grouped_bias": True},
        {"bias": False},
        {"single_grouped_weight": True, "scale_bias": True},
    ],
    ids=["one weight", "no bias", "scaled bias"],
)
def test_both_buffers(given: dict[str, Any], dtype: torch.dtype) -> None:
    op = grouped(dtype=dtype, **given)
    x = torch.randn(10, 8, dtype=dtype, requires_grad=True)
    extra = [SPLITS]
    if given.get("scale_bias"):
        extra.append(torch.rand(10, dtype=dtype, requires_grad=True))
    leaves = [x, *extra[1:], *op.parameters()]
    want = op(x, *extra)
    grad = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, leaves, grad)
    for _ in range(2):
        mine = buffers(dtype)
        got = op(x, *extra, **mine)
        grads = torch.autograd.grad(got, leaves, grad)
        assert got.data_ptr() == mine["output"].data_ptr()
        assert grads[0].data_ptr() == mine["grad_input"].data_ptr()
        torch.testing.assert_close((got, *grads), (want, *want_grads), rtol=0, atol=0)
    assert not mine["output"].requires_grad


def test_the_op_itself_writes_there() -> None:
    x, weight, output = torch.randn(10, 8), torch.randn(3, 16, 8), torch.empty(10, 16)
    run = torch.ops.transformer_ops.grouped_linear
    _C.write_next_result_into(output)
    result = run(x, SPLITS, [weight], [], None, True, True)
    assert result.data_ptr() == output.data_ptr()
    # Once; and not where it does not fit.
    result = run(x, SPLITS, [weight], [], None, True, True)
    assert result.data_ptr() != output.data_ptr()
    _C.write_next_result_into(output.t())
    result = run(x, SPLITS, [weight], [], None, True, True)
    assert result.shape == output.shape and result.data_ptr() != output.data_ptr()


@pytest.mark.parametrize("name", ["output", "grad_input"])
def test_one_buffer_without_what_it_is_for(name: str) -> None:
    op, x, mine = grouped(), torch.randn(10, 8), buffers()
    with torch.no_grad():
        torch.testing.assert_close(op(x, SPLITS, **{name: mine[name]}), op(x, SPLITS))
    # Nobody wants the gradient of x.
    op(x, SPLITS, grad_input=mine["grad_input"]).sum().backward()
    assert (mine["grad_input"] == 7).all()


def test_a_layer_of_experts() -> None:
    layer = tops.Sequential(
        tops.Linear(8, 8), grouped(), tops.ScaledSwiGLU(), tops.GroupedLinear(3, 8, 8)
    )
    x, scales = torch.randn(10, 8), torch.rand(10)

    def results(call: Any, **given: Any) -> list[Tensor]:
        for parameter in layer.parameters():
            parameter.grad = None
        y = call(x, SPLITS, scales, SPLITS, **given)
        y.square().sum().backward()
        return [y, *(p.grad for p in layer.parameters() if p.grad is not None)]

    want = results(layer)
    compiled = torch.compile(layer, backend="aot_eager")
    for call in (layer, compiled, layer):
        mine = buffers()
        got = results(call, op_kwargs={layer[1]: mine})
        torch.testing.assert_close(got, want)
        assert not (mine["output"] == 7).any() and not (mine["grad_input"] == 7).any()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="outside of compiled code"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(
            x, SPLITS, scales, SPLITS, op_kwargs={1: buffers()}
        )
    # An edit between two calls.
    layer[0] = tops.ReLU()
    got, want = results(layer, op_kwargs={1: buffers()}), results(layer)
    torch.testing.assert_close(got, want)


def test_what_was_saved_of_a_buffer_that_is_written_again() -> None:
    op, x, mine = grouped(), torch.randn(10, 8, requires_grad=True), buffers()
    first = op(x, SPLITS, output=mine["output"]).square().sum()
    op(x, SPLITS, output=mine["output"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_autocast() -> None:
    op, x = grouped(), torch.randn(10, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        want = op(x, SPLITS)
        got = op(x, SPLITS, output=buffers(torch.bfloat16)["output"])
        with pytest.raises(ValueError, match=r"output must have shape .*bfloat16"):
            op(x, SPLITS, **buffers())
    torch.testing.assert_close(got, want)
    (grad,) = torch.autograd.grad(got.sum(), x)
    assert grad.dtype == torch.float32


OUTPUT, GRAD = torch.zeros(10, 16), torch.zeros(10, 8)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"out": OUTPUT}, TypeError, r"must be among output and grad_input, got 'out'"),
        ({"output": [1.0]}, TypeError, r"output must be a plain tensor, got a list"),
        ({"output": GRAD}, ValueError, r"output must have shape \(10, 16\), .* got \(10, 8\)"),
        ({"output": OUTPUT.double()}, ValueError, r"output must have shape .* got .*float64"),
        ({"output": OUTPUT.to("meta")}, ValueError, r"output must have .* on cpu, got .* on meta"),
        ({"output": torch.zeros(16, 10).t()}, ValueError, r"output must be contiguous"),
        ({"output": torch.zeros(10, 16, requires_grad=True)}, ValueError, r"require no gradient"),
        ({"grad_input": OUTPUT}, ValueError, r"grad_input must have shape \(10, 8\)"),
    ],
)
def test_buffers_that_do_not_fit(given: Any, error: Any, message: str) -> None:
    op, x = grouped(), torch.randn(10, 8)
    with pytest.raises(error, match=r"\[GroupedLinear\] .*" + message):
        op(x, SPLITS, **given)
    torch.testing.assert_close(op(x, SPLITS), op(x, SPLITS, output=torch.empty(10, 16)))


def test_settings_and_tensors_that_only_a_plan_can_have() -> None:
    x = torch.randn(10, 8)
    for flag in ("accumulate_into_main_grad", "delay_wgrad_compute"):
        with pytest.raises(RuntimeError, match=rf"\[GroupedLinear\] {flag} must be False"):
            grouped(single_grouped_weight=True, **{flag: True})(x, SPLITS, **buffers())
    op = grouped()
    with tops.autocast(), pytest.raises(RuntimeError, match="outside of a recipe, got mx"):
        op(x, SPLITS, **buffers())
    with pytest.raises(ValueError, match="output must share no memory with input, got some"):
        memory = torch.zeros(240)
        op(memory[:80].view(10, 8), SPLITS, output=memory[80:].view(10, 16))
    with pytest.raises(ValueError, match="extra inputs must be 1 for splits, got 0"):
        op(x, **buffers())
    with pytest.raises(RuntimeError, match=r"\[grouped_linear\] splits must"):
        op(x, torch.tensor([1, 2]), **buffers())
    # A refused call leaves no buffer behind.
    assert op(x, SPLITS).data_ptr() != 0
