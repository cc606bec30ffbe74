"""Results as data: what was measured, the ratios that follow from it, and the JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import DEFAULT, EAGER, FORWARD, OPS, REFERENCES, TRAINING, Case, Stack
from .measure import COPY, PRODUCTS
from .timing import ratio, ratios

FORMAT = 1
# What a time by itself is compared to. Machines differ, so it is shown, and no --check fails by it.
SECOND = "1 s"


class Row:
    """One case: times by pass and way, saved bytes by way."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.case = Case.parse(given["case"])
        self.ms: dict[str, dict[str, list[float]]] = given["ms"]
        self.saved: dict[str, int] = given["saved"]

    def median(self, way: str, pass_name: str = TRAINING) -> float | None:
        """Milliseconds, or None where that was not measured."""
        times = self.ms[pass_name].get(way)
        return statistics.median(times) if times else None

    def ratio(self, way: str, reference: str, pass_name: str = TRAINING) -> float | None:
        """The median over the rounds of way / reference."""
        times = self.ms[pass_name]
        if way not in times or reference not in times:
            return None
        return ratio(times[way], times[reference])

    def to_best(self, way: str, pass_name: str = TRAINING) -> float | None:
        """The ratio to whichever of eager and compiled is faster; None unless both are there."""
        found = [self.ratio(way, reference, pass_name) for reference in REFERENCES]
        known = [value for value in found if value is not None]
        return max(known) if len(known) == len(found) else None

    def to_bound(self, way: str, pass_name: str = TRAINING) -> float | None:
        """The ratio to the roof of an op, or to the floor of a block."""
        if self.case.name in OPS:
            found = self.ratio(way, COPY, pass_name)
            return None if found is None else found / self.copies(pass_name)
        return self.ratio(way, PRODUCTS, pass_name)

    def bound(self, pass_name: str = TRAINING) -> float | None:
        """Roof or floor in milliseconds."""
        if self.case.name in OPS:
            found = self.median(COPY, pass_name)
            return None if found is None else found * self.copies(pass_name)
        return self.median(PRODUCTS, pass_name)

    def copies(self, pass_name: str) -> float:
        """How many copies of its input move as much as the op; a copy moves twice its size."""
        op = OPS[self.case.name]
        return (op.forward_moves if pass_name == FORWARD else op.training_moves) / 2

    def saved_ratio(self, way: str) -> float | None:
        """Saved bytes against the better of eager and compiled."""
        best = [self.saved[reference] for reference in REFERENCES if reference in self.saved]
        if way not in self.saved or not best or not min(best):
            return None
        return self.saved[way] / min(best)


@dataclass
class Results:
    """All that one run measured."""

    about: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)  # bytes by the id of the stack
    calls: dict[str, Any] | None = None  # what call_cost.py wrote
    # What the programs of rows.py wrote, by name: adapters, avx2, experts, head_loss, layer,
    # quantized, startup, threads, models.
    limited: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # by the id of the case

    def add(self, given: dict[str, Any]) -> None:
        """A line of a worker. It takes the place of an earlier one of the same case."""
        case = Case.parse(given["case"])
        self.rows = [row for row in self.rows if row.case.id != case.id]
        self.errors.pop(case.id, None)
        if "error" in given:
            self.errors[case.id] = given["error"]
        else:
            self.rows.append(Row(given))

    def find(
        self, name: str, dtype: str, size: tuple[int, ...], allocator: str = DEFAULT
    ) -> Row | None:
        """The row of a case, or None where it was not measured."""
        wanted = (name, dtype, size, allocator)
        for row in self.rows:
            case = row.case
            if (case.name, case.dtype, case.size, case.allocator) == wanted:
                return row
        return None

    def peak(self, name: str, dtype: str, size: tuple[int, ...], way: str) -> int | None:
        """Peak bytes of a stack, or None where it was not measured."""
        return self.peaks.get(Stack(name, dtype, size, way).id)

    def peak_to_best(self, name: str, dtype: str, size: tuple[int, ...], way: str) -> float | None:
        """Peak bytes against the better of eager and compiled; None unless all are there."""
        found = [self.peak(name, dtype, size, w) for w in (way, *REFERENCES)]
        known = [value for value in found if value is not None]
        return known[0] / min(known[1:]) if len(known) == len(found) else None

    # ---- JSON

    def text(self) -> str:
        """The results as JSON, a line for each row."""
        rows = ",\n  ".join(json.dumps(self._written(row)) for row in self.rows)
        head = {"format": FORMAT, "about": self.about, "peaks": self.peaks, "errors": self.errors}
        parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        parts.append(f'"calls": {json.dumps(self.calls)}')
        parts.append(f'"limited": {json.dumps(self.limited)}')
        parts.append(f'"rows": [\n  {rows}\n ]')
        return "{\n " + ",\n ".join(parts) + "\n}\n"

    @staticmethod
    def _written(row: Row) -> dict[str, Any]:
        # Ratios follow from the times; they stand beside them for readers without this code.
        found = {
            pass_name: {
                f"{way} / {EAGER}": [round(r, 4) for r in ratios(times[way], times[EAGER])]
                for way in times
                if way != EAGER
            }
            for pass_name, times in row.ms.items()
            if EAGER in times
        }
        return {**row.given, "ratios": found}

    @staticmethod
    def read(path: Path) -> Results:
        """The way back from `text`. ValueError where it is something else."""
        given = json.loads(path.read_text(encoding="utf-8"))
        if given.get("format") != FORMAT:
            raise ValueError(
                f"[bench] {path} must be of format {FORMAT}, got {given.get('format')!r}"
            )
        rows = [Row(row) for row in given["rows"]]
        limited = given.get("limited", {})  # runs of before it was measured have none
        return Results(
            given["about"], rows, given["peaks"], given["calls"], limited, given["errors"]
        )
