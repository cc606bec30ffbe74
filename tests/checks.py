"""Checks one row of `op_cases.py` or `fusion_cases.py` against float64 on the CPU, on any
device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from fusion_cases import Case
from helpers import as_tuple, assert_near, differentiable, twin
from op_cases import OpCase, run_seeded
from torch import Tensor, nn
from user_fusions import gradients

import transformer_ops as tops


def check_op(
    case: OpCase,
    op: nn.Module,
    inputs: list[Tensor],
    dtype: torch.dtype,
    expand_grads: bool = False,
    factor: float = 1,
) -> None:
    """Checks outputs and all gradients of `op` against the reference in float64."""
    device = inputs[0].device
    outputs = as_tuple(run_seeded(op, *inputs))
    exact = [twin(tensor.cpu(), torch.float64) for tensor in inputs]
    parameters = {name: twin(p.cpu(), torch.float64) for name, p in op.named_parameters()}
    with device:  # where the references of random ops draw
        wanted = as_tuple(case.reference(*exact, **parameters))
    assert len(outputs) == len(wanted)
    for output, want in zip(outputs, wanted, strict=True):
        assert output.requires_grad == want.requires_grad
        if not output.is_floating_point():
            assert torch.equal(output.cpu(), want) and output.dtype == want.dtype
    outputs, wanted = differentiable(outputs), differentiable(wanted)
    grads = []
    for output, want in zip(outputs, wanted, strict=True):
        of_output = dtype
        if case.accumulates_output and dtype.itemsize == 2:
            of_output = torch.float32
        assert output.dtype == of_output and output.device == device
        assert_near(output, want, dtype, "output", factor)
        grads.append(torch.randn(() if expand_grads else want.shape).to(of_output))
    sources = [*differentiable(inputs), *op.parameters()]
    exact = list(differentiable(exact))
    given = [grad.to(device).expand(want.shape) for grad, want in zip(grads, wanted, strict=True)]
    found = torch.autograd.grad(outputs, sources, given)
    given = [grad.double().expand(want.shape) for grad, want in zip(grads, wanted, strict=True)]
    right = torch.autograd.grad(wanted, [*exact, *parameters.values()], given)
    names = ["input", *(f"extra input {i}" for i in range(len(exact) - 1)), *parameters]
    for name, source, got, want in zip(names, sources, found, right, strict=True):
        assert got.dtype == source.dtype and got.device == device
        assert_near(got, want, dtype, f"gradient of {name}", factor=2 * factor)


@contextmanager
def unfused() -> Iterator[None]:
    """Disables all fusions."""
    with ExitStack() as stack:
        for handle in tops.fusions():
            stack.enter_context(handle.disabled())
        yield


class DrawnOn(tops.BasicOperation):
    """An op that drops numbers, on the CPU; it drops those that it drops on `device`."""

    def __init__(self, op: tops.Dropout | tops.DropPath, device: torch.device) -> None:
        super().__init__()
        self.make, self.p, self.device = type(op), op.p, device

    def op_forward(self, ctx, input_, **unused):
        factor = self.make(self.p)(torch.ones(input_.shape, device=self.device)) != 0
        factor = factor.to(input_) * (1 / (1 - self.p) if self.p < 1 else 0)
        ctx.save_for_backward(factor)
        return input_ * factor

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.saved_tensors[0], ()


def exact_on_cpu(module: tops.Sequential, device: torch.device) -> tops.Sequential:
    """The module in float64 on the CPU; its random ops draw on `device`."""
    twin = copy.deepcopy(module).cpu().double()
    random = (tops.Dropout, tops.DropPath)
    return tops.Sequential(*(DrawnOn(op, device) if isinstance(op, random) else op for op in twin))


def check_fusion(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    """The fused ops must be as close to float64 as the unfused ones, because they round no more
    often."""
    module = tops.Sequential(*case.make()).to(device, dtype)
    inputs = [t.to(device) for t in case.inputs(torch.randn(7, 5, 16).to(dtype))]
    with unfused():
        plain = gradients(module, *inputs)
        want = gradients(exact_on_cpu(module, device), *(t.cpu().double() for t in inputs))
    for exact, other, fused in zip(want, plain, gradients(module, *inputs), strict=True):
        assert fused.dtype == other.dtype == dtype
        assert fused.device == other.device == inputs[0].device
        error, allowed = ((t.cpu().double() - exact).norm() for t in (fused, other))
        # In float64, `exact` is itself rounded, and is no more exact.
        roundings = 8 if dtype == torch.float64 else 2
        assert error <= 1.1 * allowed + roundings * torch.finfo(dtype).eps * exact.norm()
        # The unfused ops must be close, too: otherwise both may have the same error.
        assert allowed <= 32 * torch.finfo(dtype).eps * exact.norm()
