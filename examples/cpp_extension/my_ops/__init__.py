"""Ops of our own, in C++."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import transformer_ops as tops
from transformer_ops.op import Check
from transformer_ops.op.checks import check_positive

__all__ = ["Softcap"]

tops.load_library(Path(__file__).parent / "libmy_ops.so")


class Softcap(tops.BasicOperation, kind="my_ops::Softcap"):
    """`cap * tanh(x / cap)`, elementwise, in the input's dtype (Gemma 2, 2024).

    ValueError unless `cap` is a finite number > 0.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"cap": check_positive}

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap
