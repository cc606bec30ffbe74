"""Ops on parameters of modules that do not know about ops, such as `torch.nn.Linear`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from .. import _C
from ..quantization.quantized_tensor import QuantizedTensor
from ..quantization.stored import is_stored, why_not_decoded
from .hooks import HOOKS
from .view import View

__all__ = [
    "Borrowed",
    "add_guards",
    "borrowed_from",
    "class_of",
    "find_obstacle",
    "guards_of",
    "has_stored",
]

_PLAIN = (Tensor, nn.Parameter)
# The function at import time, because somebody may replace that of torch's class.
_CALL, _CALL_IMPL = nn.Module.__call__, nn.Module._call_impl


def class_of(module: nn.Module) -> type[Any]:
    """The class of a module, or the one that it had before `fuse`."""
    kind: type[Any] = getattr(type(module), "_tops_base", type(module))
    return kind


def _is_call(function: Any) -> bool:
    """Whether it is the `__call__` of torch's modules, or notes its calls: for a report, or in a
    trace of torch.fx."""
    names = getattr(function, "__globals__", {})
    is_of_fx = names.get("__name__") == "torch.fx._symbolic_trace"
    return is_of_fx or getattr(function, "_tops_noted", function) is _CALL


def find_obstacle(
    module: nn.Module,
    forward: Any,
    tensors: Iterable[str] = (),
    is_called: bool = True,
    has_known_hooks: bool = False,
    encoded: Container[str] = (),
) -> str | None:
    """Returns the reason why an op may not replace this module now, or None. Reasons are hooks, a
    `forward` other than this function, or parameters of a special class (adapters, quantizers,
    DTensor). If the op runs within that `forward` (not `is_called`), hooks do not matter; nor do
    those that the caller knows. The parameters with names in `encoded` may be
    stored quantized, in this library or another one."""
    kind, made = class_of(module), getattr(type(module), "_tops_made", {})
    is_known = kind.forward is forward and made.get("forward") in (None, type(module).forward)
    is_known &= type(module)._call_impl is _CALL_IMPL
    if not is_known or not _is_call(kind.__call__) or not _is_call(type(module).__call__):
        return f"the forward of its class {kind.__name__} is another one"
    own = vars(module)
    if is_called and ("forward" in own or "_call_impl" in own):
        return "it has a forward of its own"
    if is_called and not has_known_hooks and any(own.get(name) for name in HOOKS):
        return "it has hooks"
    for name in tensors:
        if name not in module._parameters:
            return f"its {name} is not among its parameters"
        found = module._parameters[name]
        if found is not None and type(found) not in _PLAIN:
            why_not = _why_not_plain(found, name in encoded)
            if why_not is not None:
                return f"its {name} is {why_not}"
    return None


def _why_not_plain(tensor: Tensor, may_decode: bool) -> str | None:
    """The reason why an op cannot read a tensor of a special class, or None."""
    if may_decode and type(tensor) is QuantizedTensor:
        return None
    if may_decode and is_stored(tensor):
        return why_not_decoded(tensor)
    return f"a {type(tensor).__name__}"


def add_guards(
    guards: _C.Guards,
    module: nn.Module,
    name: str,
    *,
    values: Iterable[str] = (),
    tensors: Iterable[str] = (),
    is_called: bool = True,
) -> None:
    """Adds guards on the module: on its class and, if it `is_called`, on an own `forward` and the
    number of its hooks; also on these attributes, and the classes, dtypes and devices of these
    parameters."""
    own = vars(module)
    for table in ("_parameters", "_buffers"):  # which other guards look into
        guards.add_value(own, table, f"{name} has another dict of {table[1:]}")
    guards.add_type(module, f"{name} is of another class")
    what = f"the class of {name} has another forward"
    guards.add_class_attribute(class_of(module), "forward", what)
    if is_called:
        for method in ("forward", "_call_impl"):
            guards.add_value(own, method, f"{name} has another {method}")
        for hooks in HOOKS:
            guards.add_size(own, hooks, f"{name} has other hooks")
    for value in values:
        guards.add_value(own, value, f"{value} of {name} has changed")
    for tensor in tensors:
        what = f"{tensor} of {name} is of another class or dtype, or on another device"
        guards.add_type_of_value(module._parameters, tensor, what)


class Borrowed(View):
    """A basic op on the parameters of another module, which may be of any class.

    It reads everything from that module at each call: parameters, attributes, and the training
    flag. If the op may not replace it (`find_obstacle`), the module itself is called.
    """

    # Attributes of the owner that plans depend on.
    _watched: tuple[str, ...] = ()
    # The owner's names for parameters that the op decodes if they are encoded.
    _decoded: tuple[str, ...] = ()
    # Whether the group of the op checks the owner before each call; False if the caller of the
    # group does.
    _is_guarded = True
    # Whether the owner is called by others, or runs the op in its own forward.
    _is_called = True

    def __init__(self, owner: nn.Module) -> None:
        super().__init__(owner)
        self.__dict__["_known_forward"] = class_of(owner).forward

    def _owners(self) -> list[nn.Module]:
        """The modules that it replaces."""
        return [self._parameter_owner]

    def _tensors_of_owner(self) -> tuple[str, ...]:
        """The owner's names for the parameters."""
        return self._tensor_names()

    def _obstacle(self) -> str | None:
        forward = self.__dict__["_known_forward"]
        tensors = self._tensors_of_owner()
        found = (
            find_obstacle(owner, forward, tensors, self._is_called, encoded=self._decoded)
            for owner in self._owners()
        )
        return next((why for why in found if why is not None), None)

    def _decoded_places(self) -> list[tuple[nn.Module, str]]:
        """The modules and the names of parameters that may be encoded."""
        return [(owner, name) for owner in self._owners() for name in self._decoded]

    @property
    def _has_own_forward(self) -> bool:
        # No graph can contain what a class of another library does.
        return (is_compiling() and has_stored(self)) or self._obstacle() is not None

    def _add_guards(self, guards: _C.Guards) -> None:
        for owner in self._owners():
            name = type(owner).__name__
            tensors = self._tensors_of_owner()
            add_guards(
                guards,
                owner,
                name,
                values=self._watched,
                tensors=tensors,
                is_called=self._is_called,
            )

    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """Same as `FusibleOperation.forward`, but the owner itself is called if it has hooks or a
        `forward` of its own."""
        if self._has_own_forward:
            return self._parameter_owner(input, *extra_inputs, **kwargs)
        return super().forward(input, *extra_inputs, **kwargs)


def borrowed_from(op: Any) -> list[nn.Module]:
    """The modules of other libraries that a basic op replaces."""
    return op._owners() if isinstance(op, Borrowed) else []


def has_stored(op: Any) -> bool:
    """Whether a basic op borrows a weight that a class of another library decodes."""
    places = op._decoded_places() if isinstance(op, Borrowed) else []
    return any(is_stored(owner._parameters.get(name)) for owner, name in places)


def guards_of(ops: Iterable[Any]) -> _C.Guards | None:
    """What these ops assume about the modules that they borrow from; None if there are none."""
    borrowed = [
        op for op in ops if isinstance(op, Borrowed) and op._is_guarded and op._obstacle() is None
    ]
    if not borrowed:
        return None
    guards = _C.Guards(None)
    for op in borrowed:
        op._add_guards(guards)
    return guards
