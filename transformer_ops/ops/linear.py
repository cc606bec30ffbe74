"""Linear, the container that the fuser expands to BasicLinear and Bias."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..op.base import BasicOperation, FusibleOperation
from ..op.checks import check_bool
from ..op.parameters import new_parameter
from ..op.quantizers import passed_over
from ..op.state_dict import take_extra_state
from ..op.tensor_parallel import SplitProductMixin
from ..op.view import View, of_owner
from ..quantization.model_init import hold_quantized
from ..quantization.scales import renew_scales
from .basic_linear import BasicLinear, check_rng_tracker, init_weight
from .bias import Bias
from .collective import collectives_around

__all__ = ["Linear"]

# The keys of the reference's state dict, whose Linear registers its basic ops.
_REFERENCE_KEYS = {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias"}
_REFERENCE_STATES = ("basic_ops.0._extra_state", "basic_ops.1._extra_state")


class _Parts(list[BasicOperation]):
    """The parts of a Linear, which do not keep it alive. The list does."""

    def __init__(self, owner: nn.Module, parts: list[BasicOperation]) -> None:
        super().__init__(parts)
        self._owner = owner


class LinearProduct(View, BasicLinear):
    """The product of a `Linear`, which is its `owner`."""

    _is_part = True

    weight = of_owner("weight")
    in_features = of_owner("local_in_features")
    out_features = of_owner("local_out_features")
    accumulate_into_main_grad = of_owner("accumulate_into_main_grad")
    _rng_state_tracker_function = of_owner("_rng_state_tracker_function")


class LinearBias(View, Bias):
    """The bias of a `Linear`, which is its `owner`."""

    _is_part = True

    bias = of_owner("bias")
    size = of_owner("local_out_features")


class _Views(NamedTuple):
    """The basic ops of a Linear, and the settings that they were made for."""

    key: tuple[str | None, bool]
    before: list[BasicOperation]
    product: LinearProduct
    bias: LinearBias
    after: list[BasicOperation]


class Linear(FusibleOperation, SplitProductMixin):
    """`x @ weight.T + bias`, where `bias` starts at zero; that of `torch.nn.Linear` does not.

    It is planned as BasicLinear and Bias.

    `x[..., in_features]`, `weight[out_features, in_features]`, `bias[out_features]` (absent with
    `bias=False`) → `[..., out_features]` in the weight's dtype. The state dict is that of
    `torch.nn.Linear`; the reference's keys (`basic_ops.0.weight`, `basic_ops.1.bias`) load, too.
    The weight is initialized kaiming-uniform with a = sqrt(5). Other arguments and errors are those
    of `BasicLinear`.

    If it is split by "column", so is the bias. By "row", each rank has a whole bias, and the sum
    over the ranks contains all of them, as in the reference.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    _takes_scales = True
    _fixed_once_captured = BasicLinear._fixed_once_captured
    _checks = BasicLinear._checks
    qconfig = passed_over(
        lambda _: (
            "[Linear] torch.ao.quantization passes over transformer_ops.Linear, as it looks for "
            "torch.nn.Linear: quantize with a recipe of transformer_ops, or use torch.nn.Linear"
        )
    )

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
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
        check_bool(op, "bias", bias)
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_state_tracker_function = check_rng_tracker(op, rng_state_tracker_function)
        self._split(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        sizes = (self.local_out_features, self.local_in_features)
        self.weight = new_parameter(op, sizes, device, dtype)
        self.register_parameter(
            "bias", new_parameter(op, sizes[:1], device, dtype) if bias else None
        )
        views = self._make_views()
        self.reset_parameters()
        hold_quantized(views.product)

    def _make_views(self) -> _Views:
        key = (self.tensor_parallel_mode, self.sequence_parallel)
        before, after = collectives_around(self)
        views = _Views(key, before, LinearProduct(self), LinearBias(self), after)
        self.__dict__["_views"] = views
        return views

    def reset_parameters(self) -> None:
        """Initializes `weight` again and sets `bias` to zeros."""
        init_weight(self.weight, self._rng_state_tracker_function, self.in_features)
        renew_scales(self)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def basic_ops(self) -> list[BasicOperation]:
        """Views on this Linear: a BasicLinear and, with a bias, a Bias; if it is split, its
        collectives are around them. The views own nothing."""
        views: _Views = self.__dict__["_views"]
        # A shallow copy of the module also has the views of the original.
        is_ours = views.product._is_view_of(self)
        if not is_ours or views.key != (self.tensor_parallel_mode, self.sequence_parallel):
            views = self._make_views()
        # If the bias was deleted, the Bias raises an error with its name.
        bias = [] if getattr(self, "bias", views) is None else [views.bias]
        return _Parts(self, [*views.before, views.product, *bias, *views.after])

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
        for reference, name in _REFERENCE_KEYS.items():
            if prefix + reference in state_dict and prefix + name not in state_dict:
                state_dict[prefix + name] = state_dict.pop(prefix + reference)
        for reference in _REFERENCE_STATES:
            take_extra_state(state_dict, prefix + reference, unexpected_keys)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.bias is not None}"
        text += ", accumulate_into_main_grad=True" * self.accumulate_into_main_grad
        return text + self._tensor_parallel_repr()
