"""Reshape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from ..checks import check_int
from ..op import Attribute, BasicOperation

__all__ = ["Reshape"]


class Reshape(BasicOperation):
    """`x.reshape(shape)`; backward restores the shape of the input.

    `shape`: ints >= 0, of which one may be -1 and follows from the input. Any dtype.
    ValueError for a shape that no tensor can have.
    """

    _kind: ClassVar[str | None] = "Reshape"

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        op = type(self).__name__
        if not isinstance(shape, Iterable) or isinstance(shape, (str, bytes, torch.Tensor)):
            raise ValueError(f"[{op}] shape must be a sequence of ints, got {shape!r}")
        sizes = tuple(check_int(op, "each size of shape", size, minimum=-1) for size in shape)
        if sizes.count(-1) > 1:
            raise ValueError(f"[{op}] shape must have at most one -1, got {sizes}")
        if -1 in sizes and 0 in sizes:
            raise ValueError(f"[{op}] shape must not have a -1 beside a 0, got {sizes}")
        self.shape = sizes

    def _attributes(self) -> dict[str, Attribute]:
        return {"shape": list(self.shape)}

    def extra_repr(self) -> str:
        return f"shape={self.shape}"
