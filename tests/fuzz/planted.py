"""A fuzzer with faults, which shows that the harness reports them. It is not part of a run."""

from __future__ import annotations

import ctypes
import time

from .report import about_to

ISOLATED = True


def run_seed(seed: int) -> int:
    """0 is right, 1 raises, 2 crashes, and 3 hangs."""
    about_to(f"run planted seed {seed}")
    assert seed != 1, "planted failure"
    if seed == 2:
        ctypes.string_at(0)
    if seed == 3:
        time.sleep(1000)
    return 1
