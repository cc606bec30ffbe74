"""`check_fusion`: a fusion against the ops that it replaces."""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser import OperationFuser
from ..fusion import registry
from ..op.base import FusibleOperation
from ..op.fused import FusedOperation
from ..plan.plan import Plan, Step
from .ways import WITHOUT, Numbers, Subject, Way, compare, compiled_ways, eager_ways, unfused_scope

__all__ = ["FusionCheck", "check_fusion"]

_REGISTER = {
    "forward": registry.register_forward_fusion,
    "backward": registry.register_backward_fusion,
    "forward_backward": registry.register_forward_backward_fusion,
}
# An error of autograd: a tensor that was saved for backward is another one by now.
_CHANGED = "modified by an inplace operation"


ALONE = "alone: "


def _is_listed(way: str) -> bool:
    return "recompute=" not in way


class FusionCheck:
    """What `check_fusion` tried; `print` shows it.

    Attributes:
        name: the fusion.
        lists: the ops that ran: the whole list, and the ops that the fusion replaces, alone.
        tried: the ways in which they ran, and the numbers equal those of the unfused ops.
        not_fused: those of them in which the fusion did not fire.
        not_tried: the ways that the unfused ops refuse, with the error.
        slots_read: for each slot of the replaced ops, whether a backward read it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.lists: list[str] = []
        self.tried: list[str] = []
        self.not_fused: list[str] = []
        self.not_tried: dict[str, str] = {}
        self.slots_read: dict[str, bool] = {}

    def __str__(self) -> str:
        plain = dict.fromkeys(way.removeprefix(ALONE) for way in self.tried if _is_listed(way))
        subsets = [way for way in plain if way.startswith(WITHOUT)]
        rows = [way for way in plain if way not in subsets]
        if subsets:
            rows.insert(1, f"{len(subsets)} subsets of inputs and parameters without a gradient")
        read = [slot for slot, is_read in self.slots_read.items() if is_read]
        unread = [slot for slot in self.slots_read if slot not in read]
        missed = [way for way in self.not_fused if _is_listed(way)]
        refused = [f"{way} ({why})" for way, why in self.not_tried.items() if _is_listed(way)]
        lines = {
            "ops": self.lists,
            "tried": rows,
            "and each with": ['recompute="none"', 'recompute="products"'],
            "not fused": missed,
            "the unfused ops refuse": refused,
            "slots that backward reads": read,
            "slots that it never reads": unread,
        }
        text = [f"{self.name}: {len(self.tried)} ways equal the unfused ops"]
        for head, found in lines.items():
            if found:
                line = f"{head}: {'; '.join(found)}"
                text += textwrap.wrap(line, 100, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(text)

    __repr__ = __str__


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
    - with one and three dimensions, one row and no rows, inputs and gradients that are not
      contiguous, and expanded gradients;
    - in other dtypes, under autocast to bfloat16, in eval mode, and without grad;
    - with a second backward, another call before backward, and a gradient of one output alone;
    - under `torch.compile`, with `fullgraph=True` unless a Python forward has the single style.

    A parameter that backward reads and that changed in place before must either be saved, which is
    an error of autograd, or have no effect. Nothing that a call is given may change in place. A way
    that the unfused ops refuse is not tried.

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
    report = FusionCheck("")
    checked = _checked(func, kind, pattern, guard)
    report.name = checked.name
    check = _Check(checked, inputs, report, rtol, atol)
    whole = _Pair.of(ops)
    report.lists.append(", ".join(whole.fused.kinds()))
    numbers = check.run(whole, "", [Way()])
    outputs = len(numbers[0].shared)
    runs = _runs(checked, whole.fused.plans(Way()))
    dtype = next((t.dtype for t in inputs if t.is_floating_point()), torch.float32)
    parameters = whole.fused.parameters
    check.run(whole, "", list(eager_ways(parameters, dtype, outputs, alone=False))[1:])
    for run in runs:
        alone = _alone(ops, run, inputs)
        if alone is None:
            report.lists.append("the ops that it replaces do not run alone: others feed them")
            continue
        pair, given = alone
        parameters = pair.fused.parameters
        report.lists.append(f"{', '.join(pair.fused.kinds())} alone")
        ways = list(eager_ways(parameters, dtype, outputs, alone=True))
        check._replace(inputs=given).run(pair, ALONE, ways)
    compiled = [way._replace(compiled=True) for way in compiled_ways(parameters)]
    check.run(whole, "", compiled)
    return report


class _Checked(NamedTuple):
    """The fusion to check: the name of its steps, their pass, and how to recognize them."""

    name: str
    kind: str
    registered: Callable[[], AbstractContextManager[Any]]
    is_step: Callable[[Step], bool]

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
                f"{pattern!r} and {guard!r}"
            )
        if func.func is None:
            name = func.name
            return _Checked(name, func.pass_name, nullcontext, lambda step: step.name == name)
        kind, pattern, guard, func = func.pass_name, func.pattern, func.guard, func.func
    registry.check_kind(func, kind, pattern, guard)
    name = getattr(func, "__name__", type(func).__name__)
    made: list[FusedOperation] = []

    def recorded(given: list[FusibleOperation], **keywords: Any) -> Any:
        returned = func(list(given), **keywords)
        found = returned if isinstance(returned, list | tuple) else [returned]
        made.extend(op for op in found if isinstance(op, FusedOperation) and op not in given)
        return returned

    @contextmanager
    def registered() -> Iterator[None]:
        same = [h for h in registry.fusions() if h.func is func and h.pass_name == kind]
        register = _REGISTER[kind]
        with unfused_scope(same), register(recorded, name=name, pattern=pattern, guard=guard):
            yield

    return _Checked(name, kind, registered, lambda step: any(step.fused_op is op for op in made))


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
            raise TypeError(f"[check_fusion] {name} must be callable, got {value!r}")
    if not inputs:
        raise ValueError("[check_fusion] inputs must hold the main input at least, got none")
    for tensor in inputs:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"[check_fusion] inputs must be tensors, got {tensor!r}")
    if not isinstance(kind, str) or kind not in _REGISTER:
        raise ValueError(f"[check_fusion] kind must be one of {', '.join(_REGISTER)}, got {kind!r}")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"[check_fusion] {name} must be a number or None, got {value!r}")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"[check_fusion] {name} must be finite and >= 0, got {value!r}")


def _check_ops(ops: object) -> list[FusibleOperation]:
    if not isinstance(ops, list | tuple):
        raise TypeError(f"[check_fusion] make_ops must return a list of ops, got {ops!r}")
    for op in ops:
        if not isinstance(op, FusibleOperation):
            raise TypeError(f"[check_fusion] make_ops must return FusibleOperations, got {op!r}")
    if not ops:
        raise ValueError("[check_fusion] make_ops must return at least one op, got []")
    return list(ops)


class _Pair(NamedTuple):
    """The same ops for both sides; `first` is the number of the first basic op in the list."""

    fused: Subject
    unfused: Subject

    @classmethod
    def of(cls, ops: Sequence[FusibleOperation], run: slice | None = None) -> _Pair:
        return cls(Subject(ops, run), Subject(copy.deepcopy(ops), run))


class _Check(NamedTuple):
    """One call of `check_fusion`."""

    checked: _Checked
    inputs: Sequence[Tensor]
    report: FusionCheck
    rtol: float | None
    atol: float | None

    def run(self, pair: _Pair, where: str, ways: Sequence[Way]) -> list[Numbers]:
        """Compares both sides in each way; returns the numbers of the fused one."""
        expected: dict[Way, Numbers | Exception] = {}
        with unfused_scope(registry.fusions()):
            for way in {way.reference(): way for way in ways}:
                expected[way] = _run(pair.unfused, self.inputs, way)
        with self.checked.registered():
            return [
                numbers
                for way in ways
                if (numbers := self._compared(pair, where, way, expected[way.reference()]))
            ]

    def _compared(
        self, pair: _Pair, where: str, way: Way, expected: Numbers | Exception
    ) -> Numbers | None:
        is_first = way == Way() and not where
        if isinstance(expected, Exception):
            if is_first:
                raise expected
            self.report.not_tried[where + way.name] = str(expected).partition("\n")[0]
            return None
        name = f"[{self.checked.name}] {where}{way.name}:"
        try:
            actual = pair.fused.run(self.inputs, way)
        except Exception as error:
            if way.changed and _CHANGED in str(error):
                self.report.tried.append(where + way.name)
                return None
            if is_first:
                raise
            raise AssertionError(
                f"{name} the fused ops must not raise, got {type(error).__name__}: {error}"
            ) from error
        plans = [] if way.compiled else pair.fused.plans(way)
        if is_first:
            _check_fires(self.checked, plans)
        try:
            compare(name, way, actual, expected, self.rtol, self.atol)
        except AssertionError as error:
            if not way.changed:
                raise
            raise AssertionError(
                f"[{self.checked.name}] a parameter that backward reads must be saved with "
                f"save_for_backward, so that autograd finds changes in place, got {way.changed} "
                f"unsaved: {error}"
            ) from error
        self._note(pair, where, way, plans)
        return actual

    def _note(self, pair: _Pair, where: str, way: Way, plans: Sequence[Plan]) -> None:
        report = self.report
        report.tried.append(where + way.name)
        found = [steps for plan in plans for steps in self.checked.runs_in(plan).values()]
        if found and not any(found):
            report.not_fused.append(where + way.name)
        if where and self.checked.kind == "forward" and way.grad:
            read = pair.fused.slots_read(way)
            for op, slots in enumerate(plans[0].slots):
                for slot in slots:
                    name = f"{op} {plans[0].ops[op][0]}.{slot}"
                    report.slots_read[name] = report.slots_read.get(name) or (op, slot) in read


def _run(subject: Subject, inputs: Sequence[Tensor], way: Way) -> Numbers | Exception:
    try:
        return subject.run(inputs, way)
    except Exception as error:
        return error


def _alone(
    ops: Sequence[FusibleOperation], run: slice, inputs: Sequence[Tensor]
) -> tuple[_Pair, Sequence[Tensor]] | None:
    """The ops of a run and what they get in the list; None if their channels leave the run."""
    basic = [basic for op in ops for basic in op.basic_ops]
    try:
        count = OperationFuser(basic[run]).num_extra_inputs
        if run.start == 0:
            return _Pair.of(ops, run), inputs[: 1 + count]
        before = OperationFuser(basic[: run.start])
    except ValueError:
        return None
    first = 1 + before.num_extra_inputs
    with torch.no_grad(), torch.random.fork_rng():
        found = before(*inputs[:first])
    main = found[0] if isinstance(found, tuple) else found
    return _Pair.of(ops, run), [main, *inputs[first : first + count]]


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
