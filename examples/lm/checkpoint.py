"""Checkpoints that are either whole or not there."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from .failure import Failure, reason

FORMAT = 2


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint beside the last one, then put it in its place.

    Raises Failure where it cannot be written; the last one is still there then.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        # Through memory: a failing write is then an OSError that keeps its reason.
        buffer = io.BytesIO()
        torch.save({"format": FORMAT, **state}, buffer)
        with open(temporary, "wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        kept = "; the last good one is still there" if path.exists() else ""
        raise Failure(
            f"the checkpoint {str(path)!r} could not be written: {reason(error)}{kept}"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # Without it a power cut may lose the new name.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: str) -> dict[str, Any]:
    """Read a checkpoint; Failure where that does not work."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Failure(f"--resume must be readable, got {path!r}: {reason(error)}") from error
    except Exception as error:  # torch.load raises whatever its unpickler meets
        raise Failure(f"--resume must be a checkpoint of train_lm.py, got {path!r}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise Failure(f"--resume must be a checkpoint of train_lm.py, got {path!r}")
    if state["format"] != FORMAT:
        raise Failure(
            f"--resume must be a checkpoint of format {FORMAT}, got {path!r} of {state['format']}"
        )
    return state
