"""The part of a group that Dynamo sees: plain tensors, constants, and one op or Python steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.compiler import is_exporting

from .. import _C
from .._loader import build_digest
from ..base import guard_groups
from ..base.handles import handles
from ..base.marks import Reason, constant, disabled
from ..fusion import registry
from ..op.base import BasicOperation, FusibleOperation
from ..op.names import WantedInputs, check_count
from ..op.tensor_parallel import is_dtensor, local_parameter
from ..quantization.quantized_tensor import QuantizedTensor, with_parts
from ..quantization.scales import has_scales
from ..quantization.second_run import check_traced_call
from ..quantization.state import COMPILED as COMPILED_RECIPE
from ..quantization.state import STATE as RECIPE_STATE
from ..runtime.layout import Segment, group_of_members
from ..runtime.main_grad import is_marked, traced_buffer_of
from .graph import (
    accumulating,
    number_of,
    obstacle,
    plain_state,
    read,
    run_in_graph,
    state_places,
)

# For each tensor: (dtype, requires_grad, format if it is quantized); None if it is None.
TensorFacts = tuple[torch.dtype, bool, str | None] | None
# (grad enabled, autocast dtype, device type, tensors, training flags, formats of a recipe)
Facts = tuple[bool, torch.dtype | None, str, tuple[TensorFacts, ...], tuple[bool, ...], str | None]
# Each name on the way from a global to an object is a guard of a compiled graph.
_run_plan = torch.ops.transformer_ops.run_plan.default
_run_plan_by_passes = torch.ops.transformer_ops.run_plan.by_passes
_run_plan_unfused = torch.ops.transformer_ops.run_plan_unfused
# The reason why the call that is being traced leaves the graph.
_reason = Reason()


@constant
def _exports_to_onnx() -> bool:
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and bool(onnx.is_in_onnx_export())


class Reads(NamedTuple):
    """What a call of a group reads from its modules, which are given by index."""

    parameters: tuple[tuple[int, str], ...]
    distributed: tuple[bool, ...]  # for each parameter: is it a DTensor?
    formats: tuple[str | None, ...]  # for each parameter: the format if it is quantized
    absent: tuple[tuple[int, str], ...]  # parameters that are None
    training: tuple[int | None, ...]  # the modules whose training flag a basic op reads


def traced_call(
    state: str,
    modules: Sequence[FusibleOperation],
    input: Tensor,
    extra_inputs: tuple[Tensor | None, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    """The call of a group of these modules as Dynamo sees it: plain tensors, and one op or Python
    steps. Each function that a trace calls is several guards, so the steps of most calls are here,
    and those of rare ones are functions of their own."""
    # What is read: parameters and training flags.
    reads = _reads_constant(state)
    if reads is None:
        parameters, formats, training = _read_all(modules)
    else:
        formats = reads.formats
        parameters = [getattr(modules[i], name) for i, name in reads.parameters]
        if any(reads.distributed):
            parameters = _local_tensors(modules, reads, parameters)
        training = tuple(i is not None and modules[i].training for i in reads.training)
        for i, name in reads.absent:
            if getattr(modules[i], name) is not None:
                _fail_for_absent(modules[i], name)
    for tensor in parameters:
        if not isinstance(tensor, Tensor):
            check_parameters(_basic_ops(modules))
            break

    # The key of the plan.
    device = input.device.type
    autocast = None
    if _has_autocast(device) and is_autocast_enabled(device):
        autocast = get_autocast_dtype(device)
    plain = (None,) * (1 + len(extra_inputs))
    dtypes = tuple(
        None if tensor is None else (tensor.dtype, tensor.requires_grad, format)
        for tensor, format in zip(
            [input, *extra_inputs, *parameters], (*plain, *formats), strict=True
        )
    )
    recipe = RECIPE_STATE.key if RECIPE_STATE.is_traced else COMPILED_RECIPE.key
    facts = (is_grad_enabled(), autocast, device, dtypes, training, recipe)
    members: tuple[str, ...] = ()
    if recipe is not None and (_keeps_scales(recipe) or _asks_modules(recipe)):
        # Planning creates the buffers of these very modules, or passes the modules to the user's
        # recipe.
        members = tuple([module._traced_number for module in modules])
    text = _native_plan(state, members, registry.VERSION, facts)

    # What the plan takes: tensors, codes and scales of quantized ones, and states.
    extra = [tensor for tensor in extra_inputs if tensor is not None]
    given = [tensor for tensor in parameters if tensor is not None]
    if any(formats):
        given = with_parts(parameters)
    if recipe is not None and _keeps_scales(recipe):
        states = _states_of(state, members, registry.VERSION, facts)
        if any(i < 0 for i, _ in states):
            _because_of_scales(state, members, states)
            return _run_outside(state, members, input, extra_inputs, kwargs)
        own = [getattr(modules[i], name) for i, name in states]
        # An exported program may not write to its constants, and no region updates their scales.
        given = [*given, *(map(torch.clone, own) if is_exporting() else own)]

    # The road: one op for a native plan, else Python steps.
    is_native = text and not (kwargs and any(kwargs))
    if is_exporting() and _exports_to_onnx():
        outputs = _run_for_onnx(text if is_native else "", input, extra, given)
    elif is_native:
        # An exported program shows single ops to the compilers that run it.
        run_plan = _run_plan if is_exporting() else _run_plan_by_passes
        outputs = tuple(run_plan(text, input, extra, given))
    else:
        return _traced_steps(
            state, modules, input, extra_inputs, kwargs, parameters, formats, facts, given
        )
    return outputs[0] if len(outputs) == 1 else outputs


def _read_all(
    modules: Sequence[FusibleOperation],
) -> tuple[list[Any], tuple[str | None, ...], tuple[bool, ...]]:
    """Parameters, formats of quantized ones, and training flags of a group that nobody has asked
    for its reads."""
    ops = _basic_ops(modules)
    parameters = [tensor for op in ops for tensor in op._parameter_tensors()]
    formats = tuple(
        tensor.format if isinstance(tensor, QuantizedTensor) else None for tensor in parameters
    )
    return parameters, formats, tuple(op.training for op in ops)


def _local_tensors(
    modules: Sequence[FusibleOperation], reads: Reads, parameters: list[Any]
) -> list[Any]:
    return [
        local_parameter(modules[i], name, tensor) if is_distributed else tensor
        for (i, name), tensor, is_distributed in zip(
            reads.parameters, parameters, reads.distributed, strict=True
        )
    ]


def _fail_for_absent(module: FusibleOperation, name: str) -> None:
    raise RuntimeError(
        f"[{type(module).__name__}] {name} must be assigned to the module, "
        "got a tensor that was put in its place (torch.func.functional_call)"
    )


def _run_for_onnx(
    text: str, input: Tensor, extra: list[Tensor], given: list[Tensor]
) -> tuple[Tensor, ...]:
    if not text:
        raise NotImplementedError(
            "[Sequential] torch.onnx.export must run over native ops only, got a Python op or "
            "keyword arguments for one; an nn.Module with the same forward is exported"
        )
    # ONNX has no op for our typed ops.
    return tuple(_run_plan_unfused(text, input, extra, given))


def _traced_steps(
    state: str,
    modules: Sequence[FusibleOperation],
    input: Tensor,
    extra_inputs: tuple[Tensor | None, ...],
    kwargs: list[dict[str, Any]] | None,
    parameters: list[Any],
    formats: tuple[str | None, ...],
    facts: Facts,
    given: list[Tensor],
) -> Any:
    """A plan with Python steps: inside the graph, or outside of it with the reason why."""
    # Other modules in the same state need another graph, so Dynamo guards on the numbers.
    members = tuple([module._traced_number for module in modules])
    plan = _python_plan(state, members, registry.VERSION, facts)
    if plan < 0:
        _because_of_plan(state, members, registry.VERSION, facts)
        return _run_outside(state, members, input, extra_inputs, kwargs)
    basic_ops = _basic_ops(modules)
    if any(format is not None for format in formats):
        # In a Python step, a parameter is replaced by one tensor.
        _because_of_formats(plan, formats)
        return _run_outside(state, members, input, extra_inputs, kwargs)
    for state_place, value in plain_state(plan):
        # This is never true during tracing, but Dynamo guards on it.
        if read(basic_ops, state_place) != value:
            _because_of_value(plan, state_place)
            return _run_outside(state, members, input, extra_inputs, kwargs)
    current = [read(basic_ops, state_place) for state_place in state_places(plan)]
    own = kwargs if kwargs is not None else [{} for _ in basic_ops]
    buffers = []
    for op, k, position in accumulating(plan):
        weight = parameters[position]
        if not (is_grad_enabled() and weight.requires_grad):
            continue
        if is_marked(weight):
            # Only a backward that runs in Python can set the mark.
            _because_of_mark(plan, op)
            return _run_outside(state, members, input, extra_inputs, kwargs)
        buffers.append((op, k, *traced_buffer_of(weight, basic_ops[op], k)))
    extra = [tensor for tensor in extra_inputs if tensor is not None]
    outputs = run_in_graph(plan, [input, *extra, *given], current, own, buffers)
    return outputs[0] if len(outputs) == 1 else outputs


def _basic_ops(modules: Sequence[FusibleOperation]) -> list[BasicOperation]:
    return [op for module in modules for op in module.basic_ops]


def traced_segment(
    segment: Segment,
    modules: list[Any],
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    """The call of a group of a Sequential as Dynamo sees it."""
    # If Dynamo left the caller to Python, it may trace this frame with the groups themselves.
    state = segment.group_state if segment.group is None else segment.group._traced_state
    assert state is not None
    return traced_call(state, modules, input, extra_inputs, kwargs)


def traced_group(
    state: str,
    modules: Sequence[FusibleOperation],
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    """The call of a single OperationFuser as Dynamo sees it."""
    wanted, optional, is_split = _group_in(state)
    if is_split:
        _because_of_members(state)
        return _call_outside(state, input, extra_inputs, kwargs)
    check_call(wanted, optional, input, extra_inputs)
    return traced_call(state, modules, input, extra_inputs, kwargs)


def traced_alone(
    op: FusibleOperation, input: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> Any:
    """The call of a single op as Dynamo sees it."""
    given = [kwargs] if kwargs else None
    return traced_group(op._traced_state, (op,), input, extra_inputs, given)


# A group is found by its state, because groups in the same state are interchangeable. If they are
# not, it is found also by the numbers of its members.


def _find_group(state: str, members: tuple[str, ...] = ()) -> Any:
    if not members:
        return guard_groups.find(state)[0]
    return group_of_members(state, [handles.find(int(number)) for number in members])


@constant
def _group_in(state: str) -> tuple[WantedInputs, tuple[bool, ...], bool]:
    group = _find_group(state)
    return group._wanted, group._optional, group._is_split()


@constant
def _reads_constant(state: str) -> Reads | None:
    reads: Reads | None = _find_group(state)._reads()
    return reads


# Each function gives the reason why the call of a disabled function after it leaves the graph.


def _owner_name(plan: int, op: int) -> str:
    return type(handles.find(plan).basic_ops[op]._parameter_owner).__name__


@constant
def _because_of_scales(
    state: str, members: tuple[str, ...], states: tuple[tuple[int, str], ...]
) -> None:
    group = _find_group(state, members)
    name = next(name.removeprefix("_call_") for place, name in states if place < 0)
    owners = [op._parameter_owner for op in group._basic_ops]
    owner = next(filter(has_scales, owners))
    _reason.text = (
        f"[{type(owner).__name__}] a module with scales must be called itself in a compiled graph, "
        f"got its basic ops, which do not hold {name}"
    )


@constant
def _because_of_plan(state: str, members: tuple[str, ...], version: int, facts: Facts) -> None:
    _reason.text = obstacle(_find_group(state, members)._entry(facts).host)


@constant
def _because_of_formats(plan: int, formats: tuple[str | None, ...]) -> None:
    steps = handles.find(plan).steps
    name = type(steps[0].op).__name__ if steps else _owner_name(plan, 0)
    format = next(format for format in formats if format is not None)
    _reason.text = (
        f"[{name}] weights must be plain in a compiled graph with Python steps or main_grad, "
        f"got one in the format {format}"
    )


@constant
def _because_of_value(plan: int, place: tuple[int, str]) -> None:
    op, path = place
    _reason.text = (
        f"[{_owner_name(plan, op)}] {path} must be set outside of compiled code, "
        "got another value within it"
    )


@constant
def _because_of_mark(plan: int, op: int) -> None:
    _reason.text = (
        f"[{_owner_name(plan, op)}] weight must have no grad_added_to_main_grad in a compiled "
        "graph, got one: only a backward outside of the graph can set it"
    )


@constant
def _because_of_members(state: str) -> None:
    _reason.text = _find_group(state)._why_split()


@disabled(_reason)
def _call_outside(
    state: str,
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    return _find_group(state)(input, *extra_inputs, basic_op_kwargs=kwargs)


@disabled(_reason)
def _run_outside(
    state: str,
    members: tuple[str, ...],
    input: Tensor,
    extra_inputs: tuple[Tensor | None, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    return _find_group(state, members)._run(input, extra_inputs, kwargs)


@constant
def _native_plan(state: str, members: tuple[str, ...], version: int, facts: Facts) -> str:
    check_traced_call()
    group = _find_group(state, members)
    if len(facts[3]) != 1 + group.num_extra_inputs + sum(group._num_parameters):
        group._capture()
    entry = group._entry(facts)
    if not entry.native:
        return ""
    # Torch caches compiled code on disk, by the graph with this text in it. Another build of ours
    # may decompose the same plan into other ops, so the text of a graph names the build. An
    # exported program runs with any build.
    return str(entry.text) if is_exporting() else f"{entry.text}# build {build_digest()}\n"


def _keeps_scales(recipe: str) -> bool:
    return "delayed" in recipe


def _asks_modules(recipe: str) -> bool:
    return recipe.startswith("custom ")


@constant
def _states_of(
    state: str, members: tuple[str, ...], version: int, facts: Facts
) -> tuple[tuple[int, str], ...]:
    """The states of the plan: the module, and the attribute with the state of a call."""
    found = _find_group(state, members)._state_places(facts)
    return tuple((place, f"_call_{name}") for place, name in found)


@constant
def _python_plan(state: str, members: tuple[str, ...], version: int, facts: Facts) -> int:
    # A trace needs the plan before it gets to the call.
    torch.compiler.allow_in_graph(run_in_graph)
    return number_of(_find_group(state, members)._entry(facts).host)


@constant
def _has_autocast(device: str) -> bool:
    """False for example for the meta device. Dynamo of torch 2.11 cannot trace this call."""
    return torch.amp.is_autocast_available(device)


def _optional_tensors(op: BasicOperation) -> tuple[str, ...]:
    """The tensors of parameters, and the extra inputs, that may be None."""
    # This reads the class, because reading the instance would be a guard. All kinds of a class have
    # the same tensors.
    kind = op._kinds[0] if op._kinds else None
    return tuple(name for one in _optional(kind) for name in op._names_in(one))


@constant
def _optional(kind: str | None) -> tuple[str, ...]:
    return () if kind is None else tuple(_C.declaration(kind)["optional"])


# This is here because traced calls need it: each module on the way to a function is a guard.


def check_call(
    wanted: WantedInputs,
    optional: tuple[bool, ...],
    input: Tensor,
    extra_inputs: tuple[Tensor | None, ...],
) -> None:
    """Raises ValueError for a wrong number of extra inputs, and TypeError for an input that is no
    tensor.

    `optional`: for each extra input, whether it may be None.
    """
    check_count(wanted, len(extra_inputs))
    for tensor, may_be_none in zip((input, *extra_inputs), (False, *optional), strict=True):
        if not (isinstance(tensor, Tensor) or (tensor is None and may_be_none)):
            raise TypeError(
                f"[{wanted.caller}] inputs must be tensors, got {type(tensor).__name__}"
            )
        # Dynamo would wrap each entry of the table of modules that `is_dtensor` reads.
        if type(tensor) is not Tensor and is_dtensor(tensor):
            raise TypeError(
                f"[{wanted.caller}] inputs must be local tensors, got a DTensor; call its "
                "to_local()"
            )


def check_parameters(basic_ops: Sequence[BasicOperation]) -> None:
    """Raises TypeError if a parameter of a native op is no tensor."""
    for op in basic_ops:
        for name, tensor in zip(op._tensor_names(), op._parameter_tensors(), strict=False):
            if tensor is None and name in _optional_tensors(op):
                continue
            if not isinstance(tensor, Tensor):
                owner = type(op._parameter_owner).__name__
                raise TypeError(f"[{owner}] {name} must be a tensor, got {tensor!r}")
