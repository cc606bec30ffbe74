"""What an op keeps between its forward and its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class OperationContext:
    """What one op keeps between its forward and its backward; any attribute may be set on it.

    `dtype` is the compute dtype of the op, `requires_grad` whether its backward will run,
    `saved_tensors` what forward saved (in backward only; slot order for a native op).
    """

    def __init__(self, *, requires_grad: bool = True, dtype: torch.dtype | None = None) -> None:
        self.requires_grad = requires_grad
        self.dtype = dtype
        self.to_save: tuple[Tensor | None, ...] = ()
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward, where `saved_tensors` gives them in this order."""
        self.to_save = tensors

    def _bind(self, saved_tensors: tuple[Tensor | None, ...]) -> OperationContext:
        """A fresh context for one backward: Dynamo refuses to mutate the one made in forward."""
        return _BackwardContext(self, saved_tensors)


class _BackwardContext(OperationContext):
    """Saved tensors of one backward over the attributes that forward set."""

    def __init__(self, forward: OperationContext, saved_tensors: tuple[Tensor | None, ...]) -> None:
        self._forward = forward
        self.saved_tensors = saved_tensors

    def __getattr__(self, name: str) -> Any:
        if name == "_forward":  # not set yet while copying
            raise AttributeError(name)
        return getattr(self._forward, name)
