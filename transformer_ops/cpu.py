"""What the library takes the processor for."""

from __future__ import annotations

from typing import NamedTuple

from . import _C

__all__ = ["Processor", "processor"]


class Processor(NamedTuple):
    """What the library decides by the processor."""

    level: str
    """The widest that the processor has: avx512_fp16, avx512_bf16, avx512, avx2 or default."""
    kernels: str
    """The instruction set of the kernels: the widest that was built, up to `level`."""
    multiplies_bfloat16: bool
    """Products of bfloat16 run in instructions of their own; else in float32, rounded once."""
    multiplies_float16: bool
    """The same for float16."""
    prefers_onednn: bool
    """Large products of float32 go to oneDNN instead of MKL."""


def processor() -> Processor:
    """What the library takes the processor for.

    The environment variable `TRANSFORMER_OPS_ISA` names a lower level: the library then behaves as
    on a processor that has no more. It is read on first use. RuntimeError if this machine has no
    such level, or the library was not built for it.
    """
    return Processor(*_C.processor())
