"""Creates the parameters of ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .checks import check_dtype


def new_parameter(
    op: str,
    shape: Sequence[int],
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    """An uninitialized parameter; None means torch's default device and default dtype."""
    dtype = check_dtype(op, dtype)
    # A parameter created as an inference tensor could never be trained.
    with torch.inference_mode(False):
        return nn.Parameter(torch.empty(tuple(shape), device=device, dtype=dtype))
