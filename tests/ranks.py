"""Jobs of several processes, which always end within a limit: with a result or with an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# On two busy cores, this is several times as long as the longest job takes on free ones.
LIMIT = 500
# This is longer than any collective takes on busy cores. A rank that waits for nothing then ends
# with an error.
TIMEOUT = timedelta(seconds=60)


def spawn(work: Callable[..., None], *arguments: Any, ranks: int, limit: float = LIMIT) -> None:
    """Runs `work(rank, *arguments)` in each of `ranks` processes. An error in one ends all of them,
    and is raised. If they run longer than `limit` seconds, raises AssertionError."""
    context = torch.multiprocessing.start_processes(work, arguments, ranks, join=False)
    end = time.monotonic() + limit
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < end, f"{ranks} ranks must end within {limit:.0f} s"
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def start_group(rank: int, size: int, folder: str) -> None:
    """The process joins the world of a job. Its processes have a core each and meet in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous{size}",
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )


@contextmanager
def group_of_ranks(rank: int, size: int, folder: str) -> Iterator[None]:
    """The same for a block of code."""
    start_group(rank, size, folder)
    try:
        yield
    finally:
        dist.destroy_process_group()
