"""Ops of our own, in C++."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import transformer_ops as tops
from transformer_ops.op import Attribute, Check
from transformer_ops.op.checks import check_positive

__all__ = ["Softcap"]

tops.load_library(Path(__file__).parent / "libmy_ops.so")


class Softcap(tops.BasicOperation):
    """`cap * tanh(x / cap)`, elementwise, in the input's dtype (Gemma 2, 2024).

    ValueError unless `cap` is a finite number > 0.
    """

    _kind: ClassVar[str | None] = "my_ops::Softcap"
    _checks: ClassVar[Mapping[str, Check]] = {"cap": check_positive}

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def _attributes(self) -> dict[str, Attribute]:
        return {"cap": self.cap}

    def extra_repr(self) -> str:
        return f"cap={self.cap}"
