"""Linear: the container that the fuser expands to BasicLinear and Bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..op.base import BasicOperation, FusibleOperation
from ..op.checks import check_bool
from ..op.parameters import new_parameter
from ..op.state_dict import drop_if_empty
from .basic_linear import BasicLinear, check_rng_tracker, init_weight
from .bias import Bias

__all__ = ["Linear"]

# Keys of the reference's state dict, whose Linear registers its basic ops.
_REFERENCE_KEYS = {"basic_ops.0.weight": "weight", "basic_ops.1.bias": "bias"}
_REFERENCE_EMPTY = ("basic_ops.0._extra_state", "basic_ops.1._extra_state")


class _View(BasicOperation):
    """A basic op without state: everything is looked up on the Linear, when it is needed."""

    def __init__(self, owner: Linear) -> None:
        BasicOperation.__init__(self)
        # Past nn.Module, which would register the owner as a submodule of its own part.
        self.__dict__["_owner"] = owner

    @property
    def _parameter_owner(self) -> nn.Module:
        owner: nn.Module = self.__dict__["_owner"]
        return owner

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        owner = self._parameter_owner
        for name in self._parameter_names:
            yield prefix + ("." if prefix else "") + name, getattr(owner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._parameter_names:
            setattr(self._parameter_owner, name, value)
        elif name == "forward":
            raise AttributeError(
                f"[{self._kind}] forward must be set on the Linear, which nobody calls in parts, "
                f"got {value!r}"
            )
        else:
            super().__setattr__(name, value)

    def _get_name(self) -> str:
        return str(self._kind)


class _WeightView(_View, BasicLinear):
    """The product of a Linear."""

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        return self._parameter_owner.weight  # type: ignore[return-value]

    @property
    def in_features(self) -> int:  # type: ignore[override]
        return self._parameter_owner.in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self._parameter_owner.out_features  # type: ignore[return-value]

    @property
    def accumulate_into_main_grad(self) -> bool:  # type: ignore[override]
        return self._parameter_owner.accumulate_into_main_grad  # type: ignore[return-value]

    @property
    def _rng_state_tracker_function(self) -> Callable[[], Any] | None:  # type: ignore[override]
        return self._parameter_owner._rng_state_tracker_function  # type: ignore[return-value]


class _BiasView(_View, Bias):
    """The bias of a Linear."""

    @property
    def bias(self) -> nn.Parameter:  # type: ignore[override]
        return self._parameter_owner.bias  # type: ignore[return-value]

    @property
    def size(self) -> int:  # type: ignore[override]
        return self._parameter_owner.out_features  # type: ignore[return-value]


class Linear(FusibleOperation):
    """`x @ weight.T + bias`, planned as BasicLinear and Bias.

    `x[..., in_features]`, `weight[out_features, in_features]`, `bias[out_features]` (absent with
    `bias=False`) → `[..., out_features]` in the weight's dtype. The state dict is that of
    `torch.nn.Linear`; the reference's keys (`basic_ops.0.weight`, `basic_ops.1.bias`) load too.
    The weight starts kaiming-uniform with a = sqrt(5), the bias at zero. Arguments and errors are
    those of `BasicLinear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    _fixed_once_captured = BasicLinear._fixed_once_captured
    _checks = BasicLinear._checks

    def __init__(
        self,
        in_features: int,
        out_features: int,
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
        self.out_features = out_features
        check_bool(op, "bias", bias)
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_state_tracker_function = check_rng_tracker(op, rng_state_tracker_function)
        self.weight = new_parameter(op, (self.out_features, self.in_features), device, dtype)
        self.register_parameter(
            "bias", new_parameter(op, (self.out_features,), device, dtype) if bias else None
        )
        self._make_views()
        self.reset_parameters()

    def _make_views(self) -> tuple[BasicOperation, BasicOperation]:
        views = (_WeightView(self), _BiasView(self))
        self.__dict__["_views"] = views
        return views

    def reset_parameters(self) -> None:
        """Draw `weight` anew and set `bias` to zeros."""
        init_weight(self.weight, self._rng_state_tracker_function)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def basic_ops(self) -> list[BasicOperation]:
        """Views on this Linear: a BasicLinear and, with a bias, a Bias. They own nothing."""
        views: tuple[BasicOperation, BasicOperation] = self.__dict__["_views"]
        # A shallow copy of the module brings the views of the original along.
        if views[0]._parameter_owner is not self:
            views = self._make_views()
        # A bias that was deleted is missed by name when the Bias looks for it.
        return [views[0]] if getattr(self, "bias", views[1]) is None else list(views)

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
        for reference in _REFERENCE_EMPTY:
            drop_if_empty(state_dict, prefix + reference)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += f", bias={self.bias is not None}"
        return text + (", accumulate_into_main_grad=True" * self.accumulate_into_main_grad)
