"""Matrix product with a weight, without a bias."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..op.base import Attribute, BasicOperation, Check
from ..op.checks import check_bool, check_size
from ..op.parameters import new_parameter
from ..op.tensor_parallel import SplitProductMixin
from ..quantization.model_init import hold_quantized
from ..quantization.scales import renew_scales
from .collective import between_collectives

__all__ = ["BasicLinear"]


class BasicLinear(BasicOperation, SplitProductMixin, kind="BasicLinear"):
    """`x @ weight.T`.

    `x[..., in_features]`, `weight[out_features, in_features]` → `[..., out_features]` in the
    weight's dtype. Outside autocast the input is cast to it, and the input gradient is returned in
    the input's dtype. The weight is initialized kaiming-uniform with a = sqrt(5) (He et al. 2015),
    as in `torch.nn.Linear`.

    With `accumulate_into_main_grad` the weight gradient is added to `weight.main_grad` instead of
    being returned. If the parameter's `overwrite_main_grad` is set, the first gradient of each
    backward pass overwrites the buffer, and gradients of further uses of the weight are added.
    `rng_state_tracker_function` returns an object whose `fork()` is a context manager around the
    initialization of the weight.

    In a `tensor_parallel_group` (a ProcessGroup, a 1-dimensional DeviceMesh, or None for all ranks;
    a single rank splits nothing) the weight of each rank is a shard:

        "column"  weight[out_features / ranks, in_features]: x is the same on all ranks, and each
                  has its columns of the output. With `sequence_parallel` each rank has its share of
                  the rows of x, which are gathered.
        "row"     weight[out_features, in_features / ranks]: each rank has its columns of x, and all
                  have the sum, or with `sequence_parallel` their share of its rows.

    The plan then has a collective before or after it (Shoeybi et al. 2019; Korthikanti et al.
    2022). Gathered rows that backward needs are gathered again.

    Raises ValueError if a size is below 1, a flag is no bool, or the tracker is not callable; also
    if a mode is given without a group, a group or `sequence_parallel` without a mode, or if the
    ranks do not divide the features. A call raises RuntimeError unless x is of floating numbers and
    its last dimension is that of the weight.
    """

    _takes_scales: ClassVar[bool] = True
    _fixed_once_captured: ClassVar[tuple[str, ...]] = ("accumulate_into_main_grad",)
    _checks: ClassVar[Mapping[str, Check]] = {
        "in_features": check_size,
        "out_features": check_size,
        "accumulate_into_main_grad": check_bool,
    }

    in_features: int
    out_features: int
    accumulate_into_main_grad: bool
    weight: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.in_features = in_features
        self.out_features = out_features
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_state_tracker_function = check_rng_tracker(op, rng_state_tracker_function)
        self._split(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        shape = (self.local_out_features, self.local_in_features)
        self.weight = new_parameter(op, shape, device, dtype)
        self.reset_parameters()
        hold_quantized(self)

    def reset_parameters(self) -> None:
        """Initializes `weight` again, inside the tracker's `fork()` if there is one."""
        init_weight(self.weight, self._rng_state_tracker_function, self.in_features)
        renew_scales(self)

    @property
    def basic_ops(self) -> list[BasicOperation]:
        """Itself, between its collectives if it is split."""
        return between_collectives(self)

    def _attributes(self) -> dict[str, Attribute]:
        local = {"in_features": self.local_in_features, "out_features": self.local_out_features}
        return {**super()._attributes(), **local}

    def extra_repr(self) -> str:
        return super().extra_repr() + self._tensor_parallel_repr()


def check_rng_tracker(op: str, tracker: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """None, or something callable."""
    if tracker is not None and not callable(tracker):
        raise ValueError(
            f"[{op}] rng_state_tracker_function must be callable or None, got {tracker!r}"
        )
    return tracker


def init_weight(weight: Tensor, tracker: Callable[[], Any] | None, in_features: int) -> None:
    """Initializes kaiming-uniform with a = sqrt(5), as `torch.nn.Linear`; a shard as a part of the
    whole."""
    with contextlib.nullcontext() if tracker is None else tracker().fork():
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if weight.shape[1] != in_features:
            with torch.no_grad():
                weight.mul_(math.sqrt(weight.shape[1] / in_features))
