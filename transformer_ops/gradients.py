"""Gradients that Python methods return: checked by autograd's rule for a custom
`torch.autograd.Function`, with errors that name the op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import main_grad
from .instructions import Values, add, op_of
from .op import BasicOperation
from .plan import Plan


class Like(NamedTuple):
    """What a gradient has to look like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """The look of the tensor's gradient."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def zeros(self) -> Tensor:
        """A gradient that nobody gave."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def fitted(op: str, what: Callable[[], str], gradient: Tensor | None, like: Like) -> Tensor | None:
    """The gradient that `op` returned for `what`, in the shape and dtype of `like`.

    A shape that `like` expands to is summed; a dtype is cast; a single number changes its device.

    Raises:
        RuntimeError: another shape or device; complex numbers for a real tensor.
    """
    if gradient is None:
        return None
    if gradient.shape != like.shape:
        if not _expands_to(like.shape, gradient.shape):
            raise _error(op, what, "shape", tuple(like.shape), tuple(gradient.shape))
        gradient = gradient.sum_to_size(like.shape)
    if gradient.dtype != like.dtype:
        if gradient.is_complex() and not like.dtype.is_complex:
            raise _error(op, what, "dtype", like.dtype, gradient.dtype)
        gradient = gradient.to(like.dtype)
    if gradient.device != like.device:
        if gradient.dim() > 0:
            raise _error(op, what, "device", like.device, gradient.device)
        gradient = gradient.to(like.device)
    return gradient


def _expands_to(shape: tuple[int, ...], wider: tuple[int, ...]) -> bool:
    trailing = wider[len(wider) - len(shape) :]
    return len(shape) <= len(wider) and all(
        a in (b, 1) for a, b in zip(shape, trailing, strict=True)
    )


def _error(
    op: str, what: Callable[[], str], field: str, wanted: object, got: object
) -> RuntimeError:
    return RuntimeError(f"[{op}] gradient of {what()} must have {field} {wanted}, got {got}")


class Returned(NamedTuple):
    """Where the gradients that one Python method returned belong."""

    op: str
    likes: dict[str, Like]
    wanted: frozenset[str]  # inputs of the plan that want a gradient
    values: Values


class Gradients:
    """Puts the gradients that Python methods return among the values of a plan's backward."""

    def __init__(
        self,
        plan: Plan,
        basic_ops: Sequence[BasicOperation],
        parameters: list[list[str]],
        accumulating: list[int],
    ) -> None:
        self.plan = plan
        self.basic_ops = basic_ops
        self.parameters = parameters
        self.accumulating = accumulating

    def put_input(self, to: Returned, first: int, grad: Tensor | None) -> None:
        """That of a step's main input, the boundary before op `first`."""
        is_wanted = "x0" in to.wanted if first == 0 else first > self.plan.first_backward
        like = to.likes.get(f"x{first}")
        if is_wanted and like is None and grad is None:
            raise RuntimeError(f"[{to.op}] gradient of the input must be a tensor here, got None")
        if is_wanted and like is not None:
            grad = fitted(to.op, lambda: "the input", grad, like)
        to.values[f"g{first}"] = grad if is_wanted else None

    def put_parameters(self, to: Returned, i: int, grads: Sequence[Tensor | None]) -> None:
        """Those of basic op `i`; adds to `main_grad` where the op asks for it."""
        names = self.parameters[i]
        wanted = [name for name in names if name in to.wanted]
        if len(grads) != len(names) and (grads or wanted):
            raise RuntimeError(
                f"[{to.op}] backward must return {len(names)} parameter gradients for "
                f"op {i} ({self.plan.ops[i][0]}), got {len(grads)}"
            )
        for k, name in enumerate(names):
            if name in wanted:
                self._put_parameter(to, i, k, grads[k])

    def _put_parameter(self, to: Returned, i: int, k: int, grad: Tensor | None) -> None:
        name = self.parameters[i][k]

        def what() -> str:
            return f"parameter {self._name(i, k)!r} of op {i}"

        if i not in self.accumulating or grad is None:
            to.values["d" + name] = fitted(to.op, what, grad, to.likes[name])
            return
        # main_grad may be of a wider dtype than the weight.
        grad = fitted(to.op, what, grad, to.likes[name]._replace(dtype=grad.dtype))
        if grad is not None and name == f"p{i}.weight":
            grad = main_grad.accumulate(self.basic_ops[i]._parameter_tensors()[0], grad)
        to.values["d" + name] = grad

    def _name(self, i: int, k: int) -> str:
        tensor = self.basic_ops[i]._parameter_tensors()[k]
        found = (name for name, p in self.basic_ops[i].named_parameters() if p is tensor)
        return next(found, self.parameters[i][k].partition(".")[2])

    def put_extra_inputs(self, to: Returned, i: int, grads: Sequence[Tensor | None]) -> None:
        """Those of basic op `i`, for whoever gave them: the caller, or an op of the group."""

        def what() -> str:
            return f"extra input {k} of op {i}"

        for k, grad in enumerate(grads):
            source = self.plan.routes.get(f"e{i}.{k}", f"e{i}.{k}")
            like = to.likes.get(source)
            if like is not None and self._wants_gradient(to, source, like):
                add(to.values, "d" + source, fitted(to.op, what, grad, like))

    def _wants_gradient(self, to: Returned, source: str, like: Like) -> bool:
        if not source.startswith("o"):
            return source in to.wanted
        is_number = like.dtype.is_floating_point or like.dtype.is_complex
        return is_number and op_of(source) >= self.plan.first_backward
