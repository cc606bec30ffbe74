"""Plans with Python steps under torch.compile: either one node of Dynamo's graph, which AOTAutograd
traces through, or a graph break."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..base.handles import handles
from ..base.marks import constant
from ..op.base import BasicOperation
from ..op.methods import single_name, split_names
from ..runtime.host import HostPlan, Kwargs, check_kwargs
from ..runtime.main_grad import Buffer
from ..runtime.main_grad import number_of as number_of_buffer
from ..runtime.stand_ins import StandIns

# The index of a basic op, and the path of a tensor on it.
Place = tuple[int, str]
_PLAIN = (bool, int, float, complex, str, torch.dtype, type(None))


def number_of(plan: HostPlan) -> int:
    """The number by which `run_in_graph` finds a plan; -1 if it needs a graph break."""
    if obstacle(plan):
        return -1
    if plan.number is None:
        plan.number = handles.add(plan)
    return plan.number


def obstacle(plan: HostPlan) -> str:
    """The reason why a plan needs a graph break; empty if it needs none."""
    # A gradient that is computed later is not an output of the graph.
    if plan.delaying and plan.plan.needs_backward:
        name = type(plan.basic_ops[plan.delaying[0]]._parameter_owner).__name__
        return (
            f"[{name}] delay_wgrad_compute must be False in a compiled graph with a backward, "
            "got True"
        )
    # A method in the single style may do anything, and its writes to the context cannot be
    # separated.
    for step in plan.forward_steps:
        found = step.op._python_forward
        if found is not None and found.style == "single":
            compute, save = split_names(found.family)
            return (
                f"[{type(step.op).__name__}] forward must be the split pair {compute} and {save} "
                f"in a compiled graph, got the single method {single_name(found.family)}"
            )
    for step in plan.steps:
        name = type(step.op).__name__
        # A fused op is not part of a module, so its tensors would become constants.
        path = next(_tensor_paths(step.op), None) if step.op.is_fused_op else None
        if path is not None:
            return (
                f"[{name}] a fused op must leave its tensors to its basic ops in a compiled graph, "
                f"got its own {path}"
            )
        for basic in step.op.basic_ops:
            parametrizations = getattr(basic._parameter_owner, "parametrizations", None)
            if parametrizations is not None:
                return (
                    f"[{name}] the parameters of a Python step must not be parametrized in a "
                    f"compiled graph, got parametrizations of {', '.join(parametrizations)}"
                )
    return ""


@constant
def accumulating(number: int) -> tuple[tuple[int, int, int], ...]:
    """For each weight that accumulates: its op, the index of its tensor, and its position among all
    parameters."""
    plan: HostPlan = handles.find(number)
    for op in plan.accumulating:
        for weight in plan.weights_of(op):
            # The numbers are assigned before the trace reads them.
            if getattr(weight, "overwrite_main_grad", False) and hasattr(weight, "main_grad"):
                number_of_buffer(weight.main_grad)
    counts = [len(op._parameter_tensors()) for op in plan.basic_ops]
    return tuple(
        (op, k, sum(counts[:op]) + k)
        for op in plan.accumulating
        for k in range(len(plan.weight_names[op]))
    )


@constant
def state_places(number: int) -> tuple[Place, ...]:
    """The tensors other than parameters that Python ops may read from themselves."""
    plan: HostPlan = handles.find(number)
    return tuple(
        (i, path)
        for i, op in enumerate(plan.basic_ops)
        if op.is_python
        for path in _tensor_paths(op)
    )


@constant
def plain_state(number: int) -> tuple[tuple[Place, Any], ...]:
    """The plain values of Python ops, which become constants of a trace."""
    plan: HostPlan = handles.find(number)
    found = _plain_state(plan).items()
    return tuple((place, v) for place, v in found if place not in plan.changed_by_tracing)


def _tensor_paths(op: nn.Module) -> Iterator[str]:
    for start, module in _parts(op):
        yield from (start + name for name, buffer in module._buffers.items() if buffer is not None)
        yield from (start + name for name, v in vars(module).items() if isinstance(v, Tensor))


def _plain_state(plan: HostPlan) -> dict[Place, Any]:
    return {
        (i, start + name): value
        for i, op in enumerate(plan.basic_ops)
        if op.is_python
        for start, module in _parts(op)
        for name, value in vars(module).items()
        # NaN is not equal to itself.
        if not name.startswith("_") and isinstance(value, _PLAIN) and value == value
    }


def _parts(op: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in op.named_modules():
        yield prefix + "." if prefix else "", module


def read(ops: Sequence[BasicOperation], place: Place) -> Any:
    """The value at a place now."""
    found: Any = ops[place[0]]
    for name in place[1].split("."):
        found = getattr(found, name)
    return found


@contextmanager
def unchanged(plan: HostPlan, stand_ins: StandIns) -> Iterator[None]:
    """Removes the tensors of a trace that Python ops assign to their modules in this scope. Raises
    RuntimeError if one is not the result of an operation in place."""
    dicts = [
        (type(step.op).__name__, own)
        for step in plan.steps
        for op in (step.op, *step.op.basic_ops)
        for _, module in _parts(op)
        for own in (vars(module), module._buffers, module._parameters)
    ]
    before = [dict(own) for _, own in dicts]
    lost = ""
    try:
        yield
    finally:
        for (name, own), old in zip(dicts, before, strict=True):
            for key, value in list(own.items()):
                if not isinstance(value, Tensor) or value is old.get(key):
                    continue
                if value is not stand_ins.replace(old.get(key)):
                    lost = f"[{name}] {key}"
                if key in old:
                    own[key] = old[key]
                else:
                    del own[key]
    if lost:
        raise RuntimeError(
            f"{lost} must be a buffer that is changed in place in a compiled graph, as by "
            "copy_(), got an assignment of another tensor"
        )


def run_in_graph(
    number: int,
    tensors: Sequence[Tensor],
    state: Sequence[Tensor],
    kwargs: Kwargs,
    buffers: Sequence[tuple[int, int, Tensor, bool, int | None]],
) -> tuple[Tensor, ...]:
    """Runs a plan with the tensors of a trace instead of those of its ops.

    `buffers`: (op, index of the weight's tensor, main_grad, whether it is overwritten, its number
    then) for each weight that accumulates.
    """
    plan: HostPlan = handles.find(number)
    check_kwargs(plan.basic_ops, kwargs)
    rows = [op._parameter_tensors() for op in plan.basic_ops]
    parameters = [tensor for row in rows for tensor in row if tensor is not None]
    real = [*parameters, *(read(plan.basic_ops, place) for place in state_places(number))]
    end = len(tensors) - len(plan.plan.states)
    given = [*tensors[end - len(parameters) : end], *state]
    before = _plain_state(plan)
    found = {(op, k): Buffer(tensor, overwrites, n) for op, k, tensor, overwrites, n in buffers}
    stand_ins = StandIns(real, given, is_trace=True)
    with unchanged(plan, stand_ins):
        outputs = plan.program.run(list(tensors), plan.start(kwargs, stand_ins, found))
    after = _plain_state(plan)
    # A method that counts its calls would be traced again at each call.
    plan.changed_by_tracing.update(
        place for place in before.keys() | after.keys() if before.get(place) != after.get(place)
    )
    return tuple(outputs)
