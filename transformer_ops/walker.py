"""The Python walker: runs a plan that has Python steps, behind one `torch.autograd.Function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import main_grad, python_steps
from .op import BasicOperation, FusibleOperation, OperationContext
from .plan import Argument, Instruction, Plan, Step

Kwargs = list[dict[str, Any]]
Values = dict[str, Any]


class Walker:
    """Runs one plan over the ops it was made for."""

    def __init__(
        self,
        plan: Plan,
        basic_ops: Sequence[BasicOperation],
        python_ops: Sequence[FusibleOperation],
        slots: dict[str, list[str]],
    ) -> None:
        self.plan = plan
        self.basic_ops = tuple(basic_ops)
        self.python_ops = tuple(python_ops)
        self.slots = slots
        count = len(basic_ops)
        self.inputs = ("x0", *plan.extra_inputs, *plan.parameters)
        self.outputs = (f"x{count}", *plan.extra_outputs)
        self.output_grads = (f"g{count}", *("d" + name for name in plan.extra_outputs))
        self.input_grads = ("g0", *("d" + name for name in (*plan.extra_inputs, *plan.parameters)))
        self.live_backward = [step for step in reversed(plan.backward) if not step.skipped]
        self.kept = _read_in_backward(self.live_backward)
        self.routed = frozenset(plan.routes.values())

    def run(self, tensors: Sequence[Tensor], kwargs: Kwargs) -> tuple[Tensor, ...]:
        """The main output, then the visible extra outputs; tensors in plan order."""
        if self.plan.needs_backward and torch.is_grad_enabled():
            outputs: tuple[Tensor, ...] = _Walk.apply(self, kwargs, *tensors)
            return outputs
        values, _, _ = self._forward(tensors, kwargs)
        return self._outputs(values)

    # ---- forward

    def _forward(
        self, tensors: Sequence[Tensor], kwargs: Kwargs
    ) -> tuple[Values, Values, list[OperationContext]]:
        values: Values = dict(zip(self.inputs, tensors, strict=True))
        saved: Values = {}
        contexts = [
            OperationContext(requires_grad=self._needs_backward(i)) for i in range(len(self.basic_ops))
        ]
        for step in self.plan.forward:
            if step.python is None:
                self._native_forward(step, values, saved, contexts)
            else:
                self._python_forward(step, values, saved, contexts, kwargs)
        return values, saved, contexts

    def _needs_backward(self, op: int) -> bool:
        return op >= self.plan.first_backward

    def _native_forward(
        self, step: Step, values: Values, saved: Values, contexts: list[OperationContext]
    ) -> None:
        cast = _cast_step(step, values, f"x{step.ops[0]}")
        for instruction in step.instructions:
            _run(instruction, cast)
        for slot, source in step.sources:
            # A parameter is saved as it is, and cast again in backward.
            saved[slot] = values[source] if source.startswith("p") else cast[source]
        for op in step.ops:
            contexts[op].dtype = values["x0"].dtype if step.compute is None else _dtype(step.compute)
        for name, value in cast.items():
            if not name.startswith("p"):
                values[name] = value

    def _python_forward(
        self,
        step: Step,
        values: Values,
        saved: Values,
        contexts: list[OperationContext],
        kwargs: Kwargs,
    ) -> None:
        op = self._python_op(step)
        first, last = step.ops[0], step.ops[-1]
        input_ = values[f"x{first}"]
        mine = contexts[first : last + 1]
        for ctx in mine:
            ctx.dtype = _compute_dtype(input_)
        arguments: dict[str, Any] = {
            "extra_inputs": [self._extra_inputs(step, i, values) for i in step.ops],
            "kwargs": [kwargs[i] for i in step.ops],
        }
        if op._forward_style() == "single":
            output, extra = python_steps.forward(op, mine, input_, **arguments)
        else:
            arguments["requires_grad"] = [ctx.requires_grad for ctx in mine]
            output, extra, to_save = python_steps.forward_compute(op, input_, **arguments)
            python_steps.forward_save_ctx(op, mine, input_, to_save, **arguments)
        values[f"x{last + 1}"] = _check_output(op, "forward", output)
        for i, tensors in zip(step.ops, extra, strict=True):
            self._put_extra_outputs(step, op, i, tensors, values)
        for i in step.ops:
            if i < self.plan.first_backward or not self.plan.needs_backward:
                contexts[i].to_save = ()
            elif self.plan.native_ops[i]:
                names = self.slots[self.plan.ops[i][0]]
                for name, tensor in zip(names, contexts[i].to_save, strict=False):
                    saved[f"s{i}.{name}"] = tensor
                contexts[i].to_save = ()

    def _python_op(self, step: Step) -> FusibleOperation:
        assert step.python is not None
        return self.python_ops[step.python]

    def _extra_inputs(self, step: Step, op: int, values: Values) -> tuple[Tensor | None, ...]:
        tensors: list[Tensor | None] = []
        for k in range(self.basic_ops[op].num_extra_inputs):
            name = f"e{op}.{k}"
            source = self.plan.routes.get(name, name)
            inside = source.startswith("o") and _op_of(source) in step.ops
            tensors.append(None if inside else self._with_requires_grad(source, values))
        return tuple(tensors)

    def _with_requires_grad(self, name: str, values: Values) -> Tensor:
        tensor: Tensor = values[name]
        routed = name.startswith("o")
        wanted = routed and self.plan.needs_backward and _op_of(name) >= self.plan.first_backward
        if not wanted or torch.compiler.is_compiling():
            return tensor
        return tensor.detach().requires_grad_()

    def _put_extra_outputs(
        self,
        step: Step,
        fused: FusibleOperation,
        op: int,
        tensors: Sequence[Tensor | None],
        values: Values,
    ) -> None:
        for k, tensor in enumerate(tensors):
            name = f"o{op}.{k}"
            if tensor is None:
                if self._read_outside(step, name):
                    raise RuntimeError(
                        f"[{type(fused).__name__}] extra output {k} of op {op} must be a tensor: "
                        "it is read outside the step, got None"
                    )
                continue
            values[name] = _check_output(fused, "forward", tensor)

    def _read_outside(self, step: Step, output: str) -> bool:
        if output in self.plan.extra_outputs:
            return True
        return any(
            source == output and _op_of(target) not in step.ops
            for target, source in self.plan.routes.items()
        )

    def _outputs(self, values: Values) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []
        for name in self.outputs:
            tensor = values[name]
            # Autograd needs a tensor of its own for each output.
            repeated = any(tensor is other for other in outputs)
            outputs.append(tensor.view_as(tensor) if repeated else tensor)
        return tuple(outputs)

    # ---- saving

    def keep(
        self, ctx: Any, values: Values, saved: Values, contexts: list[OperationContext]
    ) -> None:
        """Saves on `ctx` what backward reads: slots and parameters, then each Python op's own."""
        tensors: list[Tensor] = []
        places: dict[str, int | None] = {}
        for name in self.kept:
            source = saved if name.startswith("s") else values
            places[name] = _place(tensors, source.get(name))
        own: list[tuple[int | None, ...]] = []
        for context in contexts:
            own.append(tuple(_place(tensors, tensor) for tensor in context.to_save))
            context.to_save = ()
        ctx.places, ctx.own, ctx.contexts, ctx.walker = places, own, contexts, self
        ctx.shapes = {name: tuple(values["x" + name[1:]].shape) for name in self.shape_names()}
        ctx.save_for_backward(*tensors)

    def shape_names(self) -> list[str]:
        return [name for name in _arguments(self.live_backward) if name.startswith("n")]

    # ---- backward

    def backward(self, ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            names = [step.name for step in self.plan.forward if step.python is not None]
            raise RuntimeError(
                "[Sequential] create_graph=True must have native ops only: Python steps have no "
                f"second derivative, got {', '.join(names) or 'accumulate_into_main_grad'}"
            )
        saved = ctx.saved_tensors
        values: Values = dict(zip(self.output_grads, grads, strict=True))
        for name, place in ctx.places.items():
            if place is not None:
                values[name] = saved[place]
        values.update(ctx.shapes)
        for step in self.live_backward:
            if step.python is None:
                self._native_backward(step, values)
            else:
                self._python_backward(ctx, saved, step, values)
        return [values.get(name) for name in self.input_grads]

    def _native_backward(self, step: Step, values: Values) -> None:
        for instruction in step.instructions:
            for argument in instruction.arguments:
                if isinstance(argument, str) and argument not in values:
                    self._raise_missing(step, argument)
        cast = _cast_step(step, values, None)
        for instruction in step.instructions:
            _run(instruction, cast)
        for name, value in cast.items():
            if name.startswith(("g", "d")):
                values[name] = value
        if step.result is not None:
            name = f"g{step.ops[0]}"
            values[name] = values[name].to(_dtype(step.result))
        for op in step.ops:
            if self.basic_ops[op]._attributes().get("accumulate_into_main_grad"):
                name = f"dp{op}.weight"
                weight = self.basic_ops[op]._parameter_tensors()[0]
                if values.get(name) is not None:
                    values[name] = main_grad.accumulate(weight, values[name])

    def _raise_missing(self, step: Step, name: str) -> None:
        op = _op_of(name)
        raise RuntimeError(
            f"[{step.name}] backward of op {op} ({self.plan.ops[op][0]}) must find {name[1:]!r}, got "
            "nothing: the Python forward that covers the op must save its slots in its context"
        )

    def _python_backward(
        self, ctx: Any, saved: Sequence[Tensor], step: Step, values: Values
    ) -> None:
        op = self._python_op(step)
        first, last = step.ops[0], step.ops[-1]
        contexts = []
        for i in step.ops:
            if self.plan.native_ops[i] and not ctx.own[i]:
                names = self.slots[self.plan.ops[i][0]]
                tensors = tuple(values.get(f"s{i}.{name}") for name in names)
            else:
                tensors = tuple(None if k is None else saved[k] for k in ctx.own[i])
            contexts.append(ctx.contexts[i]._bind(tensors))
        grad_extra_outputs = [
            tuple(values.get(f"do{i}.{k}") for k in range(self.basic_ops[i].num_extra_outputs))
            for i in step.ops
        ]
        grad_input, grad_parameters, grad_extra_inputs = python_steps.backward(
            op, contexts, values[f"g{last + 1}"], grad_extra_outputs=grad_extra_outputs
        )
        values[f"g{first}"] = grad_input
        for i, grads in zip(step.ops, grad_parameters, strict=True):
            self._put_parameter_grads(op, i, grads, values)
        for i, grads in zip(step.ops, grad_extra_inputs, strict=True):
            for k, grad in enumerate(grads):
                name = self.plan.routes.get(f"e{i}.{k}", f"e{i}.{k}")
                _add(values, "d" + name, grad)

    def _put_parameter_grads(
        self, op: FusibleOperation, i: int, grads: Sequence[Tensor | None], values: Values
    ) -> None:
        names = [name for name in self.plan.parameters if _op_of(name) == i]
        if grads and len(grads) != len(names):
            raise RuntimeError(
                f"[{type(op).__name__}] backward must return {len(names)} parameter gradients for op "
                f"{i} ({self.plan.ops[i][0]}), got {len(grads)}"
            )
        for name, grad in zip(names, grads, strict=False):
            values["d" + name] = grad


class _Walk(torch.autograd.Function):
    """The autograd node of a plan that Python walks."""

    @staticmethod
    def forward(ctx: Any, walker: Walker, kwargs: Kwargs, *tensors: Tensor) -> tuple[Tensor, ...]:
        values, saved, contexts = walker._forward(tensors, kwargs)
        walker.keep(ctx, values, saved, contexts)
        return walker._outputs(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, None, *ctx.walker.backward(ctx, grads))


def _arguments(steps: Sequence[Step]) -> list[str]:
    names: dict[str, None] = {}
    for step in steps:
        for instruction in step.instructions:
            for argument in instruction.arguments:
                if isinstance(argument, str):
                    names[argument] = None
    return list(names)


def _read_in_backward(steps: Sequence[Step]) -> list[str]:
    names = {name: None for name in _arguments(steps) if name.startswith(("s", "p"))}
    return list(names)


def _place(tensors: list[Tensor], tensor: Tensor | None) -> int | None:
    """The position at which a tensor is saved, each once."""
    if tensor is None:
        return None
    for position, other in enumerate(tensors):
        if other is tensor:
            return position
    tensors.append(tensor)
    return len(tensors) - 1


def _run(instruction: Instruction, values: Values) -> None:
    arguments = [_load(argument, values) for argument in instruction.arguments]
    results: Any
    if not instruction.target:
        results = (arguments[0],) * len(instruction.results)
    else:
        results = _target(instruction.target)(*arguments)
        if not isinstance(results, tuple):
            results = (results,)
    for name, result in zip(instruction.results, results, strict=True):
        _add(values, name, result)


def _add(values: Values, name: str, tensor: Tensor | None) -> None:
    # Several consumers of one channel: their gradients add up.
    if name.startswith("do") and tensor is not None and values.get(name) is not None:
        tensor = values[name] + tensor
    values[name] = tensor


def _target(name: str) -> Any:
    if name.startswith("aten::"):
        return getattr(torch.ops.aten, name.removeprefix("aten::")).default
    return getattr(torch.ops.transformer_ops, name).default


def _load(argument: Argument, values: Values) -> Any:
    if isinstance(argument, str):
        return values[argument]
    return argument[0] if argument is not None else None


def _cast_step(step: Step, values: Values, main: str | None) -> Values:
    """The values as the step reads them: its input and parameters in its compute dtype."""
    if step.compute is None:
        return values
    dtype = _dtype(step.compute)
    cast = dict(values)
    for name in _arguments([step]):
        is_parameter = name.startswith("p") or name.endswith(".weight")
        if name == main or (step.cast_parameters and is_parameter and name in values):
            cast[name] = values[name].to(dtype)
    return cast


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def _op_of(name: str) -> int:
    """The op index in a value's name, as in "dp3.weight"."""
    return int(name.partition(".")[0].lstrip("abcdefghijklmnopqrstuvwxyz"))


def _check_output(op: FusibleOperation, method: str, tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise RuntimeError(f"[{type(op).__name__}] {method} must return tensors, got {tensor!r}")
    return tensor
