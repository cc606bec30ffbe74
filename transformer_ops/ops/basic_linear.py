"""Matrix product with a weight, without a bias."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool, check_size
from ..op.parameters import new_parameter

__all__ = ["BasicLinear"]


class BasicLinear(BasicOperation, kind="BasicLinear"):
    """`x @ weight.T`.

    `x[..., in_features]`, `weight[out_features, in_features]` → `[..., out_features]` in the
    weight's dtype; outside autocast the input is cast to it, and the input gradient comes back in
    the input's dtype. The weight starts kaiming-uniform with a = sqrt(5) (He et al. 2015), as in
    `torch.nn.Linear`.

    With `accumulate_into_main_grad` the weight gradient is added into `weight.main_grad` (written,
    where the parameter has `overwrite_main_grad` set) instead of being returned.
    `rng_state_tracker_function` returns an object whose `fork()` is a context manager around the
    initialization of the weight.

    ValueError for sizes below 1, a flag that is no bool, or a tracker that cannot be called.
    """

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
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.in_features = in_features
        self.out_features = out_features
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_state_tracker_function = check_rng_tracker(op, rng_state_tracker_function)
        self.weight = new_parameter(op, (self.out_features, self.in_features), device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw `weight` anew, inside the tracker's `fork()` where there is one."""
        init_weight(self.weight, self._rng_state_tracker_function)


def check_rng_tracker(op: str, tracker: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """None, or something that can be called."""
    if tracker is not None and not callable(tracker):
        raise ValueError(
            f"[{op}] rng_state_tracker_function must be callable or None, got {tracker!r}"
        )
    return tracker


def init_weight(weight: Tensor, tracker: Callable[[], Any] | None) -> None:
    """Kaiming-uniform with a = sqrt(5), as `torch.nn.Linear`."""
    with contextlib.nullcontext() if tracker is None else tracker().fork():
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
