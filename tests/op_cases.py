"""One row for each op: how to build it, its inputs, and its reference in plain PyTorch
(op_references.py has references longer than a line).

A new op adds a row here and inherits every property of `test_ops.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from op_references import (
    COPIES,
    GROUPS,
    angles,
    attention,
    by_head,
    clamped,
    combine,
    dispatch,
    gated,
    gather,
    gelu,
    grouped_linear,
    ids_for,
    interleaved,
    l2_normalization,
    layer_norm,
    linear_cross_entropy,
    lora_linear,
    packed_linear,
    places_for,
    qgelu,
    qk_norm,
    rms_norm,
    rope,
    row_numbers,
    scaled,
    scatter,
    situ,
    split,
    splits_for,
    srelu,
    targets_for,
)
from process_groups import group_of_zeros
from torch import Tensor

import transformer_ops as tops
from transformer_ops.ops.collective import ReduceGradient

SEED = 1234
Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class OpCase:
    """`reference(x, *extra, **parameters)` returns the outputs in plain PyTorch.

    `saved(h, B)`: the bytes saved for backward for each row, without parameters; `bad`: an input
    shape and its error. `row` is the shape of the smallest valid input; the first dimension of an
    input is a multiple of `multiple`.
    """

    name: str
    make: Callable[[], tops.FusibleOperation]
    reference: Callable[..., Result]
    saved: Callable[[int, int], float]
    row: tuple[int, ...] = (16,)
    batch: tuple[int, ...] = (3, 4)
    extra_inputs: int = 0
    # The extra inputs for a main input, if they are not like it; integers get no gradient.
    extras: Callable[[Tensor], list[Tensor]] | None = None
    # The extra inputs have no gradient.
    constants: bool = False
    elementwise: bool = False
    # The op takes its rows in one dimension.
    flat: bool = False
    bad: tuple[tuple[int, ...], str] | None = None
    any_dtype: bool = False
    multiple: int = 1
    distributed: bool = False
    # The output is in float32 also for 16-bit parameters.
    accumulates_output: bool = False
    # Does backward read the input? Else the op has no second derivatives.
    saves_input: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch + self.row

    def build(self, dtype: torch.dtype = torch.float32) -> tops.FusibleOperation:
        """The op with random parameters."""
        op = self.make().to(dtype)
        with torch.no_grad():
            for parameter in op.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.5)
        return op

    def inputs(
        self, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] | None = None
    ) -> list[Tensor]:
        """The main input and the extra inputs, each a leaf that requires a gradient if it can."""
        shape = self.shape if shape is None else shape
        shape = (*(-(-rows // self.multiple) * self.multiple for rows in shape[:1]), *shape[1:])
        tensors = [torch.randn(shape).to(dtype) for _ in range(1 + self.extra_inputs)]
        if self.flat:
            tensors = [tensor.reshape(-1, shape[-1] if shape else 1) for tensor in tensors]
        return self.with_extras(tensors)

    def with_extras(self, tensors: list[Tensor]) -> list[Tensor]:
        """The given tensors, which are the main input and those extra inputs that are like it, with
        the other extra inputs."""
        given = len(tensors) if self.constants else None
        if self.extras is not None:
            tensors = [*tensors, *self.extras(tensors[0].detach())]
        floating = [t for t in tensors[:given] if t.is_floating_point()]
        for tensor in floating:
            tensor.requires_grad_()
        return tensors


def run_seeded(op: Callable[..., Any], *inputs: Tensor) -> Any:
    """Calls with the generator state that the references of random ops assume."""
    torch.manual_seed(SEED)
    return op(*inputs)


def all_of_input(h: int, B: int) -> float:
    return h * B


def nothing(h: int, B: int) -> float:
    return 0


def statistics(count: int) -> Callable[[int, int], float]:
    """The input and `count` statistics of 4 bytes, 8 for float64."""
    return lambda h, B: h * B + count * max(B, 4)


def bit_mask(h: int, B: int) -> float:
    return h / 8


def dropout(p: float) -> Callable[[Tensor], Tensor]:
    """The numbers that the op draws from `SEED` on the default device; `test_dropout.py` tests
    them."""

    def reference(x: Tensor) -> Tensor:
        kept = run_seeded(tops.Dropout(p), torch.ones(x.shape)) != 0
        return torch.where(kept.to(x.device), x * (1 / (1 - p) if p < 1 else 0), 0)

    return reference


def attention_factors(p: float, heads: int, kv_heads: int, shape: Sequence[int]) -> Tensor:
    """What `SEED` multiplies the probabilities of rows by: rows without scores share one
    probability, and values that are unit vectors show what is left of it."""
    rows = shape[-1]
    zeros = torch.zeros(*shape, (heads + kv_heads) * rows, dtype=torch.double)
    values = torch.eye(rows, dtype=torch.double).repeat(1, kv_heads).expand(*shape, -1)
    probe = tops.Attention(heads, kv_heads, head_dim=rows, p=p)
    left = run_seeded(probe, torch.cat([zeros, values], -1)) * rows
    return left.unflatten(-1, (heads, rows)).transpose(-2, -3)  # type: ignore[no-any-return]


def attention_dropout(
    p: float, heads: int = 4, kv_heads: int = 2, **kwargs: Any
) -> Callable[..., Tensor]:
    def reference(x: Tensor, *mask: Tensor, **sinks: Tensor) -> Tensor:
        factors = attention_factors(p, heads, kv_heads, x.shape[:-1])
        return attention(heads, kv_heads, factors=factors.to(x), **kwargs)(x, *mask, **sinks)

    return reference


def drop_path(p: float) -> Callable[[Tensor], Tensor]:
    """The numbers that the op draws from `SEED`, which do not depend on the sizes of a sample."""

    def reference(x: Tensor) -> Tensor:
        ones = torch.ones(len(x), *(1 for _ in x.shape[1:]))
        kept = run_seeded(tops.DropPath(p), ones) != 0
        return kept.to(x) * x * (1 / (1 - p) if p < 1 else 0)

    return reference


# ---- rows


def _activation(
    name: str,
    reference: Callable[..., Result],
    saved: Any = all_of_input,
    label: str = "",
    **kwargs: Any,
) -> OpCase:
    make = functools.partial(getattr(tops, name), **kwargs)
    return OpCase(name + label, make, reference, saved, elementwise=True)


def _glu(name: str, reference: Callable[..., Result], label: str = "", **kwargs: Any) -> OpCase:
    return OpCase(
        name + label,
        lambda: getattr(tops, name)(**kwargs),
        reference,
        all_of_input,
        bad=((3, 7), "input must have a last dimension that is a multiple of"),
    )


CASES = [
    OpCase("Identity", tops.Identity, lambda x: x, nothing, elementwise=True, any_dtype=True),
    # It rounds only under a recipe: tests/quantization/test_recipes.py.
    OpCase("Quantize", tops.Quantize, lambda x: x, nothing, elementwise=True, any_dtype=True),
    OpCase(
        "Reshape",
        lambda: tops.Reshape((-1, 8)),
        lambda x: x.reshape(-1, 8),
        nothing,
        bad=((3, 3), "shape"),
        any_dtype=True,
    ),
    OpCase(
        "ConstantScale",
        lambda: tops.ConstantScale(-1.5),
        lambda x: x * -1.5,
        nothing,
        elementwise=True,
    ),
    OpCase(
        "Bias",
        lambda: tops.Bias(16),
        lambda x, bias: x + bias,
        nothing,
        bad=((3, 15), r"input"),
    ),
    OpCase(
        "BasicLinear",
        lambda: tops.BasicLinear(16, 24),
        lambda x, weight: x @ weight.T,
        all_of_input,
        bad=((3, 15), r"input"),
    ),
    OpCase(
        "Linear",
        lambda: tops.Linear(16, 24),
        F.linear,
        all_of_input,
        bad=((3, 15), r"input"),
    ),
    OpCase(
        "Linear-no-bias",
        lambda: tops.Linear(16, 1, bias=False),
        F.linear,
        all_of_input,
        bad=((3, 15), r"input"),
    ),
    OpCase(
        "PackedLinear",
        lambda: tops.PackedLinear(16, (8, 16), bias=False),
        packed_linear,
        all_of_input,
        bad=((3, 15), r"input must have last dimension 16, got shape \[3, 15\]"),
    ),
    OpCase(
        "PackedLinear-bias",
        lambda: tops.PackedLinear(16, (8, 4, 4)),
        packed_linear,
        all_of_input,
        bad=((3, 15), r"input"),
    ),
    OpCase(
        "LoRALinear",
        lambda: tops.LoRALinear(16, 8, 2, scaling=0.5).requires_grad_(),
        lora_linear([0], [0.5]),
        lambda h, B: (h + 2) * B,
        bad=((3, 15), r"input must have last dimension 16, got shape \[3, 15\]"),
    ),
    OpCase(
        "LoRALinear-two-of-three",
        lambda: tops.LoRALinear(
            16, (8, 4, 4), (2, 3, 1), scaling=(0.25, 0.125, 0.5), adapted=(0, 2, 0), bias=False
        ).requires_grad_(),
        lora_linear([0, 2, 0], [0.25, 0.125, 0.5]),
        lambda h, B: (h + 6) * B,
        bad=((3, 15), r"input"),
    ),
    OpCase(
        "LayerNorm",
        lambda: tops.LayerNorm(16),
        layer_norm(),
        statistics(2),
        bad=((3, 15), r"input must end in dimensions \[16\], got shape \[3, 15\]"),
    ),
    OpCase(
        "LayerNorm-zero-centered-2d",
        lambda: tops.LayerNorm((2, 8), eps=0.1, zero_centered_gamma=True),
        layer_norm(0.1, True),
        statistics(2),
        row=(2, 8),
        bad=((3, 16), r"input must end in dimensions \[2, 8\], got shape \[3, 16\]"),
    ),
    OpCase(
        "LayerNorm-no-bias",
        lambda: tops.LayerNorm(16, bias=False),
        layer_norm(),
        statistics(2),
        bad=((3, 15), r"input must end in dimensions \[16\], got shape \[3, 15\]"),
    ),
    OpCase(
        "LayerNorm-not-affine-2d",
        lambda: tops.LayerNorm((2, 8), 0.1, False),
        lambda x: F.layer_norm(x, (2, 8), eps=0.1),
        statistics(2),
        row=(2, 8),
        bad=((3, 16), r"input must end in dimensions \[2, 8\], got shape \[3, 16\]"),
    ),
    OpCase(
        "RMSNorm",
        lambda: tops.RMSNorm(16),
        rms_norm(),
        statistics(1),
        bad=((3, 15), r"input must end in dimensions \[16\], got shape \[3, 15\]"),
    ),
    OpCase(
        "RMSNorm-zero-centered-2d",
        lambda: tops.RMSNorm((2, 8), eps=0.1, zero_centered_gamma=True),
        rms_norm(0.1, True),
        statistics(1),
        row=(2, 8),
        bad=((16,), r"input must end in dimensions"),
    ),
    OpCase(
        "RMSNorm-eps-of-the-dtype",
        lambda: tops.RMSNorm(16, eps=None),
        lambda x, *, weight: F.rms_norm(x, weight.shape, weight),
        statistics(1),
        bad=((3, 15), r"input must end in dimensions \[16\], got shape \[3, 15\]"),
    ),
    OpCase(
        "RMSNorm-not-affine",
        lambda: tops.RMSNorm(16, elementwise_affine=False),
        lambda x: F.rms_norm(x, (16,), eps=1e-5),
        statistics(1),
        bad=((3, 15), r"input must end in dimensions \[16\], got shape \[3, 15\]"),
    ),
    OpCase(
        "RMSNorm-not-affine-2d",
        lambda: tops.RMSNorm((2, 8), eps=0.1, elementwise_affine=False),
        lambda x: F.rms_norm(x, (2, 8), eps=0.1),
        statistics(1),
        row=(2, 8),
        bad=((16,), r"input must end in dimensions"),
    ),
    OpCase(
        "L2Normalization",
        lambda: tops.L2Normalization(eps=1e-3),
        l2_normalization(1e-3),
        statistics(1),
        bad=((), r"input must have at least 1 dimension, got 0"),
    ),
    _activation("GELU", gelu),
    _activation("GELU", F.gelu, label="-exact", approximate="none"),
    _activation("QGELU", qgelu),
    _activation("ReLU", F.relu, bit_mask),
    _activation("SReLU", srelu),
    _activation("SiLU", F.silu),
    _glu("GLU", gated(torch.sigmoid)),
    _glu("GEGLU", gated(gelu)),
    _glu("GEGLU", gated(F.gelu), "-exact", approximate="none"),
    _glu("QGEGLU", gated(qgelu)),
    _glu("ReGLU", gated(F.relu)),
    _glu("SReGLU", gated(srelu)),
    _glu("SwiGLU", gated(F.silu)),
    _glu("SwiGLU", interleaved(4, gated(F.silu)), "-interleaved", glu_interleave_size=4),
    _glu("SiTUGLU", situ),
    _glu(
        "SiTUGLU",
        interleaved(2, lambda x: situ(x, 0.5, 2.0)),
        "-interleaved",
        beta1=0.5,
        beta2=2.0,
        glu_interleave_size=2,
    ),
    _glu("ClampedSwiGLU", clamped),
    _glu(
        "ClampedSwiGLU",
        interleaved(8, lambda x: clamped(x, 0.5, 1.1, 0.25)),
        "-interleaved",
        limit=0.5,
        alpha=1.1,
        glu_linear_offset=0.25,
        glu_interleave_size=8,
    ),
    OpCase("Dropout", lambda: tops.Dropout(0.3), dropout(0.3), bit_mask, elementwise=True),
    OpCase(
        "Dropout-eval",
        lambda: tops.Dropout(0.3).eval(),
        lambda x: x,
        nothing,
        elementwise=True,
        any_dtype=True,
    ),
    OpCase(
        "LayerScale",
        lambda: tops.LayerScale(16),
        lambda x, gamma: x * gamma,
        all_of_input,
        bad=((3, 15), r"input must end in dimensions \[16\], got shape"),
    ),
    *(
        OpCase(
            f"DropPath-{p}",
            functools.partial(tops.DropPath, p),
            drop_path(p),
            # A sample is four rows.
            lambda h, B: max(B, 4) / 4,
            bad=((), r"input must have at least 1 dimension, got 0"),
        )
        for p in (0.4, 1.0)
    ),
    *(
        OpCase(name, make, lambda x: x, nothing, elementwise=True, any_dtype=True)
        for name, make in (
            ("DropPath-eval", lambda: tops.DropPath(0.3).eval()),
            ("DropPath-none", lambda: tops.DropPath(0.0)),
        )
    ),
    OpCase(
        "RoPE",
        lambda: tops.RoPE(4, 3),
        rope(3),
        lambda h, B: 2 * 16 * B / 3,  # two tables for all samples
        row=(4, 16),
        batch=(3,),
        extras=lambda x: angles(x, 4),
        constants=True,
        bad=((4, 11), r"input must .* of at least 12 \(3 heads\), got shape \[4, 11\]"),
    ),
    OpCase(
        "RoPE-interleaved-part",
        lambda: tops.RoPE(8, interleaved=True, rotary_dim=4),
        rope(2, 4, interleaved=True),
        lambda h, B: 2 * 8 * B,
        row=(4, 16),
        batch=(3,),
        # A number for each pair, and a table for each sample.
        extras=lambda x: [t.expand(*x.shape[:-1], 2).contiguous() for t in angles(x, 2)],
        constants=True,
        bad=((4, 15), r"input must have a last dimension that is a multiple of 8, got shape"),
    ),
    OpCase(
        "RoPE-by-head",
        lambda: tops.RoPE(4, by_head=True),
        by_head(2, rope(4), is_back=True),
        lambda h, B: 2 * 16 * B / 3,
        row=(4, 24),
        batch=(3,),
        extras=lambda x: angles(x, 4),
        constants=True,
        bad=((4, 20), r"input must have a last dimension that is a multiple of 12 with by_head"),
    ),
    OpCase(
        "QKNorm",
        lambda: tops.QKNorm(2, 1, head_dim=4),
        qk_norm(2, 1),
        all_of_input,
        bad=((3, 11), r"input must .* least 12 \(queries of 2 heads, keys of 1 heads\), got shape"),
    ),
    OpCase(
        "QKNorm-whole-rows",
        lambda: tops.QKNorm(2, 1, head_dim=4, per_head=False, eps=0.1, zero_centered_gamma=True),
        qk_norm(1, 1, 0.1, zero_centered=True),
        all_of_input,
        bad=((3, 11), r"input must .* least 12 \(queries of 2 heads, keys of 1 heads\), got shape"),
    ),
    OpCase(
        "Attention",
        lambda: tops.Attention(2, 1, head_dim=4, causal=True),
        attention(2, 1, causal=True),
        # The input, half of it as output, and a statistic for each head of four rows.
        lambda h, B: 1.5 * h * B + 4 * 2 * max(B, 4),
        row=(4, 16),
        batch=(3,),
        bad=((4, 15), r"input must have last dimension 16 \(queries of 2 heads, keys and values"),
    ),
    OpCase(
        "Attention-mask",
        lambda: tops.Attention(2, head_dim=3, scale=0.7, mask=True),
        attention(2, 2, scale=0.7),
        lambda h, B: (h + h / 3) * B + 4 * 2 * max(B, 4) + 16 * B / 3,
        row=(4, 18),
        batch=(3,),
        extras=lambda x: [torch.randn(2 * x.shape[-2:-1]).to(x)],
        constants=True,
        bad=((4, 17), r"input must have last dimension 18"),
    ),
    OpCase(
        "Attention-sinks",
        lambda: tops.Attention(2, 1, head_dim=4, causal=True, sinks=True),
        attention(2, 1, causal=True),
        lambda h, B: 1.5 * h * B + 4 * 2 * max(B, 4),
        row=(4, 16),
        batch=(3,),
        bad=((4, 15), r"input must have last dimension 16 \(queries of 2 heads, keys and values"),
    ),
    OpCase(
        "Attention-by-head",
        lambda: tops.Attention(2, head_dim=3, by_head=True, causal=True),
        by_head(2, attention(2, 2, causal=True)),
        lambda h, B: (h + h / 3) * B + 4 * 2 * max(B, 4),
        row=(4, 18),
        batch=(3,),
        bad=((4, 17), r"input must have last dimension 18"),
    ),
    OpCase(
        "Attention-dropout",
        lambda: tops.Attention(4, 2, head_dim=2, p=0.4, causal=True, mask=True),
        attention_dropout(0.4, causal=True),
        # A mask and a seed serve all samples.
        lambda h, B: 1.5 * h * B + 4 * 4 * max(B, 4) + (16 + 16) / 3,
        row=(4, 16),
        batch=(3,),
        extras=lambda x: [torch.eye(x.shape[-2]) == 0],
        constants=True,
        bad=((4, 15), r"input must have last dimension 16"),
    ),
    OpCase("Dropout-all", lambda: tops.Dropout(1.0), dropout(1.0), bit_mask, elementwise=True),
    OpCase(
        "Dropout-none",
        lambda: tops.Dropout(0.0),
        lambda x: x,
        nothing,
        elementwise=True,
        any_dtype=True,
    ),
    OpCase(
        "AddExtraInput",
        tops.AddExtraInput,
        lambda x, extra: x + extra,
        nothing,
        extra_inputs=1,
        elementwise=True,
    ),
    OpCase(
        "GroupedLinear",
        lambda: tops.GroupedLinear(GROUPS, 16, 4, single_grouped_weight=True, bias=False),
        grouped_linear,
        lambda h, B: h * B + 1,  # 4 bytes a group, of twelve rows
        extras=lambda x: [splits_for(x).int()],
        bad=((3, 15), r"input must have last dimension 16, got shape \[3, 15\]"),
    ),
    OpCase(
        "GroupedLinear-bias-each",
        lambda: tops.GroupedLinear(GROUPS, 16, 4),
        grouped_linear,
        lambda h, B: h * B + 2,
        extras=lambda x: [splits_for(x)],
        bad=((3, 15), r"input"),
    ),
    OpCase(
        "GroupedLinear-scales",
        lambda: tops.GroupedLinear(
            GROUPS, 16, 4, single_grouped_weight=True, single_grouped_bias=True, scale_bias=True
        ),
        grouped_linear,
        lambda h, B: h * B + 2 + B,
        extras=lambda x: [splits_for(x), row_numbers(x)],
        bad=((3, 15), r"input"),
    ),
    *(
        OpCase(
            name + label,
            lambda name=name, options=options: getattr(tops, name)(**options),  # type: ignore[misc]
            scaled(reference),
            lambda h, B: h * B + B,
            extras=lambda x: [row_numbers(x)],
            bad=bad,
        )
        for name, label, options, reference, bad in (
            ("ScaledSwiGLU", "", {}, gated(F.silu), ((3, 7), r"input")),
            (
                *("ScaledSwiGLU", "-interleaved", {"glu_interleave_size": 4}),
                *(interleaved(4, gated(F.silu)), None),
            ),
            ("ScaledSiTUGLU", "", {}, situ, ((3, 7), r"input")),
            (
                *("ScaledClampedQGeGLU", "", {"limit": 0.5, "alpha": 1.1}),
                *(lambda x: clamped(x, 0.5, 1.1), ((3, 7), r"input")),
            ),
            ("ScaledSReLU", "", {}, srelu, None),
        )
    ),
    OpCase(
        "Dispatch",
        lambda: tops.Dispatch(GROUPS),
        dispatch,
        lambda h, B: 4 * COPIES,
        extras=lambda x: [ids_for(x), torch.stack([row_numbers(x)] * COPIES, -1)],
    ),
    OpCase(
        "Dispatch-local",
        lambda: tops.Dispatch(GROUPS, first_expert=1, local_experts=2),
        lambda x, ids, probs: dispatch(x, ids, probs, range(1, 3)),
        lambda h, B: 4 * COPIES,
        extras=lambda x: [ids_for(x), torch.stack([row_numbers(x)] * COPIES, -1)],
    ),
    OpCase(
        "Combine",
        tops.Combine,
        combine,
        lambda h, B: 4,
        extras=lambda x: [places_for(x)],
        flat=True,
    ),
    *(
        OpCase(
            f"LinearCrossEntropy{label}",
            functools.partial(tops.LinearCrossEntropy, 16, 21, **options),
            linear_cross_entropy(**options),
            # The gradients of all 12 rows together, or the input, the target and lse of each row.
            (lambda h, B: h * B + (21 * (h + 1) * B + max(B, 4)) / 12)
            if made
            else (lambda h, B: h * B + 8 + max(B, 4)),
            extras=lambda x: [targets_for(x, 21)],
            bad=((3, 7), r"input must have last dimension 16, got shape \[3, 7\]"),
            accumulates_output=True,
            saves_input=not made,
        )
        for label, made, options in (
            ("", True, {"bias": True, "chunk": 5}),
            (
                *("-recomputed", False),
                {"label_smoothing": 0.1, "softcap": 2.0, "z_loss": 0.1, "gradients_in": "backward"},
            ),
            ("-rows", False, {"bias": True, "reduction": "none", "chunk": 7}),
        )
    ),
    OpCase(
        "MakeExtraOutput",
        tops.MakeExtraOutput,
        lambda x: (x, x * 1),
        nothing,
        elementwise=True,
        any_dtype=True,
    ),
    OpCase(
        "AllGather",
        lambda: tops.AllGather(group_of_zeros()),
        gather,
        nothing,
        bad=((), r"input must have at least 1 dimension, got 0"),
        distributed=True,
    ),
    OpCase(
        "ReduceScatter",
        lambda: tops.ReduceScatter(group_of_zeros()),
        scatter,
        nothing,
        batch=(4, 6),
        bad=((), r"input must have at least 1 dimension, got 0"),
        multiple=2,
        distributed=True,
    ),
    OpCase(
        "AllReduce",
        lambda: tops.AllReduce(group_of_zeros()),
        lambda x: x * 1,
        nothing,
        bad=((), r"input must have at least 1 dimension, got 0"),
        distributed=True,
    ),
    *[
        OpCase(
            f"{name}-{mode}{'-sequence' * sequence}",
            functools.partial(
                getattr(tops, name),
                16,
                24,
                tensor_parallel_mode=mode,
                tensor_parallel_group=group_of_zeros(),
                sequence_parallel=sequence,
            ),
            split(mode, sequence),
            all_of_input,
            row=(1, 16 if mode == "column" else 8),
            batch=(4, 6),
            multiple=2 if mode == "row" and sequence else 1,
            distributed=True,
        )
        for name in ("BasicLinear", "Linear")
        for mode in ("column", "row")
        for sequence in (False, True)
        if sequence or name == "Linear"
    ],
    OpCase(
        "Bias-tensor-parallel",
        lambda: tops.Bias(32, tensor_parallel=True, tensor_parallel_group=group_of_zeros()),
        lambda x, bias: x + bias,
        nothing,
        distributed=True,
    ),
    OpCase(
        "ReduceGradient",
        lambda: ReduceGradient(group_of_zeros()),
        lambda x: x * 1,
        nothing,
        any_dtype=True,
        distributed=True,
    ),
]
NAMES = [case.name for case in CASES]
