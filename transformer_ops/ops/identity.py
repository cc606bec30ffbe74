"""Identity."""

from __future__ import annotations

from typing import ClassVar

from ..op.base import BasicOperation

__all__ = ["Identity"]


class Identity(BasicOperation):
    """Returns its input: the same memory, any shape and dtype."""

    _kind: ClassVar[str | None] = "Identity"

    def __init__(self) -> None:
        super().__init__()
