"""How a step calls the Python methods of an op: the definition that counts, with the keywords that
its signature accepts. Lists have one entry for each basic op of the step; `counts` are the numbers
of extra tensors that each must return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, strided
from torch.compiler import is_compiling
from torch.nn.parameter import is_lazy

from ..op.base import BasicOperation, FusibleOperation
from ..op.context import OperationContext
from ..op.methods import KEYWORDS, shown, single_name, split_names, unpacked

Tensors = tuple[Tensor | None, ...]

# The types that methods return most often.
_PLAIN_LISTS = (tuple, list)


def forward(
    op: FusibleOperation,
    ctxs: list[OperationContext],
    input_: Tensor,
    *,
    extra_inputs: list[Tensors],
    kwargs: list[dict[str, Any]],
    counts: list[int],
) -> tuple[Tensor, list[Tensors]]:
    """Single style: returns (output, extra outputs of each basic op); saves tensors in `ctxs`."""
    keywords = _offer(op, "fuser_forward", extra_inputs, kwargs)
    if _delegates(op):
        basic = cast(BasicOperation, op)
        output, extra = BasicOperation.fuser_forward(basic, ctxs, input_, **keywords)
    else:
        found = op.fuser_forward(ctxs, input_, **keywords)
        output, extra = unpacked(op, "fuser_forward", found, "output, extra outputs")
    return output, _extra_outputs(op, "fuser_forward", extra, counts)


def forward_compute(
    op: FusibleOperation,
    input_: Tensor,
    *,
    requires_grad: list[bool],
    extra_inputs: list[Tensors],
    kwargs: list[dict[str, Any]],
    counts: list[int],
) -> tuple[Tensor, list[Tensors], Any]:
    """Split style, first half: returns (output, extra outputs of each basic op, tensors to
    save)."""
    name = "fuser_forward_compute"
    keywords = _offer(op, name, extra_inputs, kwargs, requires_grad)
    if _delegates(op):
        basic = cast(BasicOperation, op)
        output, extra, to_save = BasicOperation.fuser_forward_compute(basic, input_, **keywords)
    else:
        found = op.fuser_forward_compute(input_, **keywords)
        output, extra, to_save = unpacked(op, name, found, "output, extra outputs, tensors to save")
    return output, _extra_outputs(op, name, extra, counts), to_save


def forward_save_ctx(
    op: FusibleOperation,
    ctxs: list[OperationContext],
    input_: Tensor,
    tensors_to_save: Any,
    *,
    requires_grad: list[bool],
    extra_inputs: list[Tensors],
    kwargs: list[dict[str, Any]],
) -> None:
    """Split style, second half: saves tensors in `ctxs`."""
    keywords = _offer(op, "fuser_forward_save_ctx", extra_inputs, kwargs, requires_grad)
    if _delegates(op):
        basic = cast(BasicOperation, op)
        BasicOperation.fuser_forward_save_ctx(basic, ctxs, input_, tensors_to_save, **keywords)
    else:
        op.fuser_forward_save_ctx(ctxs, input_, tensors_to_save, **keywords)


def backward(
    op: FusibleOperation,
    ctxs: list[OperationContext],
    grad_output: Tensor,
    *,
    grad_extra_outputs: list[Tensors],
    counts: list[int],
) -> tuple[Tensor | None, list[Tensors], list[Tensors]]:
    """Returns the gradients of (input, parameters of each basic op, extra inputs of each basic
    op)."""
    if op._python_backward == "op":
        basic = cast(BasicOperation, op)
        grads = BasicOperation.fuser_backward(
            basic, ctxs, grad_output, basic_op_grad_extra_outputs=grad_extra_outputs
        )
    else:
        grads = op.fuser_backward(ctxs, grad_output, basic_op_grad_extra_outputs=grad_extra_outputs)
    method = f"{op._python_backward}_backward"
    what = "input gradient, parameter gradients, extra-input gradients"
    grad_input, grad_parameters, grad_extra_inputs = unpacked(op, method, grads, what)
    parameters = _per_basic_op(op, method, "lists of parameter gradients", grad_parameters)
    extra = _per_basic_op(op, method, "lists of extra gradients", grad_extra_inputs)
    _check_gradient(op, "the input", grad_input)
    _check_counts(op, method, "gradients", extra, counts)
    _check_gradients(op, "a parameter", parameters)
    _check_gradients(op, "an extra input", extra)
    return grad_input, parameters, extra


def _check_gradients(op: FusibleOperation, what: str, lists: list[Tensors]) -> None:
    for tensors in lists:
        for gradient in tensors:
            _check_gradient(op, what, gradient)


def _check_gradient(op: FusibleOperation, what: str, gradient: Any) -> None:
    if gradient is None:
        return
    if type(gradient) is not Tensor and not is_tensor(gradient):
        raise RuntimeError(
            f"[{type(op).__name__}] {op._python_backward}_backward must return a tensor or None "
            f"as the gradient of {what}, got {shown(gradient)}"
        )
    if not is_compiling() and gradient.layout != strided:
        raise RuntimeError(
            f"[{type(op).__name__}] {op._python_backward}_backward must return a dense tensor or "
            f"None as the gradient of {what}, got one with layout {gradient.layout}"
        )


def forward_method(op: FusibleOperation, saves: bool = False) -> str:
    """The method of a Python forward that returns its outputs, or the one that saves tensors."""
    implementation = op._python_forward
    assert implementation is not None
    if implementation.style == "single":
        return single_name(implementation.family)
    return split_names(implementation.family)[saves]


def is_tensor(value: object) -> bool:
    """Whether it is a tensor, and no mock of one, for which isinstance() may be true, nor a
    parameter without memory, which raises whenever it is used."""
    kind = type(value)
    return kind is Tensor or (issubclass(kind, Tensor) and not is_lazy(cast(Tensor, value)))


def check_output(op: FusibleOperation, output: Any) -> Tensor:
    """Checks the main or an extra output of a Python forward. Raises RuntimeError unless it is a
    tensor."""
    if not is_tensor(output):
        raise RuntimeError(
            f"[{type(op).__name__}] {forward_method(op)} must return tensors, got {shown(output)}"
        )
    return output


def check_real(
    op: FusibleOperation, method: str, tensors: Iterable[Tensor | None], like: Tensor
) -> None:
    """Raises RuntimeError for a tensor without numbers, if `like` has them."""
    for tensor in tensors:
        if tensor is None or (type(tensor) is Tensor and not tensor.is_meta):
            continue
        if _has_no_numbers(tensor) and not _has_no_numbers(like):
            kind = type(tensor).__name__
            got = "a tensor on meta" if issubclass(Tensor, type(tensor)) else kind
            raise RuntimeError(
                f"[{type(op).__name__}] {method} must give tensors with numbers, got {got}"
            )


def _has_no_numbers(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)


def check_saved(op: FusibleOperation, tensors: Any) -> None:
    """Checks what a context is to save. Raises RuntimeError unless it is a tuple (or list) of
    tensors and None."""
    wrong = tensors
    if isinstance(tensors, _PLAIN_LISTS):
        for wrong in tensors:
            if not (wrong is None or is_tensor(wrong)):
                break
        else:
            return
    raise RuntimeError(
        f"[{type(op).__name__}] {forward_method(op, saves=True)} must save tensors or None, "
        f"got {shown(wrong)}"
    )


def _delegates(op: FusibleOperation) -> bool:
    # A subclass may override op_* over an inherited fuser_*: the most derived definition is used.
    return op._python_forward is not None and op._python_forward.family == "op"


def _offer(
    op: FusibleOperation,
    method: str,
    extra_inputs: list[Tensors],
    kwargs: list[dict[str, Any]],
    requires_grad: list[bool] | None = None,
) -> dict[str, Any]:
    offered = {
        "basic_op_extra_inputs": extra_inputs,
        "basic_op_kwargs": kwargs,
        "next_op_input_quantizer": None,
        "prev_op_grad_output_quantizer": None,
    }
    accepted = None if _delegates(op) else op._accepted_keywords[method]
    if accepted == KEYWORDS:
        return offered
    offered |= {"requires_grad": requires_grad} if accepted or requires_grad is not None else {}
    return {n: v for n, v in offered.items() if accepted is None or n in accepted}


def _extra_outputs(
    op: FusibleOperation, method: str, extra: Any, counts: list[int]
) -> list[Tensors]:
    outputs = _per_basic_op(op, method, "lists of extra outputs", extra)
    _check_counts(op, method, "outputs", outputs, counts)
    return outputs


def _check_counts(
    op: FusibleOperation, method: str, what: str, lists: list[Tensors], counts: list[int]
) -> None:
    if list(map(len, lists)) == counts:
        return
    for basic, tensors, count in zip(op.basic_ops, lists, counts, strict=True):
        if len(tensors) != count:
            raise RuntimeError(
                f"[{type(op).__name__}] {method} must return {count} extra {what} for "
                f"{type(basic).__name__}, got {len(tensors)}"
            )


def _per_basic_op(
    op: FusibleOperation,
    method: str,
    what: str,
    lists: Any,
) -> list[Tensors]:
    entries = lists if type(lists) in _PLAIN_LISTS else _entries(op, method, what, lists)
    found = [e if type(e) is tuple else _entries(op, method, what, e) for e in entries]
    count = len(op.basic_ops)
    if not found:
        return [()] * count
    if len(found) != count:
        raise RuntimeError(
            f"[{type(op).__name__}] {method} must return {count} {what}, one for each basic op, "
            f"got {len(found)}"
        )
    return found


def _entries(op: FusibleOperation, method: str, what: str, entries: Any) -> tuple[Any, ...]:
    if type(entries) in _PLAIN_LISTS:
        return tuple(entries)
    # Iterating over a tensor would give its rows.
    if isinstance(entries, Tensor) or not isinstance(entries, Iterable | None):
        raise RuntimeError(
            f"[{type(op).__name__}] {method} must return {what}, got {shown(entries)}"
        )
    return () if entries is None else tuple(entries)
