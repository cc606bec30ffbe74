"""Autograd of the typed ops: one loop over the declarations, for users who call them directly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _C
from .locks import new_lock

_registered: set[str] = set()
_lock = new_lock()


def register() -> None:
    """Calls `torch.library.register_autograd` for every typed op that has no autograd yet.

    C++ calls it again before the first gradient of an op, which a library may have brought later.
    """
    with _lock:
        for forward, backward in _C.typed_op_pairs():
            if forward in _registered:
                continue
            if backward:
                _register_pair(forward, backward)
            else:
                _register_unfused(forward)
            _registered.add(forward)


def listen() -> None:
    """Has C++ call `register` for typed ops of libraries that are loaded later."""
    _C.set_autograd_maker(register)


def _overload(name: str) -> Any:
    return getattr(torch.ops.transformer_ops, name).default


def _register_pair(forward: str, backward: str) -> None:
    """The schemas name what backward takes: arguments, results, and grad_<result>."""
    arguments = [argument.name for argument in _overload(forward)._schema.arguments]
    results = [result.name for result in _overload(forward)._schema.returns]
    wanted = [argument.name for argument in _overload(backward)._schema.arguments]
    given = [result.name.removeprefix("grad_") for result in _overload(backward)._schema.returns]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        values = dict(zip((*arguments, *results), (*inputs, *outputs), strict=True))
        tensors = {n: v for n, v in values.items() if n in wanted and isinstance(v, Tensor)}
        ctx.names = list(tensors)
        ctx.constants = {n: v for n, v in values.items() if n in wanted and n not in tensors}
        ctx.save_for_backward(*tensors.values())
        # The other results serve this backward only.
        ctx.mark_non_differentiable(*outputs[1:])

    def backward_function(ctx: Any, *grads: Tensor | None) -> Any:
        values = dict(zip(ctx.names, ctx.saved_tensors, strict=True)) | ctx.constants
        values |= {f"grad_{name}": grad for name, grad in zip(results, grads, strict=True)}
        if "output_mask" in wanted:
            values["output_mask"] = [ctx.needs_input_grad[arguments.index(name)] for name in given]
        returned = _overload(backward)(*[values[name] for name in wanted])
        found = returned if isinstance(returned, tuple) else (returned,)
        by_name = dict(zip(given, found, strict=True))
        # A gradient that needs no computation is the output's own.
        for name in ("input", "extra_input"):
            by_name.setdefault(name, values["grad_output"])
        return tuple(
            by_name.get(name) if needed else None
            for name, needed in zip(arguments, ctx.needs_input_grad, strict=True)
        )

    torch.library.register_autograd(
        f"transformer_ops::{forward}", backward_function, setup_context=setup_context
    )


def _register_unfused(name: str) -> None:
    """Gradients through the unfused meaning: fused ops without a backward, and backward ops."""
    is_forward = _overload(name)._schema.returns[0].name == "output"

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.constants = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*[inputs[i] for i in ctx.places])
        if is_forward and isinstance(output, tuple):
            # The other results serve a backward only.
            ctx.mark_non_differentiable(*output[1:])

    def backward_function(ctx: Any, *grads: Tensor | None) -> Any:
        values = list(ctx.constants)
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            tensors = [_input_of(tensor) for tensor in ctx.saved_tensors]
            for place, tensor in zip(ctx.places, tensors, strict=True):
                values[place] = tensor
            results = _C.unfused(name, tuple(values))
            pairs = [
                (result, grad)
                for result, grad in zip(results, grads, strict=False)
                if result is not None and grad is not None and result.requires_grad
            ]
            inputs = [tensor for tensor in tensors if tensor.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [result for result, _ in pairs],
                    inputs,
                    [grad for _, grad in pairs],
                    create_graph=create_graph,
                    allow_unused=True,
                )
                if pairs
                else [None] * len(inputs)
            )
        by_place = {
            place: next(found) if tensor.requires_grad else None
            for place, tensor in zip(ctx.places, tensors, strict=True)
        }
        return tuple(by_place.get(i) for i in range(len(values)))

    torch.library.register_autograd(
        f"transformer_ops::{name}", backward_function, setup_context=setup_context
    )


def _input_of(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    # A view, so that the inner gradient stops at it.
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
