"""Fused ops and basic ops in Python, as users write them, with each Python forward in both
styles."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import transformer_ops as tops


def rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def replacing(
    fused: type[tops.FusedOperation],
    *kinds: type,
    calls: list | None = None,
    follows: bool = True,
):
    """A fusion function that replaces every run of ops of these kinds; none under a recipe, if it
    follows those."""

    def fuse(ops, *, recipe=None, **unused):
        if calls is not None:
            calls.append([type(op).__name__ for op in ops])
        if follows and recipe is not None:
            return ops
        result, i = [], 0
        while i < len(ops):
            window = ops[i : i + len(kinds)]
            found = len(window) == len(kinds) and all(map(isinstance, window, kinds))
            result.append(fused(window) if found else ops[i])
            i += len(kinds) if found else 1
        return result

    fuse.__name__ = f"fuse_{fused.__name__}"
    return fuse


# ---- joint: Linear + SiLU that saves only its input


class JointSplit(tops.FusedOperation):
    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, **unused):
        weight = self.basic_ops[0].weight
        return nn.functional.silu(input_ @ weight.T), [(), ()], (input_, weight)

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)
        basic_op_ctxs[1].note = "from forward"

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        linear, silu = basic_op_ctxs
        assert silu.note == "from forward" and silu.saved_tensors == ()
        x, weight = linear.saved_tensors
        grad = silu_gradient(grad_output, x @ weight.T)
        grad_weight = rows(grad).T @ rows(x) if self.basic_ops[0].weight.requires_grad else None
        return grad @ weight, [(grad_weight,), ()], [(), ()]


class JointSingle(tops.FusedOperation):
    fuser_backward = JointSplit.fuser_backward

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        weight = self.basic_ops[0].weight
        basic_op_ctxs[0].save_for_backward(input_, weight)
        basic_op_ctxs[1].note = "from forward"
        return nn.functional.silu(input_ @ weight.T), [(), ()]


# ---- forward only: Linear + SiLU for the native backward


class ForwardSplit(tops.FusedOperation):
    def fuser_forward_compute(self, input_, **unused):
        weight = self.basic_ops[0].weight
        hidden = input_ @ weight.T
        return nn.functional.silu(hidden), [(), ()], ((input_, weight), (hidden,))

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        for ctx, tensors in zip(basic_op_ctxs, tensors_to_save, strict=True):
            ctx.save_for_backward(*tensors)


class ForwardSingle(tops.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        weight = self.basic_ops[0].weight
        hidden = input_ @ weight.T
        basic_op_ctxs[0].save_for_backward(input_, weight)
        basic_op_ctxs[1].save_for_backward(hidden)
        return nn.functional.silu(hidden), [(), ()]


# ---- backward only: Linear + SiLU from what the native forward saved


class Backward(tops.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, weight = basic_op_ctxs[0].saved_tensors
        (hidden,) = basic_op_ctxs[1].saved_tensors
        grad = silu_gradient(grad_output, hidden)
        grad_weight = None if x is None else rows(grad).T @ rows(x)
        return grad @ weight if weight is not None else None, [(grad_weight,), ()], [(), ()]


# ---- basic ops


class ScaleShift(tops.BasicOperation):
    """x * weight * factor + bias, split style, with a buffer and plain state besides parameters."""

    def __init__(self, size: int, sign: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.bias = nn.Parameter(torch.rand(size))
        self.register_buffer("mask", (torch.arange(size) % 3 > 0).float())
        self.gain = torch.full((), 1.5)
        self.sign = sign

    def op_forward_compute(
        self, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, factor=1.0
    ):
        scale = self.weight * self.mask * self.gain * self.sign * factor
        return input_ * scale + self.bias, (input_, scale)

    def op_forward_save_ctx(
        self,
        ctx,
        input_,
        tensors_to_save,
        *,
        prev_op_grad_output_quantizer,
        next_op_input_quantizer,
        factor=1.0,
    ):
        ctx.save_for_backward(*tensors_to_save)
        ctx.factor = factor

    def op_backward(self, ctx, grad_output):
        x, scale = ctx.saved_tensors
        grad_scale = rows(grad_output * x).sum(0)
        # These are read from the module again, as in users' code.
        grad_weight = grad_scale * self.mask * self.gain * self.sign * ctx.factor
        return grad_output * scale, (grad_weight, rows(grad_output).sum(0))

    def reference(self, x: Tensor, factor: float = 1.0) -> Tensor:
        return x * (self.weight * self.mask * self.gain * self.sign * factor) + self.bias


class SingleSquare(tops.BasicOperation):
    """x * x, single style."""

    def op_forward(self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer):
        ctx.save_for_backward(input_)
        return input_ * input_

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output, ()


class Gate(tops.BasicOperation):
    """x * (its extra input); the extra outputs are x + 1 and, hidden or not, the doubled gate."""

    num_extra_inputs = 1
    num_extra_outputs = 2

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, requires_grad, **unused):
        ((gate,),) = basic_op_extra_inputs
        self.seen = (gate.requires_grad, requires_grad)
        return input_ * gate, [(input_ + 1, gate * 2)], (input_, gate)

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, gate = basic_op_ctxs[0].saved_tensors
        grad_sum, grad_doubled = basic_op_grad_extra_outputs[0]
        grad_gate = grad_output * x + 2 * grad_doubled
        return grad_output * gate + grad_sum, [()], [(grad_gate,)]


class AddNorm(tops.FusedOperation):
    """MakeExtraOutput ... AddExtraInput over a channel inside: x + x."""

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, **unused):
        assert basic_op_extra_inputs == [(), (None,)]
        return 2 * input_, [(None,), ()], ()

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        pass

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return 2 * grad_output, [(), ()], [(), (None,)]


def output_gradients(*outputs: Tensor) -> list[Tensor]:
    """Output gradients that are the same in every dtype and on every device."""
    torch.manual_seed(5)
    return [torch.randn(output.shape).bfloat16().to(output) for output in outputs]


def gradients(module, x: Tensor, *extra: Tensor, **kwargs) -> list[Tensor]:
    """The outputs, then the gradients of inputs and parameters for fixed output gradients."""
    inputs = [t.detach().clone().requires_grad_() for t in (x, *extra)]
    torch.manual_seed(3)
    found = module(*inputs, **kwargs)
    outputs = found if isinstance(found, tuple) else (found,)
    given = output_gradients(*outputs)
    wanted = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
    return [*(output.detach() for output in outputs), *grads]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
