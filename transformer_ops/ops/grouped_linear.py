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
    in_features]`, which costs least; else `weight0`, `weight1`, ... of `[out_features,
    in_features]`, neighbours in one buffer. `single_grouped_bias` says the same of the bias. State
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
    has a `main_grad` of its own, and in compiled code there has to be the one of
    `single_grouped_weight`. ValueError for sizes below 1, flags that are no bools, and `scale_bias`
    without a bias. RuntimeError on the CPU where splits are negative or add up to more rows than
    there are (on CUDA they are not looked at).
    """

    _fixed_once_captured: ClassVar[tuple[str, ...]] = (
        "accumulate_into_main_grad",
        "delay_wgrad_compute",
    )
    _checks: ClassVar[Mapping[str, Check]] = {
        "num_groups": check_size,
        "in_features": check_size,
        "out_features": check_size,
        "accumulate_into_main_grad": check_bool,
        "delay_wgrad_compute": check_bool,
    }

    _takes_buffers: ClassVar[bool] = True
    _takes_scales: ClassVar[bool] = True

    num_groups: int
    in_features: int
    out_features: int
    accumulate_into_main_grad: bool
    delay_wgrad_compute: bool

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
        single = {
            "weight": check_bool(op, "single_grouped_weight", single_grouped_weight),
            "bias": check_bool(op, "single_grouped_bias", single_grouped_bias),
        }
        self._rng_state_tracker_function = check_rng_tracker(op, rng_state_tracker_function)
        self.num_extra_inputs = 2 if scale_bias else 1
        shape = (self.num_groups, self.out_features, self.in_features)
        self._add_parameters("weight", new_parameter(op, shape, device, dtype), single["weight"])
        if bias:
            packed = new_parameter(op, shape[:2], device, dtype)
            self._add_parameters("bias", packed, single["bias"])
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        if single["weight"]:
            hold_quantized(self)

    def _add_parameters(self, name: str, packed: nn.Parameter, single: bool) -> None:
        if single:
            self.register_parameter(name, packed)
            return
        for i, part in enumerate(packed.detach()):
            # Not under inference mode: it could never be trained.
            with torch.inference_mode(False):
                self.register_parameter(f"{name}{i}", nn.Parameter(part))

    def _parts(self, name: str) -> list[Tensor]:
        """The parameters of the groups; none where there is one for all."""
        if name in self._parameters or f"{name}0" not in self._parameters:
            return []
        return [getattr(self, f"{name}{i}") for i in range(self.num_groups)]

    def __getattr__(self, name: str) -> Any:
        # What nn.Module does not find: one tensor in the place of the parameters of the groups.
        if name in ("weight", "bias"):
            parts = self._parts(name)
            if parts:
                return self._packed(name, parts)
        return super().__getattr__(name)

    def _packed(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        found = packed(parts)
        if name != "weight":
            return found
        if not torch.compiler.is_compiling():
            found.parts = parts  # type: ignore[attr-defined]
        elif self.accumulate_into_main_grad:
            raise RuntimeError(
                f"[{type(self).__name__}] accumulate_into_main_grad must come with "
                "single_grouped_weight=True in compiled code, got a parameter for each group"
            )
        return found

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

    def _pack(self) -> None:
        """Make the parameters of the groups neighbours in memory."""
        for name in ("weight", "bias"):
            parts = self._parts(name)
            apart = bool(parts) and not _are_neighbours(parts)
            if apart and all(type(p) is nn.Parameter and not p.is_meta for p in parts):
                with torch.no_grad():
                    for part, row in zip(parts, torch.stack(parts), strict=True):
                        part.data = row

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinear:
        super()._apply(fn, recurse)
        self._pack()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()

    def reset_parameters(self) -> None:
        """Draw the weights anew, inside the tracker's `fork()`, and set biases to zero."""
        tracker = self._rng_state_tracker_function
        with contextlib.nullcontext() if tracker is None else tracker().fork():
            for weight in self._parts("weight") or self.weight.detach():
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        for bias in self._parts("bias") or [self.bias]:
            if bias is not None:
                nn.init.zeros_(bias)

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


def packed(parts: Sequence[Tensor]) -> Tensor:
    """The tensors as one, of one dimension more: without a copy where they are neighbours."""
    if torch.compiler.is_compiling() or not _are_neighbours(parts):
        return torch.stack(list(parts))
    found: Tensor = _Packed.apply(*parts)
    return found


def _are_neighbours(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    # What stands in for a parameter, under torch.func for one, may have no memory.
    if any(type(part) is not nn.Parameter for part in parts) or first.is_meta:
        return False
    step = first.numel() * first.element_size()
    start, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    return all(
        part.is_contiguous()
        and part.data_ptr() == start + i * step
        and part.untyped_storage().data_ptr() == storage
        for i, part in enumerate(parts)
    )


class _Packed(torch.autograd.Function):
    """Neighbours as one tensor; each gets its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.count = len(parts)
        first = parts[0].detach()
        shape = (len(parts), *first.shape)
        return first.as_strided(shape, (first.numel(), *first.stride()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return (None,) * ctx.count if grad is None else grad.unbind(0)
