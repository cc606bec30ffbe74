"""Attention modules of transformers and timm: the ops that compute what they do, and what a call
must give them."""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils.weak import WeakTensorKeyDictionary

from ..modules.views import (
    BorrowedDropout,
    BorrowedProduct,
    BorrowedRMSNorm,
    is_torch,
    weight_of,
)
from ..op.base import FusibleOperation
from ..op.borrowed import class_of
from .attention_forms import (
    PARTS,
    check_rotation_of_timm,
    forward_of,
    known_sdpa,
    names_of_timm,
)
from .attention_ops import (
    AddArgument,
    AttentionCall,
    AttentionInputs,
    BorrowedAttention,
    BorrowedQKNorm,
    BorrowedRoPE,
    JoinedBias,
    NoKeyBias,
    ReorderedLinear,
)
from .attention_reading import Reading, part_behind, product, reach, read_attention
from .attention_statements import CACHES, MASK, TABLES
from .norms import norm_of_heads
from .parts import dtypes_of, linear, part, products
from .pattern import Names
from .rules import FuseSkip
from .whole import check_number, name_of

__all__ = ["find_attention"]


# What makes a call something else than attention of a sequence to itself.
_UNKNOWN = (
    "past_key_value",
    "encoder_hidden_states",
    "position_bias",
    "softcap",
    "output_attentions",
)


def _has_empty_rows(mask: Tensor, is_filled: bool = False) -> bool:
    if is_filled:
        return bool(mask.all(-1).any())
    least = torch.finfo(mask.dtype).min if mask.is_floating_point() else 0
    return not bool((mask.amax(-1) > least).all())


class TransformersAttention(AttentionCall):
    """A module of transformers."""

    def __init__(self, module: nn.Module, reading: Reading, called: nn.Module) -> None:
        self.reading, self.key_factor, self.rest = reading, reading.key_factor, reading.rest
        _, self._first, *others = inspect.signature(class_of(called).forward).parameters
        self._others = tuple(others)
        self.sinks = "".join(reading.sinks)
        # What a call must not give.
        self._refused = {*_UNKNOWN, *reading.absent} - {reading.masking.bias}
        self._interface = reading.interface
        # Whether the configuration says how attention is computed.
        self._asks = self._interface is not None or reading.asks
        self._sdpa = None if self._interface is None else known_sdpa(self._interface)
        if self._interface is not None and self._sdpa is None:
            raise FuseSkip("its attention function is another one")

    def functions(self) -> list[Any]:
        return [] if self._sdpa is None else [self._sdpa]

    def rotary_dims(self, module: Any) -> list[int | None]:
        return [None if self.reading.rotation is None else self.reading.head_dim]

    def head_dim(self, module: Any) -> int:
        return self.reading.head_dim

    def widths(self, module: Any) -> tuple[int, int]:
        reading = self.reading
        return reading.heads * reading.head_dim, reading.kv_heads * reading.head_dim

    def scale(self, module: Any) -> float:
        return self.reading.scale

    def p(self, module: Any) -> float:
        return self.reading.p

    @property
    def by_head(self) -> bool:
        return self.reading.by_head

    def ops(self, module: Any) -> list[FusibleOperation]:
        reading, attention = self.reading, BorrowedAttention(module, self)
        heads, kv_heads = reading.heads, reading.kv_heads
        if heads % kv_heads or heads < 1:
            raise FuseSkip(f"{heads} query heads are no multiple of {kv_heads}")
        if getattr(module, "num_key_value_groups", heads // kv_heads) * kv_heads != heads:
            raise FuseSkip(f"{kv_heads} key heads are not repeated to {heads}")
        ops = [self._products(module)]
        for kind, *what in reading.before:
            if kind == "norm":
                query, key, is_whole = what
                norms = [reach(module, path) for path in (query, key)]
                ops.append(_norms_of(norms, attention, is_whole=is_whole))
            else:
                assert reading.rotation is not None
                ops.append(
                    BorrowedRoPE(
                        attention.head_dim,
                        None if self.by_head else heads + kv_heads,
                        by_head=self.by_head,
                        interleaved=reading.rotation.is_interleaved,
                    )
                )
        ops.append(attention)
        for kind, what in reading.after:
            if kind == "part":
                ops += part_behind(reach(module, what))
            elif kind == "sum":
                ops.append(AddArgument())
            else:
                check_number(module, what)
                ops.append(BorrowedDropout(module, what))
        return ops

    def _products(self, module: Any) -> FusibleOperation:
        layers = [reach(module, path) for path in self.reading.products]
        if self.reading.parts:
            found = [linear(layers[0])]
            if found != layers or type(found[0].weight) is not nn.Parameter:
                raise FuseSkip("its product has rows in another order, and adapters or codes")
            return ReorderedLinear(found[0], self.reading.parts)
        if len(layers) == 1:
            return product(layers[0])
        found = list(map(linear, layers))
        if len(dtypes_of(*found)) > 1:
            raise FuseSkip("its products have different dtypes")
        return _side_by_side(layers, found)

    def inputs(
        self, module: Any, input: Tensor, given: Mapping[str, Any], gives_weights: bool
    ) -> AttentionInputs | None:
        cache = None
        for name, value in given.items():
            if value is None:
                continue
            if name in self._refused and value is not False:
                return None
            if name in CACHES:
                if cache is not None:
                    return None
                cache = value
        reading, mask = self.reading, given.get(MASK)
        if cache is not None:
            more = given.get(reading.slot, 0) if reading.slot else 0
            if not reading.has_cache or not isinstance(more, int):
                return None
            cache = cache, module.layer_idx + more
            if not _is_empty(*cache):
                return None
        is_causal: bool | None = False
        function = module.config._attn_implementation if self._asks else "sdpa"
        if reading.implementation == "eager" and function != "eager":
            return None
        if reading.is_plain:
            if function != reading.implementation or (gives_weights and reading.has_weights):
                return None
        elif function == "sdpa":
            if self._interface is not None and self._interface["sdpa"] is not self._sdpa:
                return None
            is_causal = reading.is_causal
            if is_causal is None:
                is_causal = given.get("is_causal")
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        elif function != "eager" or not reading.has_eager or gives_weights:
            return None
        if reading.dropout and reach(module, reading.dropout).training != module.training:
            return None
        masking = reading.masking
        if mask is None and masking.is_needed:
            return None
        if mask is not None:
            if not isinstance(mask, Tensor):
                return None
            if masking.is_sized and not (mask.dim() == 4 and mask.shape[1] == 1):
                return None
            # The gradient of a score that is no more than the least number is another one.
            has_others = masking.is_clamped or masking.is_filled
            if has_others and (is_compiling() or _has_empty_rows(mask, masking.is_filled)):
                return None
        if masking.bias:
            mask = self._with_bias(given.get(masking.bias), mask, input)
            if mask is None:
                return None
        sums: list[Any] = []
        for kind, name in reading.after:
            if kind == "sum":
                one = given.get(name)
                if not isinstance(one, Tensor) or one.shape != input.shape:
                    return None
                sums.append(one)
        tables: tuple[Tensor, ...] = ()
        rotary_dim = None
        if reading.rotation is not None:
            tables = given.get(TABLES) or ()
            if len(tables) != 2:
                return None
            cos, sin, rotary_dim = reading.rotation.of(*tables)
            if rotary_dim != (reading.rotation.width or rotary_dim):
                return None  # the statements raise
            tables = cos, sin
        if mask is None:
            choice = (False, bool(is_causal), rotary_dim, cache is not None, False)
            return AttentionInputs(choice, (*tables, *sums), cache)
        found = self.masked(module, mask, tables, rotary_dim, cache)
        return found and found._replace(extra_inputs=(*found.extra_inputs, *sums))

    def _with_bias(self, bias: Any, mask: Tensor | None, input: Tensor) -> Tensor | None:
        """The bias of scores and the mask in one; None if ops do not compute it."""
        masking, heads, length = self.reading.masking, self.reading.heads, input.shape[-2]
        is_known = isinstance(bias, Tensor) and bias.dim() == 3 and bias.dtype == input.dtype
        count = heads * (input.shape[0] if masking.is_flat else 1)
        if not is_known or bias.requires_grad or bias.shape[:2] != (count, 1):
            return None
        if bias.shape[2] < length or (bias.shape[2] > length and not masking.is_last):
            return None
        scores: Tensor = bias[..., -length:].view(-1, heads, 1, length)
        if mask is None:
            return scores
        wanted = torch.bool if masking.is_filled else bias.dtype
        if mask.dtype != wanted or mask.requires_grad:
            return None
        if is_compiling() or bias.is_inference() or mask.is_inference():
            return _joined(scores, mask)
        # The layers of a model share one mask, which is as large as all weights of a layer.
        key = heads, length, bias._version, mask._version
        known = _joined_masks.get(bias)
        if known is None or known[0]() is not mask or known[1] != key:
            known = weakref.ref(mask), key, _joined(scores, mask)
            _joined_masks[bias] = known
        found: Tensor = known[2]
        return found

    def has_plain_softmax(self, module: Any) -> bool:
        if self.reading.is_plain:
            return True
        return self._asks and bool(module.config._attn_implementation == "eager")


def _joined(scores: Tensor, mask: Tensor) -> Tensor:
    """A bias with a mask: numbers that are added, or booleans that hide."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    return scores + mask


# A bias -> the mask, their versions and what else was given, and what was made of them.
_joined_masks = WeakTensorKeyDictionary()


# These layers of caches give back what they are given while they are empty.
_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionAndFullAttentionLayer"}
_LAYERS |= {"LinearAttentionAndSlidingWindowAttentionLayer"}


def _is_empty(cache: Any, layer: int) -> bool:
    """Whether it is a cache that only grows, and that has nothing of this layer yet: attention then
    reads what the cache is given."""
    home = sys.modules.get("transformers.cache_utils")
    known, kind = getattr(home, "DynamicCache", None), type(cache)
    # Models add states of other layers in subclasses.
    if known not in kind.__mro__ or not _is_own(home, cache, kind):
        return False
    if kind.update is not known.update or kind.get_seq_length is not known.get_seq_length:
        return False
    if cache.offloading or cache.get_seq_length(layer) != 0:
        return False
    found = cache.layers[layer] if layer < len(cache.layers) else None
    kind = cache.layer_class_to_replicate if found is None else type(found)
    is_known = kind.__name__ in _LAYERS and getattr(home, kind.__name__, None) is kind
    return is_known and _is_own(home, found, kind)


def _is_own(home: Any, instance: Any, kind: Any) -> bool:
    """Whether nobody has replaced the `update` of a class, which is that of transformers."""
    code = getattr(getattr(kind, "update", None), "__code__", None)
    is_replaced = instance is not None and "update" in vars(instance)
    is_given = code is not None and code.co_filename == getattr(home, "__file__", None)
    return is_given and not is_replaced and type(torch.cat) is BuiltinFunctionType


class TimmAttention(AttentionCall):
    """A module of timm."""

    gives_pair = False

    def __init__(self, module: nn.Module, names: Names) -> None:
        self.names = names
        self._may_rotate = "prefix" in names
        if self._may_rotate:
            check_rotation_of_timm(class_of(module).forward.__globals__)
        self._others = tuple(inspect.signature(class_of(module).forward).parameters)[2:]

    def rotary_dims(self, module: Any) -> list[int | None]:
        return [None, module.head_dim] if self._may_rotate else [None]

    def head_dim(self, module: Any) -> int:
        return int(module.head_dim)

    def scale(self, module: Any) -> float:
        return float(getattr(module, self.names["scaling"]))

    def p(self, module: Any) -> float:
        return float(getattr(module, self.names["dropout_module"]).p)

    def widths(self, module: Any) -> tuple[int, int]:
        kv_heads = getattr(module, self.names.get("num_kv_heads", "num_heads"))
        return module.num_heads * module.head_dim, kv_heads * module.head_dim

    def ops(self, module: Any) -> list[FusibleOperation]:
        if module.gate is not None:
            raise FuseSkip("it has a gate")
        if module.fused_attn and not math.isclose(module.scale, module.head_dim**-0.5):
            raise FuseSkip("torch's attention does not get its scale")
        dropout = getattr(module, self.names["dropout_module"])
        if not module.fused_attn and not is_torch(dropout, nn.Dropout):
            raise FuseSkip(f"{name_of(dropout)} is not a torch.nn.Dropout")
        check_number(module, self.names["scaling"])
        attention = BorrowedAttention(module, self)
        heads = attention.num_heads, attention.num_kv_heads
        if "groups" in self.names and heads[0] != heads[1] * getattr(module, self.names["groups"]):
            raise FuseSkip(f"{heads[1]} key heads are not repeated to {heads[0]}")
        ops = self._products(module)
        norms = module.q_norm, module.k_norm
        if not all(is_torch(one, nn.Identity) for one in norms):
            ops.append(_norms_of(norms, attention, is_whole=False))
        if self._may_rotate:
            is_interleaved = not getattr(module, "rotate_half", False)
            ops.append(BorrowedRoPE(module.head_dim, sum(heads), interleaved=is_interleaved))
        after = (op for one in (module.norm, module.proj, module.proj_drop) for op in part(one))
        return [*ops, attention, *after]

    def _products(self, module: Any) -> list[FusibleOperation]:
        query, key = self.widths(module)
        if module.qkv is None:
            layers = [getattr(module, self.names[name]) for _, name in PARTS]
            found = list(map(linear, layers))
            if [weight_of(one).shape[0] for one in found] != [query, key, key]:
                raise FuseSkip("its products are not as wide as its heads")
            return [_side_by_side(layers, found)]
        packed = linear(module.qkv)
        if weight_of(packed).shape[0] != query + 2 * key:
            raise FuseSkip("its product is not as wide as its heads")
        biases = [self.names.get(f"{name}_bias", "") for _, name in PARTS]
        if not all(biases) or getattr(module, biases[0]) is None:
            return [products(module.qkv)]
        if packed.bias is not None:
            raise FuseSkip("its product has two biases")
        if packed is not module.qkv:
            raise FuseSkip("the biases of its product are parts")
        return [BorrowedProduct(packed), JoinedBias(module, biases)]

    def inputs(
        self, module: Any, input: Tensor, given: Mapping[str, Any], gives_weights: bool
    ) -> AttentionInputs | None:
        mask, is_causal = given.get("attn_mask"), given.get("is_causal", False)
        if gives_weights or (mask is not None and is_causal):
            return None
        dropout = getattr(module, self.names["dropout_module"])
        if not module.fused_attn and dropout.training != module.training:
            return None
        tables: tuple[Tensor, ...] = ()
        rope = given.get("rope")
        if rope is not None:
            # Tables of their own for heads, or for images, are not what ops take.
            if rope.dim() != 2 or rope.requires_grad or rope.shape[-1] % 4:
                return None
            tables = _tables_of_timm(rope, getattr(module, self.names["prefix"]))
        rotary_dim = tables[0].shape[-1] if tables else None
        if mask is None:
            choice = (False, bool(is_causal), rotary_dim, False, False)
            return AttentionInputs(choice, tables, None)
        return self.masked(module, mask, tables, rotary_dim, None)

    def has_plain_softmax(self, module: Any) -> bool:
        return not module.fused_attn


def _tables_of_timm(rope: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all tokens: the first ones are not rotated."""
    sin, cos = rope.chunk(2, -1)
    shape = prefix, cos.shape[-1]
    return torch.cat([cos.new_ones(shape), cos]), torch.cat([sin.new_zeros(shape), sin])


def _side_by_side(layers: Sequence[nn.Module], found: Sequence[nn.Linear]) -> FusibleOperation:
    """The products of queries, keys and values, of which that for keys may have no bias."""
    has_bias = [one.bias is not None for one in found]
    if has_bias == [True, False, True] and list(layers) == list(found):
        return NoKeyBias(*found)
    if len({*has_bias}) > 1:
        raise FuseSkip("some of its products have a bias, and some have none")
    return products(*layers)


def _norms_of(
    modules: Sequence[nn.Module], attention: BorrowedAttention, is_whole: bool
) -> BorrowedQKNorm:
    widths = [attention.head_dim] * 2
    if is_whole:
        widths = list(attention.call.widths(attention.module))
    query, key = map(norm_of_heads, modules, widths)
    if not isinstance(query, BorrowedRMSNorm) or not isinstance(key, BorrowedRMSNorm):
        raise FuseSkip(f"{name_of(modules[0])} is no RMS norm that ops know")
    if [one.normalized_shape for one in (query, key)] != [(width,) for width in widths]:
        raise FuseSkip("its norms of queries and keys have other weights")
    same = (query.eps, query.zero_centered_gamma) == (key.eps, key.zero_centered_gamma)
    if (query.weight is None) != (key.weight is None) or not same:
        raise FuseSkip("its norms of queries and keys differ")
    return BorrowedQKNorm(query, key, attention, is_whole)


def find_attention(module: nn.Module, called: nn.Module | None = None) -> AttentionCall:
    """What is known of an attention module that is called itself, or by a module that is called.
    FuseUnfit for another one."""
    names = names_of_timm(module)
    if names is not None and called is None:
        return TimmAttention(module, names)
    reading = read_attention(module, forward_of(module))
    return TransformersAttention(module, reading, module if called is None else called)
