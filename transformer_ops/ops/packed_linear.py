"""Products of one input with several weights; the outputs are next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool, check_size, check_sizes
from ..op.parameters import new_parameter
from ..quantization.model_init import hold_quantized
from .basic_linear import check_rng_tracker, init_weight

__all__ = ["PackedLinear"]


class PackedLinear(BasicOperation, kind="PackedLinear"):
    """`x @ cat(weight0, weight1, ...).T + cat(bias0, bias1, ...)`, as for gate and up of an MLP, or
    query, key and value. The weights are separate parameters and are never concatenated.

    `x[..., in_features]`, `weight<i>[out_features[i], in_features]`, `bias<i>[out_features[i]]`
    (absent with `bias=False`) → `[..., sum(out_features)]`, with columns in the order of the
    weights. The result has the dtype of `weight0`; outside autocast the input and the other
    parameters are cast to it. Weights are initialized kaiming-uniform with a = sqrt(5), biases with
    zeros.

    On the CPU, weights that follow each other in memory are multiplied as one matrix. The gradients
    of all weights are one product; they share its memory without overlap. If one weight needs a
    gradient, those of all weights are computed.

    Recipes round each weight separately. `DelayedScaling` raises RuntimeError, because its scales
    are for a single weight. `accumulate_into_main_grad` and `rng_state_tracker_function` are those
    of `BasicLinear`; each weight has its own `main_grad`. Raises ValueError if sizes are below 1 or
    there are none, if a flag is no bool, and if the tracker is not callable.
    """

    _fixed_once_captured: ClassVar[tuple[str, ...]] = ("accumulate_into_main_grad",)
    _checks: ClassVar[Mapping[str, Check]] = {
        "in_features": check_size,
        "out_features": check_sizes,
        "accumulate_into_main_grad": check_bool,
    }

    in_features: int
    out_features: tuple[int, ...]
    accumulate_into_main_grad: bool

    def __init__(
        self,
        in_features: int,
        out_features: Iterable[int],
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.in_features = in_features
        self.out_features = out_features  # type: ignore[assignment]
        check_bool(op, "bias", bias)
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_state_tracker_function = check_rng_tracker(op, rng_state_tracker_function)
        for i, size in enumerate(self.out_features):
            weight = new_parameter(op, (size, self.in_features), device, dtype)
            self.register_parameter(f"weight{i}", weight)
        for i, size in enumerate(self.out_features):
            parameter = new_parameter(op, (size,), device, dtype) if bias else None
            self.register_parameter(f"bias{i}", parameter)
        self.reset_parameters()
        hold_quantized(self)

    @property
    def num_weights(self) -> int:
        """The number of weights."""
        return len(self.out_features)

    def _tensors_in(self, parameter: str) -> list[Tensor | None]:
        return [getattr(self, name) for name in self._names_in(parameter)]

    def reset_parameters(self) -> None:
        """Initializes the weights again, inside the tracker's `fork()`, and sets biases to zero."""
        for weight in self._tensors_in("weight"):
            assert weight is not None
            init_weight(weight, self._rng_state_tracker_function, self.in_features)
        for bias in self._tensors_in("bias"):
            if bias is not None:
                nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self._tensors_in('bias')[0] is not None}"
        return text + ", accumulate_into_main_grad=True" * self.accumulate_into_main_grad
