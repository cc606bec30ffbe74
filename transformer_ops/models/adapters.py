"""Layers that add adapters of low rank to a product: those of PEFT.

In: a `peft.tuners.lora.layer.Linear`. Out: its base and the adapters that are active, as an
`Adapted`, of which `view` makes one op. FuseSkip says which option ops do not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .. import _C
from ..modules.views import Adapter, is_torch
from ..op.borrowed import class_of
from .pattern import Pattern
from .rules import FuseSkip
from .whole import name_of, names_in, patterns

__all__ = ["adapters_of", "add_adapter_facts", "base_of", "is_adapted"]

_BEGIN = """
self._check_forward_args(H, *A, **K)
N = K.pop("adapter_names", None)
V = {k: K.pop(k, None) for k in VARIANT_KWARG_KEYS}
if self.disable_adapters:
    if self.merged:
        self.unmerge()
    R = self.base_layer(H, *A, **K)
elif N is not None:
    any_statements
elif self.merged:
    R = self.base_layer(H, *A, **K)
else:
    R = self.base_layer(H, *A, **K)
"""
_PLAIN = """
    T = R.dtype
    Q = self.lora_A.keys()
    for P in self.active_adapters:
        if P not in Q:
            continue
        L = self.lora_A[P]
        B = self.lora_B[P]
        D = self.lora_dropout[P]
        S = self.scaling[P]
        H = self._cast_input_dtype(H, L.weight.dtype)
        if P not in self.lora_variant:
            R = R + B(L(D(H))) * S
        else:
            any_statements
    R = R.to(T)
return R
"""
_IN_4_BITS = """
    R = R.clone()
    for P in self.active_adapters:
        if P not in self.lora_A.keys():
            continue
        L = self.lora_A[P]
        B = self.lora_B[P]
        D = self.lora_dropout[P]
        S = self.scaling[P]
        Q = not torch.is_autocast_enabled()
        if Q:
            T = R.dtype
            H = self._cast_input_dtype(H, L.weight.dtype)
        if P not in self.lora_variant:
            O = B(L(D(H))) * S
            if Q:
                O = O.to(T)
            R = R + O
        else:
            any_statements
return R
"""
_FORWARDS = patterns(_BEGIN + _PLAIN, _BEGIN + _IN_4_BITS)
# What `forward` asks for by properties -> their getters.
_PROPERTIES = {
    "disable_adapters": Pattern("return self._disable_adapters"),
    "merged": Pattern("return bool(self.merged_adapters)"),
    "active_adapter": Pattern("return self._active_adapter"),
    "active_adapters": Pattern(
        """
        if isinstance(self.active_adapter, str):
            return [self.active_adapter]
        return self.active_adapter
        """
    ),
}
_CAST = Pattern(
    """
    if H is None:
        return None
    E = getattr(self, "cast_input_dtype_enabled", True)
    if not E or H.dtype == D:
        return H
    return H.to(dtype=D)
    """
)
_METHODS = ("_cast_input_dtype", "_check_forward_args")
# An instance may have methods of its own.
_ATTRIBUTES = (*_METHODS, "_disable_adapters", "cast_input_dtype_enabled")
_CONTAINERS = ("merged_adapters", "_active_adapter", "scaling", "lora_variant")


def is_adapted(module: nn.Module) -> bool:
    """Whether the forward of a module adds adapters of low rank to that of its base."""
    kind = class_of(module)
    forms = (names_in(kind.forward, form) for form in _FORWARDS)
    is_of_class = vars(module).keys().isdisjoint(_METHODS)
    return is_of_class and any(found is not None for found in forms) and _is_known(kind)


def _is_known(kind: Any) -> bool:
    getters = ((getattr(kind, name), pattern) for name, pattern in _PROPERTIES.items())
    found = [names_in(getattr(one, "fget", None), form) for one, form in getters]
    return None not in found and names_in(kind._cast_input_dtype, _CAST) is not None


def base_of(module: Any) -> nn.Module:
    """The module whose product a layer with adapters computes, or the module itself."""
    base: nn.Module = module.base_layer if is_adapted(module) else module
    return base


def adapters_of(module: Any) -> tuple[Adapter, ...]:
    """The adapters that a layer adds now. FuseSkip for those that ops do not compute."""
    if not is_adapted(module):
        return ()
    if module.disable_adapters:
        if module.merged:
            raise FuseSkip(f"{name_of(module)} is to take its adapters out of its weight")
        return ()
    return () if module.merged else tuple(_active(module))


def _active(module: Any) -> Iterator[Adapter]:
    if not getattr(module, "cast_input_dtype_enabled", True):
        raise FuseSkip(f"{name_of(module)} does not cast its input")
    for key in module.active_adapters:
        if key not in module.lora_A.keys():
            continue
        if key in module.lora_variant:
            kind = type(module.lora_variant[key]).__name__
            raise FuseSkip(f"the adapter {key} of {name_of(module)} is a {kind}")
        a, b = module.lora_A[key], module.lora_B[key]
        dropout, scaling = module.lora_dropout[key], module.scaling[key]
        for one in (a, b):
            if not is_torch(one, nn.Linear):
                raise FuseSkip(f"the adapter {key} has a {name_of(one)}")
        if a.bias is not None:
            raise FuseSkip(f"lora_A of the adapter {key} of {name_of(module)} has a bias")
        if not is_torch(dropout, nn.Identity) and not is_torch(dropout, nn.Dropout):
            raise FuseSkip(f"the adapter {key} has a {name_of(dropout)}")
        if getattr(dropout, "inplace", False):
            raise FuseSkip(f"the dropout of the adapter {key} works in place")
        if not isinstance(scaling, int | float):
            raise FuseSkip(f"the scaling of the adapter {key} is a {type(scaling).__name__}")
        yield Adapter(a, b, dropout, float(scaling))


def add_adapter_facts(guards: _C.Guards, module: Any, name: str) -> None:
    """Guards on what decides which adapters a layer adds, and how."""
    kind, own = type(module), vars(module)
    for dropout in module.lora_dropout.values():
        # Adapters of one op drop the same elements, so all of them drop or none.
        if is_torch(dropout, nn.Dropout):
            guards.add_value(vars(dropout), "training", f"a dropout of {name} has another mode")
    for method in (*_PROPERTIES, *_METHODS):
        guards.add_class_attribute(kind, method, f"the class of {name} has another {method}")
    for attribute in _ATTRIBUTES:
        guards.add_value(own, attribute, f"{attribute} of {name} has changed")
    guards.add_value(vars(module.lora_A), "keys", f"keys of lora_A of {name} has changed")
    for attribute in _CONTAINERS:
        guards.add_items(own, attribute, f"{attribute} of {name} has changed")
