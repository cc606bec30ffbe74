"""Identity."""

from __future__ import annotations

from ..op.base import BasicOperation

__all__ = ["Identity"]


class Identity(BasicOperation, kind="Identity"):
    """Returns its input: `x[...]` → the same memory, any shape and dtype. It raises nothing."""

    def __init__(self) -> None:
        super().__init__()
