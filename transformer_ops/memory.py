"""The memory of a training step (`step_bytes`), and of results on the CPU. The latter is recycled,
because fresh memory costs more than the computation on it.

Tensors of 64 KiB and more that the library makes (outputs, gradients, saved and temporary tensors)
take their memory from a pool. It returns there when the last reference to the tensor's storage is
dropped, on any thread. Idle memory returns to the system if there is more than `limit()`, on
`trim()`, when it stays idle for 4096 allocations, and if the machine or the cgroup is short of
memory before more is taken. `TRANSFORMER_OPS_POOL_LIMIT=0` in the environment, or `set_limit(0)`,
switches the pool off.
"""

from __future__ import annotations

from typing import NamedTuple

from . import _C
from .reports.step_bytes import StepBytes, step_bytes

__all__ = ["Stats", "StepBytes", "limit", "set_limit", "stats", "step_bytes", "trim"]


class Stats(NamedTuple):
    """Counters of the pool since the process started. Sizes are in bytes, in whole pages of
    4096."""

    in_use_bytes: int
    """Bytes of the tensors that are alive."""
    idle_bytes: int
    """Bytes that wait for the next tensor."""
    peak_in_use_bytes: int
    """The most that was in use at one time."""
    peak_held_bytes: int
    """The most that was in use and idle together."""
    hits: int
    """Tensors that were given idle memory."""
    misses: int
    """Tensors that needed fresh memory from the system."""
    released_bytes: int
    """Idle bytes given back to the system."""


def stats() -> Stats:
    """The counters of the pool."""
    return Stats(*_C.memory_stats())


def limit() -> int:
    """The most bytes that may stay idle.

    The default is the environment variable `TRANSFORMER_OPS_POOL_LIMIT`, in bytes, which is read on
    first use (ValueError if it is not a valid number). Without it, the default is a quarter of the
    memory of the machine or, if that is less, of the cgroup.
    """
    return int(_C.memory_limit())


def set_limit(limit: int) -> None:
    """Sets the most bytes that may stay idle. Idle memory beyond that returns to the system at
    once.

    0 switches recycling off: tensors then get their memory from torch's own allocator. Raises
    ValueError unless `limit` is an int that is not negative.
    """
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise ValueError(f"[memory] limit must be an int, got {limit!r}")
    if not 0 <= limit < 2**63:
        raise ValueError(f"[memory] limit must be between 0 and 2**63 - 1, got {limit}")
    _C.memory_set_limit(limit)


def trim() -> int:
    """Returns all idle memory to the system; the result is its size in bytes. Memory that the C
    library's allocator has free is returned, too, and does not count."""
    return int(_C.memory_trim())
