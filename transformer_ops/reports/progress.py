"""A progress bar for calls that run a whole model, or look at all of its products."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

_SILENT_SECONDS = 2.0


@contextmanager
def progress(what: str, total: int, unit: str = "run") -> Iterator[Callable[[], object]]:
    """Shows a bar of tqdm, and yields the function that moves it by one of `total` units.

    It appears after two seconds, in a terminal or a notebook, and disappears at the end. Without
    tqdm there is none.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda: None
        return
    is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    with tqdm(
        desc=what,
        total=total,
        unit=unit,
        delay=_SILENT_SECONDS,
        leave=False,
        disable=not is_seen,
    ) as bar:
        yield bar.update
