"""Tensors whose class sees the calls of groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_PLAIN = {Tensor, torch.nn.Parameter}


def overriding(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors whose class overrides `__torch_function__`."""
    if not torch._C._is_torch_function_enabled():
        return []
    disabled = torch._C._disabled_torch_function_impl
    return [
        tensor
        for tensor in tensors
        if tensor is not None
        and type(tensor) not in _PLAIN
        and type(tensor).__torch_function__ is not disabled
    ]
