"""C++ libraries of ops: loads them, and registers the autograd of typed ops for direct callers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import _C
from .base.locks import new_lock
from .reports import flops

_registered: set[str] = set()
_lock = new_lock()


def load_library(path: str | os.PathLike[str]) -> str:
    """Load a shared library of ops and fusions, at any time; docs/cpp-extension.md shows one.

    Its typed ops are `torch.ops.<name>.*`; its kinds and rules are called `<name>::...`. Modules
    plan again, and a compiled graph is recompiled if a rule was added. Loading the same file again
    does nothing.

    Returns:
        The library's name.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the file is no library of ops, cannot be loaded, or was built for another torch
            or transformer_ops; a name is taken; a declaration or rule is wrong. Nothing is
            registered.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"[load_library] path must be a file, got {str(path)!r}")
    name = _C.load_library(str(file.resolve()))
    flops.register()
    return name


def register() -> None:
    """Calls `torch.library.register_autograd` for every typed op that has no autograd yet.

    C++ calls it before the first gradient of each op. It takes as long as the other imports
    together, most programs call no typed op, and a library may add more later.
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
    """Makes C++ call `register` when needed, and FLOP counters find the formulas."""
    _C.set_autograd_maker(register)
    flops.register()


def _overload(name: str) -> Any:
    namespace, _, base = _full(name).partition("::")
    return getattr(getattr(torch.ops, namespace), base).default


def _full(name: str) -> str:
    return name if "::" in name else f"transformer_ops::{name}"


def _register_pair(forward: str, backward: str) -> None:
    """Registers a backward. The schemas name its arguments, results, and grad_<result>."""
    arguments = [argument.name for argument in _overload(forward)._schema.arguments]
    results = [result.name for result in _overload(forward)._schema.returns]
    wanted = [argument.name for argument in _overload(backward)._schema.arguments]
    given = [result.name.removeprefix("grad_") for result in _overload(backward)._schema.returns]
    constants = _C.constants_of(forward)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        # torch adds an argument of its own behind them.
        for name, needed in zip(arguments, ctx.needs_input_grad, strict=False):
            if needed and name in constants:
                raise RuntimeError(
                    f"[{forward}] {name} must not require a gradient, got one that does"
                )
        outputs = output if isinstance(output, tuple) else (output,)
        values = dict(zip((*arguments, *results), (*inputs, *outputs), strict=True))
        kept = {n: v for n, v in values.items() if n in wanted}
        leaves, ctx.spec = tree_flatten(kept)
        _save(ctx, leaves)
        # The other results are only for this backward.
        rest = zip(results, outputs, strict=True)
        ctx.mark_non_differentiable(*(o for name, o in rest if f"grad_{name}" not in wanted))

    def backward_function(ctx: Any, *grads: Tensor | None) -> Any:
        values = tree_unflatten(_saved(ctx), ctx.spec)
        values |= {f"grad_{name}": grad for name, grad in zip(results, grads, strict=True)}
        values.setdefault("grad_output", None)  # None if the op passes its input through
        if "output_mask" in wanted:
            mask = (_any(ctx.needs_input_grad[arguments.index(name)]) for name in given)
            values["output_mask"] = list(mask)
        returned = _overload(backward)(*[values[name] for name in wanted])
        found = returned if isinstance(returned, tuple) else (returned,)
        by_name = dict(zip(given, found, strict=True))
        # A gradient that needs no computation is that of the output.
        for name in ("input", "extra_input"):
            by_name.setdefault(name, values["grad_output"])
        return tuple(
            _needed(by_name.get(name), needed)
            for name, needed in zip(arguments, ctx.needs_input_grad, strict=True)
        )

    torch.library.register_autograd(_full(forward), backward_function, setup_context=setup_context)


def _register_unfused(name: str) -> None:
    """Gradients through the decomposition, for fused ops without a backward and for backward
    ops."""
    is_forward = _overload(name)._schema.returns[0].name == "output"

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        leaves, ctx.spec = tree_flatten(list(inputs))
        _save(ctx, leaves)
        if is_forward and isinstance(output, tuple):
            # The other results are only for a backward.
            ctx.mark_non_differentiable(*output[1:])

    def backward_function(ctx: Any, *grads: Any) -> Any:
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = [_input_of(v) if isinstance(v, Tensor) else v for v in _saved(ctx)]
            results = _C.decomposition(name, tuple(tree_unflatten(leaves, ctx.spec)))
            given = [g for grad in grads for g in (grad if isinstance(grad, list) else [grad])]
            pairs = [
                (result, grad)
                for result, grad in zip(results, given, strict=False)
                if result is not None and grad is not None and result.requires_grad
            ]
            inputs = [v for v in leaves if isinstance(v, Tensor) and v.requires_grad]
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
        by_leaf = [
            next(found) if isinstance(v, Tensor) and v.requires_grad else None for v in leaves
        ]
        # A list of flags or sizes has one gradient, which is None.
        values = tree_unflatten(leaves, ctx.spec)
        by_argument = tree_unflatten(by_leaf, ctx.spec)
        return tuple(
            grads if _is_tensor_list(value) or isinstance(value, Tensor) else None
            for value, grads in zip(values, by_argument, strict=True)
        )

    torch.library.register_autograd(_full(name), backward_function, setup_context=setup_context)


def _save(ctx: Any, leaves: list[Any]) -> None:
    """Saves tensors with autograd, and stores other values directly."""
    ctx.places = [i for i, value in enumerate(leaves) if isinstance(value, Tensor)]
    ctx.constants = [None if isinstance(value, Tensor) else value for value in leaves]
    ctx.save_for_backward(*[leaves[i] for i in ctx.places])


def _saved(ctx: Any) -> list[Any]:
    leaves = list(ctx.constants)
    for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
        leaves[place] = tensor
    return leaves


def _is_tensor_list(value: Any) -> bool:
    # torch also treats an empty list as a list of tensors.
    return isinstance(value, list) and all(isinstance(item, Tensor) for item in value)


def _any(needed: Any) -> bool:
    return any(needed) if isinstance(needed, list) else bool(needed)


def _needed(grad: Any, needed: Any) -> Any:
    """The gradients that are needed, for an argument or for each tensor in its list."""
    if not isinstance(needed, list):
        return grad if needed else None
    given = grad if any(needed) else [None] * len(needed)
    return [g if is_needed else None for g, is_needed in zip(given, needed, strict=True)]


def _input_of(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    # The view makes the inner gradient stop here.
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
