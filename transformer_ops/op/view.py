"""Basic ops that are parts of another module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .base import BasicOperation
from .observers import ObservedMixin


class View(BasicOperation):
    """A basic op without state: everything is looked up on its owner when it is needed."""

    def __init__(self, owner: nn.Module) -> None:
        BasicOperation.__init__(self)
        # This bypasses nn.Module, which would register the owner as a submodule of its own part.
        self.__dict__["_owner"] = owner

    @property
    def _parameter_owner(self) -> nn.Module:
        owner: nn.Module = self.__dict__["_owner"]
        return owner

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
