"""The Python walker: runs a plan that has Python steps, behind one `torch.autograd.Function`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import instructions, main_grad, python_steps, saved_bytes
from .gradients import Gradients, Like, Returned
from .instructions import Values, arguments_of, op_of, place
from .op import BasicOperation, FusibleOperation, OperationContext
from .plan import Instruction, Plan, Step
from .saved_bytes import SavedBytes
from .stand_ins import StandIns

Kwargs = list[dict[str, Any]]


def check_kwargs(ops: Sequence[BasicOperation], kwargs: Kwargs) -> None:
    """Raises ValueError for a wrong number of entries, TypeError for arguments of a native op."""
    if len(kwargs) != len(ops):
        raise ValueError(
            f"[OperationFuser] basic_op_kwargs must have {len(ops)} entries, got {len(kwargs)}"
        )
    for op, given in zip(ops, kwargs, strict=True):
        if given and not op.is_python:
            raise TypeError(
                f"[{type(op).__name__}] a native op takes no keyword arguments, got {sorted(given)}"
            )


class Tape:
    """What the forward of one call leaves for its backward."""

    def __init__(
        self, values: Values, contexts: list[OperationContext], stand_ins: StandIns
    ) -> None:
        self.values = values
        self.contexts = contexts
        self.stand_ins = stand_ins
        self.saved: Values = {}
        # What the gradients of main tensors, extra tensors and parameters look like, where asked.
        self.likes: dict[str, Like] = {}
        # id -> (tensor handed to a Python step in its place, the tensor itself)
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}

    def original(self, tensor: Tensor | None) -> Tensor | None:
        """The tensor that is saved for one that a Python step had in its hands."""
        tensor = self.stand_ins.replace(tensor)
        return self.copies[id(tensor)][1] if id(tensor) in self.copies else tensor


class Kept(NamedTuple):
    """What a node keeps besides its saved tensors; places are positions among those."""

    walker: Walker
    places: dict[str, int | None]  # of slots and parameters
    own: list[tuple[int | None, ...]]  # of what each op's context saved for itself
    contexts: list[OperationContext]
    likes: dict[str, Like]
    real: tuple[Tensor, ...]  # that others stand in for
    standing: list[int | None]


class Backward(NamedTuple):
    """One backward: what its forward kept, the tensors, and the inputs that want a gradient."""

    kept: Kept
    saved: Sequence[Tensor]
    wanted: frozenset[str]


class Walker:
    """Runs one plan over the ops it was made for. It has no state that a call changes, but for
    `last_saved`."""

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
        self.extra_outputs = [
            [f"o{i}.{k}" for k in range(op.num_extra_outputs)] for i, op in enumerate(basic_ops)
        ]
        self.parameters: list[list[str]] = [[] for _ in basic_ops]
        for name in plan.parameters:
            self.parameters[op_of(name)].append(name)
        self.accumulating = [
            op for op, row in enumerate(plan.ops) if row[1].get("accumulate_into_main_grad")
        ]
        self.gradients = Gradients(plan, basic_ops, self.parameters, self.accumulating)
        self._check_methods()
        # Ops whose contexts keep what they like; the others keep the slots of their declaration.
        joint = {i for step in plan.forward if step.joint and step.fused_op for i in step.ops}
        self.is_free = [i in joint or not native for i, native in enumerate(plan.native_ops)]
        self.kept = self._read_in_backward()
        self.last_read = self._find_last_reads()
        self.computed_for_later = self._find_computed_for_later()
        read = arguments_of(self.live_backward)
        self.shapes_read = [(name, "x" + name[1:]) for name in read if name.startswith("n")]
        # Gradients of inputs that may be views: torch's own ops give them.
        by_torch = {
            name
            for step in self.live_backward
            for i in step.instructions
            if i.target.startswith("aten::")
            for name in i.results
        }
        self.views = [k for k, name in enumerate(self.input_grads) if name in by_torch]
        self.grad_behind = {step: f"g{step.ops[-1] + 1}" for step in self.live_backward}
        # The inputs whose gradients come from Python methods.
        by_python = [i for s in self.live_backward if s.python is not None for i in s.ops]
        self.checked = [n for n in self.inputs if n != "x0" and op_of(n) in by_python]
        # Under torch.compile it is found by number.
        self.number: int | None = None
        self.changed_by_tracing: set[tuple[int, str]] = set()
        # Of the last call that saved anything.
        self.last_saved: SavedBytes | None = None

    def _check_methods(self) -> None:
        runs = [(s, "forward") for s in self.plan.forward]
        runs += [(s, "backward") for s in self.live_backward]
        for step, direction in runs:
            if step.python is None:
                continue
            op = self.python_ops[step.python]
            found = op._python_forward if direction == "forward" else op._python_backward
            if found is None:
                raise RuntimeError(
                    f"[{type(op).__name__}] a Python op must define its {direction} or be covered "
                    f"by a fusion that does, got no {direction}"
                )

    def _read_in_backward(self) -> list[str]:
        """The slots and parameters that backward reads by name, and does not compute again."""
        computed = {n for s in self.live_backward for i in s.instructions for n in i.results}
        names = [n for n in arguments_of(self.live_backward) if n.startswith(("s", "p"))]
        for step in self.live_backward:
            for i in step.ops if step.python is not None else ():
                names += [f"s{i}.{slot}" for slot in self._slots_of(i)]
        return [name for name in dict.fromkeys(names) if name not in computed]

    def _find_last_reads(self) -> dict[Step, list[str]]:
        """Per step, the main tensors computed again that no later step reads."""
        last: dict[str, Step] = {}
        for step in self.live_backward:
            written = [n for instruction in step.instructions for n in instruction.results]
            last.update({n: step for n in (*arguments_of([step]), *written) if n[0] == "x"})
        by_step: dict[Step, list[str]] = {}
        for name, step in last.items():
            by_step.setdefault(step, []).append(name)
        return by_step

    def _find_computed_for_later(self) -> dict[Step, list[Instruction]]:
        """Per step, what it computes again for later steps too: they may run where it does not."""
        by_step: dict[Step, list[Instruction]] = {}
        read: set[str] = set()
        for step in reversed(self.live_backward):
            again = [i for i in step.instructions if i.results[0].startswith(("x", "s"))]
            if not read.isdisjoint(n for i in again for n in i.results):
                by_step[step] = again
            read.update(arguments_of([step]))
            if step.python is not None:
                read.update(f"s{i}.{n}" for i in step.ops for n in self._slots_of(i))
        return by_step

    def _slots_of(self, op: int) -> list[str]:
        """The slots in which a Python step finds the tensors of an op."""
        return [] if self.is_free[op] else self.slots[self.plan.ops[op][0]]

    @property
    def python_steps(self) -> list[Step]:
        """The steps of both passes that run Python methods."""
        return [s for s in (*self.plan.forward, *self.live_backward) if s.python is not None]

    def run(
        self, tensors: Sequence[Tensor], kwargs: Kwargs, stand_ins: StandIns | None = None
    ) -> tuple[Tensor, ...]:
        """The main output, then the visible extra outputs; tensors in plan order."""
        stand_ins = stand_ins or StandIns()
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "[Sequential] torch.func transforms must run over native ops only, "
                f"got the Python steps {self._python_names()}"
            )
        if self.plan.needs_backward and torch.is_grad_enabled():
            outputs: tuple[Tensor, ...] = _Walk.apply(self, kwargs, stand_ins, *tensors)
            return outputs
        return self._outputs(self._forward(tensors, kwargs, stand_ins).values)

    def _python_names(self) -> str:
        return ", ".join(dict.fromkeys(step.name for step in self.python_steps)) or "none"

    # ---- forward

    def _forward(self, tensors: Sequence[Tensor], kwargs: Kwargs, stand_ins: StandIns) -> Tape:
        values: Values = dict(zip(self.inputs, tensors, strict=True))
        first = self.plan.first_backward
        contexts = [OperationContext(requires_grad=i >= first) for i in range(len(self.basic_ops))]
        tape = Tape(values, contexts, stand_ins)
        tape.likes.update({name: Like.of(values[name]) for name in self.checked})
        for step in self.plan.forward:
            name = f"x{step.ops[0]}"
            tape.likes[name] = Like.of(values[name])
            if step.python is None:
                self._native_forward(step, tape)
            else:
                self._python_forward(step, tape, kwargs)
            if name != self.outputs[0]:
                # Who needs it later has it in `saved`.
                del values[name]
        tape.likes[self.outputs[0]] = Like.of(values[self.outputs[0]])
        return tape

    def _native_forward(self, step: Step, tape: Tape) -> None:
        first = f"x{step.ops[0]}"
        cast = instructions.cast_for(step, tape.values, first)
        for instruction in step.instructions:
            instructions.run(instruction, cast)
        for slot, source in step.sources:
            # A parameter is saved as it is, and cast again in backward.
            tape.saved[slot] = tape.values[source] if source.startswith("p") else cast[source]
        for op in step.ops:
            tape.contexts[op].dtype = cast[first].dtype
        for name in (name for instruction in step.instructions for name in instruction.results):
            if name.startswith(("x", "o")):
                tape.values[name] = cast[name]
            if name.startswith("o"):
                tape.likes[name] = Like.of(cast[name])

    def _python_forward(self, step: Step, tape: Tape, kwargs: Kwargs) -> None:
        op = self._python_op(step)
        first, last = step.ops[0], step.ops[-1]
        input_ = tape.values[f"x{first}"]
        mine = tape.contexts[first : last + 1]
        self._set_dtypes(step, input_.dtype, tape)
        arguments: dict[str, Any] = {
            "extra_inputs": [self._extra_inputs(step, i, tape) for i in step.ops],
            "kwargs": [kwargs[i] for i in step.ops],
        }
        with tape.stand_ins:
            if op._forward_style() == "single":
                output, extra = python_steps.forward(op, mine, input_, **arguments)
            else:
                arguments["requires_grad"] = [ctx.requires_grad for ctx in mine]
                output, extra, to_save = python_steps.forward_compute(op, input_, **arguments)
                python_steps.forward_save_ctx(op, mine, input_, to_save, **arguments)
        tape.values[f"x{last + 1}"] = tape.original(python_steps.check_output(op, output))
        for i, tensors in zip(step.ops, extra, strict=True):
            self._put_extra_outputs(step, op, i, tensors, tape)
        for i in step.ops:
            self._take_saved(op, i, tape)

    def _python_op(self, step: Step) -> FusibleOperation:
        assert step.python is not None
        return self.python_ops[step.python]

    def _set_dtypes(self, step: Step, running: torch.dtype, tape: Tape) -> None:
        like = tape.likes[f"x{step.ops[0]}"]
        autocast = None if self.plan.autocast is None else instructions.dtype(self.plan.autocast)
        for i in step.ops:
            if autocast is not None and running != torch.float64 and like.dtype.is_floating_point:
                running = autocast
            elif self.plan.native_ops[i] and self.plan.ops[i][0] == "BasicLinear":
                running = tape.values[self.parameters[i][0]].dtype
            tape.contexts[i].dtype = running

    def _extra_inputs(self, step: Step, op: int, tape: Tape) -> tuple[Tensor | None, ...]:
        tensors: list[Tensor | None] = []
        for k in range(self.basic_ops[op].num_extra_inputs):
            name = f"e{op}.{k}"
            source = self.plan.routes.get(name, name)
            inside = source.startswith("o") and op_of(source) in step.ops
            tensors.append(None if inside else self._with_requires_grad(source, tape))
        return tuple(tensors)

    def _with_requires_grad(self, name: str, tape: Tape) -> Tensor:
        tensor: Tensor = tape.values[name]
        wanted = self.plan.needs_backward and op_of(name) >= self.plan.first_backward
        if not (name.startswith("o") and wanted and torch.is_floating_point(tensor)):
            return tensor
        # Inside the node no tensor has a history: a copy of the handle says what the step asks.
        copy = tensor.detach().requires_grad_()
        tape.copies[id(copy)] = (copy, tensor)
        return copy

    def _put_extra_outputs(
        self, step: Step, fused: FusibleOperation, op: int, tensors: Sequence[Any], tape: Tape
    ) -> None:
        for k, tensor in enumerate(tensors):
            name = f"o{op}.{k}"
            if tensor is not None:
                found = tape.original(python_steps.check_output(fused, tensor))
                assert found is not None
                tape.values[name], tape.likes[name] = found, Like.of(found)
            elif self._read_outside(step, name):
                raise RuntimeError(
                    f"[{type(fused).__name__}] extra output {k} of op {op} must be a tensor: "
                    "it is read outside the step, got None"
                )

    def _read_outside(self, step: Step, output: str) -> bool:
        if output in self.plan.extra_outputs:
            return True
        return any(
            source == output and op_of(target) not in step.ops
            for target, source in self.plan.routes.items()
        )

    def _take_saved(self, fused: FusibleOperation, op: int, tape: Tape) -> None:
        """From the context of an op to where backward finds it."""
        context = tape.contexts[op]
        kept, context.to_save = [tape.original(tensor) for tensor in context.to_save], ()
        if op < self.plan.first_backward:
            return
        if self.is_free[op]:
            context.to_save = tuple(kept)
            return
        kind = self.plan.ops[op][0]
        names = [f"s{op}.{slot}" for slot in self.slots[kind]]
        missing = [name for name, tensor in zip(names, kept, strict=False) if tensor is None]
        if len(kept) != len(names):
            missing = names
        if any(name in self.kept for name in missing) or len(kept) not in (0, len(names)):
            raise RuntimeError(
                f"[{type(fused).__name__}] forward must save the slots "
                f"({', '.join(self.slots[kind])}) of op {op} ({kind}) in its context, "
                f"got {len(kept)} tensors, {sum(tensor is None for tensor in kept)} of them None"
            )
        tape.saved.update(zip(names, kept, strict=False))

    def _outputs(self, values: Values) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []
        for name in self.outputs:
            tensor = values[name]
            # Autograd needs a tensor of its own for each output.
            repeated = any(tensor is other for other in outputs)
            outputs.append(tensor.view_as(tensor) if repeated else tensor)
        return tuple(outputs)

    # ---- saving

    def keep(self, ctx: Any, tape: Tape) -> None:
        """Saves on `ctx` what backward reads: slots and parameters, then each Python op's own."""
        tensors: list[Tensor] = []
        places: dict[str, int | None] = {}
        for name in self.kept:
            source = tape.saved if name.startswith("s") else tape.values
            places[name] = place(tensors, source.get(name))
        own: list[tuple[int | None, ...]] = []
        for context in tape.contexts:
            own.append(tuple(place(tensors, tensor) for tensor in context.to_save))
            context.to_save = ()
        real, given = tape.stand_ins.real, tape.stand_ins.given
        standing = [place(tensors, tensor) for tensor in given]
        # One name: torch's own contexts have names like `real`.
        ctx.kept = Kept(self, places, own, tape.contexts, tape.likes, real, standing)
        ctx.save_for_backward(*tensors)
        if not tape.stand_ins.tracing:
            self._note_bytes(tape.likes["x0"], tape.values, tensors, places, own)

    def _note_bytes(
        self,
        input: Like,
        values: Values,
        tensors: Sequence[Tensor],
        places: dict[str, int | None],
        own: Sequence[tuple[int | None, ...]],
    ) -> None:
        slots = {n: None if k is None else tensors[k] for n, k in places.items() if n[0] == "s"}
        for op, kept in enumerate(own):
            slots |= {f"s{op}.saved{i}": tensors[k] for i, k in enumerate(kept) if k is not None}
        parameters = [values[name] for name in self.plan.parameters]
        self.last_saved = saved_bytes.measure(input, slots, parameters)

    def rehearse(self, inputs: Sequence[tuple[Sequence[int], torch.dtype]]) -> SavedBytes:
        """What a call of a native plan saves, from the sizes and dtypes of its inputs."""
        shapes = [torch.empty(list(sizes), dtype=dtype, device="meta") for sizes, dtype in inputs]
        for op in self.basic_ops:
            shapes += [torch.empty_like(p, device="meta") for p in op._parameter_tensors()]
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            tape = self._forward(shapes, [{} for _ in self.basic_ops], StandIns())
        slots = {name: tape.saved.get(name) for name in self.kept if name[0] == "s"}
        parameters = [tape.values[name] for name in self.plan.parameters]
        return saved_bytes.measure(tape.likes["x0"], slots, parameters)

    # ---- backward

    def backward(self, ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "[Sequential] create_graph=True must have native ops only: Python steps have no "
                f"second derivative, got the steps {self._python_names()}"
            )
        kept: Kept = ctx.kept
        wanted = zip(self.inputs, ctx.needs_input_grad[_FIRST_TENSOR:], strict=True)
        call = Backward(kept, ctx.saved_tensors, frozenset(n for n, wants in wanted if wants))
        values: Values = dict(zip(self.output_grads, grads, strict=True))
        for name, position in kept.places.items():
            if position is not None:
                values[name] = call.saved[position]
        for name, boundary in self.shapes_read:
            if boundary in kept.likes:
                values[name] = kept.likes[boundary].shape
        zeros = None  # the gradient that only stands for one that nobody gave
        for number, step in enumerate(self.live_backward):
            if zeros is None and values.get(self.grad_behind[step]) is not None:
                self._run_backward_step(call, step, values)
            else:
                zeros = self._run_partly_used(call, number, zeros, values)
            values.pop(self.grad_behind[step], None)
            for name in self.last_read.get(step, ()):
                values.pop(name, None)
        results = [values.get(name) for name in self.input_grads]
        for k in self.views:
            results[k] = _unshared(results[k], [*results[:k], *results[k + 1 :], *grads])
        return results

    def _run_backward_step(self, call: Backward, step: Step, values: Values) -> None:
        if step.python is None:
            self._native_backward(call.kept.likes, step, values)
        else:
            self._python_backward(call, step, values)

    def _run_partly_used(
        self, call: Backward, number: int, zeros: str | None, values: Values
    ) -> str | None:
        """Runs a step whose main gradient nobody gave, or skips it. Returns the gradient it made of
        zeros alone."""
        step, likes = self.live_backward[number], call.kept.likes
        unused = self._unused_ops(step, values, zeros)
        zeros = f"g{step.ops[0]}" if len(unused) == len(step.ops) else None
        before = {name: values.get(name) for i in unused for name in self._grads_of(i)}
        if zeros is not None and self._may_skip(number, likes, values):
            self._skip(step, likes, values)
        else:
            self._run_backward_step(call, step, values)
        # The zeros that stood for gradients of unused ops gave zeros, autograd gives nothing.
        values.update(before)
        return zeros

    def _unused_ops(self, step: Step, values: Values, zeros: str | None) -> list[int]:
        """The last ops of a step, as far as nobody gave a gradient for what they put out."""
        unused: list[int] = []
        name = f"g{step.ops[-1] + 1}"
        if values.get(name) is None or name == zeros:
            for i in reversed(step.ops):
                if any(values.get("d" + extra) is not None for extra in self.extra_outputs[i]):
                    break
                unused.append(i)
        return unused

    def _grads_of(self, op: int) -> list[str]:
        """The gradients of an op's parameters and extra inputs."""
        extra = [f"e{op}.{k}" for k in range(self.basic_ops[op].num_extra_inputs)]
        sources = [self.plan.routes.get(name, name) for name in extra]
        return ["d" + name for name in (*self.parameters[op], *sources)]

    def _may_skip(self, number: int, likes: dict[str, Like], values: Values) -> bool:
        """Whether the steps after an unused one are unused too, up to a boundary at which zeros can
        be made."""
        for later in self.live_backward[number + 1 :]:
            if f"x{later.ops[-1] + 1}" in likes:
                return True
            # Inside a fused forward step: only the step before knows what zeros look like there.
            extra = (n for i in later.ops for n in self.extra_outputs[i])
            if later in self.computed_for_later or any(
                values.get("d" + n) is not None for n in extra
            ):
                return False
        return True

    def _skip(self, step: Step, likes: dict[str, Like], values: Values) -> None:
        for instruction in self.computed_for_later.get(step, ()):
            for argument in instruction.arguments:
                if isinstance(argument, str) and argument.startswith("g"):
                    values[argument] = _gradient(likes, values, argument)
            instructions.run(instruction, values)

    def _native_backward(self, likes: dict[str, Like], step: Step, values: Values) -> None:
        written: set[str] = set()
        for instruction in step.instructions:
            for argument in instruction.arguments:
                if not isinstance(argument, str) or argument in written:
                    continue
                if argument.startswith(("g", "do")):
                    values[argument] = _gradient(likes, values, argument)
                elif argument not in values:
                    raise RuntimeError(
                        f"[{step.name}] backward must find {argument[1:]!r} of op "
                        f"{op_of(argument)}, got nothing: its forward did not save it"
                    )
            written.update(instruction.results)
        cast = instructions.cast_for(step, values, None)
        for instruction in step.instructions:
            self._run_backward(instruction, cast)
        if cast is not values:
            values.update({name: cast[name] for name in written})
        # The dtype of a Python step's output is known only now.
        _fit(likes, values, step.ops[0])

    def _run_backward(self, instruction: Instruction, values: Values) -> None:
        for op in self.accumulating:
            if f"dp{op}.weight" in instruction.results:
                weight = self.basic_ops[op]._parameter_tensors()[0]
                return main_grad.run(instruction, values, f"dp{op}.weight", weight)
        instructions.run(instruction, values)

    def _python_backward(self, call: Backward, step: Step, values: Values) -> None:
        op = self._python_op(step)
        kept, last = call.kept, step.ops[-1]
        grad_output = _gradient(kept.likes, values, f"g{last + 1}")
        values[f"g{last + 1}"] = grad_output
        for instruction in step.instructions:
            instructions.run(instruction, values)
        contexts = [self._bound_context(call, i, values) for i in step.ops]
        grad_extra_outputs = [
            tuple(
                _gradient(kept.likes, values, f"do{i}.{k}")
                for k in range(self.basic_ops[i].num_extra_outputs)
            )
            for i in step.ops
        ]
        given = [call.saved[k] for k in kept.standing if k is not None]
        with StandIns(kept.real, given):
            grad_input, grad_parameters, grad_extra_inputs = python_steps.backward(
                op, contexts, grad_output, grad_extra_outputs=grad_extra_outputs
            )
        taken = Returned(type(op).__name__, kept.likes, call.wanted, values)
        self.gradients.put_input(taken, step.ops[0], grad_input)
        for i, grads in zip(step.ops, grad_parameters, strict=True):
            self.gradients.put_parameters(taken, i, grads)
        for i, grads in zip(step.ops, grad_extra_inputs, strict=True):
            self.gradients.put_extra_inputs(taken, i, grads)

    def _bound_context(self, call: Backward, i: int, values: Values) -> OperationContext:
        if self.is_free[i]:
            tensors = tuple(None if k is None else call.saved[k] for k in call.kept.own[i])
        else:
            tensors = tuple(values.get(f"s{i}.{name}") for name in self._slots_of(i))
        return call.kept.contexts[i]._bind(tensors)


# Position of the tensors among the arguments of the node.
_FIRST_TENSOR = 3


class _Walk(torch.autograd.Function):
    """The autograd node of a plan that Python walks."""

    @staticmethod
    def forward(
        ctx: Any, walker: Walker, kwargs: Kwargs, stand_ins: StandIns, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        # None for an output that nobody uses: what only it needs is not computed.
        ctx.set_materialize_grads(False)
        tape = walker._forward(tensors, kwargs, stand_ins)
        walker.keep(ctx, tape)
        return walker._outputs(tape.values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (*[None] * _FIRST_TENSOR, *ctx.kept.walker.backward(ctx, grads))


def _unshared(grad: Tensor | None, others: Sequence[Tensor | None]) -> Tensor | None:
    """A gradient in memory of its own: a leaf adds to the one that it is given in place, and does
    not see that others share the memory of a view."""
    if grad is None:
        return None
    memory = saved_bytes.storage_of(grad)
    shares = any(other is not None and saved_bytes.storage_of(other) == memory for other in others)
    return grad.clone() if shares else grad


def _gradient(likes: dict[str, Like], values: Values, name: str) -> Any:
    """A gradient; zeros where nobody gave one, None for an output that was never made."""
    if values.get(name) is not None:
        return values[name]
    like = likes.get("x" + name[1:] if name[0] == "g" else name[1:])
    return None if like is None else like.zeros()


def _fit(likes: dict[str, Like], values: Values, boundary: int) -> None:
    """Give the gradient at a boundary the dtype of the tensor there."""
    gradient, like = values.get(f"g{boundary}"), likes.get(f"x{boundary}")
    if gradient is not None and like is not None and gradient.dtype != like.dtype:
        values[f"g{boundary}"] = gradient.to(like.dtype)
