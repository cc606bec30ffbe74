"""What a gradient that a Python method returns has to look like: autograd's rule for a custom
`torch.autograd.Function`, told with the name of the op."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Like(NamedTuple):
    """What a gradient has to look like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """The look of the tensor's gradient."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def zeros(self) -> Tensor:
        """A gradient that nobody gave."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


def fitted(op: str, what: str, gradient: Tensor | None, like: Like) -> Tensor | None:
    """The gradient that `op` returned for `what`, in the shape and dtype of `like`.

    A shape that `like` expands to is summed; a dtype is cast; a single number changes its device.

    Raises:
        RuntimeError: another shape or device; complex numbers for a real tensor.
    """
    if gradient is None:
        return None
    if tuple(gradient.shape) != like.shape:
        if not _expands_to(like.shape, tuple(gradient.shape)):
            raise _error(op, what, "shape", like.shape, tuple(gradient.shape))
        gradient = gradient.sum_to_size(like.shape)
    if gradient.dtype != like.dtype:
        if gradient.is_complex() and not like.dtype.is_complex:
            raise _error(op, what, "dtype", like.dtype, gradient.dtype)
        gradient = gradient.to(like.dtype)
    if gradient.device != like.device:
        if gradient.dim() > 0:
            raise _error(op, what, "device", like.device, gradient.device)
        gradient = gradient.to(like.device)
    return gradient


def _expands_to(shape: tuple[int, ...], wider: tuple[int, ...]) -> bool:
    trailing = wider[len(wider) - len(shape) :]
    return len(shape) <= len(wider) and all(
        a in (b, 1) for a, b in zip(shape, trailing, strict=True)
    )


def _error(op: str, what: str, field: str, wanted: object, got: object) -> RuntimeError:
    return RuntimeError(f"[{op}] gradient of {what} must have {field} {wanted}, got {got}")
