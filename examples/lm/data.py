"""Text: where it comes from, how it is split, how batches are drawn."""

from __future__ import annotations

import hashlib
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor

from .failure import Failure, reason

VALIDATION_BYTES = 1 << 16


def read_text(source: str | None) -> bytes:
    """The bytes of a file, of all text files of a folder, or of Python's reference manual.

    In a folder, files are read in the order of their paths; hidden ones, and those that hold
    NUL bytes, are left out.
    """
    if source is None:
        return _manual().encode()
    path = Path(source)
    try:
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
            texts = [file.read_bytes() for file in found]
            return b"\n\n".join(text for text in texts if b"\0" not in text)
        if path.exists() and not path.is_file():
            raise Failure(f"--data must be a file or a folder, got {source!r}")
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        raise Failure(f"--data must be readable, got {source!r}: {reason(error)}") from error
    if b"\0" in text:
        raise Failure(f"--data must be text, got {source!r} with NUL bytes in it")
    return text


def _manual() -> str:
    # Topics repeat sections of each other: an eighth of the held-out text would be known before.
    seen: set[str] = set()
    kept = []
    for paragraph in "\n\n".join(topics.topics.values()).split("\n\n"):
        if len(paragraph) < 60 or paragraph.strip() not in seen:
            kept.append(paragraph)
        seen.add(paragraph.strip())
    return "\n\n".join(kept)


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


class Corpus:
    """A text split into what is trained on and its last tenth, which is held out."""

    def __init__(self, text: bytes, context: int) -> None:
        least = 2 * (context + 1)
        if len(text) < least:
            raise Failure(
                f"--data must have at least {least} bytes for --context {context}, got {len(text)}"
            )
        held_out = max(len(text) // 10, context + 1)
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.training = tokens[:-held_out]
        self.held_out = tokens[-held_out:]
        self.digest = hashlib.sha256(text).hexdigest()

    def validation(self, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
        """Windows side by side over the held-out text, spread evenly where it is a long one."""
        count = (len(self.held_out) - 1) // context
        kept = min(count, max(1, VALIDATION_BYTES // context))
        starts = torch.arange(kept) * count // kept * context
        windows = _windows(self.held_out, starts, context)
        return [(part[:, :-1], part[:, 1:]) for part in windows.split(batch)]


class Batches:
    """Windows at random places of the training text. The generator's state is the data order."""

    def __init__(self, tokens: Tensor, batch: int, context: int, seed: int) -> None:
        self._tokens, self._batch, self._context = tokens, batch, context
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 `[batch, context]`."""
        places = len(self._tokens) - self._context
        starts = torch.randint(places, (self._batch,), generator=self.generator)
        windows = _windows(self._tokens, starts, self._context)
        return windows[:, :-1], windows[:, 1:]


def _windows(tokens: Tensor, starts: Tensor, context: int) -> Tensor:
    return tokens[starts[:, None] + torch.arange(context + 1)].long()
