"""Addition of a bias vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..op.base import Attribute, BasicOperation, Check
from ..op.checks import check_bool, check_size
from ..op.parameters import new_parameter
from ..op.tensor_parallel import TensorParallelMixin, shard_size

__all__ = ["Bias"]


class Bias(BasicOperation, TensorParallelMixin, kind="Bias"):
    """`x + bias` over the last dimension.

    `x[..., size]`, `bias[size]` (zeros at start) → `[..., size]` in the input's dtype. The
    gradient of `bias` is the sum over the leading dimensions.

    With `tensor_parallel` each rank of `tensor_parallel_group` (None: all ranks) has its part of
    the columns of x, and of the bias: `bias[size / ranks]`.

    Raises ValueError unless `size` >= 1; also if a flag is no bool, if there is a group without the
    flag, or if the ranks do not divide `size`. A call raises RuntimeError unless the last dimension
    of x is that of the bias.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"size": check_size}

    size: int
    bias: nn.Parameter

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: Any = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.size = size
        if check_bool(op, "tensor_parallel", tensor_parallel):
            self._take_group(tensor_parallel_group)
        elif tensor_parallel_group is not None:
            raise ValueError(
                f"[{op}] tensor_parallel_group must come with tensor_parallel=True, "
                f"got {tensor_parallel_group!r} alone"
            )
        self.bias = new_parameter(op, (self.local_size,), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets `bias` to zeros."""
        nn.init.zeros_(self.bias)

    @property
    def local_size(self) -> int:
        """The number of elements of the bias on this rank."""
        return shard_size(type(self).__name__, "size", self.size, self.tensor_parallel_size)

    def _attributes(self) -> dict[str, Attribute]:
        return {**super()._attributes(), "size": self.local_size}
