"""Whether a result got worse than the recorded one: by ratios, never by times."""

from __future__ import annotations

from typing import NamedTuple

from .cases import EAGER, OURS, OURS_COMPILED, PASSES
from .results import Results

WORSE = 1.5
# Times on another processor than that of the record: with other vector instructions a kernel takes
# half or a quarter of the elements at a time, and eager's kernels do not follow it; MKL, by which
# eager draws its dropout masks, is several times as fast on Intel's.
WORSE_ELSEWHERE = 4.0


class Regression(NamedTuple):
    """A ratio to eager that is more than `limit` times the recorded one."""

    case: str
    what: str
    found: float
    recorded: float
    limit: float

    def __str__(self) -> str:
        return (
            f"[bench] {self.case}, {self.what}: must be at most {self.limit:g} times the recorded "
            f"{self.recorded:.3f}, got {self.found:.3f}"
        )


def time_limit(results: Results, recorded: Results) -> float:
    """How many times the recorded one a ratio of times may be."""
    same = all(results.about.get(name) == recorded.about.get(name) for name in ("cpu", "features"))
    return WORSE if same else WORSE_ELSEWHERE


def compare(results: Results, recorded: Results) -> tuple[list[Regression], int]:
    """What became worse, and how many ratios were compared."""
    worse, compared = [], 0
    times = time_limit(results, recorded)
    for row in results.rows:
        case = row.case
        before = recorded.find(case.name, case.dtype, case.size, case.allocator)
        if before is None:
            continue
        for way in (OURS, OURS_COMPILED):
            against = f"{way} / {EAGER}"
            ratios = [
                (name, row.ratio(way, EAGER, name), before.ratio(way, EAGER, name), times)
                for name in PASSES
            ]
            saved = _saved(row.saved, way), _saved(before.saved, way)
            ratios.append(("saved bytes", *saved, WORSE))
            for what, found, known, limit in ratios:
                if found is not None and known is not None:
                    compared += 1
                    if found > limit * known:
                        worse.append(Regression(case.id, f"{what}, {against}", found, known, limit))
    return worse, compared


def _saved(saved: dict[str, int], way: str) -> float | None:
    if way not in saved or not saved.get(EAGER):
        return None
    return saved[way] / saved[EAGER]
