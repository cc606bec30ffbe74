"""Ways of one computation, timed in turn, round after round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from random import Random

import torch

Call = Callable[[], object]
SAMPLE_SECONDS = 0.002
LEAST_ROUNDS, MOST_ROUNDS = 5, 41


class Clock:
    """Seconds that calls take on a device: by events on CUDA, by the wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Call, count: int) -> float:
        """The time of `count` calls, a call."""
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / count
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count


def interleave(
    calls: Mapping[str, Call], seconds: float, clock: Clock, least: int = LEAST_ROUNDS
) -> dict[str, list[float]]:
    """Milliseconds by way, one number a round.

    Rounds go on for `seconds`, within bounds. Each takes the ways in another order, so that none
    always finds the caches that the same other one left.
    """
    counts, round_seconds = {}, 0.0
    for name, call in calls.items():
        clock.seconds(call, 1)
        once = clock.seconds(call, 1)
        if once < SAMPLE_SECONDS:
            once = clock.seconds(call, 3)
        counts[name] = max(1, round(SAMPLE_SECONDS / once))
        round_seconds += counts[name] * once
    rounds = min(MOST_ROUNDS, max(least, int(seconds / round_seconds)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, random = list(calls), Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in order:
                times[name].append(1e3 * clock.seconds(calls[name], counts[name]))
            random.shuffle(order)
    finally:
        gc.enable()
    return times


def ratios(times: list[float], reference: list[float]) -> list[float]:
    """time / reference, round by round."""
    return [a / b for a, b in zip(times, reference, strict=True)]


def ratio(times: list[float], reference: list[float]) -> float:
    """The median over the rounds of time / reference."""
    return statistics.median(ratios(times, reference))
