"""Norms that classes write out, or that call torch's functions in a way of their own.

In: a module such as `LlamaRMSNorm`. Out: a LayerNorm or an RMSNorm that borrows its parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..modules.views import BorrowedLayerNorm, BorrowedRMSNorm, is_torch, view
from ..op.base import FusibleOperation
from ..op.borrowed import class_of
from .pattern import Names, Pattern
from .rules import FuseSkip
from .statements import function_of
from .whole import check_number, find, name_of, names_in, patterns

__all__ = ["NORMS_OF_INPUT_DTYPE", "NORMS_THAT_PROMOTE", "norm", "norm_of_heads"]

# These round before the scale, or behind it, or both; ours rounds once, behind it.
_WRITTEN_OUT = (
    """
    D = H.dtype
    H = H.to(torch.float32)
    V = H.pow(2).mean(-1, keepdim=True)
    H = H * torch.rsqrt(V + self.any_eps)
    return self.weight * H.to(D)
    """,
    """
    D = H.dtype
    H = H.to(torch.float32)
    V = H.pow(2).mean(-1, keepdim=True)
    H = H * torch.rsqrt(V + self.any_eps)
    return (self.weight * H).to(D)
    """,
    """
    V = H.to(torch.float32).pow(2).mean(-1, keepdim=True)
    H = H * torch.rsqrt(V + self.any_eps)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        H = H.to(self.weight.dtype)
    return self.weight * H
    """,
)
# Helium's: the weight is taken to float32.
_WRITTEN_OUT_IN_FLOAT32 = """
D = H.dtype
H = H.to(torch.float32)
V = H.pow(2).mean(-1, keepdim=True)
H = H * torch.rsqrt(V + self.any_eps)
return (self.weight.to(torch.float32) * H).to(D)
"""
# Meta's, in the first code of Llama: the method has no weight.
_BY_METHOD = """
Y = self._norm(H.float()).type_as(H)
return Y * self.weight
"""
# Gemma's: the scale is 1 + weight.
_CENTERED = """
Y = self._norm(H.float())
Y = Y * (1.0 + self.weight.float())
return Y.type_as(H)
"""
# The norm of heads has no weight, and takes any width.
_WITHOUT_WEIGHT = Pattern("return self._norm(H.float()).type_as(H)")
_METHOD = Pattern(
    "return H * torch.rsqrt(H.pow(2).mean(-1, keepdim=True) + self.any_eps)",
)
# litgpt's: an attribute says which scale.
_WITH_OFFSET = """
D = H.dtype
H = H.float()
V = torch.mean(H * H, dim=self.any_dim, keepdim=True)
Y = H * torch.rsqrt(V + self.any_eps)
W = (1 + self.weight) if self.any_has_offset else self.weight
return (Y * W.float()).to(dtype=D)
"""
# torch's function, which is six times slower on CPU than ours.
_RMS_NORM = "return F.rms_norm(H, self.normalized_shape, self.weight, self.any_eps)"
# OLMo's: no weight, and always in float32.
_PLAIN_IN_FLOAT32 = """
D = H.dtype
return F.layer_norm(H.to(dtype=torch.float32), self.normalized_shape, None, None, eps=any_eps).to(D)
"""
# timm's.
_RMS_NORM_IN_FLOAT32 = """
W = self.weight.float() if self.weight is not None else None
return F.rms_norm(H.float(), self.normalized_shape, W, self.any_eps).to(H.dtype)
"""
_LAYER_NORM_IN_FLOAT32 = """
W = self.weight.float() if self.weight is not None else None
B = self.bias.float() if self.bias is not None else None
return F.layer_norm(H.float(), self.normalized_shape, W, B, self.eps).to(H.dtype)
"""

# Cohere's: no bias, and always in float32.
_LAYER_NORM_WRITTEN_OUT = """
D = H.dtype
H = H.to(torch.float32)
M = H.mean(-1, keepdim=True)
V = (H - M).pow(2).mean(-1, keepdim=True)
H = (H - M) * torch.rsqrt(V + self.any_eps)
H = self.weight.to(torch.float32) * H
return H.to(D)
"""

# What a rule for norms on their own takes: the first ones give the weight's dtype where that is
# wider than the input's.
NORMS_THAT_PROMOTE = (*_WRITTEN_OUT, _BY_METHOD, _RMS_NORM)
NORMS_OF_INPUT_DTYPE = (
    _WRITTEN_OUT_IN_FLOAT32,
    _CENTERED,
    _WITH_OFFSET,
    _PLAIN_IN_FLOAT32,
    _RMS_NORM_IN_FLOAT32,
    _LAYER_NORM_IN_FLOAT32,
    _LAYER_NORM_WRITTEN_OUT,
)

# timm's, which have other functions for where apex is installed.
_FAST_LAYER_NORM = """
if self.any_is_fast:
    H = fast_layer_norm(H, self.normalized_shape, self.weight, self.bias, self.eps)
else:
    H = F.layer_norm(H, self.normalized_shape, self.weight, self.bias, self.eps)
return H
"""
_FAST_RMS_NORM = """
if self.any_is_fast:
    H = fast_rms_norm(H, self.normalized_shape, self.weight, self.any_eps)
else:
    H = F.rms_norm(H, self.normalized_shape, self.weight, self.any_eps)
return H
"""
# The tensors are images, whose channels are not the last dimension.
_FAST_NORM_OF_CHANNELS = """
if self.any_is_fast:
    H = fast_rms_norm2d(H, self.normalized_shape, self.weight, self.any_eps)
else:
    H = rms_norm2d(H, self.normalized_shape, self.weight, self.any_eps)
return H
"""
_NORM_OF_CHANNELS_IN_FLOAT32 = """
W = self.weight.float() if self.weight is not None else None
return rms_norm2d(H.float(), self.normalized_shape, W, self.any_eps).to(H.dtype)
"""
# Nemotron's: the scale is 1 + weight; autocast casts all that it takes, as it does for our op.
_CENTERED_LAYER_NORM = Pattern(
    """
    D = H.device.type
    A = _cast_if_autocast_enabled(
        D, H, self.normalized_shape, self.weight + 1.0, self.bias, self.eps
    )
    with maybe_autocast(device_type=H.device.type, enabled=False):
        return F.layer_norm(*A)
    """
)
_CAST = Pattern(
    """
    if not torch.is_autocast_enabled():
        return A
    else:
        T = torch.get_autocast_dtype(D)
        return torch.amp.autocast_mode._cast(A, D, T)
    """
)


class _PlainLayerNorm(BorrowedLayerNorm):
    """A LayerNorm without parameters, whose `eps` is a number in its source."""

    weight = None
    bias = None
    eps = 0.0

    def __init__(self, owner: nn.Module, eps: float) -> None:
        super().__init__(owner)
        self.__dict__["eps"] = eps

    def _tensors_of_owner(self) -> tuple[str, ...]:
        return ()

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        return [(self, name) for name in self._tensor_names()]


class _LayerNormWithoutBias(BorrowedLayerNorm):
    """A LayerNorm whose shape is that of its weight; `eps`: the attribute name."""

    bias = None

    def __init__(self, owner: nn.Module, eps: str) -> None:
        super().__init__(owner)
        self.__dict__["_watched"] = (eps,)

    def _tensors_of_owner(self) -> tuple[str, ...]:
        return ("weight",)

    def _tensor_places(self) -> list[tuple[nn.Module, str]]:
        return [(self._parameter_owner, "weight"), (self, "bias")]

    @property
    def normalized_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.weight.shape)

    @property
    def eps(self) -> float:  # type: ignore[override]
        return float(getattr(self._parameter_owner, self._watched[0]))


class _CenteredLayerNorm(BorrowedLayerNorm):
    """A LayerNorm whose scale is `1 + weight`."""

    zero_centered_gamma = True


def _rms_of_weight(module: Any, names: Names) -> FusibleOperation:
    _check_weight(module)
    check_number(module, names["eps"])
    return BorrowedRMSNorm(module, names["eps"])


def _rms(module: Any, names: Names) -> FusibleOperation:
    if getattr(module, names["eps"]) is not None:
        check_number(module, names["eps"])
    return BorrowedRMSNorm(module, names["eps"], of_weight=False)


def _check_weight(module: Any) -> None:
    if module.weight.dim() != 1:
        raise FuseSkip(f"{name_of(module)} has a weight of {module.weight.dim()} dimensions")


def _rms_by_method(module: Any, is_centered: bool) -> FusibleOperation | None:
    found = _METHOD.match_all(function_of(type(module)._norm))
    if found is None:
        return None
    _check_weight(module)
    check_number(module, found["eps"])
    return BorrowedRMSNorm(module, found["eps"], zero_centered_gamma=is_centered)


def _rms_with_offset(module: Any, names: Names) -> FusibleOperation | None:
    if getattr(module, names["dim"]) != -1:
        return None
    _check_weight(module)
    check_number(module, names["eps"])
    has_offset = bool(getattr(module, names["has_offset"]))
    return BorrowedRMSNorm(module, names["eps"], zero_centered_gamma=has_offset)


def _layer(module: Any, names: Names) -> FusibleOperation:
    check_number(module, "eps")
    return BorrowedLayerNorm(module)


def _layer_without_bias(module: Any, names: Names) -> FusibleOperation:
    _check_weight(module)
    check_number(module, names["eps"])
    return _LayerNormWithoutBias(module, names["eps"])


def _if_not_fast(make: Callable[[Any, Names], FusibleOperation], module: Any, names: Names) -> Any:
    if getattr(module, names["is_fast"]):
        raise FuseSkip(f"{class_of(module).__name__} calls a faster function of another library")
    return make(module, names)


def _of_channels(module: Any, names: Names) -> FusibleOperation:
    kind = class_of(module).__name__
    raise FuseSkip(f"{kind} normalizes over dimension 1, and ops over the last one")


# What the forward of a class may compute, and the op for it.
_NORMS: tuple[tuple[tuple[Pattern, ...], Callable[[Any, Names], FusibleOperation | None]], ...] = (
    (
        patterns(*_WRITTEN_OUT, _WRITTEN_OUT_IN_FLOAT32),
        _rms_of_weight,
    ),
    (patterns(_RMS_NORM, _RMS_NORM_IN_FLOAT32), _rms),
    (patterns(_BY_METHOD), lambda module, names: _rms_by_method(module, is_centered=False)),
    (patterns(_CENTERED), lambda module, names: _rms_by_method(module, is_centered=True)),
    (patterns(_WITH_OFFSET), _rms_with_offset),
    (patterns(_FAST_RMS_NORM), functools.partial(_if_not_fast, _rms)),
    (patterns(_LAYER_NORM_IN_FLOAT32), _layer),
    (patterns(_FAST_LAYER_NORM), functools.partial(_if_not_fast, _layer)),
    (patterns(_LAYER_NORM_WRITTEN_OUT), _layer_without_bias),
    (
        patterns(_PLAIN_IN_FLOAT32),
        lambda module, names: _PlainLayerNorm(module, float(names["eps"])),
    ),
    (patterns(_FAST_NORM_OF_CHANNELS, _NORM_OF_CHANNELS_IN_FLOAT32), _of_channels),
)


class _PlainRMSNorm(BorrowedRMSNorm):
    """An RMSNorm without a weight, which takes rows of any width."""

    weight = None
    normalized_shape = ()

    def __init__(self, owner: nn.Module, eps: str, width: int) -> None:
        super().__init__(owner, eps)
        self.__dict__["normalized_shape"] = (width,)


def norm_of_heads(module: Any, width: int) -> FusibleOperation | None:
    """The op of a norm of rows of this width; None for another module."""
    if is_torch(module, nn.RMSNorm):
        return view(module)
    if find(module, (_WITHOUT_WEIGHT,)) is None:
        return norm(module)
    found = _METHOD.match_all(function_of(type(module)._norm))
    if found is None:
        return None
    check_number(module, found["eps"])
    return _PlainRMSNorm(module, found["eps"], width)


def norm(module: Any) -> FusibleOperation | None:
    """The op of a class's own norm over the last dimension; None for another module. FuseSkip with
    the reason for a norm that is no such op."""
    for forms, make in _NORMS:
        names = find(module, forms)
        if names is not None:
            return make(module, names)
    return _centered_layer_norm(module)


def _centered_layer_norm(module: Any) -> FusibleOperation | None:
    forward = class_of(module).forward
    if names_in(forward, _CENTERED_LAYER_NORM) is None:
        return None
    known = forward.__globals__
    if names_in(known.get("_cast_if_autocast_enabled"), _CAST) is None:
        return None
    if not _turns_autocast_off(known.get("maybe_autocast")):
        return None
    if module.weight is None:
        return None
    check_number(module, "eps")
    return _CenteredLayerNorm(module)


def _turns_autocast_off(function: Any) -> bool:
    """Whether what the function gives changes nothing but autocast."""
    context = function(device_type="cpu", enabled=False) if callable(function) else None
    if isinstance(context, torch.autocast):
        return not context._enabled
    return isinstance(context, contextlib.nullcontext)
