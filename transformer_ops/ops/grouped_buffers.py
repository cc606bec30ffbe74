"""A GroupedLinear that writes to tensors of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .. import _C
from ..op.names import WantedInputs, check_count
from ..quantization.state import STATE

__all__: list[str] = []

_PLAIN = (Tensor, nn.Parameter)
_ops = torch.ops.transformer_ops


class Buffers(NamedTuple):
    """Tensors that receive the output and, in backward, the gradient of the input."""

    output: Tensor | None = None
    grad_input: Tensor | None = None


def run_into(
    op: Any, input: Tensor, extra_inputs: tuple[Tensor, ...], given: dict[str, Any]
) -> Tensor:
    """One call of a GroupedLinear with the buffers `given`.

    Raises TypeError for another keyword argument and if a buffer is no plain tensor, ValueError if
    a buffer does not fit, and RuntimeError for options that need a plan.
    """
    buffers = Buffers(**_checked_names(op, given))
    names = " and ".join(op._extra_input_names())
    check_count(
        WantedInputs(type(op).__name__, op.num_extra_inputs, f" for {names}"), len(extra_inputs)
    )
    splits, scales = (*extra_inputs, None)[:2]
    weights, biases = _tensors_of(op, "weight"), _tensors_of(op, "bias")
    tensors = {"input": input, "splits": splits, "scales": scales}
    for name, given_tensors in (("weight", weights), ("bias", biases)):
        tensors |= dict(zip(op._names_in(name), given_tensors, strict=False))
    _check_setting(op, tensors)
    dtype = _compute_dtype(input, weights[0])
    input, *cast = (tensor.to(dtype) for tensor in (input, *weights, *biases))
    shape = (*input.shape[:-1], op.out_features)
    _check_buffer(op, "output", buffers.output, shape, dtype, tensors)
    _check_buffer(op, "grad_input", buffers.grad_input, input.shape, dtype, tensors)
    layout = Layout(len(weights), op.single_grouped_weight, op.single_grouped_bias)
    output: Tensor = _Into.apply(buffers, layout, input, splits, scales, *cast)
    return output


def _tensors_of(op: Any, name: str) -> list[Tensor]:
    names = op._names_in(name)
    found = [getattr(op, each) for each in names]
    if name == "bias" and all(tensor is None for tensor in found):
        return []
    for each, tensor in zip(names, found, strict=True):
        if tensor is None:
            raise RuntimeError(f"[{type(op).__name__}] {each} must be a tensor, got None")
    return found


class Layout(NamedTuple):
    """The number of parameters that are weights, and whether weights and biases are stacked."""

    weights: int
    single_weight: bool
    single_bias: bool


class _Into(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        buffers: Buffers,
        layout: Layout,
        input: Tensor,
        splits: Tensor,
        scales: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        count, *single = layout
        weights, biases = list(parameters[:count]), list(parameters[count:])
        with _written_into(buffers.output) as written:
            result = written(_ops.grouped_linear(input, splits, weights, biases, scales, *single))
        ctx.grad_input, ctx.single = buffers.grad_input, single
        wants_input, _, wants_scales, *needed = ctx.needs_input_grad[2:]
        wants_weight, wants_bias = any(needed[:count]), any(needed[count:])
        ctx.mask = [wants_input, wants_weight, wants_bias, wants_scales]
        ctx.counts = (len(weights), len(biases))
        ctx.kept = (len(weights) if wants_input else 0, len(biases) if wants_scales else 0)
        ctx.save_for_backward(
            input if wants_weight else None,
            splits,
            scales if wants_bias or wants_scales else None,
            *(weights if wants_input else ()),
            *(biases if wants_scales else ()),
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        input, splits, scales, *parameters = ctx.saved_tensors
        weights, biases = parameters[: ctx.kept[0]], parameters[ctx.kept[0] :]
        with _written_into(ctx.grad_input if ctx.mask[0] else None) as written:
            grad_input, grad_weights, grad_biases, grad_scales = _ops.grouped_linear_backward(
                grad_output, input, splits, weights, biases, scales, *ctx.single, ctx.mask
            )
            if ctx.mask[0]:
                grad_input = written(grad_input)
        wants_input, _, _, wants_scales = ctx.mask
        return (
            None,
            None,
            grad_input if wants_input else None,
            None,
            grad_scales if wants_scales else None,
            *(grad_weights or [None] * ctx.counts[0]),
            *(grad_biases or [None] * ctx.counts[1]),
        )


@contextmanager
def _written_into(buffer: Tensor | None) -> Iterator[Any]:
    """Makes the next typed op write its first result to the buffer. Yields a function to call on
    that result, which returns a tensor with the buffer's memory, whether the op could do that or
    not."""

    def written(result: Tensor) -> Tensor:
        if buffer is None:
            return result
        if result.data_ptr() != buffer.data_ptr():
            buffer.detach().copy_(result)
        torch.autograd.graph.increment_version(buffer)
        return buffer.detach()

    _C.write_next_result_into(buffer)
    try:
        yield written
    finally:
        _C.write_next_result_into(None)


def _checked_names(op: Any, given: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(given.keys() - set(Buffers._fields))
    if unknown:
        raise TypeError(
            f"[{type(op).__name__}] keyword arguments must be among output and grad_input, "
            f"got {unknown[0]!r}"
        )
    return given


def _check_setting(op: Any, tensors: dict[str, Tensor | None]) -> None:
    kind = type(op).__name__
    for flag in ("accumulate_into_main_grad", "delay_wgrad_compute"):
        if getattr(op, flag):
            raise RuntimeError(
                f"[{kind}] {flag} must be False where output or grad_input is given, got True"
            )
    if STATE.key is not None:
        raise RuntimeError(
            f"[{kind}] output and grad_input must be given outside of a recipe, got {STATE.key}"
        )
    for name, tensor in tensors.items():
        if tensor is not None and type(tensor) not in _PLAIN:
            raise TypeError(
                f"[{kind}] {name} must be a plain tensor where output or grad_input is given, "
                f"got a {type(tensor).__name__}"
            )


def _check_buffer(
    op: Any,
    name: str,
    buffer: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tensors: dict[str, Tensor | None],
) -> None:
    if buffer is None:
        return
    kind = type(op).__name__
    if type(buffer) not in _PLAIN:
        raise TypeError(f"[{kind}] {name} must be a plain tensor, got a {type(buffer).__name__}")
    device = tensors["input"].device  # type: ignore[union-attr]
    found = (tuple(buffer.shape), buffer.dtype, buffer.device)
    if found != (tuple(shape), dtype, device):
        raise ValueError(
            f"[{kind}] {name} must have shape {tuple(shape)}, {dtype}, on {device}, "
            f"got {found[0]}, {found[1]}, on {found[2]}"
        )
    if not buffer.is_contiguous():
        raise ValueError(f"[{kind}] {name} must be contiguous, got strides {buffer.stride()}")
    if buffer.requires_grad:
        raise ValueError(f"[{kind}] {name} must require no gradient, got one that does")
    memory = buffer.untyped_storage().data_ptr()
    for other, tensor in tensors.items():
        if tensor is not None and tensor.untyped_storage().data_ptr() == memory:
            raise ValueError(f"[{kind}] {name} must share no memory with {other}, got some")


def _compute_dtype(input: Tensor, weight: Tensor) -> torch.dtype:
    device = input.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocasts and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype
