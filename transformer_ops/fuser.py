"""OperationFuser: one group of ops, its plans, and how it is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from . import explain as _explain
from . import main_grad, registry
from .channels import Routed, resolve_channels
from .op import BasicOperation, FusibleOperation, has_hooks
from .plan import Plan
from .planning import PlanningSession
from .saved_bytes import SavedBytes, likely_shape
from .traced import (
    number_of,
    numbered,
    plain_state,
    read,
    state_places,
    walk_in_graph,
)
from .walker import Walker, check_kwargs

_C = registry._C
# (grad enabled, autocast dtype, device type, (dtype, requires_grad) of each tensor, training flags)
Facts = tuple[bool, torch.dtype | None, str, tuple[tuple[torch.dtype, bool], ...], tuple[bool, ...]]
# For each op, for each extra input: the (op, extra output) of this group that feeds it, or None.
Sources = Sequence[Sequence[tuple[int, int] | None]]
# The sources, and for each op whether somebody outside the group reads each of its extra outputs.
Channels = tuple[Sources, Sequence[Sequence[bool]]]

_PLAIN_TENSORS = {Tensor, torch.nn.Parameter}


class OperationFuser:
    """A group of ops that run as one plan.

    `ops` are `FusibleOperation`s; containers are expanded. Calling it takes the main input and the
    extra inputs in order and returns the main output, or a flat tuple with the extra outputs.
    Plans are made on the first call for each kind of input and kept. `recompute` is that of
    `Sequential`.

    Raises:
        TypeError: an op that is no `FusibleOperation`.
        ValueError: no ops; another value of `recompute`; channels that do not fit together.
    """

    def __init__(
        self,
        ops: Iterable[FusibleOperation],
        *,
        recompute: str = "cheap",
        _own: bool = False,
        _channels: Channels | None = None,
    ) -> None:
        self._ops = _check_ops(ops)
        self._recompute = check_recompute("OperationFuser", recompute)
        # The group of one op that its `forward` runs: what is around the op has happened already.
        self._own = _own
        self._given_channels = _channels
        self._number = numbered.add(self)
        # Compiled graphs guard on it.
        self._edits = 0
        self._basic_ops: list[BasicOperation] = [b for op in self._ops for b in op.basic_ops]
        self._capture()

    def _capture(self) -> None:
        """Take the ops as they are now."""
        self._is_stale = False
        for op in (*self._ops, *self._basic_ops):
            op._add_holder(self)
        self._sources, self._visible = self._given_channels or self._route()
        self.num_extra_inputs = sum(s is None for sources in self._sources for s in sources)
        self._accumulates = [
            op for op in self._basic_ops if op._attributes().get("accumulate_into_main_grad")
        ]
        for op in (*self._ops, *self._basic_ops):
            op.__dict__["_channels_captured"] = True
        places = [_places(op) for op in self._basic_ops]
        self._num_parameters = [len(row) for row in places]
        self._members = self._find_members()
        self._calls_members = any(op._has_own_forward for op in self._members)
        absent = [(op, name) for op in self._ops for name in op._absent_parameters()]
        self._has_absent = bool(absent)
        self._group = _C.Group(
            [self._describe(i) for i in range(len(self._basic_ops))],
            places,
            self._basic_ops,
            self._members,
            absent,
            lambda: PlanningSession(self._basic_ops),
            self._recompute == "cheap",
        )
        # Python decides at once where C++ could only hand back.
        self._call = _hand_back if self._needs_python() else self._group.make_call()
        self._traced_dtypes: list[torch.dtype] = []
        self._split: Any = None

    def _needs_python(self) -> bool:
        if self._accumulates or self._calls_members:
            return True
        return any(op.is_python or _computes_training(op) for op in self._basic_ops)

    def _op_changed(self) -> None:
        """An op has other basic ops, hooks or another `forward` than when it was captured."""
        if self._own:
            self._ops[0].__dict__.pop("_own_group", None)
        self._is_stale = True
        self._edits += 1
        self._call = _hand_back

    def _refresh(self) -> None:
        """Capture the ops again where they have changed since."""
        if self._is_stale and self._given_channels is None:
            self._basic_ops = [b for op in self._ops for b in op.basic_ops]
            self._capture()

    def _route(self) -> Channels:
        if self._own and len(self._basic_ops) == 1:
            # What its channels lead to is around the group.
            op = self._basic_ops[0]
            return [[None] * op.num_extra_inputs], [[True] * op.num_extra_outputs]
        routing = resolve_channels(self._basic_ops)
        sources = [
            [(s.position, s.output) if isinstance(s, Routed) else None for s in row]
            for row in routing.inputs
        ]
        visible = [
            [(position, k) in routing.visible_outputs for k in range(op.num_extra_outputs)]
            for position, op in enumerate(self._basic_ops)
        ]
        return sources, visible

    def _describe(self, i: int) -> tuple[Any, ...]:
        op = self._basic_ops[i]
        kind = type(op).__name__ if op.is_python or op._kind is None else op._kind
        native = not op.is_python
        return kind, op._attributes() if native else {}, native, self._sources[i], self._visible[i]

    def _find_members(self) -> list[FusibleOperation]:
        """The modules whose hooks and whose own `forward` the group must not go past."""
        if self._own:
            return [op for op in self._basic_ops if op is not self._ops[0] and not _is_view(op)]
        seen = {id(op): op for op in (*self._ops, *self._basic_ops)}
        return list(seen.values())

    def __getstate__(self) -> dict[str, Any]:
        names = ("_ops", "_recompute", "_own", "_given_channels")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            state["_ops"],
            recompute=state["_recompute"],
            _own=state["_own"],
            _channels=state["_given_channels"],
        )

    def __call__(
        self,
        input: Tensor,
        *extra_inputs: Tensor,
        basic_op_kwargs: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Run the group. `basic_op_kwargs`: keyword arguments for each basic op.

        Raises:
            ValueError: a wrong number of extra inputs.
            TypeError: an input that is no tensor; keyword arguments for a native op.
            RuntimeError: a tensor that does not fit an op, a fusion function that misbehaves.
        """
        if not torch.compiler.is_compiling():
            if basic_op_kwargs is None:
                output = self._call(input, *extra_inputs)
                if output is not None:
                    return output
            return self._call_in_python(input, extra_inputs, basic_op_kwargs)
        if _traced_group(self._number, self._edits, has_hooks(self._members)):
            return _call_outside(self._number, input, extra_inputs, basic_op_kwargs)
        _check_call(self.num_extra_inputs, input, extra_inputs)
        return traced_call(self._number, self._basic_ops, input, extra_inputs, basic_op_kwargs)

    # ---- eager, where C++ hands back

    def _call_in_python(
        self, input: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: list[dict[str, Any]] | None
    ) -> Any:
        self._refresh()
        _check_call(self.num_extra_inputs, input, extra_inputs)
        if self._is_split():
            given = {i: found for i, found in enumerate(self._kwargs(kwargs)) if found}
            return self._split_at_members()._run_by_op(input, extra_inputs, given)
        return self._walk(input, extra_inputs, kwargs)

    def _walk(
        self, input: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: list[dict[str, Any]] | None
    ) -> Any:
        tensors = [input, *extra_inputs, *self._parameters()]
        if not _PLAIN_TENSORS.issuperset(map(type, tensors)):
            _check_parameters(self._basic_ops)
            overriding = _overriding(tensors)
            if overriding:
                arguments = (self, input, extra_inputs, kwargs)
                return handle_torch_function(run_group, overriding, *arguments)
        entry = self._entry(_facts(tensors, self._basic_ops))
        return _unpack(self._walker(entry).run(tensors, self._kwargs(kwargs)))

    def _entry(self, facts: Facts) -> Any:
        grad, autocast, device, tensors, training = facts
        self._traced_dtypes = [dtype for dtype, _ in tensors[: 1 + self.num_extra_inputs]]
        return self._group.plan(grad, autocast, device, list(tensors), list(training))

    def _walker(self, entry: Any) -> Walker:
        session: PlanningSession = entry.session
        if session.walker is None:
            plan = self._plan_of(entry)
            slots = {kind: row["slots"] for kind, row in _declarations(plan).items()}
            session.walker = Walker(plan, self._basic_ops, session.python_ops, slots)
        return session.walker

    def _last_walker(self) -> Walker:
        self.plan()
        return self._walker(self._group.last)

    def _parameters(self) -> list[Tensor]:
        if torch.is_grad_enabled():
            for op in self._accumulates:
                weight = op._parameter_tensors()[0]
                if weight.requires_grad:
                    main_grad.check(weight)
        if self._has_absent:
            self._group.check_absent()
        rows = [op._parameter_tensors() for op in self._basic_ops]
        if [len(row) for row in rows] != self._num_parameters:
            # A Python op, or a module in it, has other parameters than before.
            self._capture()
        return [tensor for row in rows for tensor in row]

    def _kwargs(self, kwargs: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        if kwargs is None:
            return [{} for _ in self._basic_ops]
        check_kwargs(self._basic_ops, kwargs)
        return kwargs

    def _is_split(self) -> bool:
        """Whether a member has to be called, so that the group falls apart."""
        # The Sequential that made the group has looked.
        is_within_layout = self._given_channels is not None
        return not is_within_layout and (self._calls_members or has_hooks(self._members))

    def _split_at_members(self) -> Any:
        if self._split is None:
            from .sequential import Sequential

            modules = self._basic_ops if self._own else self._ops
            self._split = Sequential(*modules, recompute=self._recompute)
        return self._split

    # ---- looking at plans

    def plan(self) -> Plan:
        """The plan of the last call. RuntimeError before any call."""
        if self._group.last is None:
            raise RuntimeError("[OperationFuser] plan() must follow a call, got none so far")
        return self._plan_of(self._group.last)

    def _plan_of(self, entry: Any) -> Plan:
        session: PlanningSession = entry.session
        if session.plan is None:
            session.plan = Plan(entry.text, entry.data, entry.near_misses, session.python_ops)
        return session.plan

    def explain(self) -> _explain.Explanation:
        """The plan of the last call for reading: text, a table in a notebook, or an SVG."""
        if self._split is not None and self._is_split():
            explanation: _explain.Explanation = self._split.explain()
            return explanation
        return _explain.Explanation([self._explained()])

    def _explained(self, note: str = "") -> _explain.Group:
        plan = self.plan()
        session = self._group.last.session
        return _explain.describe(plan, self._basic_ops, session.made_by, self._saved_bytes(), note)

    def _saved_bytes(self) -> SavedBytes | None:
        """What the last call saved; None where a Python step decides and no call ran eagerly."""
        entry = self._group.last
        walker = self._walker(entry)
        if not entry.native or self._accumulates:
            return walker.last_saved
        inputs = self._group.last_inputs
        if not inputs:
            rows = _declarations(walker.plan)
            changes = {kind for kind, row in rows.items() if not row["keeps_width"]}
            shape = likely_shape(walker.plan.ops, changes)
            inputs = [(shape, dtype) for dtype in self._traced_dtypes]
        try:
            return walker.rehearse(inputs)
        except RuntimeError:
            # Sizes that do not fit: the module has changed since, or its shapes cannot be guessed.
            return None


def _declarations(plan: Plan) -> dict[str, dict[str, Any]]:
    """Of the native kinds of a plan; a library may have brought one since the last plan."""
    kinds = {kind for (kind, _), native in zip(plan.ops, plan.native_ops, strict=True) if native}
    return {kind: _C.declaration(kind) for kind in kinds}


def traced_call(
    number: int,
    basic_ops: Sequence[BasicOperation],
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    """What Dynamo sees of a group: plain tensors, and one op or the walker."""
    parameters = [tensor for op in basic_ops for tensor in op._parameter_tensors()]
    _check_parameters(basic_ops)
    tensors = [input, *extra_inputs, *parameters]
    facts = _facts(tensors, basic_ops)
    text = _native_plan(number, registry.VERSION, facts)
    if text and not (kwargs and any(kwargs)):
        return _unpack(
            tuple(torch.ops.transformer_ops.run_plan(text, input, list(extra_inputs), parameters))
        )
    walker = _python_plan(number, registry.VERSION, facts)
    if walker < 0:
        return _walk_outside(number, input, extra_inputs, kwargs)
    for place, value in plain_state(walker):
        # Never true while tracing: what Dynamo guards on.
        if read(basic_ops, place) != value:
            return _walk_outside(number, input, extra_inputs, kwargs)
    state = [read(basic_ops, place) for place in state_places(walker)]
    given = kwargs if kwargs is not None else [{} for _ in basic_ops]
    return _unpack(walk_in_graph(walker, tensors, state, given))


def traced_alone(
    op: FusibleOperation, input: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> Any:
    """What Dynamo sees of an op that is called on its own."""
    number, count, is_split = _own_group(op._number)
    given = [kwargs] if kwargs else None
    if is_split:
        return _call_outside(number, input, extra_inputs, given)
    _check_call(count, input, extra_inputs)
    return traced_call(number, op.basic_ops, input, extra_inputs, given)


@torch._dynamo.assume_constant_result
def _own_group(number: int) -> tuple[int, int, bool]:
    op: FusibleOperation = numbered.find(number)
    group: OperationFuser = op._make_own_group()
    return group._number, group.num_extra_inputs, group._is_split()


@torch._dynamo.assume_constant_result
def _traced_group(number: int, edits: int, hooked: bool) -> bool:
    """Whether the group falls apart. Dynamo guards on the arguments."""
    group: OperationFuser = numbered.find(number)
    group._refresh()
    return group._is_split()


@torch.compiler.disable
def _call_outside(
    number: int,
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    group: OperationFuser = numbered.find(number)
    return group(input, *extra_inputs, basic_op_kwargs=kwargs)


@torch.compiler.disable
def _walk_outside(
    number: int,
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    group: OperationFuser = numbered.find(number)
    return group._walk(input, extra_inputs, kwargs)


@torch._dynamo.assume_constant_result
def _native_plan(number: int, version: int, facts: Facts) -> str:
    group: OperationFuser = numbered.find(number)
    if len(facts[3]) != 1 + group.num_extra_inputs + sum(group._num_parameters):
        group._capture()
    entry = group._entry(facts)
    native = entry.native and not group._accumulates
    return str(entry.text) if native else ""


@torch._dynamo.assume_constant_result
def _python_plan(number: int, version: int, facts: Facts) -> int:
    group: OperationFuser = numbered.find(number)
    return number_of(group._walker(group._entry(facts)))


def _facts(tensors: Sequence[Tensor], basic_ops: Sequence[BasicOperation]) -> Facts:
    device = tensors[0].device.type
    autocast = None
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    return (
        torch.is_grad_enabled(),
        autocast,
        device,
        tuple((tensor.dtype, tensor.requires_grad) for tensor in tensors),
        tuple(op.training for op in basic_ops),
    )


@torch._dynamo.assume_constant_result
def _has_autocast(device: str) -> bool:
    """False for the meta device, for one. Dynamo of torch 2.11 cannot trace the question."""
    return torch.amp.is_autocast_available(device)


def _hand_back(input: Tensor, *extra_inputs: Tensor) -> Any:
    return None


def run_group(
    group: OperationFuser,
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    """What `__torch_function__` of a tensor subclass sees: one call of a whole group."""
    return group(input, *extra_inputs, basic_op_kwargs=kwargs)


def _overriding(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose class has a `__torch_function__` of its own."""
    if not torch._C._is_torch_function_enabled():
        return []
    disabled = torch._C._disabled_torch_function_impl
    return [
        tensor
        for tensor in tensors
        if type(tensor) not in _PLAIN_TENSORS and type(tensor).__torch_function__ is not disabled
    ]


def _check_parameters(basic_ops: Sequence[BasicOperation]) -> None:
    for op in basic_ops:
        for name, tensor in zip(op._parameter_names, op._parameter_tensors(), strict=False):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"[{op._kind}] {name} must be a tensor, got {tensor!r}")


def _computes_training(op: BasicOperation) -> bool:
    # C++ reads the instance's `__dict__`.
    return isinstance(getattr(type(op), "training", None), property)


def _check_call(num_extra_inputs: int, input: Tensor, extra_inputs: tuple[Tensor, ...]) -> None:
    if len(extra_inputs) != num_extra_inputs:
        raise ValueError(
            f"[OperationFuser] extra inputs must be {num_extra_inputs}, got {len(extra_inputs)}"
        )
    for tensor in (input, *extra_inputs):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"[OperationFuser] inputs must be tensors, got {type(tensor).__name__}")


def check_recompute(op: str, value: str) -> str:
    """The value; ValueError where it is none of the policies."""
    if value not in ("cheap", "none"):
        raise ValueError(f'[{op}] recompute must be "cheap" or "none", got {value!r}')
    return value


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


def _places(op: BasicOperation) -> list[tuple[Any, str]]:
    if op.is_python:
        return [(None, "") for _ in op._parameter_tensors()]
    return [(op._parameter_owner, name) for name in op._parameter_names]


def _unpack(outputs: tuple[Tensor, ...]) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs


__all__ = ["OperationFuser"]
