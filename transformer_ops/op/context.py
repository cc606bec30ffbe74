"""The state of an op between its forward and its backward."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


class OperationContext:
    """The state of one op between its forward and its backward; any attribute may be set on it.

    `dtype` is the compute dtype of the op. `requires_grad` says whether its backward will run.
    `attributes` are the constructor arguments with which a native op runs, as they were in forward.
    `saved_tensors` are the tensors that forward saved (in backward only; in slot order for a native
    op).
    """

    def __init__(
        self,
        requires_grad: bool = True,
        dtype: torch.dtype | None = None,
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.requires_grad = requires_grad
        self.dtype = dtype
        self.attributes = attributes
        self.to_save: tuple[Tensor | None, ...] = ()
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Saves tensors for backward; `saved_tensors` has them in this order."""
        self.to_save = tensors

    def _bind(self, saved_tensors: tuple[Tensor | None, ...]) -> OperationContext:
        """A new context for one backward, because Dynamo cannot mutate the one made in forward."""
        return _BackwardContext(self, saved_tensors)


class _BackwardContext(OperationContext):
    """The saved tensors of one backward, together with the attributes that forward set."""

    def __init__(self, forward: OperationContext, saved_tensors: tuple[Tensor | None, ...]) -> None:
        self._forward = forward
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        if name == "_forward":  # not set yet while copying
            raise AttributeError(name)
        return getattr(self._forward, name)
