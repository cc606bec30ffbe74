"""Writes what a fuzzer is about to do to disk, because a process that crashes cannot report it."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TRANSFORMER_OPS_FUZZ_LAST"


def about_to(text: str) -> None:
    """Overwrites the file that the environment variable names, if it names one."""
    path = os.environ.get(VARIABLE)
    if path:
        Path(path).write_text(text)
