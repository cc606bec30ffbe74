"""Matrix products of runs of rows, each with a weight of its own: the Linear of experts."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool, check_size
from ..op.parameters import new_parameter
from ..op.scales import renew_scales
from ..quantization.model_init import hold_quantized
from .basic_linear import check_rng_tracker
from .grouped_buffers import run_into

__all__ = ["GroupedLinear"]


class GroupedLinear(BasicOperation, kind="GroupedLinear"):
    """`x[rows of g] @ weight[g].T + bias[g]` for each group g.

    `x[..., in_features]`, its rows sorted by group, and the extra input `splits[num_groups]`, how
    many rows each group has, in any integer dtype and on the device of `x` → `[...,
    out_features]` in the weight's dtype. Rows beyond the sum of the splits are zeros, in the output
    and in the gradients. With `scale_bias` a second extra input has a number for each row that the
    bias is multiplied by, and gets a gradient.

    With `single_grouped_weight` there is one parameter `weight[num_groups, out_features,
    in_features]`; else `weight0`, `weight1`, ... of `[out_features, in_features]`, which products
    take and give gradients of as they are. `single_grouped_bias` says the same of the bias. State
    dicts of both kinds load into both. Weights start kaiming-uniform with a = sqrt(5), biases at
    zero.

    With `delay_wgrad_compute` backward leaves the gradient of the weight to `backward_dw()`; a bias
    gets its own in backward. In compiled code the call is then a graph break. RuntimeError for a
    weight that is no parameter.

    A call may name a contiguous tensor `output` that takes the output, and `grad_input`, which
    takes the gradient of `x` in backward: keyword arguments of the op alone, or its `op_kwargs` in
    a `Sequential`, where it is then a step of its own, outside of compiled code. What is returned
    is the same memory. ValueError for a buffer of another shape, dtype or device; RuntimeError with
    `accumulate_into_main_grad`, `delay_wgrad_compute` or a recipe; no second derivatives.

    `accumulate_into_main_grad` and `rng_state_tracker_function` as in `BasicLinear`: each parameter
    has a `main_grad` of its own. ValueError for sizes below 1, flags that are no bools, and
    `scale_bias` without a bias. RuntimeError on the CPU where splits are negative or add up to more
    rows than there are (on CUDA they are not looked at).
    """

    _fixed_once_captured: ClassVar[tuple[str, ...]] = (
        "accumulate_into_main_grad",
        "delay_wgrad_compute",
        "single_grouped_weight",
        "single_grouped_bias",
    )
    _checks: ClassVar[Mapping[str, Check]] = {
        "num_groups": check_size,
        "in_features": check_size,
        "out_features": check_size,
        "accumulate_into_main_grad": check_bool,
        "delay_wgrad_compute": check_bool,
        "single_grouped_weight": check_bool,
        "single_grouped_bias": check_bool,
    }

    _takes_buffers: ClassVar[bool] = True
    _takes_scales: ClassVar[bool] = True

    num_groups: int
    in_features: int
    out_features: int
    accumulate_into_main_grad: bool
    delay_wgrad_compute: bool
    # Whether one parameter stands for those of all groups; a bias that is None is one.
    single_grouped_weight: bool
    single_grouped_bias: bool
    # Where they are.
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        check_bool(op, "bias", bias)
        check_bool(op, "scale_bias", scale_bias)
        if scale_bias and not bias:
            raise ValueError(f"[{op}] scale_bias must come with bias=True, got bias={bias}")
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self.single_grouped_weight = single_grouped_weight
        self.single_grouped_bias = check_bool(op, "single_grouped_bias", single_grouped_bias)
        self.single_grouped_bias |= not bias
        self._rng_state_tracker_function = check_rng_tracker(op, rng_state_tracker_function)
        self.num_extra_inputs = 2 if scale_bias else 1
        shape = (self.num_groups, self.out_features, self.in_features)
        self._add_parameters("weight", shape, device, dtype, self.single_grouped_weight)
        if bias:
            self._add_parameters("bias", shape[:2], device, dtype, self.single_grouped_bias)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        hold_quantized(self)

    def _add_parameters(
        self, name: str, shape: tuple[int, ...], device: Any, dtype: Any, single: bool
    ) -> None:
        op = type(self).__name__
        if single:
            self.register_parameter(name, new_parameter(op, shape, device, dtype))
            return
        for i in range(self.num_groups):
            self.register_parameter(f"{name}{i}", new_parameter(op, shape[1:], device, dtype))

    def _parts(self, name: str) -> list[Tensor]:
        """The parameters of the groups; none where there is one for all."""
        names = self._names_in(name)
        return [] if names == (name,) else [getattr(self, part) for part in names]

    def extra_repr(self) -> str:
        """The attributes; layouts where there is one parameter for all groups."""
        found = super().extra_repr()
        has_bias = self._parameters.get("bias", self) is not None
        return found if has_bias else found.replace(", single_grouped_bias=True", "")

    def _run_into(
        self, input: Tensor, extra_inputs: tuple[Tensor, ...], buffers: dict[str, Any]
    ) -> Tensor:
        return run_into(self, input, extra_inputs, buffers)

    def need_backward_dw(self) -> bool:
        """Whether backward leaves the gradient of the weight to `backward_dw()`."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Compute the weight gradient of the first backward that is still to be finished.

        It goes where backward would have put it: to `.grad`, with the hooks of the parameter, or to
        `main_grad`. Nothing happens where no backward waits. RuntimeError, with nothing lost, where
        what backward kept was modified in place since, or the weight has another shape.
        """
        delayed = self.__dict__.get("_delayed")
        if not delayed:
            return
        finish = delayed.popleft()
        try:
            finish()
        except BaseException:
            delayed.appendleft(finish)
            raise

    def _delay(self, finish: Callable[[], None]) -> None:
        self.__dict__.setdefault("_delayed", collections.deque()).append(finish)

    def reset_parameters(self) -> None:
        """Draw the weights anew, inside the tracker's `fork()`, and set biases to zero."""
        tracker = self._rng_state_tracker_function
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            for weight in self._parts("weight") or self.weight.detach():
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        biases: Sequence[Tensor | None] = self._parts("bias") or [self.bias]
        for bias in biases:
            if bias is not None:
                nn.init.zeros_(bias)
        renew_scales(self)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name in ("weight", "bias"):
            parts = [f"{prefix}{name}{i}" for i in range(self.num_groups)]
            if self._parts(name) and prefix + name in state_dict:
                whole = state_dict[prefix + name]
                if len(whole) == len(parts):
                    state_dict.update(zip(parts, state_dict.pop(prefix + name), strict=True))
            elif not self._parts(name) and all(part in state_dict for part in parts):
                state_dict[prefix + name] = torch.stack([state_dict.pop(p) for p in parts])
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
