"""The Python steps of a plan, which the C++ interpreter calls, and what a call stores for them
between forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..op.base import BasicOperation, FusibleOperation
from ..op.context import OperationContext
from ..plan.plan import Plan, Step
from . import delayed, main_grad, method_calls
from .autocast import Autocast, in_dtype
from .stand_ins import StandIns
from .weight_call import Weight, WeightCall

Kwargs = list[dict[str, Any]]
Tensors = Sequence[Tensor | None]

_NO_STAND_INS = StandIns()
_NOTHING = nullcontext()
# The attributes of a context that are there from the start.
_OWN = {"to_save", "saved_tensors", "requires_grad", "dtype", "attributes"}
# A placeholder for a tensor among other values.
_TENSOR = object()


def check_kwargs(ops: Sequence[BasicOperation], kwargs: Kwargs) -> None:
    """Raises ValueError if the number of entries is wrong, and TypeError if a native op gets
    arguments."""
    if len(kwargs) != len(ops):
        raise ValueError(
            f"[OperationFuser] basic_op_kwargs must have {len(ops)} entries, got {len(kwargs)}"
        )
    for op, given in zip(ops, kwargs, strict=True):
        if given and not op.is_python:
            raise TypeError(
                f"[{type(op).__name__}] a native op takes no keyword arguments, got {sorted(given)}"
            )


def _without_views(outputs: Tensors, given: Tensors) -> list[Tensor | None]:
    """Outputs that may change in place. Autograd refuses that for a view of a tensor that it does
    not know, such as `y.reshape(x.shape)`."""
    if not any(tensor is not None and tensor._is_view() for tensor in outputs):
        return list(outputs)
    memory = [t.untyped_storage()._cdata for t in (*outputs, *given) if t is not None]
    return [
        tensor.detach()
        if tensor is not None
        and tensor._is_view()
        and memory.count(tensor.untyped_storage()._cdata) == 1
        else tensor
        for tensor in outputs
    ]


class HostStep:
    """One step of one pass that runs methods of a Python op."""

    def __init__(
        self, step: Step, python_ops: Sequence[FusibleOperation], plan: HostPlan, direction: str
    ) -> None:
        assert step.python is not None
        self._python_ops, self._number = python_ops, step.python
        op = self.op
        found = op._python_forward if direction == "forward" else op._python_backward
        if found is None:
            raise RuntimeError(
                f"[{type(op).__name__}] a Python op must define its {direction} or be covered "
                f"by a fusion that does, got no {direction}"
            )
        self.ops = step.ops
        self.basic_ops = [plan.basic_ops[i] for i in step.ops]
        self.extra_inputs = [basic.num_extra_inputs for basic in self.basic_ops]
        self.extra_outputs = [basic.num_extra_outputs for basic in self.basic_ops]
        self.has_extra_inputs, self.has_extra_outputs = (
            any(self.extra_inputs),
            any(self.extra_outputs),
        )
        self.attributes = [plan.plan.ops[i][1] for i in step.ops]

    @property
    def op(self) -> FusibleOperation:
        """The op whose methods run."""
        return self._python_ops[self._number]

    def note(self, error: Exception, direction: str, detail: str = "") -> None:
        """Adds to an error of the user's methods the step that raised it."""
        if hasattr(error, "add_note"):  # Python 3.11
            name = type(self.op).__name__
            error.add_note(f"[{name}] raised in the {direction} of ops {list(self.ops)}{detail}")


class HostPlan:
    """The state of one plan's Python steps that calls share. Only tracing changes it.

    `rows`: the declaration of each native kind.
    """

    def __init__(
        self,
        plan: Plan,
        program: Any,
        basic_ops: Sequence[BasicOperation],
        python_ops: Sequence[FusibleOperation],
        rows: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.plan = plan
        self.autocast = Autocast(plan)
        self.program = program
        self.basic_ops = basic_ops
        # The ops whose contexts save freely; the others save the slots of their declaration.
        self.is_free: list[bool] = program.keeps_own
        self.forward_steps = [
            HostStep(step, python_ops, self, "forward")
            for step in plan.forward
            if step.python is not None
        ]
        self.backward_steps = [
            HostStep(step, python_ops, self, "backward")
            for step in reversed(plan.backward)
            if step.python is not None and not step.skipped
        ]
        # The (op, slot) pairs that backward reads.
        self.is_read = set(program.slots_read)
        # The ops with a weight that accumulates.
        self.accumulating: list[int] = []
        # The ops whose weight gradient is computed after backward.
        self.delaying: list[int] = []
        for op, (kind, attributes) in enumerate(plan.ops):
            for attribute, is_for_later in rows[kind]["states"] if plan.native_ops[op] else ():
                if attributes.get(attribute):
                    (self.delaying if is_for_later else self.accumulating).append(op)
        # The names of their weights' tensors. Another number of tensors needs another plan.
        self.weight_names = {
            op: basic_ops[op]._names_in(basic_ops[op]._parameter_names[0])
            for op in (*self.accumulating, *self.delaying)
        }
        # Under torch.compile the plan is found by this number.
        self.number: int | None = None
        self.changed_by_tracing: set[tuple[int, str]] = set()

    @property
    def steps(self) -> list[HostStep]:
        """The Python steps of both passes."""
        return self.forward_steps + self.backward_steps

    def weights_of(self, op: int) -> list[Tensor]:
        """The weight of an op that accumulates, or the tensors of its list."""
        owner = self.basic_ops[op]._parameter_owner
        return [getattr(owner, name) for name in self.weight_names[op]]

    def weight_of(self, op: int, k: int) -> Tensor:
        """Tensor k of the weight of such an op."""
        weight: Tensor = getattr(self.basic_ops[op]._parameter_owner, self.weight_names[op][k])
        return weight

    def start(
        self,
        kwargs: Kwargs | None = None,
        stand_ins: StandIns | None = None,
        buffers: Mapping[Weight, main_grad.Buffer] | None = None,
        backward_pass: int | None = None,
    ) -> HostCall:
        """A new call. Raises RuntimeError if a weight that accumulates has no buffer.

        `buffers`: by weight, the buffers that a trace uses instead of those of the weights.
        `backward_pass`: the pass that the gradients belong to, if it is not the one that runs.
        """
        if self.plan.needs_backward:
            for op in self.accumulating:
                for k, weight in enumerate(self.weights_of(op)):
                    main_grad.check(weight, self.basic_ops[op], k)
            for op in self.delaying:
                delayed.check(self.weights_of(op))
        stand_ins = stand_ins or _NO_STAND_INS
        return HostCall(self, kwargs, stand_ins, buffers or {}, backward_pass)


class HostCall(WeightCall):
    """One call of a plan: the contexts of its ops, and the methods with which C++ runs its Python
    steps. Lists of tensors are flat, op after op, in the order given in executor/host.h."""

    def __init__(
        self,
        plan: HostPlan,
        kwargs: Kwargs | None,
        stand_ins: StandIns,
        buffers: Mapping[Weight, main_grad.Buffer],
        backward_pass: int | None,
    ) -> None:
        super().__init__(plan, buffers, backward_pass)
        self.kwargs = kwargs
        self.stand_ins = stand_ins
        self.contexts: dict[int, OperationContext] = {}
        self.own: dict[int, Tensors] = {}
        # id -> (tensor that a Python step got instead, the tensor itself)
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}
        # Under autocast: the indices of parameters among the tensors that an op saves itself.
        self.saved_parameters: dict[int, set[int]] = {}
        # The ids of the tensors that steps got or returned. Then, for tensors that an op stores as
        # attributes of its context: (op, attribute, its structure, its parts that are no tensors).
        self.seen: set[int] = set()
        self.attributes: list[tuple[int, str, Any, list[Any]]] = []

    def original(self, tensor: Tensor | None) -> Tensor | None:
        """The tensor that is saved for one that a Python step got."""
        if self.stand_ins is _NO_STAND_INS and not self.copies:
            return tensor
        tensor = self.stand_ins.replace(tensor)
        return self.copies[id(tensor)][1] if id(tensor) in self.copies else tensor

    # ---- forward

    def forward(self, number: int, dtypes: Sequence[torch.dtype], tensors: Tensors) -> list[Any]:
        """Runs a step of forward. Returns the main output, extra outputs, slots of native ops."""
        step = self.plan.forward_steps[number]
        op, first = step.op, self.plan.plan.first_backward
        input_ = in_dtype(cast(Tensor, tensors[0]), dtypes[0])
        extra_inputs: list[method_calls.Tensors] = [()] * len(step.ops)
        if step.has_extra_inputs:
            given = iter(tensors[1:])
            extra_inputs = [
                tuple(self._with_requires_grad(i, k, next(given)) for k in range(count))
                for i, count in zip(step.ops, step.extra_inputs, strict=True)
            ]
        contexts = [
            OperationContext(i >= first, dtype, attributes)
            for i, dtype, attributes in zip(step.ops, dtypes, step.attributes, strict=True)
        ]
        self.contexts.update(zip(step.ops, contexts, strict=True))
        kwargs = [{} if self.kwargs is None else self.kwargs[i] for i in step.ops]
        arguments: dict[str, Any] = {"extra_inputs": extra_inputs, "kwargs": kwargs}
        try:
            with self._seen_by(step, dtypes, self.stand_ins):
                output, extra = self._run_forward(step, contexts, input_, arguments)
        except Exception as error:
            step.note(error, "forward")
            raise
        results = [self.original(method_calls.check_output(op, output))]
        if step.has_extra_outputs:
            for i, found in zip(step.ops, extra, strict=True):
                results += [self._extra_output(step, i, k, out) for k, out in enumerate(found)]
        is_trace = self.stand_ins.is_trace
        if not is_trace:
            results = _without_views(results, tensors)
        for i in step.ops:
            results += self._slots_of(step, i)
        if not is_trace:
            method_calls.check_real(op, method_calls.forward_method(op), results, input_)
        self.seen.update(map(id, (input_, *tensors)))
        self.seen.update(map(id, results))
        return results

    def _run_forward(
        self,
        step: HostStep,
        contexts: list[OperationContext],
        input_: Tensor,
        arguments: dict[str, Any],
    ) -> tuple[Any, list[method_calls.Tensors]]:
        op, counts = step.op, step.extra_outputs
        if op._forward_style() == "single":
            return method_calls.forward(op, contexts, input_, counts=counts, **arguments)
        arguments["requires_grad"] = [ctx.requires_grad for ctx in contexts]
        output, extra, to_save = method_calls.forward_compute(
            op, input_, counts=counts, **arguments
        )
        method_calls.forward_save_ctx(op, contexts, input_, to_save, **arguments)
        return output, extra

    def _seen_by(
        self, step: HostStep, dtypes: Sequence[torch.dtype | None], stand_ins: StandIns
    ) -> AbstractContextManager[object]:
        """What the methods of a step get instead of the tensors on their modules."""
        if stand_ins is _NO_STAND_INS and self.plan.autocast.dtype is None:
            return _NOTHING
        found = self.plan.autocast.stand_ins(step.basic_ops, dtypes, stand_ins)
        if found.is_trace:
            found.user = type(step.op).__name__
        return found

    def _with_requires_grad(self, op: int, k: int, tensor: Tensor | None) -> Tensor | None:
        plan = self.plan.plan
        source = plan.fed_by.get((op, k))
        if tensor is None or source is None or not plan.needs_backward:
            return tensor
        if source[0] < plan.first_backward or not torch.is_floating_point(tensor):
            return tensor
        # Inside the node no tensor has a history. A copy of the handle shows what the step needs.
        copy = tensor.detach().requires_grad_()
        self.copies[id(copy)] = (copy, tensor)
        return copy

    def _extra_output(self, step: HostStep, op: int, k: int, tensor: Any) -> Tensor | None:
        if tensor is not None:
            return self.original(method_calls.check_output(step.op, tensor))
        if self.plan.plan.is_read_outside(op, k, step.ops):
            raise RuntimeError(
                f"[{type(step.op).__name__}] extra output {k} of op {op} must be a tensor: "
                "it is read outside the step, got None"
            )
        return None

    def _slots_of(self, step: HostStep, op: int) -> Tensors:
        """The slots of a native op from its context; any other op saves its own tensors."""
        context, plan = self.contexts[op], self.plan
        if type(context.to_save) is tuple and not context.to_save and plan.is_free[op]:
            return []
        method_calls.check_saved(step.op, context.to_save)
        if plan.autocast.dtype is not None:
            own = set(map(id, plan.basic_ops[op]._parameter_tensors()))
            kept_ids = enumerate(map(id, context.to_save))
            self.saved_parameters[op] = {k for k, i in kept_ids if i in own}
        kept, context.to_save = [self.original(tensor) for tensor in context.to_save], ()
        if plan.is_free[op]:
            # A joint fused op saves everything, because its backward runs as a whole.
            if step.ops[-1] >= plan.plan.first_backward:
                self.own[op] = kept
            return []
        kind = plan.plan.ops[op][0]
        slots = plan.plan.slots[op]
        if op < plan.plan.first_backward:
            return [None] * len(slots)
        missing = [slot for slot, tensor in zip(slots, kept, strict=False) if tensor is None]
        if len(kept) != len(slots):
            missing = slots
        is_needed = any((op, slot) in plan.is_read for slot in missing)
        if is_needed or len(kept) not in (0, len(slots)):
            absent = sum(tensor is None for tensor in kept)
            count = f"{len(kept)} tensors" + f", {absent} of them None" * bool(absent)
            raise RuntimeError(
                f"[{type(step.op).__name__}] forward must save the slots "
                f"({', '.join(slots)}) of op {op} ({kind}) in its context, "
                f"got {count if kept else 'nothing saved'}"
            )
        return kept or [None] * len(slots)

    def saved(self) -> list[Tensors]:
        """The tensors that each op saves itself, then the tensors that replace others, and those
        that ops store as attributes of their contexts. From now on autograd owns them: a reference
        to an output here would keep its graph alive, which owns this call."""
        own, self.own, self.copies, self.kwargs = self.own, {}, {}, None
        attributes = [tensor for op in self.contexts for tensor in self._take_attributes(op)]
        self.seen.clear()
        rows: list[Tensors] = [own.get(i, ()) for i in range(len(self.plan.basic_ops))]
        return [*rows, [*self.stand_ins.given, *attributes]]

    def _take_attributes(self, op: int) -> list[Tensor]:
        """Removes attributes with tensors of this call from a context."""
        own = vars(self.contexts[op])
        if own.keys() <= _OWN:
            return []
        taken: list[Tensor] = []
        for name, value in list(own.items()):
            if name in _OWN or not isinstance(value, Tensor | list | tuple | dict):
                continue
            leaves, spec = tree_flatten(value)
            if not any(id(leaf) in self.seen for leaf in leaves):
                continue
            del own[name]
            taken += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            rest = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self.attributes.append((op, name, spec, rest))
        return taken

    def _attributes_of(self, tensors: Tensors) -> dict[int, dict[str, Any]]:
        """The attributes that were removed, by op."""
        found: dict[int, dict[str, Any]] = {}
        given = iter(tensors)
        for op, name, spec, rest in self.attributes:
            leaves = [next(given) if leaf is _TENSOR else leaf for leaf in rest]
            found.setdefault(op, {})[name] = tree_unflatten(leaves, spec)
        return found

    # ---- backward

    def backward(
        self,
        number: int,
        grads: Tensors,
        saved: Sequence[Tensors],
        dtypes: Sequence[torch.dtype | None],
        standing: Tensors,
    ) -> list[Any]:
        """Runs a step of backward. Returns the gradients of the main input, of the parameters of
        each op, and of the extra inputs of each op."""
        step = self.plan.backward_steps[number]
        grad_extra_outputs: list[method_calls.Tensors] = [()] * len(step.ops)
        if step.has_extra_outputs:
            given = iter(grads[1:])
            grad_extra_outputs = [tuple(islice(given, count)) for count in step.extra_outputs]
        count = len(self.stand_ins.given)
        standing, attributes = standing[:count], self._attributes_of(standing[count:])
        contexts = [
            self._context(i, dtype, tensors)
            for i, dtype, tensors in zip(step.ops, dtypes, saved, strict=True)
        ]
        for i, own in attributes.items():
            if i in step.ops:
                vars(contexts[step.ops.index(i)]).update(own)
        try:
            casts = self.plan.autocast.dtype is not None
            computed = [context.dtype for context in contexts] if casts else dtypes
            others = self.stand_ins.with_given(cast(Sequence[Tensor], standing))
            in_backward = self.plan.autocast.in_backward(cast(Tensor, grads[0]))
            with self._seen_by(step, computed, others), in_backward:
                grad_input, grad_parameters, grad_extra_inputs = method_calls.backward(
                    step.op,
                    contexts,
                    cast(Tensor, grads[0]),
                    grad_extra_outputs=grad_extra_outputs,
                    counts=step.extra_inputs,
                )
        except Exception as error:
            # The method may have taken them away.
            kept = [getattr(context, "saved_tensors", None) or () for context in contexts]
            counts = ", ".join(str(len(tensors)) for tensors in kept)
            step.note(error, "backward", f", whose contexts have {counts} saved tensors")
            raise
        results = [grad_input]
        for i, found in zip(step.ops, grad_parameters, strict=True):
            results += self._parameter_grads(step, i, found)
        for count, found in zip(step.extra_inputs, grad_extra_inputs, strict=True):
            results += found or [None] * count
        if not self.stand_ins.is_trace:
            method = f"{step.op._python_backward}_backward"
            # The interpreter names gradients on another device.
            here = [tensor for tensor in results if tensor is not None and not tensor.is_meta]
            method_calls.check_real(step.op, method, here, cast(Tensor, grads[0]))
        return results

    def _context(self, op: int, dtype: torch.dtype | None, saved: Tensors) -> OperationContext:
        context = self.contexts.get(op) or OperationContext(True, dtype, self.plan.plan.ops[op][1])
        plan = self.plan
        if plan.autocast.dtype is None:
            return context._bind(tuple(saved))
        names = plan.plan.slots[op]

        def is_parameter(k: int) -> bool:
            if plan.is_free[op]:
                return k in self.saved_parameters.get(op, ())
            return names[k] in plan.plan.parameter_names[op]

        return context._bind(plan.autocast.cast_saved(saved, is_parameter, context.dtype))

    def _parameter_grads(self, step: HostStep, op: int, grads: Tensors) -> Tensors:
        plan = self.plan.plan
        count = len(plan.parameter_names[op])
        if len(grads) == count:
            return grads
        if grads or plan.wants_parameters[op]:
            raise RuntimeError(
                f"[{type(step.op).__name__}] backward must return {count} parameter gradients for "
                f"op {op} ({plan.ops[op][0]}), got {len(grads)}"
            )
        return [None] * count

    def forward_method(self, number: int, saves: bool) -> str:
        """The op and the method of a forward step, for errors."""
        op = self.plan.forward_steps[number].op
        return f"[{type(op).__name__}] {method_calls.forward_method(op, saves)}"

    def parameter_name(self, op: int, k: int) -> str:
        """The name of a parameter, for errors."""
        basic = self.plan.basic_ops[op]
        tensor = basic._parameter_tensors()[k]
        found = (name for name, p in basic.named_parameters() if p is tensor)
        return next(found, self.plan.plan.parameter_names[op][k])
