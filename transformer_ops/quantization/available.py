"""Checks which devices support which recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, overload

import torch

from .._loader import build_info

__all__ = [
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
]

_EMULATED = "recipes are emulated, by products of decoded tensors"

_Device = torch.device | str | int | None


class _Available(Protocol):
    @overload
    def __call__(
        self, device: _Device = None, *, return_reason: Literal[False] = False
    ) -> bool: ...

    @overload
    def __call__(
        self, device: _Device = None, *, return_reason: Literal[True]
    ) -> tuple[bool, str]: ...


def _with_a_reason(look: Callable[[_Device], tuple[bool, str]]) -> _Available:
    """A function that returns the reason only where it is asked for."""

    def available(
        device: _Device = None, *, return_reason: bool = False
    ) -> bool | tuple[bool, str]:
        found = look(device)
        return found if return_reason else found[0]

    for name in ("__name__", "__qualname__", "__doc__"):
        setattr(available, name, getattr(look, name))
    return available  # type: ignore[return-value]


@_with_a_reason
def is_fp8_available(device: _Device) -> tuple[bool, str]:
    """Whether FP8 recipes are useful on a device.

    On a GPU: whether it multiplies FP8, which requires compute capability 8.9. On the CPU it is
    always True, because there a recipe shows its effect on a model: products are emulated. On a GPU
    for which this is False, recipes also run emulated.

    Args:
        device: as for `torch.device`; None for the current CUDA device, or the CPU if there is
            none.
        return_reason: also return why it is False, or what is emulated; empty if neither applies.
    """
    return _look(device) or _capability(device, (8, 9), None, "at least 8.9")


@_with_a_reason
def is_fp8_block_scaling_available(device: _Device) -> tuple[bool, str]:
    """Whether `Float8BlockScaling` is useful on a device: like `is_fp8_available`, but a GPU must
    have exactly compute capability 9.0, and the build CUDA 12.9 or newer.
    """
    return _look(device) or _toolkit() or _capability(device, (9, 0), (9, 0), "9.0")


@_with_a_reason
def is_mxfp8_available(device: _Device) -> tuple[bool, str]:
    """Whether `MXFP8BlockScaling` is useful on a device: like `is_fp8_available`, but a GPU must
    have at least compute capability 10.0, and the build CUDA 12.9 or newer.
    """
    return _look(device) or _toolkit() or _capability(device, (10, 0), None, "at least 10.0")


@_with_a_reason
def is_nvfp4_available(device: _Device) -> tuple[bool, str]:
    """Whether `NVFP4BlockScaling` is useful on a device: like `is_mxfp8_available`."""
    return _look(device) or _toolkit() or _capability(device, (10, 0), None, "at least 10.0")


def _device(device: _Device) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _look(given: _Device) -> tuple[bool, str] | None:
    """The answer, if it does not depend on the GPU."""
    device = _device(given)
    if device.type == "cpu":
        return True, f"on the CPU {_EMULATED}"
    if device.type != "cuda":
        return False, f"device must be CPU or CUDA, got {device}"
    if build_info().CUDA is None:
        return False, "transformer_ops must be built with TRANSFORMER_OPS_CUDA=ON, got a CPU build"
    return None


def _capability(
    device: _Device, least: tuple[int, int], most: tuple[int, int] | None, rule: str
) -> tuple[bool, str]:
    found = torch.cuda.get_device_capability(_device(device))
    if found >= least and (most is None or found <= most):
        return True, ""
    text = ".".join(map(str, found))
    return False, f"compute capability must be {rule}, got {text}: {_EMULATED}"


def _toolkit() -> tuple[bool, str] | None:
    info = build_info().CUDA
    assert info is not None
    if tuple(map(int, info["toolkit"].split(".")[:2])) >= (12, 9):
        return None
    return False, f"the CUDA toolkit must be at least 12.9, got {info['toolkit']}: {_EMULATED}"
