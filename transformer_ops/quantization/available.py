"""Which devices have what recipes ask for."""

from __future__ import annotations

from typing import Literal, overload

import torch

from .._loader import build_info

__all__ = ["is_fp8_available"]

_EMULATED = "recipes are emulated, by products of decoded tensors"


@overload
def is_fp8_available(
    device: torch.device | str | int | None = None, *, return_reason: Literal[False] = False
) -> bool: ...


@overload
def is_fp8_available(
    device: torch.device | str | int | None = None, *, return_reason: Literal[True]
) -> tuple[bool, str]: ...


def is_fp8_available(
    device: torch.device | str | int | None = None, *, return_reason: bool = False
) -> bool | tuple[bool, str]:
    """Whether recipes in FP8 are of use on a device.

    On a GPU: whether it multiplies FP8, which begins with compute capability 8.9. On the CPU
    always, because there a recipe shows what it does to a model: products are emulated. Recipes run
    on a GPU where this is False, too, emulated.

    Args:
        device: as `torch.device` takes it; None for the current CUDA device, or the CPU where there
            is none.
        return_reason: also why it is False, or what is emulated; empty where neither is so.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = _look(torch.device(device))
    return found if return_reason else found[0]


def _look(device: torch.device) -> tuple[bool, str]:
    if device.type == "cpu":
        return True, f"on the CPU {_EMULATED}"
    if device.type != "cuda":
        return False, f"device must be CPU or CUDA, got {device}"
    if build_info().CUDA is None:
        return False, "transformer_ops must be built with TRANSFORMER_OPS_CUDA=ON, got a CPU build"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        text = ".".join(map(str, capability))
        return False, f"compute capability must be at least 8.9, got {text}: {_EMULATED}"
    return True, ""
