"""A planning call, which passes groups of ops to users' fusion functions and checks their
results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..base.handles import handles
from ..base.marks import outside_of_jit_trace
from ..op.base import BasicOperation, FusibleOperation
from ..op.checks import DTYPES
from ..op.fused import FusedOperation
from ..op.methods import is_text, shown
from ..op.names import OpName
from ..op.ops import Ops
from . import registry

# (first op, count, number of the Python object or None, name, made by a native rule?, joint?)
Group = tuple[int, int, int | None, str, bool, bool]
Answer = tuple[int, int, int | None, str]
# The fields of a `NearMiss`.
Miss = tuple[str, str, tuple[int, ...], str, int, bool]


class NativeFusedOperation(FusedOperation):
    """A fused op of a native rule, as a user's function sees it."""

    _is_contract = True

    def __init__(self, basic_ops: Iterable[BasicOperation], name: str) -> None:
        super().__init__(list(basic_ops))
        self.name = name

    def extra_repr(self) -> str:
        return f"{self.name}: {super().extra_repr()}"


class PlanningSession:
    """The Python objects of one plan. Numbers below len(basic_ops) are basic ops; fused ops
    follow."""

    @outside_of_jit_trace()
    def __init__(self, basic_ops: Ops, names: Sequence[OpName]) -> None:
        for op, name in zip(basic_ops, names, strict=True):
            _check_dtypes(op, name)
        self.basic_ops = basic_ops
        self.names = names
        self.python_ops = basic_ops.copy()
        # The fusion that made a fused op, by the number of the op.
        self.made_by: dict[int, registry.FusionHandle] = {}
        # The functions without a pattern that changed no list of this plan.
        self.changed_nothing: list[registry.FusionHandle] = []

    @outside_of_jit_trace()
    def attributes(self) -> list[dict[str, Any]]:
        """The constructor arguments of every op as they are now."""
        return [op._attributes() for op in self.basic_ops]

    def resolve(self, recipe: int) -> str:
        """The formats that a `CustomRecipe` gives each op, as the text of a recipe."""
        custom = handles.find(recipe)
        rows = ["exact, exact, exact"]
        for number, op in enumerate(self.basic_ops):
            if not op.is_python and op._declaration()["operands"]:
                rows.append(f"{number}: {', '.join(custom.operands_of(op))}")
        return "; ".join(rows)

    def rewrite(
        self, fusion: int, pass_name: str, groups: list[Group], recipe: str | None
    ) -> list[Answer]:
        """Runs a user's function in one pass. Raises RuntimeError if its result does not fit."""
        handle = registry.handle_of(fusion)
        if handle is None:
            return [(-1, index, None, "") for index in range(len(groups))]
        given = [self._module_of(group) for group in groups]
        returned = _call(handle, f"{pass_name} fusion", given, handle, recipe=recipe)
        if not isinstance(returned, list | tuple):
            raise RuntimeError(
                f"[{handle.name}] a {pass_name} fusion must return a list of ops, got "
                f"{shown(returned)} (ops: {_names(given)})"
            )
        self._check(handle, pass_name, groups, given, returned)
        answer = self._answer(groups, given, returned)
        if all(first < 0 for first, *_ in answer):
            self.changed_nothing.append(handle)
        for number in range(len(self.basic_ops), len(self.python_ops)):
            self.made_by.setdefault(number, handle)
        return answer

    def near_misses(self) -> list[Miss]:
        """Reports the functions that changed nothing."""
        ops = tuple(range(len(self.basic_ops)))
        # A function that looks for containers would never find one, and the user would not know
        # why.
        containers = dict.fromkeys(name.name for name in self.names if name.is_part)
        hints = "".join(f"; it is given the basic ops of a {name}" for name in containers)
        parts = dict.fromkeys(type(op).__name__ for op in self.basic_ops if op.owner is not op)
        if parts:
            hints += f"; compare with isinstance, as these have subclasses: {', '.join(parts)}"
        reason = f"it changed nothing of {_names(self.basic_ops)}{hints}"
        return [
            (handle.name, handle.pass_name, ops, reason, 0, False)
            for handle in self.changed_nothing
        ]

    # ---- patterns

    def fits(self, fusion: int, groups: list[Group]) -> list[list[bool]]:
        """For each entry of the fusion's pattern, the groups that are a basic op which it
        accepts."""
        handle = registry.handle_of(fusion)
        if handle is None or handle.pattern is None:
            return []
        ops = [self._unfused(group) for group in groups]
        return [[op is not None and entry.takes(op) for op in ops] for entry in handle.pattern]

    def _unfused(self, group: Group) -> BasicOperation | None:
        """The basic op of a group that no fusion took."""
        first, count, number, _, is_rule, _ = group
        is_fused = is_rule or count > 1 or number not in (None, first)
        return None if is_fused else self.basic_ops[first]

    def why_not(self, fusion: int, first: int, count: int) -> str | None:
        """The result of the fusion's guard for a match."""
        handle = registry.handle_of(fusion)
        if handle is None:
            return "it was removed"
        if handle.guard is None:
            return None
        ops = self.basic_ops[first : first + count]
        for op in ops:
            op._watch()
        with _NoNumbers():
            reason = _call(handle, "guard", ops, handle.guard)
        if reason is not None and not is_text(reason):
            raise RuntimeError(
                f"[{handle.name}] a guard must return None or the reason why not, got "
                f"{shown(reason)} (ops: {_names(ops)})"
            )
        return reason

    def make(self, fusion: int, first: int, count: int) -> tuple[int, str]:
        """The fused op of a match: its number and name."""
        handle = registry.handle_of(fusion)
        if handle is None:
            raise RuntimeError("[fusion] a fusion must not be removed while it makes a fused op")
        ops = self.basic_ops[first : first + count]
        op = _call(handle, f"{handle.pass_name} fusion", ops, handle)
        if not isinstance(op, FusedOperation):
            raise RuntimeError(
                f"[{handle.name}] a {handle.pass_name} fusion with a pattern must return a "
                f"FusedOperation, got {shown(op)} (ops: {_names(ops)})"
            )
        if [id(basic) for basic in op.basic_ops] != [id(basic) for basic in ops]:
            raise RuntimeError(
                f"[{handle.name}] a fused op must hold exactly the given basic ops in order, got "
                f"{_names([op])} (ops: {_names(ops)})"
            )
        registry.check_methods(handle.name, handle.pass_name, type(op), RuntimeError)
        number = self._add(op)
        self.made_by[number] = handle
        return number, type(op).__name__

    def _add(self, op: FusedOperation) -> int:
        """Adds a fused op to the plan, and returns its number."""
        for basic in op.basic_ops:
            # Compiled code guards on everything that it reads from a Python op.
            if not basic.is_python:
                basic._watch()
        self.python_ops.append(op)
        return len(self.python_ops) - 1

    def _module_of(self, group: Group) -> FusibleOperation:
        first, count, number, name, is_rule, _ = group
        if is_rule:
            return NativeFusedOperation(self.basic_ops[first : first + count], name)
        return self.python_ops[number] if number is not None else self.basic_ops[first]

    def _check(
        self,
        handle: registry.FusionHandle,
        pass_name: str,
        groups: list[Group],
        given: list[FusibleOperation],
        returned: Iterable[Any],
    ) -> None:
        flat: list[Any] = []
        for op in returned:
            # A container such as Linear is no step, because the function got its basic ops.
            is_step = isinstance(op, BasicOperation | FusedOperation)
            flat += op.basic_ops if is_step else [op]
        same = len(flat) == len(self.basic_ops) and all(
            a is b for a, b in zip(flat, self.basic_ops, strict=True)
        )
        if not same:
            raise RuntimeError(
                f"[{handle.name}] a {pass_name} fusion must return exactly the given basic ops in "
                f"order, got {_names(returned)} (ops: {_names(given)})"
            )
        known = {id(op) for op in given}
        for op in returned:
            if id(op) not in known and isinstance(op, FusedOperation):
                registry.check_methods(handle.name, pass_name, type(op), RuntimeError)
        kept = {id(op) for op in returned}
        for op, (*_, is_joint) in zip(given, groups, strict=True):
            if is_joint and id(op) not in kept:
                raise RuntimeError(
                    f"[{handle.name}] a {pass_name} fusion must keep joint fused ops, whose "
                    f"forward and backward belong together, got {_names(returned)} "
                    f"(ops: {_names(given)})"
                )

    def _answer(
        self, groups: list[Group], given: list[FusibleOperation], returned: Iterable[Any]
    ) -> list[Answer]:
        starts = {group[0]: index for index, group in enumerate(groups)}
        answer: list[Answer] = []
        first = 0
        for op in returned:
            count = len(op.basic_ops)
            index = starts.get(first)
            if index is not None and op is given[index]:
                # The group has not changed, so C++ keeps its own data about it.
                answer.append((-1, index, None, ""))
            elif isinstance(op, FusedOperation):
                answer.append((first, count, self._add(op), type(op).__name__))
            else:
                answer.append((first, 1, first if op.is_python else None, _name(op)))
            first += count
        return answer


class _NoNumbers(TorchDispatchMode):
    """In this scope tensors have shapes and dtypes, and computations with them raise TypeError: a
    plan is not made again when numbers change."""

    def __torch_dispatch__(self, func: Any, *unused: Any) -> Any:
        raise TypeError(f"it must not compute with tensors, as plans outlive numbers, got {func}")


@outside_of_jit_trace()
def _call(
    handle: registry.FusionHandle,
    what: str,
    ops: Sequence[FusibleOperation],
    function: Callable[..., Any],
    **keywords: Any,
) -> Any:
    """What the user's function returns for the ops. Raises RuntimeError if it raises."""
    try:
        return function(list(ops), **keywords)
    except Exception as error:
        # te.ops gives pairs.
        is_pair = isinstance(error, TypeError) and "cannot unpack non-iterable" in str(error)
        hint = "; it is given a list of ops, without their indices" if is_pair else ""
        raise RuntimeError(
            f"[{handle.name}] a {what} must not raise, got {type(error).__name__}: {error}{hint} "
            f"(ops: {_names(ops)})"
        ) from error


def _check_dtypes(op: BasicOperation, op_name: OpName) -> None:
    # A plan knows only the dtypes that have kernels, and could not say what it got.
    for name, tensor in zip(op._tensor_names(), op._parameter_tensors(), strict=False):
        if not op.is_python and tensor is not None and tensor.dtype not in DTYPES:
            raise RuntimeError(
                f"[{op_name.name}] {name} must be float16, bfloat16, float32 or float64, got "
                f"{str(tensor.dtype).removeprefix('torch.')}{op_name.suffix}"
            )


def _names(ops: Iterable[Any]) -> str:
    return "[" + ", ".join(_name(op) for op in ops) + "]"


def _name(op: Any) -> str:
    name = type(op).__name__
    if isinstance(op, FusedOperation):
        return f"{name}({', '.join(_name(basic) for basic in op.basic_ops)})"
    kind = getattr(op, "_kind", None)
    return kind if kind and not op.is_python else name
