"""The processor as the library sees it."""

from __future__ import annotations

from typing import NamedTuple

from .. import _C

__all__ = ["Processor", "processor"]


class Processor(NamedTuple):
    """The processor's properties that the library's decisions depend on."""

    level: str
    """The widest that the processor has: avx512_fp16, avx512_bf16, avx512, avx2 or default on x86,
    neon_bf16 or default on aarch64."""
    kernels: str
    """The instruction set of the kernels: the widest that was built, up to `level`."""
    multiplies_bfloat16: bool
    """Products of bfloat16 run in instructions of their own; else in float32, rounded once."""
    multiplies_float16: bool
    """The same for float16."""
    prefers_onednn: bool
    """Large products of float32 go to oneDNN instead of MKL."""


def processor() -> Processor:
    """Returns the processor as the library sees it.

    The environment variable `TRANSFORMER_OPS_ISA` names a lower level: the library then behaves as
    on a processor of that level. It is read on first use. Raises RuntimeError if this machine does
    not have the level, or if the library was not built for it.
    """
    return Processor(*_C.processor())
