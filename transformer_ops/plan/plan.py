"""A plan, as Python sees it: which step runs which ops, by which rule, and what it saves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import _C
from ..op.fused import FusedOperation


class Value(NamedTuple):
    """A tensor of a plan. `kind`: "main", "grad" (at a boundary; `op` is the op after it),
    "parameter", "extra_input", "extra_output" and their "..._grad", "slot", "shape", "temporary".
    `part` of a slot that is saved in 8 bits: "codes" or "scale".
    """

    kind: str
    op: int
    name: str
    part: str = ""


# A tensor of the plan, a list of them, a constant in a 1-tuple, or None.
Argument = Value | list[Value] | tuple[Any] | None


@dataclass(frozen=True, eq=False)
class Instruction:
    """results = target(arguments); without a target, the results are the argument itself."""

    target: str
    arguments: tuple[Argument, ...]
    results: tuple[Value | list[Value], ...]

    @property
    def reads(self) -> list[Value]:
        """The tensors among the arguments, including those in lists."""
        return _flat(self.arguments)

    @property
    def writes(self) -> list[Value]:
        """The results, including those in lists."""
        return _flat(self.results)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a pass.

    Attributes: `name` of the op, rule or fused op; `ops`, the indices of the basic ops that it
    covers; `saves`, the slots that it saves for backward as "op.slot"; `fused_op`, the user's
    `FusedOperation`, or None for native steps and single ops.
    """

    name: str
    ops: tuple[int, ...]
    saves: tuple[str, ...]
    fused_op: FusedOperation | None
    joint: bool
    skipped: bool
    instructions: tuple[Instruction, ...] = field(repr=False)
    sources: tuple[tuple[Value, Value], ...] = field(repr=False)
    python: int | None = field(repr=False)


@dataclass(frozen=True, eq=False)
class NearMiss:
    """A fusion that nearly matched, and the reason why it did not.

    `matched` is the number of ops that fitted. `structural`: the op after them is another one, or
    there is none; otherwise a guard refused, or another fusion had taken the ops.
    """

    fusion: str
    pass_name: str
    ops: tuple[int, ...]
    reason: str
    matched: int
    structural: bool


class Plan:
    """The forward and backward steps of one group, both in op order.

    `str(plan)` is its text, and `Plan.parse(text)` the inverse. `ops` has (kind, attributes) of
    each basic op.
    """

    def __init__(
        self,
        text: str,
        data: dict[str, Any],
        near_misses: list[tuple[str, str, tuple[int, ...], str, int, bool]] | None = None,
        python_ops: Sequence[Any] | None = None,
    ) -> None:
        self.text = text
        self.ops = tuple((kind, attributes) for kind, attributes, _ in data["ops"])
        self.native_ops = tuple(native for _, _, native in data["ops"])
        self.extra_inputs = _values(data["extra_inputs"])
        self.parameters = _values(data["parameters"])
        # Buffers of ops, which a call passes after the parameters.
        self.states = _values(data["states"])
        self.extra_outputs = _values(data["extra_outputs"])
        # Extra input -> the extra output that it reads.
        self.routes = {Value(*reader): Value(*source) for reader, source in data["routes"]}
        # The names of each op's parameters, and whether backward returns a gradient of any.
        self.parameter_names: list[list[str]] = data["parameter_names"]
        self.wants_parameters: list[bool] = data["wants_parameters"]
        # The names of the slots that each native op may save for backward.
        self.slots: list[list[str]] = data["slots"]
        # (op, extra input) -> the (op, extra output) that it reads
        self.fed_by: dict[tuple[int, int], tuple[int, int]] = data["fed_by"]
        self._visible = set(data["visible"])
        self.first_backward: int = data["first_backward"]
        self.autocast: str | None = data["autocast"]
        # The formats of products' input, weight and output gradient, as one text.
        self.recipe: str | None = data["recipe"]
        self.saved: str = data["saved"]
        self.forward = [_step(row, python_ops) for row in data["forward"]]
        self.backward = [_step(row, python_ops) for row in data["backward"]]
        self.near_misses = [NearMiss(*row) for row in near_misses or []]

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan of a text. If it cannot be parsed, raises RuntimeError with the line."""
        return cls(*_C.parse_plan(text))

    @property
    def needs_backward(self) -> bool:
        """Whether any op needs a backward."""
        return self.first_backward < len(self.ops)

    @property
    def has_python_steps(self) -> bool:
        """Whether a step runs Python methods of the user."""
        return any(step.python is not None for step in self.forward + self.backward)

    def is_read_outside(self, op: int, output: int, ops: tuple[int, ...]) -> bool:
        """Whether an extra output of one of the ops is read by others."""
        readers = (reader for (reader, _), source in self.fed_by.items() if source == (op, output))
        return (op, output) in self._visible or any(reader not in ops for reader in readers)

    def format_of(self, slot: Value) -> str:
        """The format of a slot with codes: the name of the policy, or the op's own format."""
        is_asked = slot.name == "input" and self.ops[slot.op][1].get("cache_quantized_input")
        return "e4m3" if is_asked else self.saved

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        forward = ", ".join(step.name for step in self.forward)
        backward = ", ".join(step.name for step in self.backward)
        return f"Plan(forward=[{forward}], backward=[{backward}])"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def declarations_of(plan: Plan) -> dict[str, dict[str, Any]]:
    """The declarations of a plan's native kinds. A library may have added one since the last
    plan."""
    kinds = {kind for (kind, _), native in zip(plan.ops, plan.native_ops, strict=True) if native}
    return {kind: _C.declaration(kind) for kind in kinds}


def _values(rows: Iterable[tuple[str, int, str]]) -> tuple[Value, ...]:
    return tuple(Value(*row) for row in rows)


def _flat(items: Iterable[Any]) -> list[Value]:
    found: list[Value] = []
    for item in items:
        found += item if isinstance(item, list) else [item] if isinstance(item, Value) else []
    return found


def _result(row: Any) -> Value | list[Value]:
    return [Value(*value) for value in row] if isinstance(row, list) else Value(*row)


def _argument(row: Any) -> Argument:
    if isinstance(row, list):
        return _result(row)
    return row if row is None or len(row) == 1 else Value(*row)


def _step(row: dict[str, Any], python_ops: Sequence[Any] | None) -> Step:
    number = row["python"]
    op = python_ops[number] if python_ops is not None and number is not None else None
    sources = tuple((Value(*slot), Value(*source)) for slot, source in row["saves"])
    return Step(
        name=row["name"],
        ops=tuple(row["ops"]),
        saves=tuple(dict.fromkeys(f"{slot.op}.{slot.name}" for slot, _ in sources)),
        fused_op=op if isinstance(op, FusedOperation) else None,
        joint=row["joint"],
        skipped=row["skipped"],
        instructions=tuple(
            Instruction(target, tuple(map(_argument, arguments)), tuple(map(_result, results)))
            for target, arguments, results in row["instructions"]
        ),
        sources=sources,
        python=number,
    )
