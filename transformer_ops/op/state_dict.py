"""The parts of loading a state dict that ops add to nn.Module's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..quantization.scales import scale_errors


class PickledState(str):
    """The key of an `_extra_state` that is not loaded. It explains this in torch's error for
    unexpected keys."""

    def __format__(self, spec: str) -> str:
        key = super().__format__(spec)
        return (
            f"{key} (state must be tensors, got a pickle as TransformerEngine writes it: "
            "leave the entry out, and scales begin anew)"
        )


def take_extra_state(state_dict: dict[str, Any], key: str, unexpected_keys: list[str]) -> None:
    """Removes the `_extra_state` that the reference writes for each of its ops. One that is not
    empty is an unexpected key."""
    if key not in state_dict:
        return
    value = state_dict.pop(key)
    is_bytes = isinstance(value, bytes)
    is_empty = value.numel() == 0 if isinstance(value, Tensor) else is_bytes and not value
    if not (is_empty or value is None):
        unexpected_keys.append(PickledState(key))


def shape_mismatches(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """One message, in nn.Module's words, for each own tensor that does not fit the state dict."""
    messages = scale_errors(module, state_dict, prefix) if _takes_scales(module) else []
    if messages:
        return messages
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        loaded = state_dict.get(prefix + name)
        if name in module._non_persistent_buffers_set or not isinstance(loaded, Tensor):
            continue
        if tensor is None or _fits(loaded, tensor):
            continue
        messages.append(
            f"size mismatch for {prefix + name}: copying a param with shape {loaded.shape} from "
            f"checkpoint, the shape in current model is {tensor.shape}."
        )
    return messages


def _takes_scales(module: nn.Module) -> bool:
    return bool(getattr(type(module), "_takes_scales", False))


def _fits(loaded: Tensor, tensor: Tensor) -> bool:
    # torch accepts an old checkpoint's 1-dim tensor for a 0-dim one, and takes its first element.
    if is_lazy(tensor) or (tensor.dim() == 0 and loaded.dim() == 1):
        return True
    return loaded.shape == tensor.shape


def modules_with_known_shapes(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules whose entries of a state dict are loaded directly, each with its prefix: neither
    they nor a parent has a pre-hook that may edit the entries, or its own way of loading."""
    if root._load_state_dict_pre_hooks or not _loads_plainly(root):
        return
    yield prefix, root
    for name, child in root._modules.items():
        if child is not None:
            yield from modules_with_known_shapes(child, f"{prefix}{name}.")


def _loads_plainly(module: nn.Module) -> bool:
    method = type(module)._load_from_state_dict
    return method.__module__.split(".")[0] in (__package__.partition(".")[0], "torch")


@contextmanager
def without_pre_hooks(module: nn.Module) -> Iterator[None]:
    """In this scope, loading does not run pre-hooks of the module."""
    hooks = module._load_state_dict_pre_hooks
    module._load_state_dict_pre_hooks = OrderedDict()
    try:
        yield
    finally:
        module._load_state_dict_pre_hooks = hooks
