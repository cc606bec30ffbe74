"""Scaled dot product attention, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from ..op.base import BasicOperation, Check
from ..op.checks import (
    check_bool,
    check_optional_float,
    check_optional_not_negative,
    check_probability,
    check_size,
)
from ..op.parameters import new_parameter

__all__ = ["Attention", "QKNorm"]


class Attention(BasicOperation, kind="Attention"):
    """Softmax(q k^T scale + mask) v for each head, of queries, keys and values side by side.

    `x[..., t, (num_heads + 2 num_kv_heads) head_dim]` → `[..., t, num_heads head_dim]` (Vaswani et
    al. 2017). A row holds the queries of `num_heads` heads, then the keys and the values of
    `num_kv_heads` heads (None: as many), as `PackedLinear` returns them; or, with `by_head`, the
    query, the key and the value of each head next to each other, as in GPT-NeoX. Query head i reads
    key head i // (num_heads / num_kv_heads); keys and values are not repeated. `scale` (None:
    head_dim ** -0.5) multiplies the products. With `causal`, row i reads the rows up to i. In
    training, probabilities are dropped with probability `p`.

    With `mask`, there is an extra input: booleans that are True where a row reads another one, or
    numbers that are added, of shape `[t, t]` or `[..., num_heads, t, t]`, where all sizes but the
    last may be 1. It gets no gradient. A row that reads nothing gives zeros. The result and the
    gradients are those of a softmax in float64, up to the rounding of the products: also for rows
    of the lowest number of a dtype, which read all keys alike, any scale, NaN and infinity.

    On the CPU without dropout, torch's own kernel runs (flash attention), and backward needs the
    input, the output and a number for each row and head. With dropout, which that kernel lacks, and
    where it is not exact, scores are made for a few heads at a time, in float32, and made again in
    backward: it needs the input, that number and a seed. Scores beyond 1000 are made in float64. On
    CUDA, torch's flash kernels run where they can, else torch chooses the kernel, and backward runs
    forward again. If the input is saved in 8 bits, backward runs forward again on what it decodes.
    The cache of a decoder, windows and soft caps are left to the caller: a window is a mask.

    With `sinks`, a parameter `sinks[num_heads]` is the score of one more key of each head, which
    every row reads and whose value is 0 (Xiao et al. 2023; gpt-oss): a row that reads nothing else
    gives zeros. On the CPU and where torch's flash kernel runs, the kernel's output is scaled for
    it; else, on CUDA, scores are made for all heads at once. Autocast rounds `sinks` to its dtype.

    Under tensor parallelism the numbers of heads are those of a rank, which has the queries, keys
    and values of its heads: `PackedLinear(..., tensor_parallel_mode="column")`.

    Raises ValueError if sizes are below 1, if `num_heads` is no multiple of `num_kv_heads` (with
    `by_head`, if they differ), unless `p` is in [0, 1], for a scale that is not finite, and if a
    flag is no bool. Raises RuntimeError if sizes do not fit, and if the mask requires a gradient.
    """

    _checks: ClassVar[Mapping[str, Check]] = {
        "num_heads": check_size,
        "num_kv_heads": check_size,
        "head_dim": check_size,
        "by_head": check_bool,
        "causal": check_bool,
        "p": check_probability,
        "scale": check_optional_float,
    }

    num_heads: int
    num_kv_heads: int
    sinks: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int,
        by_head: bool = False,
        causal: bool = False,
        p: float = 0.0,
        scale: float | None = None,
        mask: bool = False,
        sinks: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"[Attention] num_heads must be a multiple of num_kv_heads, got {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        self.head_dim = head_dim
        self.by_head = by_head
        if by_head and self.num_kv_heads != self.num_heads:
            raise ValueError(
                "[Attention] num_kv_heads must be num_heads with by_head, got "
                f"{self.num_kv_heads} and {self.num_heads}"
            )
        self.causal = causal
        self.p = p
        self.scale = scale
        self.num_extra_inputs = int(check_bool("Attention", "mask", mask))
        has_sinks = check_bool("Attention", "sinks", sinks)
        made = new_parameter("Attention", (num_heads,), device, dtype) if has_sinks else None
        self.register_parameter("sinks", made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scores of sinks to zero."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def _plan_note(self) -> str:
        if not (self.training and self.p):
            return ""
        return (
            "on CPU torch has no attention with dropout: ops make scores of a few heads at a time"
        )

    def extra_repr(self) -> str:
        text = super().extra_repr()
        text += ", mask=True" * bool(self.num_extra_inputs)
        return text + ", sinks=True" * (self.sinks is not None)


class QKNorm(BasicOperation, kind="QKNorm"):
    """RMS normalization of the queries and of the keys in rows of queries, keys and values.

    `x[..., n]` → the shape and dtype of `x`. A row holds the queries of `num_heads` heads, the keys
    of `num_kv_heads` heads, and more, which passes through. Each head is normalized by itself
    (Dehghani et al. 2023; Qwen3) with `q_weight[head_dim]` and `k_weight[head_dim]`; with
    `per_head=False`, all queries of a row together, and all keys, with weights of that width
    (OLMo 2). `eps` and `zero_centered_gamma` are those of `RMSNorm`. Computes in float32 (float64
    for float64). Backward needs the input. Raises ValueError if sizes are below 1, if eps is
    negative or not finite, and if a flag is no bool; RuntimeError if sizes do not fit.

    Under tensor parallelism the numbers of heads are those of a rank. The ranks share the weights,
    and each has a part of their gradients, from its heads: sum them over the ranks, or use
    `parallel.SequenceParallel`. Behind a product that is split by columns, `per_head=False` raises
    ValueError, because a rank lacks the heads of the others.
    """

    _checks: ClassVar[Mapping[str, Check]] = {
        "num_heads": check_size,
        "num_kv_heads": check_size,
        "head_dim": check_size,
        "per_head": check_bool,
        "eps": check_optional_not_negative,
        "zero_centered_gamma": check_bool,
    }

    num_heads: int
    num_kv_heads: int
    q_weight: nn.Parameter
    k_weight: nn.Parameter

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int,
        per_head: bool = True,
        eps: float | None = 1e-5,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = head_dim
        self.per_head = per_head
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        for name, heads in (("q_weight", self.num_heads), ("k_weight", self.num_kv_heads)):
            width = self.head_dim if self.per_head else heads * self.head_dim
            made = new_parameter("QKNorm", (width,), device, dtype)
            self.register_parameter(name, made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scales to one (zero-centred weights to zero)."""
        for weight in (self.q_weight, self.k_weight):
            nn.init.constant_(weight, 0.0 if self.zero_centered_gamma else 1.0)
