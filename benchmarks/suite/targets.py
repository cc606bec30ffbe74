"""The ratios to reach, and those that were measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .cases import (
    BLOCK_SIZE,
    BLOCKS,
    DTYPES,
    OP_SIZE,
    OPS,
    OTHER_BLOCK_SIZES,
    OTHER_OP_SIZES,
    OURS,
    OURS_COMPILED,
    SMALL_BLOCK_SIZE,
    WARM,
)
from .results import Results

Size = tuple[int, ...]
GELU_BLOCK, LLAMA_BLOCK = BLOCKS
BEST = "best of eager and Inductor"


class Target(NamedTuple):
    """A limit by dtype, and how a ratio is got from results: at its own size and at others."""

    what: str
    against: str
    limits: dict[str, float]
    ratio: Callable[[Results, str, Size], float | None]
    size: Size
    others: tuple[Size, ...] = ()


class Outcome(NamedTuple):
    """What became of a target."""

    target: Target
    found: dict[str, float | None]  # by dtype
    worst: tuple[float, str] | None  # ratio and case, over the other sizes

    def ok(self, dtype: str) -> bool | None:
        """Whether the ratio is within its limit; None where it was not measured."""
        value = self.found[dtype]
        return None if value is None else value <= self.target.limits[dtype]


def to_best(name: str, way: str = OURS) -> Callable[[Results, str, Size], float | None]:
    """Time against the faster of eager and Inductor, default allocator, forward+backward."""

    def find(results: Results, dtype: str, size: Size) -> float | None:
        row = results.find(name, dtype, size)
        return row and row.to_best(way)  # type: ignore[return-value]

    return find


def to_roof(name: str) -> Callable[[Results, str, Size], float | None]:
    """Time against the roof, warm allocator where there are two, forward+backward."""

    def find(results: Results, dtype: str, size: Size) -> float | None:
        row = results.find(name, dtype, size, WARM)
        return row and row.to_bound(OURS)  # type: ignore[return-value]

    return find


def peak(name: str) -> Callable[[Results, str, Size], float | None]:
    """Peak memory above the parameters against the better of eager and Inductor."""
    return lambda results, dtype, size: results.peak_to_best(name, dtype, size, OURS)


def _each(limit: float) -> dict[str, float]:
    return dict.fromkeys(DTYPES, limit)


OP_LIMITS = {
    "rms_norm": 0.40,
    "add+rms_norm": 0.40,
    "layer_norm": 0.60,
    "gelu": 0.45,
    "silu": 0.45,
    "relu": 0.45,
    "swiglu": 0.70,
    "dropout": 0.10,
}
BLOCK_LIMITS = {GELU_BLOCK: {"fp32": 0.93, "bf16": 0.85}, LLAMA_BLOCK: _each(0.97)}
PEAK_LIMITS = {GELU_BLOCK: 0.60, LLAMA_BLOCK: 0.70}
COMPILED_MARGIN = 0.02

TARGETS = [
    *(
        Target(name, BEST, _each(limit), to_best(name), OP_SIZE, OTHER_OP_SIZES)
        for name, limit in OP_LIMITS.items()
    ),
    *(
        Target(f"{name}, warm allocator", "roof", _each(1.5), to_roof(name), OP_SIZE)
        for name in OPS
    ),
    *(
        Target(name, BEST, limits, to_best(name), BLOCK_SIZE, OTHER_BLOCK_SIZES)
        for name, limits in BLOCK_LIMITS.items()
    ),
    *(
        Target(
            f"{name} under torch.compile",
            BEST,
            {dtype: limit + COMPILED_MARGIN for dtype, limit in limits.items()},
            to_best(name, OURS_COMPILED),
            BLOCK_SIZE,
            OTHER_BLOCK_SIZES,
        )
        for name, limits in BLOCK_LIMITS.items()
    ),
    *(
        Target(f"{name}, T=64, h=256", BEST, _each(0.85), to_best(name), SMALL_BLOCK_SIZE)
        for name in BLOCKS
    ),
    *(
        Target(f"{name} x 6, peak memory", BEST, _each(limit), peak(name), BLOCK_SIZE)
        for name, limit in PEAK_LIMITS.items()
    ),
]


def outcomes(results: Results) -> list[Outcome]:
    """Every target with what was measured."""
    return [
        Outcome(
            target,
            {dtype: target.ratio(results, dtype, target.size) for dtype in DTYPES},
            _worst(target, results),
        )
        for target in TARGETS
    ]


def _worst(target: Target, results: Results) -> tuple[float, str] | None:
    found = []
    for dtype in DTYPES:
        for size in target.others:
            value = target.ratio(results, dtype, size)
            if value is not None:
                # As far from the limit as it can be, whichever dtype that is.
                case = f"{dtype} {'x'.join(map(str, size))}"
                found.append((value / target.limits[dtype], value, case))
    if not found:
        return None
    _, value, case = max(found)
    return value, case
