"""How many numbers the rows have that ops take. Statements may broadcast others, ops do not.

In: ops. Out: the last dimension of each tensor that a call has to give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..op.base import FusibleOperation
from ..ops.activation import GELU, QGELU, ReLU, SiLU, SReLU
from ..ops.add_extra_input import AddExtraInput
from ..ops.attention import Attention, QKNorm
from ..ops.basic_linear import BasicLinear
from ..ops.bias import Bias
from ..ops.constant_scale import ConstantScale
from ..ops.dispatch import Dispatch
from ..ops.drop_path import DropPath
from ..ops.dropout import Dropout
from ..ops.glu import GEGLU, QGEGLU, ReGLU, SReGLU, SwiGLU
from ..ops.grouped_linear import GroupedLinear
from ..ops.identity import Identity
from ..ops.layer_scale import LayerScale
from ..ops.lora_linear import LoRALinear
from ..ops.make_extra_output import MakeExtraOutput
from ..ops.norm import LayerNorm, RMSNorm
from ..ops.packed_linear import PackedLinear
from ..ops.rope import RoPE
from .attention_ops import AddArgument
from .deferred import DeferredHead
from .rules import FuseSkip

__all__ = ["Routed", "Widths", "width_of", "widths_of"]

_SAME = (GELU, QGELU, ReLU, SiLU, SReLU, ConstantScale, DropPath, Dropout, Identity, QKNorm, RoPE)
_HALF = (GEGLU, QGEGLU, ReGLU, SReGLU, SwiGLU)


class Widths(NamedTuple):
    """The numbers in a row of what ops take; None for any number."""

    input: int | None
    # One for each tensor that is added, in their order; None for as many as the input has.
    others: tuple[int | None, ...]

    def fit(self, input: Tensor, others: tuple[Any, ...]) -> bool:
        """Whether these are tensors of real numbers, and their rows have these widths: others as
        many as the input."""
        shape = input.shape
        if not shape or self.input not in (None, shape[-1]) or not input.is_floating_point():
            return False
        for other, width in zip(others, self.others, strict=True):
            if not isinstance(other, Tensor) or not other.is_floating_point():
                return False
            if other.shape != (shape if width is None else (*shape[:-1], width)):
                return False
        return True


class Routed(NamedTuple):
    """What the experts of transformers take: rows, and their ids and probabilities."""

    products: tuple[GroupedLinear, ...]
    others: tuple[None, None] = (None, None)

    def fit(self, input: Tensor, others: tuple[Any, ...]) -> bool:
        """Whether these are rows of the dtype of the weights, on CPU, and as many numbers for each
        as it has experts. On CUDA the products of torch are faster."""
        ids, probs = others
        if not isinstance(ids, Tensor) or not isinstance(probs, Tensor):
            return False
        return (
            input.device.type == "cpu"
            and all(input.dtype == product.weight.dtype for product in self.products)
            and input.dim() == 2
            and ids.dim() == 2
            and ids.shape == probs.shape
            and len(ids) == len(input)
            and probs.is_floating_point()
            and ids.dtype in (torch.int64, torch.int32)
        )


def widths_of(ops: Sequence[nn.Module]) -> Widths | Routed | None:
    """The widths of what ops take; None if there are ops that are not known here. FuseSkip if rows
    that are added, normalized or scaled do not have the same width."""
    if ops and isinstance(ops[-1], DeferredHead):
        ops = ops[:-1]
    if not all(isinstance(op, FusibleOperation) for op in ops):
        return None
    basics = [b for op in ops if isinstance(op, FusibleOperation) for b in op.basic_ops]
    if basics and isinstance(basics[0], Dispatch):
        return Routed(tuple(one for one in basics if isinstance(one, GroupedLinear)))
    first: int | None = None
    width: int | None = None  # that of the input, divided by a number
    divisor = 1
    channels: dict[str | None, int | None] = {}
    others: list[int | None] = []
    for op in basics:
        wanted, given = _of(op)
        if wanted is not None and wanted != width:
            if width is not None or first is not None:
                raise FuseSkip(f"{op._kind} broadcasts rows of {width or first} to {wanted}")
            first, width = wanted * divisor, wanted
        if isinstance(op, MakeExtraOutput):
            channels[op._output_channels[0][0]] = width
        elif isinstance(op, AddExtraInput):
            channel = op._input_channels[0]
            if width is None and divisor > 1:
                raise FuseSkip("the sum is of rows of an unknown width")
            if channel is None:
                others += [] if isinstance(op, AddArgument) else [width]
            elif channel in channels and (channels[channel] or first) != (width or first):
                raise FuseSkip(f"the sum broadcasts rows of {width}")
        elif isinstance(op, _HALF):
            width, divisor = (None, divisor * 2) if width is None else (width // 2, divisor)
        elif given is not None:
            width = given
        elif wanted is None and not isinstance(op, _SAME):
            return None
    return Widths(first, tuple(others))


def width_of(op: Any) -> int | None:
    """The width of the rows that a product gives."""
    return _of(op)[1]


def _of(op: Any) -> tuple[int | None, int | None]:
    """The width of rows that an op needs, and that of rows that it gives, if it needs one."""
    if isinstance(op, BasicLinear):
        return op.in_features, op.out_features
    if isinstance(op, PackedLinear | LoRALinear):
        return op.in_features, sum(op.out_features)
    if isinstance(op, RMSNorm | LayerNorm):
        return (op.normalized_shape[-1],) * 2
    if isinstance(op, Bias | LayerScale):
        return op.size, op.size
    if isinstance(op, Attention):
        return None, op.num_heads * op.head_dim
    return None, None
