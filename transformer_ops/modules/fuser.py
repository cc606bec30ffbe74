"""OperationFuser: one group of ops, its plans, and its call."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from .. import _C
from ..base import guard_groups
from ..base.constructors import names_its_arguments
from ..base.handles import handles
from ..base.marks import outside_of_jit_trace
from ..compile.graph import number_of
from ..compile.groups import Facts, Reads, check_call, check_parameters, traced_alone, traced_group
from ..op.base import BasicOperation, FusibleOperation, run_alone_by
from ..op.borrowed import guards_of
from ..op.channels import Routed, resolve_channels
from ..op.hooks import has_hooks
from ..op.in_place import check_in_place
from ..op.names import OpName, WantedInputs, names_of, wanted_inputs
from ..op.observers import Observer
from ..op.ops import Ops
from ..op.tensor_parallel import check_columns, is_dtensor, local_parameters, local_sizes
from ..op.view import owners_of
from ..plan.explain.explanation import Explanation
from ..plan.explain.summary import Group, describe
from ..plan.plan import Plan, declarations_of
from ..plan.saved_bytes import SavedBytes, likely_shape, saved_bytes
from ..quantization.quantized_tensor import QuantizedTensor, decoded, with_parts
from ..runtime.host import Kwargs, check_kwargs
from ..runtime.layout import (
    Layout,
    call_group,
    explain_segments,
    hooked_now,
    make_layout,
    run_segments,
)
from ..runtime.overriding import overriding
from ..runtime.policies import Policies
from ..runtime.session import Session

# For each op and each extra input: the (op, extra output) of this group that it reads, or None.
Sources = Sequence[Sequence[tuple[int, int] | None]]
# The sources, and for each op whether each of its extra outputs is read outside the group.
Channels = tuple[Sources, Sequence[Sequence[bool]]]


@names_its_arguments
class OperationFuser(Observer):
    """A group of ops that run as one plan.

    `ops` are `FusibleOperation`s; containers are expanded. A call takes the main input and the
    extra inputs in order, and returns the main output, or a flat tuple with the extra outputs. The
    first call for each kind of input makes a plan, which is cached. `recompute`, `saved` and
    `saved_inputs` are those of `Sequential`.

    Raises:
        TypeError: an op is no `FusibleOperation`.
        ValueError: there are no ops; `recompute` or `saved` has another value; channels do not
            match.
    """

    def __init__(
        self,
        ops: Iterable[FusibleOperation],
        *,
        recompute: str = "cheap",
        saved: str = "exact",
        saved_inputs: bool = False,
        _own: bool = False,
        _channels: Channels | None = None,
        _names: Sequence[OpName] | None = None,
    ) -> None:
        self._ops: Any = _check_ops(ops)  # an Ops, if one of them owns this
        self._owners = () if _own else owners_of(self._ops)
        if _own:
            self._ops = Ops(self._ops, self._ops[0])
        self._policies = Policies(recompute, saved, saved_inputs).checked("OperationFuser")
        # True for the group of one op that its `forward` runs: hooks around the op have already
        # run.
        self._own = _own
        self._given_channels = _channels
        self._given_names = _names
        self._number = handles.add(self)
        self._edits = self._captures = 0  # all edits, and those of what the group consists of
        self._traced_hosts: list[Any] = []  # plans with Python steps that graphs find by number
        self._changed_entry: Any = None  # the last plan when the plans changed
        # the state, and what it was computed for
        self._shared: tuple[tuple[int, bool], str] | None = None
        self._guard_group: guard_groups.GuardGroup | None = None
        self._basic_ops: Any = self._find_basic_ops()
        self._capture()

    def _find_basic_ops(self) -> Ops:
        found = [basic for op in self._ops for basic in op.basic_ops]
        return Ops(found, self._ops[0] if self._own else None)

    @outside_of_jit_trace()
    def _capture(self) -> None:
        """Captures the ops as they are now."""
        self._is_stale = False
        check_columns(self._basic_ops)
        check_in_place(self._basic_ops)
        for op in (*self._ops, *self._basic_ops):
            op._add_observer(self)
        self._names = self._given_names or names_of(self._ops, self._paths(), "OperationFuser")
        self._sources, self._visible = self._given_channels or self._route()
        self.num_extra_inputs = sum(s is None for sources in self._sources for s in sources)
        for op in (*self._ops, *self._basic_ops):
            op.__dict__["_channels_captured"] = True
        places = [_places(op) for op in self._basic_ops]
        self._num_parameters = [len(op._parameter_tensors()) for op in self._basic_ops]
        self._members = self._find_members()
        self._calls_members = any(op._has_own_forward for op in self._members)
        self._absent = tuple(
            (i, name) for i, op in enumerate(self._ops) for name in op._absent_parameters()
        )
        self._guards = guards_of(self._basic_ops)
        basic_ops, op_names = self._basic_ops, self._names
        self._group = _C.Group(
            [self._describe(i) for i in range(len(self._basic_ops))],
            places,
            list(basic_ops),
            self._members,
            [(self._ops[i], name) for i, name in self._absent],
            self._guards,
            lambda: Session(basic_ops, op_names),
            self._policies,
        )
        # For each extra input from the caller: may it be None?
        self._optional: tuple[bool, ...] = tuple(self._group.optional_inputs)
        self._wanted = self._find_wanted()
        self._call = _hand_back if self._calls_members else self._group.make_call()
        self._call_with = self._group.make_call_with()
        self._traced_dtypes: list[torch.dtype] = []
        self._split: Layout | None = None

    def _paths(self) -> list[str]:
        """The paths of the ops, for error texts; empty if the caller sees no group."""
        return [""] if self._own else [str(i) for i in range(len(self._ops))]

    def _find_wanted(self) -> WantedInputs:
        caller = self._names[0].name if self._own else self._names[0].whole
        is_fed = ([source is not None for source in row] for row in self._sources)
        return wanted_inputs(caller, self._basic_ops, self._names, is_fed)

    def _reads(self) -> Reads | None:
        """Returns None if the parameters may change without a change to an op."""
        places = {id(op): i for i, op in enumerate(self._ops)}
        owned = [(op, places.get(id(op._parameter_owner), -1)) for op in self._basic_ops]
        if any(i < 0 or op.is_python for op, i in owned):
            return None
        found = [place for op in self._basic_ops for place in op._tensor_places()]
        return Reads(
            tuple((i, name) for op, i in owned for name in op._tensor_names()),
            tuple(is_dtensor(getattr(owner, name, None)) for owner, name in found),
            tuple(_format_of(getattr(owner, name, None)) for owner, name in found),
            self._absent,
            tuple(i if _asks_training(op) else None for op, i in owned),
        )

    def _op_changed(self) -> None:
        """An op has other basic ops, hooks or another `forward` than when it was captured."""
        if self._own:
            self._ops[0].__dict__.pop("_own_group", None)
        self._is_stale = True
        self._edits += 1
        self._captures += 1
        self._changed_entry = self._group.last
        self._call = _hand_back

    def _plans_changed(self) -> None:
        """An attribute that an op's plans depend on has changed."""
        self._changed_entry = self._group.last
        self._group.forget_plans()
        self._edits += 1

    def _refresh(self) -> None:
        """Captures the ops again if they have changed."""
        if self._guards is not None and not self._guards.hold():
            # Modules whose parameters are borrowed do not report changes.
            for op in self._basic_ops:
                op._make_groups_stale()
        if self._is_stale and self._given_channels is None:
            self._basic_ops = self._find_basic_ops()
            self._capture()

    def _route(self) -> Channels:
        if self._own and len(self._basic_ops) == 1:
            # Its channels lead out of the group.
            op = self._basic_ops[0]
            returned = [i not in op._unreturned for i in range(op.num_extra_outputs)]
            return [[None] * op.num_extra_inputs], [returned]
        routing = resolve_channels(self._basic_ops, self._names)
        sources = [
            [(s.position, s.output) if isinstance(s, Routed) else None for s in row]
            for row in routing.inputs
        ]
        shown = set(routing.visible_outputs)
        visible = [
            [(position, k) in shown for k in range(op.num_extra_outputs)]
            for position, op in enumerate(self._basic_ops)
        ]
        return sources, visible

    def _describe(self, i: int) -> tuple[Any, ...]:
        op = self._basic_ops[i]
        kind = type(op).__name__ if op.is_python or op._kind is None else op._kind
        native = not op.is_python
        return kind, op._attributes() if native else {}, native, self._sources[i], self._visible[i]

    def _find_members(self) -> list[FusibleOperation]:
        """The modules whose hooks and own `forward` the group must not bypass."""
        if self._own:
            return [op for op in self._basic_ops if op is not self._ops[0] and not _is_view(op)]
        seen = {id(op): op for op in (*self._ops, *self._basic_ops)}
        return list(seen.values())

    def __getstate__(self) -> dict[str, Any]:
        names = ("_ops", "_policies", "_own", "_given_channels", "_given_names")
        return {name: getattr(self, name) for name in names} | {"_ops": list(self._ops)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["_ops"],
            **state["_policies"]._asdict(),
            _own=state["_own"],
            _channels=state["_given_channels"],
            _names=state["_given_names"],
        )

    def __call__(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Runs the group. `basic_op_kwargs`: keyword arguments for each basic op.

        Raises:
            ValueError: the number of extra inputs is wrong.
            TypeError: an input is no tensor; a native op gets keyword arguments.
            RuntimeError: a tensor does not fit an op; a fusion function misbehaves.
        """
        if not is_compiling():
            if basic_op_kwargs is None:
                output = self._call(input, *extra_inputs)
                if output is not None:
                    return output
            return self._call_in_python(input, extra_inputs, basic_op_kwargs)
        return traced_group(self._traced_state, self._ops, input, extra_inputs, basic_op_kwargs)

    def _content(self) -> object:
        """What a compiled graph depends on, besides what it reads from the modules."""
        basic_ops = self._basic_ops
        described = [self._describe(i) for i in range(len(basic_ops))]
        watched = [repr(op._own_values()) for op in basic_ops if op._is_watched]
        # Python ops have their own contexts, and hooks may do anything.
        is_own = any(op.is_python for op in basic_ops) or self._is_split()
        own = (self._number, self._captures) if is_own else None
        return (own, self._policies, described, watched, self._reads(), self._num_parameters)

    def _shared_state(self) -> str:
        """The same text for all groups that one compiled graph can serve."""
        self._refresh()
        now = (self._edits, self._is_split())
        if self._shared is None or self._shared[0] != now:
            state = guard_groups.digest(self._content())
            self._guard_group = guard_groups.join(self, state, self._guard_group)
            self._shared = (now, state)
        assert self._guard_group is not None
        self._guard_group.note_asked(self)
        return self._shared[1]

    # Everything that a compiled graph guards on, besides what it reads from the ops.
    _traced_state = property(guard_groups.untraced(_shared_state))

    def _is_group_of(self, ops: Sequence[FusibleOperation]) -> bool:
        return len(self._ops) == len(ops) and all(map(operator.is_, self._ops, ops))

    # ---- eager calls that C++ leaves to Python

    def _call_in_python(
        self, input: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs | None
    ) -> Any:
        self._refresh()
        check_call(self._wanted, self._optional, input, extra_inputs)
        input, *extra = (decoded(tensor) for tensor in (input, *extra_inputs))
        extra_inputs = tuple(extra)
        if kwargs is not None:
            check_kwargs(self._basic_ops, kwargs)
        if self._is_split():
            given = {i: found for i, found in enumerate(kwargs or []) if found}
            layout = self._split_at_members()
            return run_segments(layout, layout.modules, input, extra_inputs, given, call_group)
        return self._run(input, extra_inputs, kwargs)

    def _run(self, input: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs | None) -> Any:
        if kwargs is not None:
            output = self._call_with(kwargs, None, input, *extra_inputs)
            if output is not None:
                return output
        rows = [op._parameter_tensors() for op in self._basic_ops]
        if [len(row) for row in rows] != self._num_parameters:
            # A Python op, or a module in it, has other parameters than before.
            self._capture()
        check_parameters(self._basic_ops)
        given = None
        if any(is_dtensor(tensor) for row in rows for tensor in row):
            pairs = zip(self._basic_ops, rows, strict=True)
            rows = [local_parameters(op, row) for op, row in pairs]
            given = tuple(tensor for row in rows for tensor in row)
        tensors = [input, *extra_inputs, *(t for row in rows for t in row)]
        if found := overriding(tensors):
            arguments = (self, input, extra_inputs, kwargs)
            return handle_torch_function(run_group, found, *arguments)
        output = self._call_with(kwargs, given, input, *extra_inputs)
        if output is None:
            raise RuntimeError(
                "[OperationFuser] hooks must be registered before the call that they see, "
                "got one while it ran"
            )
        return output

    def _entry(self, facts: Facts) -> Any:
        grad, autocast, device, tensors, training, recipe = facts
        inputs = tensors[: 1 + self.num_extra_inputs]
        self._traced_dtypes = [found[0] for found in inputs if found is not None]
        entry = self._group.plan(grad, autocast, device, list(tensors), list(training), recipe)
        if not entry.native and all(entry.host is not other for other in self._traced_hosts):
            self._traced_hosts.append(entry.host)
        guard_groups.note_traced(self._shared_state(), facts)
        return entry

    def _last_entry(self) -> Any:
        """The plan of the last call."""
        last = self._group.last
        if last is not None and last is not self._changed_entry:
            return last
        # A graph of an equal group, or of this one before edits, may have run since.
        facts = guard_groups.traced(self._shared_state())
        return last if facts is None else self._entry(facts)

    def _state_places(self, facts: Facts) -> tuple[tuple[int, str], ...]:
        """The module and the name of each state that a plan reads; module -1 if it is not part of
        the group."""
        places = {id(op): i for i, op in enumerate(self._ops)}
        owners = [op._parameter_owner for op in self._basic_ops]
        states = self._entry(facts).data["states"]
        return tuple((places.get(id(owners[op]), -1), name) for _, op, name, _ in states)

    def _is_split(self) -> bool:
        """Whether a member has to be called, so that the group is split."""
        # The Sequential that made the group has already checked this.
        is_within_layout = self._given_channels is not None
        return not is_within_layout and (self._calls_members or has_hooks(self._members))

    def _why_split(self) -> str:
        """The member that splits the group, and the reason."""
        for member in self._members:
            name = type(member).__name__
            if member._has_own_forward:
                return (
                    f"[{name}] a member of an OperationFuser in a compiled graph must have no "
                    "forward of its own, got one; Sequential takes it"
                )
            if has_hooks([member]):
                return (
                    f"[{name}] a member of an OperationFuser in a compiled graph must have no "
                    "hooks, got some; Sequential takes them"
                )
        return ""

    def _split_at_members(self) -> Layout:
        layout = self._split
        if layout is None or hooked_now(layout) != layout.hooked:
            modules = self._basic_ops if self._own else self._ops
            paths = self._paths() if not self._own else [""] * len(modules)
            self._split = layout = make_layout(
                modules, self._policies, OperationFuser, paths, self._wanted.caller
            )
        return layout

    # ---- inspecting plans

    def plan(self) -> Plan:
        """The plan of the last call. Raises RuntimeError before the first call."""
        return self._plan("[OperationFuser] plan()")

    def _plan(self, asked: str) -> Plan:
        """`asked`: the method that the user called, for an error text."""
        entry = self._last_entry()
        if entry is None:
            raise RuntimeError(f"{asked} must follow a call, got none so far")
        plan: Plan = entry.session.plan_of(entry)
        return plan

    def _is_traceable(self) -> bool:
        """Whether a compiled call like the last one needs no graph break."""
        entry = self._last_entry()
        return entry.native or number_of(entry.host) >= 0

    def explain(self) -> Explanation:
        """The plan of the last call for reading: text, a table in a notebook, or an SVG."""
        asked = "[OperationFuser] explain()"
        if self._split is not None and self._is_split():
            return explain_segments(self._split_at_members(), asked)
        return Explanation([self._explained(asked)])

    def _explained(self, asked: str, note: str = "") -> Group:
        plan = self._plan(asked)
        session = self._last_entry().session
        return describe(plan, self._basic_ops, session.made_by, self._saved_bytes(), note)

    def _saved_bytes(self) -> SavedBytes | None:
        """The bytes that the last call saved; None if a Python step decides that and no call ran
        eagerly."""
        entry = self._last_entry()
        if self.plan().has_python_steps:
            last = entry.program.last_saved
            return None if last is None else saved_bytes(*last)
        inputs = self._group.last_inputs
        if not inputs:
            plan = self.plan()
            declared = declarations_of(plan)
            changes = {kind for kind, row in declared.items() if not row["keeps_width"]}
            shape = likely_shape(plan.ops, changes)
            inputs = [(shape, dtype) for dtype in self._traced_dtypes]
        tensors = [torch.empty(list(sizes), dtype=dtype, device="meta") for sizes, dtype in inputs]
        rows = [local_sizes(op, op._parameter_tensors()) for op in self._basic_ops]
        tensors += with_parts(tensor for row in rows for tensor in row)
        tensors += [torch.empty(3, device="meta") for _ in self.plan().states]
        try:
            slots = entry.program.saved_slots_for(tensors)
        except RuntimeError:
            # The sizes do not fit: the module has changed, or its shapes cannot be inferred.
            return None
        return saved_bytes(tensors[0].shape, tensors[0].dtype, slots)


def _hand_back(input: Tensor, *extra_inputs: Tensor) -> Any:
    return None


def run_group(
    group: OperationFuser,
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    """The function that `__torch_function__` of a tensor subclass sees: one call of a whole
    group."""
    return group(input, *extra_inputs, basic_op_kwargs=kwargs)


def _format_of(parameter: object) -> str | None:
    return parameter.format if isinstance(parameter, QuantizedTensor) else None


def _asks_training(op: BasicOperation) -> bool:
    return _C.has_user_fusions() or bool(op._declaration()["asks_training"])


def _check_ops(ops: Iterable[FusibleOperation]) -> list[FusibleOperation]:
    found = list(ops)
    for op in found:
        if not isinstance(op, FusibleOperation):
            raise TypeError(
                f"[OperationFuser] ops must be FusibleOperations, got {type(op).__name__}"
            )
    if not found:
        raise ValueError("[OperationFuser] ops must not be empty, got []")
    return found


def _is_view(op: BasicOperation) -> bool:
    return op._parameter_owner is not op


def _places(op: BasicOperation) -> list[tuple[Any, ...]]:
    if op.is_python:
        return [(op, len(op._parameter_tensors()))]
    pairs = zip(op._tensor_places(), op._tensor_names(), strict=True)
    return [(*place, name) for place, name in pairs]


run_alone_by(lambda op: OperationFuser([op], _own=True), traced_alone)

__all__ = ["OperationFuser"]
