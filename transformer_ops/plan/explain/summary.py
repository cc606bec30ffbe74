"""The parts of a plan that text, table and picture show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from ...fusion.registry import FusionHandle, fusions
from ...op.base import BasicOperation
from ...quantization.number_format import FORMATS
from ..plan import Instruction, NearMiss, Plan, Step, Value
from ..saved_bytes import SavedBytes


@dataclass(frozen=True)
class Slot:
    """A tensor saved for backward. `bytes` is for each row of the group's input, or None if
    unknown. `same_as` names the slot that has the same memory and counts it. `format` is "fp8" or
    "int8", or empty if the tensor is saved exactly."""

    op: int
    name: str
    bytes: float | None
    same_as: str | None = None
    format: str = ""

    @property
    def full_name(self) -> str:
        """The name in the plan's text, without the "s"."""
        return f"{self.op}.{self.name}"


@dataclass(frozen=True)
class StepRow:
    """One step of one pass. `rule` is the fusion that made it, or empty for an op that runs alone;
    `origin` says where that was registered."""

    ops: tuple[int, ...]
    runs: str
    rule: str
    origin: str
    joint: bool
    skipped: bool
    python: bool
    saves: tuple[Slot, ...]
    reads: tuple[str, ...]
    # Main tensors ("x3" is between ops 2 and 3) that the step recomputes from what it reads.
    computes: tuple[str, ...]

    @property
    def made_by(self) -> str:
        """The rule, with useful details."""
        marks = ["joint"] if self.joint and self.rule else []
        if self.rule and self.foreign_origin:
            marks.append(f"from {self.foreign_origin}")
        return self.rule + (f" ({', '.join(marks)})" if marks else "")

    @property
    def foreign_origin(self) -> str:
        """The origin of the rule, if it is not built in and its name does not show it."""
        is_known = self.origin == "built-in" or self.rule.startswith(f"{self.origin}::")
        return "" if is_known else self.origin


@dataclass(frozen=True)
class Link:
    """An extra tensor: from an op (None: the caller) to an op (None: the caller)."""

    source: int | None
    target: int | None
    label: str


@dataclass(frozen=True)
class Group:
    """One group of fusible ops. Both lists of steps are in op order."""

    plan: Plan
    kinds: tuple[str, ...]
    details: tuple[str, ...]
    forward: tuple[StepRow, ...]
    backward: tuple[StepRow, ...]
    links: tuple[Link, ...]
    near_misses: tuple[NearMiss, ...]
    saved: SavedBytes | None
    note: str = ""

    @property
    def saved_a_row(self) -> float | None:
        """The bytes saved for backward for each row of the group's input; parameters do not
        count."""
        if not self.plan.needs_backward:
            return 0.0
        return None if self.saved is None else self.saved.total / max(1, self.saved.rows)


@dataclass(frozen=True)
class Plain:
    """A module between groups that is no fusible op, or an op that ran no group."""

    place: int
    name: str
    why: str = "not a fusible op"

    @property
    def line(self) -> str:
        """The line in text, table and picture."""
        return f"module {self.place}: {self.name}, {self.why}"


def alone_note(module: nn.Module) -> str:
    """The reason why a module is a group of its own."""
    members = [module, *getattr(module, "basic_ops", [])]
    kinds = {
        "forward pre-hooks": "_forward_pre_hooks",
        "forward hooks": "_forward_hooks",
        "backward pre-hooks": "_backward_pre_hooks",
        "backward hooks": "_backward_hooks",
    }
    found = [name for name, place in kinds.items() if any(getattr(m, place) for m in members)]
    if not found:
        return f"{type(module).__name__} overrides forward, which keeps it in a group of its own"
    return f"{type(module).__name__} has {' and '.join(found)}, which keep it in a group of its own"


def describe(
    plan: Plan,
    basic_ops: Sequence[BasicOperation],
    made_by: Mapping[int, FusionHandle],
    saved: SavedBytes | None,
    note: str = "",
) -> Group:
    """The summary of a plan. `made_by`: the user's fusion of each Python fused op."""
    origins = {(handle.pass_name, handle.name): handle.origin for handle in fusions()}
    owner: dict[int, tuple[int, str]] = {}

    def rows(
        steps: Sequence[Step], pass_name: str, slots: Sequence[tuple[Slot, ...]]
    ) -> tuple[StepRow, ...]:
        return tuple(
            _row(plan, step, pass_name, kept, _reads(plan, step, saved), made_by, origins)
            for step, kept in zip(steps, slots, strict=True)
        )

    steps = (("forward", plan.forward), ("backward", plan.backward))
    made = {(handle.pass_name, handle.name) for handle in made_by.values()} | {
        ("forward_backward" if step.joint else pass_name, step.name)
        for pass_name, found in steps
        for step in found
    }
    kept = [_slots(plan, step, saved, owner) for step in plan.forward]
    nothing: list[tuple[Slot, ...]] = [() for _ in plan.backward]
    notes = [f"op {i}: {op._plan_note()}" for i, op in enumerate(basic_ops) if op._plan_note()]
    return Group(
        plan=plan,
        kinds=tuple(kind for kind, _ in plan.ops),
        details=tuple(op.extra_repr() for op in basic_ops),
        forward=rows(plan.forward, "forward", kept),
        backward=rows(plan.backward, "backward", nothing),
        links=tuple(_links(plan, basic_ops)),
        near_misses=_relevant(plan, origins, made),
        saved=saved,
        note="; ".join(filter(None, [note, _formats(plan), _quantized_weights(plan), *notes])),
    )


def _formats(plan: Plan) -> str:
    """The formats that a recipe gives products."""
    if plan.recipe is None:
        return ""
    every, *single = plan.recipe.split("; ")
    rows = [_formats_of_op(every)] if not single else []
    for row in single:
        op, formats = row.split(": ")
        rows.append(f"op {op} {_formats_of_op(formats)}")
    return f"formats of products: {'; '.join(rows)}; {_how(plan)}"


def _how(plan: Plan) -> str:
    calls = [c for step in (*plan.forward, *plan.backward) for c in step.instructions]
    codes = (("float8_e4m3fn",), ("float8_e5m2",))
    rows = []
    if any(argument in codes for call in calls for argument in call.arguments):
        rows.append(
            "codes are multiplied in FP8, from compute capability 8.9 on and where sizes are "
            "multiples of 16"
        )
    names = {_format_of_blocks(call) for call in calls} - {""}
    scales = {FORMATS[name].scale for name in names}
    if "power of two" in scales:
        rows.append(
            "codes with a scale for each block are multiplied in FP8, with CUDA 12.9 on compute "
            "capability 9.0, and where sums are over multiples of 128, rows are multiples of 4 "
            "and columns of 16"
        )
    if "e8m0" in scales:
        rows.append(
            "codes of MXFP8 are multiplied, with CUDA 12.9 from compute capability 10.0 on, and "
            "where sizes are multiples of 32"
        )
    if "e4m3" in scales:
        rows.append(
            "codes of NVFP4 are multiplied, with CUDA 12.9 from compute capability 10.0 on, and "
            "where sums are over multiples of 32 and columns are multiples of 16"
        )
    emulated = "emulated, by products of decoded tensors"
    return "; ".join([*rows, f"all else is {emulated}"]) if rows else emulated


_ENCODERS = {
    name + way for name in ("quantize", "quantize_columns") for way in ("", "_stochastic", ".saved")
}


def _format_of_blocks(call: Instruction) -> str:
    """The format of a call that computes codes of an operand with block scales."""
    format = call.arguments[-1] if call.target in _ENCODERS else None
    value = call.results[0]
    is_operand = isinstance(value, Value) and value.kind == "temporary"
    return str(format[0]) if is_operand and isinstance(format, tuple) else ""


def _quantized_weights(plan: Plan) -> str:
    """The parameters that are stored quantized."""
    formats = {
        argument: call.arguments[2]
        for step in plan.forward
        for call in step.instructions
        for argument in call.arguments[:1]
        if isinstance(argument, Value) and (argument.kind, argument.part) == ("parameter", "codes")
    }
    rows = [f"{v.op}.{v.name} {f[0]}" for v, f in formats.items() if isinstance(f, tuple)]
    return f"weights held quantized: {', '.join(rows)}; decoded for each product" if rows else ""


# The words after the formats of a recipe.
_USES = {
    "hadamard": "both turned by a Hadamard transform for the weight's gradient",
    "stochastic": "gradients rounded stochastically",
}


def _formats_of_op(text: str) -> str:
    names = ("input", "weight", "output gradient")
    found = text.split(", ")
    rows = [f"{n} {f}" for n, f in zip(names, found[:3], strict=True)]
    return ", ".join(rows + [_use(word) for word in found[3:]])


def _use(word: str) -> str:
    if word.startswith("delayed "):
        return f"scales from the last {word.removeprefix('delayed ')} regions"
    return _USES[word]


def _relevant(
    plan: Plan, origins: Mapping[tuple[str, str], str], made: Set[tuple[str, str]]
) -> tuple[NearMiss, ...]:
    """Each near miss once, if a reader can act on it. If no op needs a backward, only users' own
    fusions are listed in the passes that have one. `made`: the (pass, name) of the fusions that
    made a step."""
    rows = {(miss.pass_name, miss.fusion, miss.ops, miss.reason): miss for miss in plan.near_misses}

    def is_own(miss: NearMiss) -> bool:
        return origins.get((miss.pass_name, miss.fusion), "") != "built-in"

    found = [
        miss
        for miss in rows.values()
        if plan.needs_backward or miss.pass_name == "forward" or is_own(miss)
    ]
    nearest: dict[tuple[str, str], int] = {}
    for miss in found:
        fusion = (miss.pass_name, miss.fusion)
        nearest[fusion] = max(miss.matched, nearest.get(fusion, 0))

    def may_matter(miss: NearMiss) -> bool:
        fusion = (miss.pass_name, miss.fusion)
        # What prevented a user's own fusion is always shown, and the nearest it came to a match.
        if is_own(miss) and (not miss.structural or fusion not in made):
            return not miss.structural or miss.matched == nearest[fusion]
        # One op, and often two, fit a pattern by chance.
        return miss.matched > (2 if miss.structural else 1)

    return tuple(filter(may_matter, found))


def _row(
    plan: Plan,
    step: Step,
    pass_name: str,
    saves: tuple[Slot, ...],
    reads: tuple[str, ...],
    made_by: Mapping[int, FusionHandle],
    origins: Mapping[tuple[str, str], str],
) -> StepRow:
    kinds = [plan.ops[i][0] for i in step.ops]
    runs = " + ".join(kinds)
    rule, origin = "", ""
    if step.fused_op is not None:
        handle = made_by.get(step.python) if step.python is not None else None
        runs = f"{step.name}({', '.join(kinds)})"
        if handle is not None:
            rule, origin = handle.name, handle.origin
    elif step.python is None and [step.name] != kinds:
        rule = step.name
        origin = origins.get(("forward_backward" if step.joint else pass_name, rule), "")
    return StepRow(
        ops=step.ops,
        runs=runs,
        rule=rule,
        origin=origin,
        joint=step.joint,
        skipped=step.skipped,
        python=step.python is not None,
        saves=saves,
        reads=reads,
        computes=_computes(step) if pass_name == "backward" else (),
    )


def _slots(
    plan: Plan, step: Step, saved: SavedBytes | None, owner: dict[int, tuple[int, str]]
) -> tuple[Slot, ...]:
    """Slots of the step; `owner` has the slot that counts each memory."""
    if not plan.needs_backward:
        return ()
    formats: dict[tuple[int, str], str] = {}
    if step.python is not None:
        # Only a call shows what its methods keep.
        places = [(step.ops[0], "?")] if saved is None else _slots_of(step, saved)
    else:
        slots = [slot for slot, source in step.sources if source.kind != "parameter"]
        places = list(dict.fromkeys((slot.op, slot.name) for slot in slots))
        formats = {(slot.op, slot.name): plan.format_of(slot) for slot in slots if slot.part}
    if saved is None:
        return tuple(Slot(*place, None, format=formats.get(place, "")) for place in places)
    found = []
    for place in places:
        kept = saved.slots.get(place)
        if kept is None:
            continue  # backward reads something else
        first = owner.setdefault(kept.storage, place)
        if first == place:
            size = kept.bytes / max(1, saved.rows)
            found.append(Slot(*place, size, format=formats.get(place, "")))
        else:
            found.append(Slot(*place, 0.0, same_as=f"{first[0]}.{first[1]}"))
    return tuple(found)


def _slots_of(step: Step, saved: SavedBytes) -> list[tuple[int, str]]:
    return [(op, name) for op, name in saved.slots if op in step.ops]


def _reads(plan: Plan, step: Step, saved: SavedBytes | None) -> tuple[str, ...]:
    if step.python is not None:
        places = _slots_of(step, saved) if saved is not None else []
    else:
        own = set(_results(step))
        read = [value for call in step.instructions for value in call.reads]
        slots = [value for value in read if value.kind == "slot" and value not in own]
        places = [(value.op, value.name) for value in slots]
    parameters = {
        (slot.op, slot.name)
        for row in plan.forward
        for slot, source in row.sources
        if source.kind == "parameter"
    }
    found = [place for place in places if place not in parameters]
    return tuple(dict.fromkeys(f"{op}.{name}" for op, name in found))


def _results(step: Step) -> list[Value]:
    return [value for call in step.instructions for value in call.writes]


def _computes(step: Step) -> tuple[str, ...]:
    return tuple(f"x{value.op}" for value in _results(step) if value.kind == "main")


def _links(plan: Plan, basic_ops: Sequence[BasicOperation]) -> list[Link]:
    links: list[Link] = []
    for (reader, _), (op, output) in plan.fed_by.items():
        channels = basic_ops[op]._output_channels if op < len(basic_ops) else ()
        name = channels[output][0] if output < len(channels) else None
        links.append(Link(op, reader, name or "channel"))
    for k, value in enumerate(plan.extra_inputs):
        links.append(Link(None, value.op, f"extra input {k}"))
    for k, value in enumerate(plan.extra_outputs):
        links.append(Link(value.op, None, f"extra output {k}"))
    return links
