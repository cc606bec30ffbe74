"""Basic ops that are parts of another module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import nn

from .base import BasicOperation
from .fused import FusedOperation
from .observers import ObservedMixin


def of_owner(name: str) -> Any:
    """A property: the attribute of this name of the owner of a `View`."""
    return property(lambda view: getattr(view._parameter_owner, name))


class View(BasicOperation):
    """A basic op without state: everything is looked up on its owner when it is needed."""

    # Whether the owner holds the view, which then must not keep the owner alive.
    _is_part: ClassVar[bool] = False

    def __init__(self, owner: nn.Module) -> None:
        BasicOperation.__init__(self)
        # This bypasses nn.Module, which would register the owner as a submodule of its own part.
        self.__dict__["_owner"] = weakref.ref(owner) if self._is_part else owner

    @property
    def _parameter_owner(self) -> nn.Module:
        owner: Any = self.__dict__["_owner"]
        if not isinstance(owner, weakref.ref):
            plain: nn.Module = owner
            return plain
        found: nn.Module | None = owner()
        if found is None:
            raise RuntimeError(f"[{self._kind}] owner must exist, got a part of a freed module")
        return found

    def _is_view_of(self, module: nn.Module) -> bool:
        owner = self.__dict__["_owner"]
        return (owner() if isinstance(owner, weakref.ref) else owner) is module

    def _let_go_of(self, module: nn.Module) -> None:
        """From now on the view does not keep this owner alive."""
        if self._is_view_of(module):
            self.__dict__["_owner"] = weakref.ref(module)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_owner": self._parameter_owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._is_part:
            self.__dict__["_owner"] = weakref.ref(state["_owner"])

    @property
    def training(self) -> bool:
        """The flag of the owner. Setting it here changes nothing."""
        return self._parameter_owner.training

    @training.setter
    def training(self, value: bool) -> None:
        pass

    def _watch(self) -> None:
        super()._watch()
        # The owner is told of its attributes.
        self._parameter_owner.__dict__["_is_watched"] = True

    def _own_values(self) -> dict[str, Any]:
        owner: Any = self._parameter_owner
        has_values = isinstance(owner, ObservedMixin)
        return super()._own_values() | (owner._own_values() if has_values else {})

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for own_name, (owner, name) in zip(
            self._tensor_names(), self._tensor_places(), strict=True
        ):
            parameter = getattr(owner, name)
            if parameter is not None:
                yield prefix + ("." if prefix else "") + own_name, parameter

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._parameter_names:
            setattr(self._parameter_owner, name, value)
        elif name == "forward":
            owner = type(self._parameter_owner).__name__
            raise AttributeError(
                f"[{self._kind}] forward must be set on the {owner}, which nobody calls in parts, "
                f"got {value!r}"
            )
        else:
            super().__setattr__(name, value)

    def _get_name(self) -> str:
        return str(self._kind)


def owners_of(modules: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """The owners of the parts among these modules, which do not keep them alive."""
    ops: list[nn.Module] = []
    for module in modules:
        ops += module.basic_ops if isinstance(module, FusedOperation) else [module]
    return tuple(op._parameter_owner for op in ops if isinstance(op, View) and op._is_part)
