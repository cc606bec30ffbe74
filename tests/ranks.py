"""Jobs of several processes, which always end within a limit: with a result or with an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

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


def _run_all(rank: int, works: list[Callable[[int], None]], folder: str, size: int) -> None:
    with group_of_ranks(rank, size, folder):
        for work in works:
            work(rank)
            dist.barrier()
            Path(folder, f"{work.__name__} {rank}").touch()


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which each rank may have a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Jobs:
    """Runs each of `works(rank)` in turn in the same processes: a start takes longer than most of
    them. Where one fails, those after it do not run, and fail with its error."""

    def __init__(self, works: list[Callable[[int], None]], folder: str, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        self.error: Exception | None = None
        try:
            spawn(_run_all, works, folder, ranks, ranks=ranks)
        except Exception as error:
            self.error = error

    def check(self, work: Callable[[int], None]) -> None:
        """Raises unless the work has ended in all processes."""
        files = [Path(self.folder, f"{work.__name__} {rank}") for rank in range(self.ranks)]
        if not all(file.exists() for file in files):
            raise AssertionError(f"{work.__name__} must end in all processes") from self.error
