"""The memory of results on the CPU: recycled, because fresh memory costs more than the work on it.

Tensors of 64 KiB and more that the library makes (outputs, gradients, what it saves and what it
needs on the way) take their memory from a pool; it returns there when the last reference to the
tensor's storage is dropped, in whichever thread. Idle memory goes back to the system beyond
`limit()`, on `trim()`, when it stays idle through 4096 allocations, and, before more is taken from
the system, where the machine or the cgroup is short of memory. `TRANSFORMER_OPS_POOL_LIMIT=0` in
the environment, or `set_limit(0)`, switches the pool off.
"""

from __future__ import annotations

from typing import NamedTuple

from . import _C

__all__ = ["Stats", "limit", "set_limit", "stats", "trim"]


class Stats(NamedTuple):
    """Counters of the pool, since the process started; bytes are whole pages of 4096."""

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
    """The most bytes that stay idle.

    At first the environment variable `TRANSFORMER_OPS_POOL_LIMIT`, in bytes, read on first use
    (ValueError if it is no such number), or else a quarter of the memory of the machine or, where
    that is less, of the cgroup.
    """
    return int(_C.memory_limit())


def set_limit(limit: int) -> None:
    """Sets the most bytes that stay idle; what is idle beyond it goes back to the system at once.

    0 switches recycling off: tensors then get their memory from torch's own allocator.
    ValueError unless `limit` is an int that is not negative.
    """
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise ValueError(f"[memory] limit must be an int, got {limit!r}")
    if not 0 <= limit < 2**63:
        raise ValueError(f"[memory] limit must be between 0 and 2**63 - 1, got {limit}")
    _C.memory_set_limit(limit)


def trim() -> int:
    """Gives all idle memory back to the system and returns its bytes."""
    return int(_C.memory_trim())
