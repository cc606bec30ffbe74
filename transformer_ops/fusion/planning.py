"""One planning call: hands groups of ops to users' fusion functions and checks what comes back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..op.base import BasicOperation, FusibleOperation
from ..op.checks import DTYPES
from ..op.fused import FusedOperation
from . import registry

# (first op, count, number of the Python object or None, name, made by a native rule?, joint?)
Group = tuple[int, int, int | None, str, bool, bool]
Answer = tuple[int, int, int | None, str]


class NativeFusedOperation(FusedOperation):
    """What a user's function sees of a fused op that a native rule made."""

    _is_contract = True

    def __init__(self, basic_ops: Iterable[BasicOperation], name: str) -> None:
        super().__init__(list(basic_ops))
        self.name = name

    def extra_repr(self) -> str:
        return f"{self.name}: {super().extra_repr()}"


class PlanningSession:
    """The Python objects of one plan. Number i < len(basic_ops) is basic op i, then fused ops."""

    def __init__(self, basic_ops: list[BasicOperation]) -> None:
        for op in basic_ops:
            _check_dtypes(op)
        self.basic_ops = basic_ops
        self.python_ops: list[FusibleOperation] = list(basic_ops)
        # The fusion that made a fused op, by its number.
        self.made_by: dict[int, registry.FusionHandle] = {}

    def attributes(self) -> list[dict[str, Any]]:
        """The constructor state of every op as it is now."""
        return [op._attributes() for op in self.basic_ops]

    def rewrite(self, fusion: int, pass_name: str, groups: list[Group]) -> list[Answer]:
        """Run a user's function in one pass; RuntimeError where its answer does not fit."""
        handle = registry.handle_of(fusion)
        if handle is None:
            return [(-1, index, None, "") for index in range(len(groups))]
        given = [self._module_of(group) for group in groups]
        try:
            returned = handle(list(given), recipe=None)
        except Exception as error:
            raise RuntimeError(
                f"[{handle.name}] a {pass_name} fusion must not raise, got "
                f"{type(error).__name__}: {error} (ops: {_names(given)})"
            ) from error
        if not isinstance(returned, list | tuple):
            raise RuntimeError(
                f"[{handle.name}] a {pass_name} fusion must return a list of ops, got "
                f"{returned!r} (ops: {_names(given)})"
            )
        self._check(handle, pass_name, groups, given, returned)
        answer = self._answer(groups, given, returned)
        for number in range(len(self.basic_ops), len(self.python_ops)):
            self.made_by.setdefault(number, handle)
        return answer

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
            # A container such as Linear is no step: its basic ops were given.
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
                _check_direction(handle, pass_name, op)
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
                # As it was: C++ keeps what it knows of the group.
                answer.append((-1, index, None, ""))
            elif isinstance(op, FusedOperation):
                self.python_ops.append(op)
                number = len(self.python_ops) - 1
                answer.append((first, count, number, type(op).__name__))
            else:
                answer.append((first, 1, first if op.is_python else None, _name(op)))
            first += count
        return answer


def _check_dtypes(op: BasicOperation) -> None:
    # A plan knows only the dtypes that have kernels, and could not say what it got.
    for name, tensor in zip(op._parameter_names, op._parameter_tensors(), strict=False):
        if not op.is_python and tensor is not None and tensor.dtype not in DTYPES:
            raise RuntimeError(
                f"[{op._kind}] {name} must be float16, bfloat16, float32 or float64, "
                f"got {str(tensor.dtype).removeprefix('torch.')}"
            )


def _check_direction(handle: registry.FusionHandle, pass_name: str, op: FusedOperation) -> None:
    missing = []
    if "forward" in pass_name and not op.supports_forward:
        missing.append("a forward")
    if "backward" in pass_name and not op.supports_backward:
        missing.append("fuser_backward")
    if missing:
        raise RuntimeError(
            f"[{handle.name}] a fused op of the {pass_name} pass must define "
            f"{' and '.join(missing)}, got {type(op).__name__}"
        )


def _names(ops: Iterable[Any]) -> str:
    return "[" + ", ".join(_name(op) for op in ops) + "]"


def _name(op: Any) -> str:
    name = type(op).__name__
    if isinstance(op, FusedOperation):
        return f"{name}({', '.join(_name(basic) for basic in op.basic_ops)})"
    kind = getattr(op, "_kind", None)
    return kind if kind and not op.is_python else name
