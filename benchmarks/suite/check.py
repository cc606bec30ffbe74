"""Whether a result got worse than the recorded one: by ratios, never by times."""

from __future__ import annotations

from typing import NamedTuple

from .cases import EAGER, OURS, OURS_COMPILED, PASSES
from .results import Results

WORSE = 1.5


class Regression(NamedTuple):
    """A ratio to eager that is more than WORSE times the recorded one."""

    case: str
    what: str
    found: float
    recorded: float

    def __str__(self) -> str:
        return (
            f"[bench] {self.case}, {self.what}: must be at most {WORSE} times the recorded "
            f"{self.recorded:.3f}, got {self.found:.3f}"
        )


def compare(results: Results, recorded: Results) -> tuple[list[Regression], int]:
    """What became worse, and how many ratios were compared."""
    worse, compared = [], 0
    for row in results.rows:
        case = row.case
        before = recorded.find(case.name, case.dtype, case.size, case.allocator)
        if before is None:
            continue
        for way in (OURS, OURS_COMPILED):
            against = f"{way} / {EAGER}"
            pairs = [
                (f"{name}, {against}", row.ratio(way, EAGER, name), before.ratio(way, EAGER, name))
                for name in PASSES
            ]
            saved = _saved(row.saved, way), _saved(before.saved, way)
            pairs.append((f"saved bytes, {against}", *saved))
            for what, found, known in pairs:
                if found is not None and known is not None:
                    compared += 1
                    if found > WORSE * known:
                        worse.append(Regression(case.id, what, found, known))
    return worse, compared


def _saved(saved: dict[str, int], way: str) -> float | None:
    if way not in saved or not saved.get(EAGER):
        return None
    return saved[way] / saved[EAGER]
