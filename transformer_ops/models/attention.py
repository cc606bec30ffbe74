"""Attention modules of transformers and timm: the ops that compute what they do, and what a call
must give them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..op.base import FusibleOperation
from ..op.borrowed import class_of
from ..views import (
    BorrowedDropout,
    BorrowedLinear,
    BorrowedLoRALinear,
    BorrowedProduct,
    BorrowedRMSNorm,
    is_torch,
    view,
    weight_of,
)
from .attention_forms import (
    PARTS,
    check_rotation_of_timm,
    forward_of,
    is_known_eager,
    known_sdpa,
    names_of_timm,
    names_of_transformers,
    rotation,
)
from .attention_ops import (
    AttentionCall,
    AttentionInputs,
    BorrowedAttention,
    BorrowedQKNorm,
    BorrowedRoPE,
    JoinedBias,
    NoKeyBias,
)
from .norms import norm
from .parts import dtypes_of, linear, part, products
from .pattern import Names
from .rules import FuseSkip, FuseUnfit
from .whole import name_of
from .widths import width_of

__all__ = ["find_attention"]


# What makes a call something else than attention of a sequence to itself.
_UNKNOWN = (
    "past_key_value",
    "encoder_hidden_states",
    "position_bias",
    "softcap",
    "output_attentions",
)

# The names of the cache in transformers: since 5.24, before, and in some models.
_CACHES = ("cache", "past_key_values", "layer_past")


class TransformersAttention(AttentionCall):
    """A module of transformers."""

    def __init__(self, module: nn.Module, names: Names, called: nn.Module) -> None:
        super().__init__(names)
        forward = forward_of(module)
        self._globals: Mapping[str, Any] = forward.__globals__
        self._parameters = tuple(inspect.signature(class_of(called).forward).parameters)[2:]
        has_tables = "position_embeddings" in forward.__code__.co_varnames and (
            "apply_rotary_pos_emb" in forward.__code__.co_names
        )
        if "rotates" in names:
            has_tables = bool(getattr(module, names["rotates"]))
        self._may_clip = "clip_qkv" in forward.__code__.co_names
        if self._may_clip and module.config.clip_qkv is not None:  # type: ignore[union-attr]
            raise FuseSkip("it clips queries, keys and values")
        if "has_layer_norms" in names and getattr(module, names["has_layer_norms"]):
            raise FuseSkip("its norms of queries and keys are no RMS norms")
        self._rotation = rotation(self._globals) if has_tables else None
        self._interface = self._globals["ALL_ATTENTION_FUNCTIONS"]
        self._sdpa = known_sdpa(self._interface)
        self._eager = is_known_eager(self._globals["eager_attention_forward"])
        if self._sdpa is None:
            raise FuseSkip("its attention function is another one")

    def functions(self) -> list[Any]:
        return [self._sdpa]

    def rotary_dims(self, module: Any) -> list[int | None]:
        head_dim: int = getattr(module, self.names["head_dim"])
        return [None if self._rotation is None else head_dim]

    def widths(self, module: Any) -> tuple[int, int]:
        names = self.names
        if "query" in names:
            query, key = (getattr(module, names[name]) for name in ("query", "key"))
            return weight_of(query).shape[0], weight_of(key).shape[0]
        if "packed_by_head" in names:
            third = weight_of(getattr(module, names["packed_by_head"])).shape[0] // 3
            return third, third
        if "part_size" in names:
            width = getattr(module, names["part_size"])
            return width, width
        head_dim = getattr(module, names["head_dim"])
        return module.config.num_attention_heads * head_dim, module.num_key_value_heads * head_dim

    def ops(self, module: Any) -> list[FusibleOperation]:
        names = self.names
        packed = self._products(module)
        attention = BorrowedAttention(module, self)
        heads = attention.num_heads, attention.num_kv_heads
        if heads[0] % heads[1] or heads[0] < 1:
            raise FuseSkip(f"{heads[0]} query heads are no multiple of {heads[1]}")
        if getattr(module, "num_key_value_groups", heads[0] // heads[1]) * heads[1] != heads[0]:
            raise FuseSkip(f"{heads[1]} key heads are not repeated to {heads[0]}")
        if "num_heads" in names:
            kinds = names["num_heads"], names.get("num_kv_heads", names["num_heads"])
            if heads != tuple(getattr(module, name) for name in kinds):
                raise FuseSkip(f"its products are as wide as {heads[0]} and {heads[1]} heads")
        ops: list[FusibleOperation] = [packed]
        for kind in ("", "whole_"):
            if f"{kind}query_norm" in names:
                norms = [getattr(module, names[f"{kind}{n}_norm"]) for n in ("query", "key")]
                ops.append(_norms_of(norms, attention, is_whole=bool(kind)))
        if self._rotation is not None:
            ops.append(
                BorrowedRoPE(
                    attention.head_dim,
                    None if attention.by_head else sum(heads),
                    by_head=attention.by_head,
                    interleaved=self._rotation.is_interleaved,
                )
            )
        ops.append(attention)
        if "output" in names:
            ops.append(_product(getattr(module, names["output"])))
        if "last_dropout" in names:
            ops.append(BorrowedDropout(module, names["last_dropout"]))
        if "last" in names:
            ops += part(getattr(module, names["last"]))
        return ops

    def _products(self, module: Any) -> FusibleOperation:
        if "packed_by_head" in self.names:
            packed = _product(getattr(module, self.names["packed_by_head"]))
            if self.widths(module)[0] % getattr(module, self.names["head_dim"]):
                raise FuseSkip("its product is no multiple of its heads")
            return packed
        if "packed" in self.names:
            packed = _product(getattr(module, self.names["packed"]))
            product: Any = packed.basic_ops[0]
            if "part_size" in self.names and width_of(product) != 3 * self.widths(module)[0]:
                raise FuseSkip("it attends to another sequence")
            return packed
        layers = [getattr(module, self.names[name]) for _, name in PARTS]
        found = list(map(linear, layers))
        if len({one.bias is None for one in found}) > 1:
            raise FuseSkip("some of its products have a bias, and some have none")
        if len(dtypes_of(*found)) > 1:
            raise FuseSkip("its products have different dtypes")
        if weight_of(found[1]).shape != weight_of(found[2]).shape:
            raise FuseSkip("its keys and values have different widths")
        return products(*layers)

    def inputs(
        self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], gives_weights: bool
    ) -> AttentionInputs | None:
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        for name in _UNKNOWN:
            value = given.get(name)
            if value is not None and value is not False:
                return None
        caches = (given.get(name) for name in _CACHES)
        cache = next((found for found in caches if found is not None), None)
        if cache is not None and not _is_empty(cache, module.layer_idx):
            return None
        if self._may_clip and module.config.clip_qkv is not None:
            return None
        function = module.config._attn_implementation
        mask, is_causal = given.get("attention_mask"), False
        if function == "sdpa":
            if self._interface["sdpa"] is not self._sdpa:
                return None
            flag = given.get("is_causal")
            is_causal = getattr(module, "is_causal", True) if flag is None else flag
        elif function != "eager" or not self._eager or gives_weights:
            return None
        elif "is_upcast" in self.names and getattr(module, self.names["is_upcast"]):
            return None
        if mask is not None and not isinstance(mask, Tensor):
            return None
        tables: tuple[Tensor, ...] = ()
        rotary_dim = None
        if self._rotation is not None:
            tables = tuple(given["position_embeddings"])
            rotary_dim = tables[0].shape[-1]
            if self._rotation.is_by_pair:
                tables = tuple(table[..., : rotary_dim // 2] for table in tables)
        if mask is None:
            choice = (False, bool(is_causal), rotary_dim, cache is not None, False)
            return AttentionInputs(choice, tables, cache)
        return self.masked(module, mask, tables, rotary_dim, cache)

    def has_plain_softmax(self, module: Any) -> bool:
        return bool(module.config._attn_implementation == "eager")


def _is_empty(cache: Any, layer: int) -> bool:
    """Whether it is a cache that only grows, and that has nothing of this layer yet."""
    kind = type(cache)
    if (kind.__module__, kind.__name__) != ("transformers.cache_utils", "DynamicCache"):
        return False
    if cache.offloading or cache.get_seq_length(layer) != 0:
        return False
    if layer >= len(cache.layers):
        return cache.layer_class_to_replicate.__name__ == "DynamicLayer"
    return type(cache.layers[layer]).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer")


class TimmAttention(AttentionCall):
    """A module of timm."""

    def __init__(self, module: nn.Module, names: Names) -> None:
        super().__init__({"head_dim": "head_dim", **names})
        self._may_rotate = "prefix" in names
        if self._may_rotate:
            check_rotation_of_timm(class_of(module).forward.__globals__)
        self._parameters = tuple(inspect.signature(class_of(module).forward).parameters)[2:]

    def rotary_dims(self, module: Any) -> list[int | None]:
        return [None, module.head_dim] if self._may_rotate else [None]

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
            has_bias = [one.bias is not None for one in found]
            if len({*has_bias}) == 1 or layers != found:
                return [products(*layers)]
            return [NoKeyBias(*found)]
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
        self, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], gives_weights: bool
    ) -> AttentionInputs | None:
        given = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
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


def _product(module: Any) -> FusibleOperation:
    """The product of a `torch.nn.Linear`, or of a module that computes the same."""
    found = [] if is_torch(module, nn.Linear) else part(module)
    if len(found) == 1 and isinstance(found[0], BorrowedLinear | BorrowedLoRALinear):
        return found[0]
    return products(module)


def _norms_of(
    modules: Sequence[nn.Module], attention: BorrowedAttention, is_whole: bool
) -> BorrowedQKNorm:
    found = [view(one) if is_torch(one, nn.RMSNorm) else norm(one) for one in modules]
    query, key = found
    if not isinstance(query, BorrowedRMSNorm) or not isinstance(key, BorrowedRMSNorm):
        raise FuseSkip(f"{name_of(modules[0])} is no RMS norm that ops know")
    same = (query.eps, query.zero_centered_gamma) == (key.eps, key.zero_centered_gamma)
    if query.weight is None or key.weight is None or not same:
        raise FuseSkip("its norms of queries and keys differ, or have no weight")
    return BorrowedQKNorm(query, key, attention, is_whole)


def find_attention(module: nn.Module, called: nn.Module | None = None) -> AttentionCall:
    """What is known of an attention module that is called itself, or by a module that is called.
    FuseUnfit for another one."""
    names = names_of_transformers(module)
    if names is not None:
        return TransformersAttention(module, names, module if called is None else called)
    names = names_of_timm(module)
    if names is not None and called is None:
        return TimmAttention(module, names)
    raise FuseUnfit(f"the forward of {name_of(module)} is not known")
