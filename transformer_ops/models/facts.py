"""What statements of a function depend on, as guards: attributes of a module, and names of modules
and functions. The function's own source says which ones it reads.

In: a module and statements, `x * self.factor`. Out: guards that hold until `factor`, or the method
that has the statements, is another one; FuseSkip for what no guard can watch.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

from torch import Tensor, nn

from .. import _C
from ..op.borrowed import add_guards, class_of
from .adapters import add_adapter_facts, is_adapted
from .reads import Chain, Reads, cell_of, is_of_torch, is_replaced, reads_of_function
from .rules import FuseSkip
from .statements import function_of

__all__ = ["Facts", "Watcher"]

_ABSENT = object()
_PROPERTY_OR_SLOT = ("__set__", "__delete__")
# The contents of these may change.
_MUTABLE = (list, dict, set, bytearray)
# Ops read these at each call.
_READ_AT_EACH_CALL = {"training", "_attn_implementation"}
# Functions that patterns know by name -> where they have to come from.
_HOMES = {
    "apply_chunking_to_forward": "transformers",
    "maybe_add_mask": "timm",
    "resolve_self_attn_mask": "timm",
}


class Facts:
    """Adds guards on what functions read. FuseSkip for what no guard can watch."""

    def __init__(self, guards: _C.Guards) -> None:
        self._guards = guards
        self._known: set[tuple[Any, ...]] = set()

    def _is_new(self, *what: Any) -> bool:
        is_new = what not in self._known
        self._known.add(what)
        return is_new

    def add_module(self, module: nn.Module, name: str) -> None:
        """All that a call of the module reads: its `forward` and the methods that this calls."""
        for called in ("__call__", "_call_impl", "forward"):
            text = f"the class of {name} has another {called}"
            self._guards.add_class_attribute(type(module), called, text)
        if is_adapted(module):
            add_adapter_facts(self._guards, module, name)
            return
        self.add_function(class_of(module).forward, module, name)

    def add_function(self, method: Any, module: nn.Module | None = None, name: str = "") -> None:
        """All that a function reads, or a method of a module."""
        function = function_of(method)
        if isinstance(function, types.FunctionType) and self._is_new(function, id(module)):
            self.add_reads(function, reads_of_function(function), module, name)

    def add_reads(
        self,
        function: types.FunctionType,
        reads: Reads,
        module: nn.Module | None = None,
        name: str = "",
    ) -> None:
        """What statements of a function read."""
        for method in function.__code__.co_names:
            self._add_method_of_tensors(method)
        for chain in sorted(reads.others):
            self._add_name(function, chain)
        if module is not None:
            for chain in sorted(reads.own):
                self._add_attributes(module, chain, name)

    # ---- names

    def _add_method_of_tensors(self, name: str) -> None:
        found = getattr(Tensor, name, None)
        home = getattr(found, "__globals__", {"__name__": "torch"}).get("__name__")
        if not is_of_torch(str(home)):
            raise FuseSkip(f"{name} of tensors is not torch's own method")
        if found is not None:
            self._guards.add_class_attribute(Tensor, name, f"{name} of tensors has changed")

    def _add_name(self, function: types.FunctionType, chain: Chain) -> None:
        name, *attributes = chain
        cell = cell_of(function, name)
        if cell is not None:
            self._guards.add_attribute(cell, "cell_contents", f"{name} has changed")
            found = getattr(cell, "cell_contents", _ABSENT)
        else:
            found = self.add_value(function.__globals__, name, name)
            if found is _ABSENT:
                found = self.add_value(vars(builtins), name, name)
        home = _HOMES.get(name)
        if home is not None and getattr(found, "__module__", "").split(".")[0] != home:
            raise FuseSkip(f"{name} is not that of {home}")
        for attribute in attributes:
            name = f"{name}.{attribute}"
            if isinstance(found, type):
                self._guards.add_class_attribute(found, attribute, f"{name} has changed")
                return
            if not isinstance(found, types.ModuleType):
                self._attribute(found, attribute, name)
                return
            owner, found = found, self.add_value(vars(found), attribute, name)
            if is_replaced(owner, attribute, found):
                raise FuseSkip(f"{name} is not torch's own function")
        if isinstance(found, nn.Module) and self._is_new(id(found)):
            add_guards(self._guards, found, name)
            self.add_module(found, name)
        if not isinstance(found, types.FunctionType):
            return
        if is_of_torch(found.__module__):
            # For a tensor of a subclass the function passes on what its module has by its name.
            own = self.add_value(found.__globals__, found.__name__, name)
            if own is not found and own is not _ABSENT:
                raise FuseSkip(f"{name} is not torch's own function")
        else:
            self.add_function(found)

    def add_value(self, table: dict[str, Any], key: str, name: str) -> Any:
        """Adds what a dict has at a key, and returns it."""
        if self._is_new(id(table), key):
            self._guards.add_value(table, key, f"{name} has changed")
        return table.get(key, _ABSENT)

    # ---- attributes

    def _add_attributes(self, module: nn.Module, chain: Chain, name: str) -> None:
        found: Any = module
        for attribute in chain:
            if attribute in _READ_AT_EACH_CALL or isinstance(found, Tensor):
                return
            owner, found = found, self._attribute(found, attribute, name)
            name = f"{attribute} of {name}"
            if isinstance(found, types.FunctionType) and isinstance(owner, nn.Module):
                self.add_function(found, owner, name)
                return
            if isinstance(found, _MUTABLE) or type(found).__name__ == "ndarray":
                raise FuseSkip(f"{name} is a {type(found).__name__}, whose contents may change")
            if found is _ABSENT:
                return

    def _attribute(self, owner: Any, attribute: str, name: str) -> Any:
        kind, text = type(owner), f"{attribute} of {name} has changed"
        if not self._is_new(id(owner), attribute):
            return getattr(owner, attribute, _ABSENT)
        static = next((vars(c)[attribute] for c in kind.__mro__ if attribute in vars(c)), _ABSENT)
        is_computed = any(hasattr(type(static), special) for special in _PROPERTY_OR_SLOT)
        is_module = isinstance(owner, nn.Module)
        own: Any = getattr(owner, "__dict__", None)
        if is_module and (is_computed or kind.__getattribute__ is not object.__getattribute__):
            raise FuseSkip(f"{attribute} of {name} is a property")
        is_plain = not hasattr(kind, "__getattr__") and not is_computed and own is not None
        if not is_module and not (is_plain and kind.__getattribute__ is object.__getattribute__):
            self._guards.add_attribute(owner, attribute, text)
            return getattr(owner, attribute, _ABSENT)
        for read in (attribute, "__getattribute__", "__getattr__"):
            self._guards.add_class_attribute(kind, read, text)
        if self._is_in(own, attribute, text):
            if is_module and attribute in owner._parameters:
                raise FuseSkip(f"{attribute} of {name} hides a parameter")
            if is_module and isinstance(static, types.FunctionType):
                raise FuseSkip(f"{attribute} of {name} is another one than that of its class")
            return own[attribute]
        if static is not _ABSENT or not isinstance(owner, nn.Module):
            return static
        if kind.__getattr__ is not nn.Module.__getattr__:
            raise FuseSkip(f"{name} has a __getattr__ of its own")
        tables = (owner._parameters, owner._buffers, owner._modules)
        # A module that gets an attribute of another kind takes it out of its other tables.
        known = [table for table in tables if attribute in table] or tables
        for table in known:
            if self._is_in(table, attribute, text):
                return table[attribute]
        return _ABSENT

    def _is_in(self, table: dict[str, Any], key: str, text: str) -> bool:
        """Whether a dict has a key, which is watched: of tensors the class and the shape, since ops
        read their numbers at each call."""
        if isinstance(table.get(key), Tensor):
            self._guards.add_type_of_value(table, key, text)
            self._guards.add_shape(table, key, text)
        else:
            self._guards.add_value(table, key, text)
        return key in table


class Watcher:
    """An op that knows of more that a call of its module reaches than the source of the module
    names."""

    def add_facts(self, facts: Facts) -> None:
        """Adds that."""
        raise NotImplementedError
