"""What both directions of the Python walker share: values by name, and how an instruction runs."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .plan import Argument, Instruction, Step

# Tensors of one direction by their names in the plan.
Values = dict[str, Any]


def op_of(name: str) -> int:
    """The op index in a value's name, as in "dp3.weight"."""
    return int(name.partition(".")[0].lstrip("abcdefghijklmnopqrstuvwxyz"))


def arguments_of(steps: Iterable[Step]) -> list[str]:
    """The names that the instructions of the steps read, each once, in order."""
    names: dict[str, None] = {}
    for step in steps:
        for instruction in step.instructions:
            for argument in instruction.arguments:
                if isinstance(argument, str):
                    names[argument] = None
    return list(names)


def add(values: Values, name: str, tensor: Tensor | None) -> None:
    """Set a value; the gradients of several consumers of one channel add up."""
    if name.startswith("do") and values.get(name) is not None:
        tensor = values[name] if tensor is None else values[name] + tensor
    values[name] = tensor


def run(instruction: Instruction, values: Values) -> None:
    """Run one instruction on the values."""
    arguments = [_load(argument, values) for argument in instruction.arguments]
    results: Any
    if not instruction.target:
        results = (arguments[0],) * len(instruction.results)
    else:
        results = _call(instruction.target, arguments)
    for name, result in zip(instruction.results, results, strict=True):
        add(values, name, result)


@functools.cache
def has_into(target: str) -> bool:
    """Whether a typed op may put its weight gradient into a buffer."""
    return hasattr(torch.ops.transformer_ops, target + "_into")


def run_into(
    instruction: Instruction, values: Values, name: str, buffer: Tensor, overwrite: bool
) -> None:
    """Run one instruction whose result `name` goes into a buffer."""
    arguments = [_load(argument, values) for argument in instruction.arguments]
    results = _call(instruction.target + "_into", [*arguments, buffer, overwrite])
    names = [other for other in instruction.results if other != name]
    for other, result in zip(names, results, strict=True):
        add(values, other, result)


def cast_for(step: Step, values: Values, main: str | None) -> Values:
    """The values as the step reads them: its input and parameters in its compute dtype. A copy
    where it casts any."""
    if step.compute is None:
        return values
    cast, wanted = dict(values), dtype(step.compute)
    for name in arguments_of([step]):
        is_parameter = name.startswith("p") or name.endswith((".weight", ".bias"))
        is_parameter = is_parameter and op_of(name) in step.ops
        if name == main or (step.cast_parameters and is_parameter and cast.get(name) is not None):
            cast[name] = cast[name].to(wanted)
    return cast


def dtype(name: str) -> torch.dtype:
    """The dtype of a plan's word for it."""
    found: torch.dtype = getattr(torch, name)
    return found


def place(tensors: list[Tensor], tensor: Tensor | None) -> int | None:
    """The position at which a tensor is saved, each once."""
    if tensor is None:
        return None
    for position, other in enumerate(tensors):
        if other is tensor:
            return position
    tensors.append(tensor)
    return len(tensors) - 1


def _call(target: str, arguments: list[Any]) -> tuple[Tensor, ...]:
    results = _target(target)(*arguments)
    return results if isinstance(results, tuple) else (results,)


def _target(name: str) -> Any:
    if name.startswith("aten::"):
        return getattr(torch.ops.aten, name.removeprefix("aten::")).default
    return getattr(torch.ops.transformer_ops, name).default


def _load(argument: Argument, values: Values) -> Any:
    if isinstance(argument, str):
        return values[argument]
    return argument[0] if argument is not None else None
