"""Jobs of several processes, which end in time: with a result or with an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

# On two busy cores, several times what the longest job takes on free ones.
LIMIT = 500


def spawn(work: Callable[..., None], *arguments: Any, ranks: int, limit: float = LIMIT) -> None:
    """`work(rank, *arguments)` in each of so many processes. What one raises ends all of them, and
    is raised; so is AssertionError where they go on for longer than `limit` seconds."""
    context = torch.multiprocessing.start_processes(work, arguments, ranks, join=False)
    end = time.monotonic() + limit
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"{ranks} ranks must end within {limit:.0f} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join()
