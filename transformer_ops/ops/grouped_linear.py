"""Matrix products of consecutive groups of rows, each with its own weight: the Linear of
experts."""

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
from ..quantization.model_init import hold_quantized
from ..quantization.scales import renew_scales
from .basic_linear import check_rng_tracker
from .grouped_buffers import run_into

__all__ = ["GroupedLinear"]


class GroupedLinear(BasicOperation, kind="GroupedLinear"):
    """`x[rows of g] @ weight[g].T + bias[g]` for each group g: the products of experts, without
    padding (Gale et al. 2022, MegaBlocks).

    `x[..., in_features]`, its rows sorted by group, and the extra input `splits[num_groups]`, the
    number of rows of each group, in any integer dtype and on the device of `x` → `[...,
    out_features]` in the weight's dtype. Rows after the sum of the splits are zeros, in the output
    and in the gradients. With `scale_bias` a second extra input has a number for each row by which
    the bias is multiplied; it gets a gradient.

    With `single_grouped_weight` there is one parameter `weight[num_groups, out_features,
    in_features]`; else `weight0`, `weight1`, ... of `[out_features, in_features]`, which are not
    copied together. `single_grouped_bias` does the same for the bias. State dicts of both kinds
    load into both. Weights are initialized kaiming-uniform with a = sqrt(5), biases with zeros.

    With `delay_wgrad_compute` backward leaves the gradient of the weight to `backward_dw()`; a bias
    gets its gradient in backward. A compiled call with gradients is then a graph break. Raises
    RuntimeError if the weight is no parameter.

    A call may pass a contiguous tensor `output` that receives the output, and `grad_input`, which
    receives the gradient of `x` in backward. Pass them as keyword arguments if the op is called
    alone, and as its `op_kwargs` in a `Sequential`. The op is then a step of its own, which runs
    outside of compiled code. The returned tensors have the same memory. Raises ValueError if a
    buffer has another shape, dtype or device, requires a gradient, or shares storage with a tensor
    that the op reads, and RuntimeError with `accumulate_into_main_grad`, `delay_wgrad_compute` or a
    recipe. There are no second derivatives.

    `accumulate_into_main_grad` and `rng_state_tracker_function` are as in `BasicLinear`; each
    parameter has its own `main_grad`. Raises ValueError if sizes are below 1, if flags are no
    bools, and for `scale_bias` without a bias. On the CPU, raises RuntimeError if splits are
    negative or their sum exceeds the number of rows (on CUDA they are not checked).
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
    # Whether one parameter is stacked for all groups; this includes a bias that is None.
    single_grouped_weight: bool
    single_grouped_bias: bool
    # The stacked parameters, if there are any.
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
        """The parameters of the groups; empty if one is stacked for all."""
        names = self._names_in(name)
        return [] if names == (name,) else [getattr(self, part) for part in names]

    def extra_repr(self) -> str:
        """The attributes, and the layouts if a parameter is stacked for all groups."""
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
        """Computes the weight gradient of the first backward that is not finished.

        It goes where backward would have put it: to `.grad`, with the hooks of the parameter, or to
        `main_grad`. If no backward is waiting, nothing happens. Raises RuntimeError, with nothing
        lost, if a saved tensor was modified in place since, or if the weight has another shape.
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
        """Initializes the weights again, inside the tracker's `fork()`, and sets biases to zero."""
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
