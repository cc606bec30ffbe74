"""Time on a GPU alone, time on the host alone, and a step as a CUDA graph.

On another device these give numbers of no meaning: so what calls them can be tried without a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .timing import Call, Clock


class GpuTimer:
    """Medians of calls one by one, each after a kernel that read its way through the L2 cache.

    The GPU sleeps first, while the host queues a batch of calls: then it finds each one waiting,
    and the host's time does not count.
    """

    SWEEP_ELEMENTS = 128 << 20  # 512 MB; an H200 has an L2 cache of 60 MB
    SLEEP_CYCLES = 20_000_000  # 10 ms at 2 GHz, longer than the host takes for a batch
    BATCH = 5

    def __init__(self, device: torch.device, samples: int) -> None:
        self.device, self.samples = device, samples
        if device.type == "cuda":
            # It is read: written, it would have to leave the cache at the cost of what is timed.
            self.sweep = torch.zeros(self.SWEEP_ELEMENTS, device=device)

    def microseconds(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """The median of each call; batches of all in turn."""
        for call in calls.values():
            for _ in range(3):
                call()
        found: dict[str, list[float]] = {name: [] for name in calls}
        while len(next(iter(found.values()))) < self.samples:
            for name, call in calls.items():
                found[name] += self._batch(call)
        return {name: statistics.median(times) for name, times in found.items()}

    def _batch(self, call: Call) -> list[float]:
        if self.device.type != "cuda":
            return [1e6 * Clock(self.device).seconds(call, 1)]
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.BATCH)
        ]
        torch.cuda.synchronize()
        torch.cuda._sleep(self.SLEEP_CYCLES)
        for start, end in events:
            self.sweep.sum()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events]


def passes(module: Any, x: Tensor, parameters: list[Tensor]) -> dict[str, Call]:
    """Forward, and backward alone: of one graph that is kept."""
    y = module(x)
    grad = torch.randn_like(y)
    wanted = [x, *parameters]
    return {
        "forward": lambda: module(x),
        "backward": lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True),
    }


def host_microseconds(call: Call, count: int, device: torch.device) -> float:
    """Microseconds until a call returns, where the GPU has less to do than the host."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    spent = time.perf_counter() - begin
    synchronize(device)
    return 1e6 * spent / count


def captured(step: Call, device: torch.device) -> Call:
    """The step as a CUDA graph; on another device the step itself."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay(kept: object = results) -> None:
        graph.replay()

    return replay


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
