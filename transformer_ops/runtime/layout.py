"""The layout of a list of modules: its groups of fusible ops, and the modules that are called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling

from ..op.base import BasicOperation, FusibleOperation
from ..op.borrowed import borrowed_from, guards_of, has_stored
from ..op.channels import External, Routed, resolve_channels
from ..op.hooks import HookDicts, has_hooks
from ..op.names import OpName, WantedInputs, names_of, wanted_inputs
from ..plan.explain.explanation import Explanation
from ..plan.explain.summary import Group, Plain, alone_note
from .policies import Policies


class Segment(NamedTuple):
    """Consecutive modules: a group of fusible ops, a fusible op that has to be called, or any other
    module."""

    modules: tuple[int, ...]  # indices in the layout
    ops: tuple[int, ...]  # positions of its basic ops among all basic ops
    group: Any  # an OperationFuser; None in a trace, and if the module is called
    inputs: tuple[External | Routed, ...]  # the sources of its extra inputs
    outputs: tuple[Routed, ...]  # its extra outputs that are read outside
    group_state: str | None = None  # by which a trace finds the group, or an interchangeable one


class Lenders(NamedTuple):
    """What a layout assumes about modules that its ops borrow from."""

    guards: Any
    called: tuple[FusibleOperation, ...]  # ops whose modules are called themselves
    may_compile: bool  # whether compiled code can run the others


class Layout(NamedTuple):
    """The segments of a list of modules, and the tensors between them and the caller."""

    names: tuple[str, ...]  # the paths of the modules in the Sequential
    modules: tuple[nn.Module, ...]  # including those of each Residual
    hooked: tuple[bool, ...]  # for each module: does it have hooks?
    hooks: HookDicts  # of all fusible modules and their basic ops
    state: str  # the same text for layouts that one compiled graph can serve; empty until it is
    # read
    segments: tuple[Segment, ...]
    outputs: tuple[Routed, ...]
    wanted: WantedInputs
    lenders: Lenders | None  # the modules that its ops borrow from
    # The OperationFuser of the only segment, if its inputs and outputs are those of the caller.
    whole: Any
    # The modules of the Sequential itself; and for each Residual, its modules, and whether it is
    # laid out.
    children: tuple[nn.Module | None, ...] = ()
    residuals: tuple[tuple[Any, tuple[nn.Module | None, ...], bool], ...] = ()


# Runs a group: (segment, its modules, input, extra inputs, keyword arguments of its basic ops).
CallGroup = Callable[
    [Segment, list[Any], Tensor, tuple[Tensor, ...], list[dict[str, Any]] | None], Any
]


def make_layout(
    modules: Sequence[nn.Module],
    policies: Policies,
    make_group: Callable[..., Any],
    names: Sequence[str],
    whole: str,
    called: Container[int] = (),
) -> Layout:
    """The layout of the modules as they are now. `make_group`: the class `OperationFuser`. `names`:
    the paths of the modules in the `whole`, for errors. `called`: the indices of modules that have
    to be called themselves.

    Raises ValueError if the channels of the ops do not match.
    """
    alone = [i in called or _has_to_be_called(module) for i, module in enumerate(modules)]
    basic_ops: list[BasicOperation] = []
    runs: list[tuple[list[int], list[int]]] = []  # (modules, basic ops)
    open_run = False
    for i, module in enumerate(modules):
        if not isinstance(module, FusibleOperation):
            runs.append(([i], []))
            open_run = False
            continue
        positions = list(range(len(basic_ops), len(basic_ops) + len(module.basic_ops)))
        basic_ops += module.basic_ops
        if open_run and not alone[i]:
            runs[-1][0].append(i)
            runs[-1][1].extend(positions)
        else:
            runs.append(([i], positions))
        open_run = not alone[i]
    op_names = names_of(modules, names, whole)
    routing = resolve_channels(basic_ops, op_names)
    is_fed = [[isinstance(source, Routed) for source in row] for row in routing.inputs]
    visible = [Routed(*pair) for pair in routing.visible_outputs]
    shared = _read_outside(routing.inputs, [positions for _, positions in runs]) | set(visible)
    make = functools.partial(make_group, **policies._asdict())
    segments = tuple(
        _make_segment(modules, basic_ops, op_names, run, alone, routing.inputs, shared, make)
        for run in runs
    )
    only = segments[0].group if len(segments) == 1 else None
    fusible = (module for module in modules if isinstance(module, FusibleOperation))
    members = (member for module in fusible for member in _members(module))
    return Layout(
        tuple(names),
        tuple(modules),
        _hook_flags(modules),
        HookDicts(members),
        "",
        segments,
        tuple(visible),
        wanted_inputs(whole, basic_ops, op_names, is_fed),
        _lenders_of(modules, basic_ops, alone),
        only,
    )


def _lenders_of(
    modules: Sequence[Any], basic_ops: list[BasicOperation], alone: list[bool]
) -> Lenders | None:
    if not any(map(borrowed_from, basic_ops)):
        return None
    fusible = (m for m, is_alone in zip(modules, alone, strict=True) if is_alone)
    called = (m for m in fusible if m._has_own_forward and any(map(borrowed_from, m.basic_ops)))
    guards = guards_of(basic_ops)
    return Lenders(guards, tuple(called), is_compiling() or not any(map(has_stored, basic_ops)))


def lenders_are_same(layout: Layout) -> bool:
    """Whether the modules that ops borrow from are as the layout assumes."""
    if layout.lenders is None:
        return True
    guards, called, may_compile = layout.lenders
    if is_compiling() and not may_compile:
        return False
    return (guards is None or guards.hold()) and all(op._has_own_forward for op in called)


def _read_outside(
    inputs: tuple[tuple[External | Routed, ...], ...], runs: list[list[int]]
) -> set[Routed]:
    """The extra outputs that an op of another segment reads."""
    run_of = {position: i for i, positions in enumerate(runs) for position in positions}
    return {
        source
        for position, row in enumerate(inputs)
        for source in row
        if isinstance(source, Routed) and run_of[source.position] != run_of[position]
    }


def _make_segment(
    modules: Sequence[nn.Module],
    basic_ops: list[BasicOperation],
    names: Sequence[OpName],
    run: tuple[list[int], list[int]],
    alone: list[bool],
    inputs: tuple[tuple[External | Routed, ...], ...],
    shared: set[Routed],
    make_group: Callable[..., Any],
) -> Segment:
    places, positions = run
    mine = set(positions)
    if not positions:
        return Segment(tuple(places), (), None, (), ())
    outside: list[External | Routed] = []
    sources: list[list[tuple[int, int] | None]] = []
    for position in positions:
        row: list[tuple[int, int] | None] = []
        for source in inputs[position]:
            local = isinstance(source, Routed) and source.position in mine
            if local:
                assert isinstance(source, Routed)
                row.append((source.position - positions[0], source.output))
            else:
                row.append(None)
                outside.append(source)
        sources.append(row)
    outputs: list[Routed] = []
    flags: list[list[bool]] = []
    for position in positions:
        flags.append([])
        for k in range(basic_ops[position].num_extra_outputs):
            key = Routed(position, k)
            seen = alone[places[0]] or key in shared
            flags[-1].append(seen)
            if seen:
                outputs.append(key)
    group = None
    if not alone[places[0]]:
        own = tuple(names[position] for position in positions)
        group = make_group([modules[i] for i in places], _channels=(sources, flags), _names=own)
    return Segment(tuple(places), tuple(positions), group, tuple(outside), tuple(outputs))


def _has_to_be_called(module: nn.Module) -> bool:
    if not isinstance(module, FusibleOperation):
        return False
    members = [module, *module.basic_ops]
    return has_hooks(members) or any(op._has_own_forward for op in members)


def _hook_flags(modules: Sequence[nn.Module]) -> tuple[bool, ...]:
    return tuple(
        isinstance(module, FusibleOperation) and has_hooks(_members(module)) for module in modules
    )


def _members(module: FusibleOperation) -> list[nn.Module]:
    """The modules whose hooks have to fire around the op."""
    owners = [owner for op in module.basic_ops for owner in borrowed_from(op)]
    return [module, *module.basic_ops, *owners]


def layout_content(layout: Layout) -> object:
    """What a compiled graph depends on, besides what it reads from the modules."""
    segments = [
        (segment._replace(group=None), segment.group and segment.group._content())
        for segment in layout.segments
    ]
    return (layout.names, layout.hooked, segments, layout.outputs, layout.wanted.number)


def hooked_now(layout: Layout) -> tuple[bool, ...]:
    """For each module, whether hooks have to fire around it."""
    if not layout.hooks:
        return (False,) * len(layout.modules)
    return _hook_flags(layout.modules)


# ---- a call


def run_segments(
    layout: Layout,
    modules: Sequence[nn.Module],
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: dict[int, dict[str, Any]],
    call: CallGroup,
) -> Any:
    """One call of the modules. `kwargs`: keyword arguments by position of the basic op."""
    if not layout.segments:
        return input
    hidden: dict[tuple[int, int], Tensor] = {}
    for segment in layout.segments:
        extra = [
            extra_inputs[source.place]
            if isinstance(source, External)
            else hidden[(source.position, source.output)]
            for source in segment.inputs
        ]
        if segment.group is None and segment.group_state is None:
            module = modules[segment.modules[0]]
            own = kwargs.get(segment.ops[0], {}) if segment.ops else {}
            output = module(input, *extra, **own)
            if segment.outputs:
                _check_outputs(module, output, 1 + len(segment.outputs))
        else:
            given = None
            if kwargs and any(op in kwargs for op in segment.ops):
                given = [kwargs.get(op, {}) for op in segment.ops]
            members = [modules[i] for i in segment.modules]
            output = call(segment, members, input, tuple(extra), given)
        if segment.outputs:
            input, *found = output
            for key, tensor in zip(segment.outputs, found, strict=True):
                hidden[(key.position, key.output)] = tensor
        else:
            input = output
    if not layout.outputs:
        return input
    return (input, *(hidden[(key.position, key.output)] for key in layout.outputs))


def call_group(
    segment: Segment,
    modules: list[Any],
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    """The eager call of a group, which owns its modules."""
    group = segment.group
    if group is None:
        assert segment.group_state is not None
        # The layout is for traces, and may have equal modules, in a frame that Dynamo left to
        # Python.
        group = group_of_members(segment.group_state, modules)
    return group(input, *extra_inputs, basic_op_kwargs=kwargs)


def group_of_members(state: str, modules: Sequence[Any]) -> Any:
    """The group of these modules that is in the state."""
    for observer in modules[0]._current_observers():
        if observer._is_group_of(modules) and observer._shared_state() == state:
            return observer
    raise RuntimeError("[OperationFuser] modules must be edited outside of compiled code")


def _check_outputs(module: nn.Module, output: Any, count: int) -> None:
    found = len(output) if isinstance(output, tuple) else 1
    if found != count:
        raise RuntimeError(
            f"[{type(module).__name__}] forward must return {count} tensors, got {found}"
        )


# ---- inspecting plans


def group_of(segment: Segment, modules: Sequence[nn.Module], asked: str) -> Any:
    """The group that ran; None if the module is not run by a plan. `asked`: the method that the
    user called, for an error text."""
    if segment.group is not None or not segment.ops:
        return segment.group
    module: Any = modules[segment.modules[0]]
    group = module._own_group
    if group is None and not module._has_own_forward:
        raise RuntimeError(f"{asked} must follow a call, got new hooks")
    return group


def has_plans(layout: Layout) -> bool:
    """Whether each of its groups has made a plan."""
    for segment in layout.segments:
        if not segment.ops:
            continue
        module: Any = layout.modules[segment.modules[0]]
        group = module._own_group if segment.group is None else segment.group
        if group is None and module._has_own_forward:
            continue
        if group is None or group._last_entry() is None:
            return False
    return True


def explain_segments(layout: Layout, asked: str) -> Explanation:
    """The plans of the last call."""
    parts: list[Group | Plain] = []
    for segment in layout.segments:
        place = segment.modules[0]
        module = layout.modules[place]
        group = group_of(segment, layout.modules, asked)
        if group is None:
            why = "whose forward is overridden" if segment.ops else "not a fusible op"
            parts.append(Plain(place, type(module).__name__, why))
        else:
            note = alone_note(module) if segment.group is None else ""
            parts.append(group._explained(asked, note))
    return Explanation(parts)
