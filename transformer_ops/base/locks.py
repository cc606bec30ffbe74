"""Locks of the package, which are free in a forked child."""

from __future__ import annotations

import os
import threading


def new_lock() -> threading.Lock:
    """A lock for the life of the process; a fork waits until it is free.

    Code that holds one must not take another, because a fork takes them all.
    """
    lock = threading.Lock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock
