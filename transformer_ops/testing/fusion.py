"""`check_fusion`: a fusion against the ops that it replaces."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..fusion import registry
from ..fusion.pattern import Pattern, check_pattern
from ..modules.fuser import OperationFuser
from ..modules.sequential import Sequential
from ..op.base import FusibleOperation
from ..op.context import OperationContext
from ..op.fused import FusedOperation
from ..op.methods import shown
from ..plan.plan import Plan, Step
from ..runtime import method_calls
from .comparison import (
    ALONE,
    Comparison,
    FusionCheck,
    check_inputs,
    check_tolerances,
    compare_errors,
)
from .subject import Numbers, Subject, with_attributes
from .ways import Way, compiled_ways, eager_ways

__all__ = ["check_fusion"]

_REGISTER = {
    "forward": registry.register_forward_fusion,
    "backward": registry.register_backward_fusion,
    "forward_backward": registry.register_forward_backward_fusion,
}


def check_fusion(
    func: Callable[..., Any],
    make_ops: Callable[[], Sequence[FusibleOperation]],
    *inputs: Tensor,
    kind: str = "forward",
    pattern: registry.PatternLike | None = None,
    guard: registry.Guard | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> FusionCheck:
    """Verifies a fusion: that it fires on the ops, and that all numbers equal those of the unfused
    ops.

    `func` is registered only during the check. The output, the extra outputs and the gradients of
    `inputs` and of every parameter are compared, for the whole list and for the ops that the fusion
    replaces alone:

    - with each `recompute`, so that each slot is read; with every subset of the parameters frozen,
      and with inputs that need no gradient;
    - with one to five dimensions, no rows and thousands of them, inputs, gradients and weights
      that are not contiguous or expanded;
    - in other dtypes, under autocast and a recipe of 4 bits, in eval mode, without grad, and in
      inference mode; with large and small numbers, zeros, NaN, and other values of integers,
      parameters and attributes, of all ops and of one; if all is dropped; each two of these
      together;
    - with three backwards, another call before backward, attributes that change before it, and a
      gradient of one output alone; with hooks that copy what is saved, unwritten memory of NaN,
      another default dtype, and backward in another thread or in a region of autocast;
    - under `torch.compile`, with `fullgraph=True` unless a Python forward has the single style.

    The mean errors against float64 are compared, too, if all ops are native ones without a kink;
    those of a forward fusion's slots as well. On the CPU, two equal calls must give the same
    numbers.

    A parameter, input or output that changed in place before backward must either be saved, which
    is an error of autograd, or have no effect. Nothing that a call is given may change in place,
    nor may `.grad`, hooks, attributes and memory of ops and parameters, the random states and the
    settings of the process. A way that the unfused ops refuse is not tried; a rule in C++ may
    refuse inputs with few dimensions. The report also lists classes of the pattern that
    `make_ops` did not return, and forms of optional ops and norms that none of its ops has.

    Args:
        func, pattern, guard: as for `register_forward_fusion`. A handle has its own pattern, guard
            and kind; a handle of a C++ rule is allowed, too.
        make_ops: returns the list of ops; both sides get the same parameters.
        inputs: the main input and the extra inputs.
        kind: "forward", "backward" or "forward_backward".
        rtol, atol: as for `torch.testing.assert_close`; None: by dtype, with atol relative to the
            largest value of each tensor.

    Returns:
        What was tried.

    Raises:
        AssertionError: the fusion does not fire, a number differs, or a method raises in any way
            but the first; the message says which.
        RuntimeError: `func` raises or returns a wrong list.
        TypeError, ValueError: an argument is wrong.
    """
    _check_arguments(func, make_ops, inputs, kind, rtol, atol)
    ops = _check_ops(make_ops())
    checked = _checked(func, kind, pattern, guard)
    report = FusionCheck(checked.name)
    check = _Fusions(checked, report, inputs, rtol, atol)
    fused, unfused = OpList(ops), OpList(copy.deepcopy(ops))
    report.lists.append(", ".join(fused.kinds()))
    numbers = check.run(fused, unfused, "", [Way()])
    outputs = len(numbers[0].shared)
    runs = _runs(checked, fused.plans(Way()))
    report.not_met = _not_met(checked.pattern, ops, inputs, runs)
    dtype = next((t.dtype for t in inputs if t.is_floating_point()), torch.float32)
    parameters = fused.parameters
    found = [(run, _alone(ops, run, inputs)) for run in runs]
    is_alone = all(given is None for _, given in found)
    ways = eager_ways(parameters, fused.attributes, dtype, len(inputs), outputs, alone=is_alone)
    check.run(fused, unfused, "", list(ways)[1:])
    for run, given in found:
        if given is None:
            report.lists.append("those that it replaces do not run alone, as others feed them")
            continue
        alone, alone_unfused = OpList(ops, run), OpList(copy.deepcopy(ops), run)
        report.lists.append(f"{', '.join(alone.kinds())} alone")
        parameters = alone.parameters
        ways = eager_ways(parameters, alone.attributes, dtype, len(given), outputs, alone=True)
        of_run = _Fusions(checked, report, given, rtol, atol)
        of_run.run(alone, alone_unfused, ALONE, list(ways))
        if checked.kind == "forward" and alone_unfused.is_smooth:
            of_run.compare_slots(alone, alone_unfused)
    compiled = [way._replace(compiled=True) for way in compiled_ways(parameters)]
    check.run(fused, unfused, "", compiled)
    return report


class _Checked(NamedTuple):
    """The fusion to check: the name of its steps, their pass, and how to recognize them."""

    name: str
    kind: str
    registered: Callable[[], AbstractContextManager[Any]]
    is_step: Callable[[Step], bool]
    contexts: list[OperationContext]
    pattern: Pattern = ()

    def runs_in(self, plan: Plan) -> dict[str, list[Step]]:
        """Its steps, by the direction in which the plan should have some."""
        steps = {"forward": plan.forward}
        if plan.needs_backward:
            steps["backward"] = [step for step in plan.backward if not step.skipped]
        return {d: list(filter(self.is_step, s)) for d, s in steps.items() if d in self.kind}


def _checked(func: Any, kind: str, pattern: Any, guard: Any) -> _Checked:
    if isinstance(func, registry.FusionHandle):
        if pattern is not None or guard is not None:
            raise TypeError(
                "[check_fusion] pattern and guard must be left to the handle, got "
                f"{shown(pattern)} and {shown(guard)}"
            )
        if func.func is None:
            name = func.name
            return _Checked(name, func.pass_name, nullcontext, lambda step: step.name == name, [])
        kind, pattern, guard, func = func.pass_name, func.pattern, func.guard, func.func
    registry.check_kind(func, kind, pattern, guard)
    name = getattr(func, "__name__", type(func).__name__)
    made: list[FusedOperation] = []
    contexts: list[OperationContext] = []

    def recorded(given: list[FusibleOperation], **keywords: Any) -> Any:
        returned = func(list(given), **keywords)
        found = returned if isinstance(returned, list | tuple) else [returned]
        new = [op for op in found if isinstance(op, FusedOperation) and op not in given]
        made.extend(new)
        for op in new:
            _record_contexts(op, contexts)
        return returned

    @contextmanager
    def registered() -> Iterator[None]:
        same = [h for h in registry.fusions() if h.func is func and h.pass_name == kind]
        register = _REGISTER[kind]
        with unfused_scope(same), register(recorded, name=name, pattern=pattern, guard=guard):
            yield

    entries = () if pattern is None else check_pattern(pattern)

    def is_step(step: Step) -> bool:
        return any(step.fused_op is op for op in made)

    return _Checked(name, kind, registered, is_step, contexts, entries)


def _not_met(
    pattern: Pattern,
    ops: Sequence[FusibleOperation],
    inputs: Sequence[Tensor],
    runs: Sequence[slice],
) -> list[str]:
    """The classes of a pattern that no op of the list has, and the forms and sizes that it could
    have. `runs`: the basic ops that are replaced."""
    basic = [basic for op in ops for basic in op.basic_ops]
    missing = [
        f"{'optional ' * entry.optional}{cls.__name__}"
        for entry in pattern
        for cls in entry.classes
        if not any(isinstance(op, cls) for op in basic)
    ]
    sizes = [
        *inputs[0].shape[-1:],
        *(size for op in basic for p in op.parameters() for size in p.shape),
    ]
    replaced = [basic[run] for run in runs]
    for entry in pattern:
        if entry.optional and all(any(isinstance(o, entry.classes) for o in r) for r in replaced):
            missing.append(f"no {' or '.join(cls.__name__ for cls in entry.classes)}")
    missing += _other_norms([op for run in replaced for op in run])
    return missing + ["an odd number of columns"] * all(size % 2 == 0 for size in sizes)


def _other_norms(ops: Sequence[Any]) -> list[str]:
    """The forms of norms that none of these ops has."""
    norms: dict[str, list[Any]] = {}
    for op in ops:
        if len(getattr(op, "normalized_shape", ())) > 0:
            norms.setdefault(str(op._kind), []).append(op)
    missing: list[str] = []
    for kind, found in norms.items():
        forms = {
            "without weight": lambda op: op.weight is None,
            "of two dimensions": lambda op: len(op.normalized_shape) > 1,
        }
        if kind == "RMSNorm":
            forms["with eps=None"] = lambda op: op.eps is None
        if kind == "LayerNorm":
            forms["without bias"] = lambda op: op.bias is None
        missing += [f"{kind} {f}" for f, has in forms.items() if not any(map(has, found))]
    return missing


def _check_arguments(
    func: object,
    make_ops: object,
    inputs: Sequence[object],
    kind: object,
    rtol: object,
    atol: object,
) -> None:
    for name, value in (("func", func), ("make_ops", make_ops)):
        if not callable(value):
            raise TypeError(f"[check_fusion] {name} must be callable, got {shown(value)}")
    if not inputs:
        raise ValueError("[check_fusion] inputs must hold the main input at least, got none")
    check_inputs("check_fusion", inputs)
    if not isinstance(kind, str) or kind not in _REGISTER:
        raise ValueError(
            f"[check_fusion] kind must be one of {', '.join(_REGISTER)}, got {shown(kind)}"
        )
    check_tolerances("check_fusion", rtol, atol)


def _check_ops(ops: object) -> list[FusibleOperation]:
    if not isinstance(ops, list | tuple):
        raise TypeError(f"[check_fusion] make_ops must return a list of ops, got {shown(ops)}")
    for op in ops:
        if not isinstance(op, FusibleOperation):
            raise TypeError(
                f"[check_fusion] make_ops must return FusibleOperations, got {shown(op)}"
            )
    if not ops:
        raise ValueError("[check_fusion] make_ops must return at least one op, got []")
    return list(ops)


class _Fusions(Comparison):
    """Runs ops with and without a fusion."""

    def __init__(self, checked: _Checked, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.checked = checked
        self.may_refuse = checked.registered is nullcontext

    def run(self, fused: Any, unfused: Any, where: str, ways: Sequence[Way]) -> list[Numbers]:
        with self.unfused_scope():
            fused.constants = unfused.constants = unfused.find_constants(self.inputs)
        return super().run(fused, unfused, where, ways)

    def unfused_scope(self) -> AbstractContextManager[Any]:
        return unfused_scope(registry.fusions())

    @contextmanager
    def fused_scope(self) -> Iterator[None]:
        with self.checked.registered():
            yield

    def check_fires(self, fused: OpList) -> None:
        _check_fires(self.checked, fused.plans(Way()))

    def is_fused(self, fused: OpList, where: str, way: Way) -> bool:
        contexts, self.checked.contexts[:] = list(self.checked.contexts), []
        if way.compiled:
            return True
        if way == Way():
            _check_contexts(self.checked.name, contexts)
        plans = fused.plans(way)
        if where and self.checked.kind == "forward" and way.grad:
            read, known = fused.slots_read(way), self.report.slots_read
            for op, slots in enumerate(plans[0].slots):
                for slot in slots:
                    name = f"{op} {plans[0].ops[op][0]}.{slot}"
                    known[name] = known.get(name, False) or (op, slot) in read
        found = [steps for plan in plans for steps in self.checked.runs_in(plan).values()]
        return not found or any(found)

    def compare_slots(self, fused: OpList, unfused: OpList) -> None:
        """Raises AssertionError if a slot has larger errors than that of the unfused ops."""
        if self.rtol is not None or self.atol is not None:
            return
        for way in (Way(), Way("bfloat16", dtype=torch.bfloat16)):
            with self.unfused_scope():
                wanted, dtypes = self._slots(unfused, way)
                exact, _ = self._slots(unfused, way._replace(exact=dtypes))
            try:
                with self.fused_scope():
                    found, _ = self._slots(fused, way)
            except RuntimeError as error:
                if "must save the slots" in str(error):
                    return  # It saved those that a backward reads, in all other ways.
                raise
            found.tensors.update((n, None) for n in wanted.tensors.keys() - found.tensors)
            compare_errors(f"[{self.report.name}] {ALONE}{way.name}:", found, wanted, exact)

    def _slots(self, ops: OpList, way: Way) -> tuple[Numbers, tuple[torch.dtype, ...]]:
        """The slots that forward saves, as a backward of all ops sees them, and the dtypes of the
        outputs."""
        seen: dict[str, Tensor | None] = {}

        class Slots(FusedOperation):
            def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
                for k, (op, ctx) in enumerate(zip(self.basic_ops, basic_op_ctxs, strict=True)):
                    for slot, tensor in enumerate(ctx.saved_tensors):
                        seen[f"slot {slot} of op {k} ({op._kind})"] = tensor
                nothing = [(None,) * len(list(op.parameters())) for op in self.basic_ops]
                extra = [(None,) * op.num_extra_inputs for op in self.basic_ops]
                return None, nothing, extra

        with registry.register_backward_fusion(lambda ops, **unused: [Slots(ops)], prepend=True):
            numbers = ops.run(self.inputs, way)
        dtypes = tuple(
            t.dtype for n, t in numbers.tensors.items() if t is not None and n in numbers.shared
        )
        return numbers._replace(tensors=seen), dtypes


def _record_contexts(op: FusedOperation, contexts: list[OperationContext]) -> None:
    """Lists the contexts that the eager forwards of an op fill."""
    if op._python_forward is None:
        return
    name = method_calls.forward_method(op, saves=True)
    method = getattr(op, name)

    @functools.wraps(method)
    def recorded(given: list[OperationContext], *args: Any, **keywords: Any) -> Any:
        if not torch.compiler.is_compiling():
            contexts.extend(given)
        return method(given, *args, **keywords)

    op.__dict__[name] = recorded


def _check_contexts(name: str, contexts: Sequence[OperationContext]) -> None:
    """Raises AssertionError if an attribute of a context still has tensors."""
    for context in contexts:
        for attribute, value in vars(context).items():
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                raise AssertionError(
                    f"[{name}] a tensor that backward reads must be saved with save_for_backward, "
                    f"so that hooks see it, got the attribute {attribute} of a context"
                )


# One rounding error decides on which side of a kink a number is, or which expert a row gets.
_WITH_KINKS = ("Clamped", "ReLU", "ReGLU", "Router", "Quantize")


class OpList(Subject):
    """A list of ops, or a run of their basic ops."""

    def __init__(self, ops: Sequence[FusibleOperation], run: slice | None = None) -> None:
        self._ops = ops
        self._run = run
        has_kinks = any(kink in kind for kind in self.kinds() for kink in _WITH_KINKS)
        self.is_smooth = not has_kinks and not any(op.is_python for op in self._basic(ops))
        self._copies: dict[tuple[Any, ...], list[FusibleOperation]] = {}
        self._groups: dict[tuple[Any, ...], Any] = {}

    def kinds(self) -> list[str]:
        """The classes of its basic ops."""
        return [str(op._kind or type(op).__name__) for op in self._basic(self._ops)]

    def _basic(self, ops: Sequence[FusibleOperation]) -> list[Any]:
        found = [basic for op in ops for basic in op.basic_ops]
        return found[self._run or slice(None)]

    def _callable(self, way: Way) -> Any:
        # A Sequential, or the OperationFuser of a run.
        ops = self._copy(way)
        key = (way.dtype, way.training, way.attributes, way.recompute, way.exact is not None)
        if key not in self._groups:
            basic = [basic for op in ops for basic in op.basic_ops]
            self._groups[key] = (
                Sequential(*ops, recompute=way.recompute)
                if self._run is None
                else OperationFuser(basic[self._run], recompute=way.recompute)
            )
        return self._groups[key]

    def plans(self, way: Way) -> list[Any]:
        """The plans of its last call in this way."""
        group = self._callable(way)
        return list(group.plans()) if self._run is None else [group.plan()]

    def slots_read(self, way: Way) -> set[tuple[int, str]]:
        """The (op, slot) pairs that the backward of its last call in this way reads."""
        group = self._callable(way)
        members = group._groups() if self._run is None else [group]
        return {pair for one in members for pair in one._group.last.program.slots_read}

    def _is_traceable(self, way: Way) -> bool:
        group = self._callable(way)
        members = group._groups() if self._run is None else [group]
        return all(one._is_traceable() for one in members)

    def _copy(self, way: Way) -> list[FusibleOperation]:
        key = (way.dtype, way.training, way.attributes, way.exact is not None)
        if key not in self._copies:
            made: list[FusibleOperation] = copy.deepcopy(list(self._ops))
            for op in made:
                op.to(way.dtype) if way.dtype is not None else op
                op.train(op.training and way.training)
            basic = (basic for op in made for basic in op.basic_ops)
            with_attributes(way, ((op, op._attribute_names) for op in basic))
            for op in made if way.exact is not None else ():
                op.to(torch.float64)
            self._copies[key] = made
        return self._copies[key]

    def _modules(self, way: Way) -> list[nn.Module]:
        return [module for op in self._copy(way) for module in op.modules()]

    def _parameters(self, way: Way) -> dict[str, Tensor]:
        ops = self._copy(way)
        basic = self._basic(ops)
        used = {id(parameter) for op in basic for parameter in op.parameters()}
        return {
            f"{i}.{name}": parameter
            for i, op in enumerate(ops)
            for name, parameter in op.named_parameters()
            if parameter.requires_grad and id(parameter) in used
        }


def unfused_scope(handles: Sequence[Any]) -> ExitStack:
    """A scope without these fusions."""
    stack = ExitStack()
    for handle in handles:
        stack.enter_context(handle.disabled())
    return stack


def _alone(
    ops: Sequence[FusibleOperation], run: slice, inputs: Sequence[Tensor]
) -> Sequence[Tensor] | None:
    """What the ops of a run get in the list; None if their channels leave the run."""
    basic = [basic for op in ops for basic in op.basic_ops]
    try:
        count = OperationFuser(basic[run]).num_extra_inputs
        if run.start == 0:
            return inputs[: 1 + count]
        before = OperationFuser(basic[: run.start])
    except ValueError:
        return None
    first = 1 + before.num_extra_inputs
    with torch.no_grad(), torch.random.fork_rng():
        found = before(*inputs[:first])
    main = found[0] if isinstance(found, tuple) else found
    return [main, *inputs[first : first + count]]


def _runs(checked: _Checked, plans: Sequence[Plan]) -> list[slice]:
    """The ops that steps of the fusion replace."""
    if len(plans) != 1:
        return []
    steps = [step for found in checked.runs_in(plans[0]).values() for step in found]
    return [slice(s[0], s[-1] + 1) for s in dict.fromkeys(step.ops for step in steps)]


def _check_fires(checked: _Checked, plans: Sequence[Plan]) -> None:
    for direction in ("forward", "backward"):
        found = [step for plan in plans for step in checked.runs_in(plan).get(direction, ())]
        if direction not in checked.kind or found:
            continue
        steps = [step for plan in plans for step in getattr(plan, direction) if not step.skipped]
        got = ", ".join(f"{step.name}{list(step.ops)}" for step in steps)
        near = (miss for plan in plans for miss in plan.near_misses)
        misses = (miss for miss in near if miss.fusion == checked.name)
        why = "".join(f"; at {list(miss.ops)}: {miss.reason}" for miss in misses)
        raise AssertionError(f"[{checked.name}] must fire in {direction}, got the steps {got}{why}")
