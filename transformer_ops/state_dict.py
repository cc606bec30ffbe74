"""What ops add to nn.Module's way of loading a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def drop_if_empty(state_dict: dict[str, Any], key: str) -> None:
    """Drop the empty `_extra_state` that the reference writes for each of its ops."""
    value = state_dict.get(key, "absent")
    if value is None or (value.numel() == 0 if isinstance(value, Tensor) else value == b""):
        del state_dict[key]


def shape_mismatches(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """One message, in nn.Module's words, for each own tensor that the state dict does not fit."""
    messages = []
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        loaded = state_dict.get(prefix + name)
        if tensor is None or not isinstance(loaded, Tensor) or loaded.shape == tensor.shape:
            continue
        messages.append(
            f"size mismatch for {prefix + name}: copying a param with shape {loaded.shape} from "
            f"checkpoint, the shape in current model is {tensor.shape}."
        )
    return messages
