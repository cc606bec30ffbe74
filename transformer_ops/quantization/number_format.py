"""The formats of quantized numbers as values: the rows of `csrc/kernels/format.h`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import _C

__all__ = ["FORMATS", "NumberFormat", "format_with"]

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class NumberFormat(NamedTuple):
    """The codes and scales of a quantized tensor. Each block has a scale. If `block_rows` and
    `block_columns` are 0, the tensor is one block."""

    name: str  # used in plans, schemas and reports
    element: str  # "e4m3", "e5m2", "e2m1", "nf4" or "int8"
    scale: str  # "float32", "power of two", "e8m0" (a byte), or "e4m3" (and one of the tensor)
    bits: int  # of a code
    largest: float  # the largest value of a code
    block_rows: int
    block_columns: int
    four_over_six: str  # "", "MAE" or "MSE"
    largest_scale: float  # of blocks, if there is also a scale of the tensor

    @property
    def has_one_scale(self) -> bool:
        """Whether the tensor has one scale and no others."""
        return self.block_columns == 0

    @property
    def is_columnwise(self) -> bool:
        """Whether blocks are parts of a column."""
        return self.block_rows > 1 and self.block_columns == 1

    @property
    def is_square(self) -> bool:
        return self.block_rows > 1 and self.block_rows == self.block_columns

    @property
    def significant_bits(self) -> int:
        """The significant bits of a code, including the leading one that floating-point codes do
        not store."""
        return {"e4m3": 4, "e5m2": 3, "e2m1": 2, "nf4": 24, "int8": 8}[self.element]

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of FP8 codes; None for others."""
        return _DTYPES.get(self.element)


FORMATS = {row.name: row for row in (NumberFormat(*fields) for fields in _C.formats())}


def format_with(
    element: str,
    scale: str,
    block: tuple[int, int] = (0, 0),
    *,
    four_over_six: str = "",
    largest_scale: float = 448.0,
) -> NumberFormat:
    """The one format with these fields. Raises KeyError if there is none."""
    wanted = (element, scale, *block, four_over_six, largest_scale)
    for row in FORMATS.values():
        if (row.element, row.scale, *row[5:]) == wanted:
            return row
    raise KeyError(wanted)
