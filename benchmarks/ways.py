"""The same MLP called in the two ways that the executor's C++ node replaces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import transformer_ops as tops

typed = torch.ops.transformer_ops
EPS = 1e-5


class _Parameters(nn.Module):
    """The parameters of a LayerNorm-Linear-GELU-Linear module, in order."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.all = nn.ParameterList(mlp.parameters())

    def _read(self) -> list[Tensor]:
        if "_list" not in self.__dict__:
            self.__dict__["_list"] = list(self.all)
        found: list[Tensor] = self.__dict__["_list"]
        return found


class TypedOps(_Parameters):
    """Typed ops one by one, each with the Python `register_autograd` of the library."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape in, same shape out."""
        gamma, beta, w1, b1, w2, b2 = self._read()
        y = typed.layer_norm(x, gamma, beta, list(gamma.shape), EPS, False)[0]
        y = typed.gelu(typed.bias(typed.linear(y, w1), b1))
        out: Tensor = typed.bias(typed.linear(y, w2), b2)
        return out


class _Function(torch.autograd.Function):
    """The calls of the plan, from Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        gamma, beta, w1, b1, w2, b2 = parameters
        y, mean, rstd = typed.layer_norm(x, gamma, beta, list(gamma.shape), EPS, False)
        activated, kept = typed.linear_bias_activation(y, w1, b1, "gelu", True)
        out: Tensor = typed.linear_epilogue(activated, w2, b2, None, 1.0)
        ctx.save_for_backward(x, mean, rstd, gamma, y, w1, kept, activated, w2)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, mean, rstd, gamma, y, w1, kept, activated, w2 = ctx.saved_tensors
        grad_b2 = typed.bias_backward(grad)
        grad, grad_w2 = typed.linear_backward(grad, activated, w2, [True, True])
        grad, grad_b1 = typed.activation_bias_backward(grad, kept, "gelu")
        grad, grad_w1 = typed.linear_backward(grad, y, w1, [True, True])
        shape, mask = list(gamma.shape), [True, True, True]
        grads = typed.layer_norm_backward(grad, x, mean, rstd, gamma, shape, EPS, False, mask)
        return *grads, grad_w1, grad_b1, grad_w2, grad_b2


class PythonFunction(_Parameters):
    """One Python `autograd.Function` around the typed ops that the plan calls."""

    def forward(self, x: Tensor) -> Tensor:
        """Shape in, same shape out."""
        out: Tensor = _Function.apply(x, *self._read())
        return out


class _NoWork(torch.autograd.Function):
    """One new tensor forward; backward hands on tensors that exist."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *ctx.saved_tensors


class NoWork(nn.Module):
    """As many parameters as a block has, and gradients for them that nothing computes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # Attributes of one module: the fewest guards.
        self.names = tuple(f"p{i}" for i, _ in enumerate(block.parameters()))
        for name, parameter in zip(self.names, block.parameters(), strict=True):
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Shape in, same shape out."""
        out: Tensor = _NoWork.apply(x, *[getattr(self, name) for name in self.names])
        return out


class _LinearGELU(tops.FusedOperation):
    """Linear, bias and GELU by three calls of torch, for the built-in backward."""

    def fuser_forward_compute(
        self, input_: Tensor, **unused: Any
    ) -> tuple[Tensor, list[tuple[()]], tuple[Tensor, Tensor]]:
        """Pure: output, extra outputs, what backward reads."""
        ops: list[Any] = self.basic_ops
        linear, bias, _ = ops
        hidden = nn.functional.linear(input_, linear.weight, bias.bias)
        return nn.functional.gelu(hidden, approximate="tanh"), [(), (), ()], (input_, hidden)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        """Fills the slots of the ops."""
        linear, bias, gelu = basic_op_ctxs
        linear.save_for_backward(tensors_to_save[0], self.basic_ops[0].weight)
        bias.save_for_backward()
        gelu.save_for_backward(tensors_to_save[1])


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    hidden = nn.functional.linear(x, weight, bias)
    return nn.functional.gelu(hidden, approximate="tanh"), hidden


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
    grad = torch.ops.aten.gelu_backward(grad, hidden, approximate="tanh")
    return grad @ weight, grad.T @ x, grad.sum(0)


class _LinearGELUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, hidden = _linear_gelu(x, weight, bias)
        ctx.save_for_backward(x, weight, hidden)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gradients(grad, *ctx.saved_tensors)


class FunctionOfLinearGELU(_Parameters):
    """A Python `autograd.Function` with the calls of `JointLinearGELU`."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        out: Tensor = _LinearGELUFunction.apply(x, *self._read())
        return out


class JointLinearGELU(tops.FusedOperation):
    """Forward and backward of Linear, bias and GELU by calls of torch."""

    def fuser_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        """Pure: output, extra outputs, what backward reads."""
        ops: list[Any] = self.basic_ops
        out, hidden = _linear_gelu(input_, ops[0].weight, ops[1].bias)
        return out, [(), (), ()], (input_, ops[0].weight, hidden)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
    ) -> None:
        """Saves them in the context of the first op."""
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
        """Gradients of the input, the parameters and no extra inputs."""
        grad, grad_weight, grad_bias = _gradients(grad_output, *basic_op_ctxs[0].saved_tensors)
        return grad, [(grad_weight,), (grad_bias,), ()], [(), (), ()]


def fuse_in_python(module: tops.Sequential, is_joint: bool = False) -> tops.FusionHandle:
    """Registers a fusion of Linear and GELU in Python for this module alone."""
    parts: list[Any] = list(module)
    mine = {id(op) for part in parts for op in part.basic_ops}

    def is_mine(ops: list[tops.BasicOperation]) -> str | None:
        return None if id(ops[0]) in mine else "it is in another module"

    pattern = [tops.BasicLinear, tops.Bias, tops.GELU]
    if is_joint:
        return tops.register_forward_backward_fusion(
            JointLinearGELU, pattern=pattern, guard=is_mine
        )
    return tops.register_forward_fusion(_LinearGELU, pattern=pattern, guard=is_mine)


def accumulate_into_main_grad(module: nn.Module) -> None:
    """Has every Linear of a module accumulate its weight gradient into a buffer."""
    for part in module.modules():
        if isinstance(part, tops.Linear):
            part.accumulate_into_main_grad = True
            weight: Any = part.weight
            weight.main_grad = torch.zeros_like(weight)
