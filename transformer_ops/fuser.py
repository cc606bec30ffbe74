"""OperationFuser: one group of ops, its plans, and how it is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from . import explain as _explain
from . import registry
from .channels import Routed, resolve_channels
from .host import Kwargs, check_kwargs
from .op import BasicOperation, FusibleOperation, has_hooks
from .plan import Plan
from .planning import PlanningSession, declarations_of
from .saved_bytes import SavedBytes, likely_shape, saved_bytes
from .traced import (
    number_of,
    numbered,
    plain_state,
    read,
    run_in_graph,
    state_places,
)

_C = registry._C
# (grad enabled, autocast dtype, device type, (dtype, requires_grad) of each tensor, training flags)
Facts = tuple[bool, torch.dtype | None, str, tuple[tuple[torch.dtype, bool], ...], tuple[bool, ...]]
# For each op, for each extra input: the (op, extra output) of this group that feeds it, or None.
Sources = Sequence[Sequence[tuple[int, int] | None]]
# The sources, and for each op whether somebody outside the group reads each of its extra outputs.
Channels = tuple[Sources, Sequence[Sequence[bool]]]

_PLAIN_TENSORS = {Tensor, torch.nn.Parameter}
# Each name on the way from a global to an object is a guard of a compiled graph.
_run_plan = torch.ops.transformer_ops.run_plan


class Reads(NamedTuple):
    """What a call of a group reads of its modules, by their index."""

    parameters: tuple[tuple[int, str], ...]
    absent: tuple[tuple[int, str], ...]  # parameters that are None
    training: tuple[int | None, ...]  # whose flag a basic op asks for


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
        for op in (*self._ops, *self._basic_ops):
            op.__dict__["_channels_captured"] = True
        places = [_places(op) for op in self._basic_ops]
        self._num_parameters = [len(op._parameter_tensors()) for op in self._basic_ops]
        self._members = self._find_members()
        self._calls_members = any(op._has_own_forward for op in self._members)
        self._absent = tuple(
            (i, name) for i, op in enumerate(self._ops) for name in op._absent_parameters()
        )
        self._group = _C.Group(
            [self._describe(i) for i in range(len(self._basic_ops))],
            places,
            self._basic_ops,
            self._members,
            [(self._ops[i], name) for i, name in self._absent],
            lambda: PlanningSession(self._basic_ops),
            self._recompute == "cheap",
        )
        self._call = _hand_back if self._calls_members else self._group.make_call()
        self._call_with = self._group.make_call_with()
        self._traced_dtypes: list[torch.dtype] = []
        self._split: Any = None

    def _reads(self) -> Reads | None:
        """None where that is not fixed as long as no op changes."""
        places = {id(op): i for i, op in enumerate(self._ops)}
        owned = [(op, places.get(id(op._parameter_owner), -1)) for op in self._basic_ops]
        if any(i < 0 or op.is_python for op, i in owned):
            return None
        return Reads(
            tuple((i, name) for op, i in owned for name in op._parameter_names),
            self._absent,
            tuple(i if _asks_training(op) else None for op, i in owned),
        )

    def _op_changed(self) -> None:
        """An op has other basic ops, hooks or another `forward` than when it was captured."""
        if self._own:
            self._ops[0].__dict__.pop("_own_group", None)
        self._is_stale = True
        self._note_edit()
        self._call = _hand_back

    def _plans_changed(self) -> None:
        """An op has another attribute that its plans depend on."""
        self._group.forget_plans()
        self._note_edit()

    def _note_edit(self) -> None:
        self._edits += 1
        if self._own:
            own = self._ops[0].__dict__
            own["_own_edits"] = own.get("_own_edits", 0) + 1

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
        if not is_compiling():
            if basic_op_kwargs is None:
                output = self._call(input, *extra_inputs)
                if output is not None:
                    return output
            return self._call_in_python(input, extra_inputs, basic_op_kwargs)
        number, count, is_split = _traced_group(self._traced_state)
        if is_split:
            return _call_outside(number, input, extra_inputs, basic_op_kwargs)
        _check_call(count, input, extra_inputs)
        return traced_call(number, self._ops, input, extra_inputs, basic_op_kwargs)

    def _state(self) -> str:
        """Another text after an edit of an op, and where it has to be split."""
        self._refresh()
        return f"{self._number}.{self._edits}" + ("h" if self._is_split() else "-")

    # All that a compiled graph guards on, beside what it reads of the ops.
    _traced_state = property(registry.untraced(_state))

    # ---- eager, where C++ hands back

    def _call_in_python(
        self, input: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs | None
    ) -> Any:
        self._refresh()
        _check_call(self.num_extra_inputs, input, extra_inputs)
        if kwargs is not None:
            check_kwargs(self._basic_ops, kwargs)
        if self._is_split():
            given = {i: found for i, found in enumerate(kwargs or []) if found}
            return self._split_at_members()._run_by_op(input, extra_inputs, given)
        return self._run(input, extra_inputs, kwargs)

    def _run(self, input: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: Kwargs | None) -> Any:
        if kwargs is not None:
            output = self._call_with(kwargs, input, *extra_inputs)
            if output is not None:
                return output
        rows = [op._parameter_tensors() for op in self._basic_ops]
        if [len(row) for row in rows] != self._num_parameters:
            # A Python op, or a module in it, has other parameters than before.
            self._capture()
        _check_parameters(self._basic_ops)
        overriding = _overriding([input, *extra_inputs, *(t for row in rows for t in row)])
        if overriding:
            arguments = (self, input, extra_inputs, kwargs)
            return handle_torch_function(run_group, overriding, *arguments)
        output = self._call_with(kwargs, input, *extra_inputs)
        if output is None:
            raise RuntimeError(
                "[OperationFuser] hooks must be registered before the call that they see, "
                "got one while it ran"
            )
        return output

    def _entry(self, facts: Facts) -> Any:
        grad, autocast, device, tensors, training = facts
        self._traced_dtypes = [dtype for dtype, _ in tensors[: 1 + self.num_extra_inputs]]
        return self._group.plan(grad, autocast, device, list(tensors), list(training))

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
        plan: Plan = self._group.last.session.plan_of(self._group.last)
        return plan

    def _is_traceable(self) -> bool:
        """Whether a compiled call like the last one needs no graph break."""
        entry = self._group.last
        return entry.native or number_of(entry.host) >= 0

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
        if self.plan().has_python_steps:
            last = entry.program.last_saved
            return None if last is None else saved_bytes(*last)
        inputs = self._group.last_inputs
        if not inputs:
            plan = self.plan()
            rows = declarations_of(plan)
            changes = {kind for kind, row in rows.items() if not row["keeps_width"]}
            shape = likely_shape(plan.ops, changes)
            inputs = [(shape, dtype) for dtype in self._traced_dtypes]
        tensors = [torch.empty(list(sizes), dtype=dtype, device="meta") for sizes, dtype in inputs]
        tensors += [p for op in self._basic_ops for p in op._parameter_tensors()]
        try:
            slots = entry.program.saved_slots_for(tensors)
        except RuntimeError:
            # Sizes that do not fit: the module has changed since, or its shapes cannot be guessed.
            return None
        return saved_bytes(tensors[0].shape, tensors[0].dtype, slots)


def traced_call(
    number: int,
    modules: Sequence[FusibleOperation],
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    """What Dynamo sees of a group of these modules: plain tensors, and one op or Python steps."""
    reads = _reads_constant(number)
    if reads is None:
        ops = _basic_ops(modules)
        parameters = [tensor for op in ops for tensor in op._parameter_tensors()]
        training = tuple(op.training for op in ops)
    else:
        parameters = [getattr(modules[place], name) for place, name in reads.parameters]
        training = tuple(place is not None and modules[place].training for place in reads.training)
        for place, name in reads.absent:
            if getattr(modules[place], name) is not None:
                raise RuntimeError(
                    f"[{type(modules[place]).__name__}] {name} must be assigned to the module, "
                    "got a tensor that was put in its place (torch.func.functional_call)"
                )
    for tensor in parameters:
        if not isinstance(tensor, Tensor):
            _check_parameters(_basic_ops(modules))
    tensors = [input, *extra_inputs, *parameters]
    facts = _facts(tensors, training)
    text = _native_plan(number, registry.VERSION, facts)
    if text and not (kwargs and any(kwargs)):
        return _unpack(tuple(_run_plan(text, input, list(extra_inputs), parameters)))
    plan = _python_plan(number, registry.VERSION, facts)
    if plan < 0:
        return _run_outside(number, input, extra_inputs, kwargs)
    basic_ops = _basic_ops(modules)
    for state_place, value in plain_state(plan):
        # Never true while tracing: what Dynamo guards on.
        if read(basic_ops, state_place) != value:
            return _run_outside(number, input, extra_inputs, kwargs)
    state = [read(basic_ops, state_place) for state_place in state_places(plan)]
    given = kwargs if kwargs is not None else [{} for _ in basic_ops]
    return _unpack(run_in_graph(plan, tensors, state, given))


def _basic_ops(modules: Sequence[FusibleOperation]) -> list[BasicOperation]:
    return [op for module in modules for op in module.basic_ops]


def traced_alone(
    op: FusibleOperation, input: Tensor, extra_inputs: tuple[Tensor, ...], kwargs: dict[str, Any]
) -> Any:
    """What Dynamo sees of an op that is called on its own."""
    number, count, is_split = _own_group(op._number, op._own_edits)
    given = [kwargs] if kwargs else None
    if is_split:
        return _call_outside(number, input, extra_inputs, given)
    _check_call(count, input, extra_inputs)
    return traced_call(number, (op,), input, extra_inputs, given)


@torch._dynamo.assume_constant_result
def _own_group(number: int, edits: int) -> tuple[int, int, bool]:
    op: FusibleOperation = numbered.find(number)
    group: OperationFuser = op._make_own_group()
    return group._number, group.num_extra_inputs, group._is_split()


@torch._dynamo.assume_constant_result
def _reads_constant(number: int) -> Reads | None:
    group: OperationFuser = numbered.find(number)
    return group._reads()


@torch._dynamo.assume_constant_result
def _traced_group(state: str) -> tuple[int, int, bool]:
    group: OperationFuser = numbered.find(int(state.partition(".")[0]))
    return group._number, group.num_extra_inputs, group._is_split()


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
def _run_outside(
    number: int,
    input: Tensor,
    extra_inputs: tuple[Tensor, ...],
    kwargs: list[dict[str, Any]] | None,
) -> Any:
    group: OperationFuser = numbered.find(number)
    return group._run(input, extra_inputs, kwargs)


@torch._dynamo.assume_constant_result
def _native_plan(number: int, version: int, facts: Facts) -> str:
    group: OperationFuser = numbered.find(number)
    if len(facts[3]) != 1 + group.num_extra_inputs + sum(group._num_parameters):
        group._capture()
    entry = group._entry(facts)
    return str(entry.text) if entry.native else ""


@torch._dynamo.assume_constant_result
def _python_plan(number: int, version: int, facts: Facts) -> int:
    group: OperationFuser = numbered.find(number)
    return number_of(group._entry(facts).host)


def _facts(tensors: Sequence[Tensor], training: tuple[bool, ...]) -> Facts:
    device = tensors[0].device.type
    autocast = None
    if _has_autocast(device) and is_autocast_enabled(device):
        autocast = get_autocast_dtype(device)
    return (
        is_grad_enabled(),
        autocast,
        device,
        tuple((tensor.dtype, tensor.requires_grad) for tensor in tensors),
        training,
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


def _asks_training(op: BasicOperation) -> bool:
    return bool(_C.declaration(op._kind)["asks_training"])


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


def _places(op: BasicOperation) -> list[tuple[Any, str | int]]:
    if op.is_python:
        return [(op, len(op._parameter_tensors()))]
    return [(op._parameter_owner, name) for name in op._parameter_names]


def _unpack(outputs: tuple[Tensor, ...]) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs


__all__ = ["OperationFuser"]
