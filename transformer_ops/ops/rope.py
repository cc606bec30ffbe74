"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool, check_optional_size, check_size

__all__ = ["RoPE"]


class RoPE(BasicOperation, kind="RoPE"):
    """Rotates pairs of numbers in each head by the angles of the row.

    `x[..., t, n]` and the extra inputs `cos` and `sin` of `[t, r]` or `[..., t, r]` → the shape and
    dtype of `x` (Su et al. 2021, RoFormer). The last dimension holds heads of `head_dim` numbers.
    The first `num_heads` of them (None: all) are rotated, the rest passes through: queries and keys
    of a row of queries, keys and values. With `by_head`, the query, the key and the value of each
    head are next to each other, as in GPT-NeoX, and every third head passes through. `rotary_dim`
    (None: `head_dim`) is how many numbers of a head are rotated. A pair (a, b) becomes
    (a cos - b sin, b cos + a sin). Pairs are numbers i and i + `rotary_dim` / 2, as in Llama, or
    2 i and 2 i + 1 with `interleaved`, as in GPT-J. Tables have a number for each number that is
    rotated (r is `rotary_dim`), or one for each pair (half of that). They may be scaled, as YaRN
    does. A table of `[t, r]` serves all rows before. Under tensor parallelism `num_heads` is that
    of a rank, and every rank has the tables of all rows.

    Computes in float32 (float64 for float64) and rounds once. Backward rotates the gradient back;
    only the tables are saved. The tables get no gradient: RuntimeError if one requires a gradient,
    if sizes do not fit, or if `rotary_dim` is odd or beyond `head_dim`. Raises ValueError if sizes
    are below 1, and if a flag is no bool.
    """

    _checks: ClassVar[Mapping[str, Check]] = {
        "head_dim": check_size,
        "num_heads": check_optional_size,
        "by_head": check_bool,
        "interleaved": check_bool,
        "rotary_dim": check_optional_size,
    }

    def __init__(
        self,
        head_dim: int,
        num_heads: int | None = None,
        *,
        by_head: bool = False,
        interleaved: bool = False,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.by_head = by_head
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim

    def extra_repr(self) -> str:
        text = f"head_dim={self.head_dim}, num_heads={self.num_heads}"
        text += ", by_head=True" * self.by_head
        text += ", interleaved=True" * self.interleaved
        return text + (f", rotary_dim={self.rotary_dim}" if self.rotary_dim else "")
