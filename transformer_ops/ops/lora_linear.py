"""Products with adapters of low rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool, check_float, check_probability, check_size, check_sizes
from ..op.parameters import new_parameter
from .basic_linear import init_weight

__all__ = ["LoRALinear"]


class LoRALinear(BasicOperation, kind="LoRALinear"):
    """Products with frozen weights and trained adapters of low rank (LoRA, Hu et al. 2021):
    `x @ weight<i>.T + bias<i>`, side by side for all i as in `PackedLinear`, and for each adapter
    `scaling * (dropout(x) @ lora_a.T) @ lora_b.T`, added to the columns of its weight.

    `x[..., in_features]`, `weight<i>[out_features[i], in_features]`, `bias<i>[out_features[i]]`
    (absent with `bias=False`), `lora_a<k>[rank, in_features]`,
    `lora_b<k>[out_features[adapted[k]], rank]` → `[..., sum(out_features)]` in the dtype of
    `weight0`. A weight may have several adapters or none. Adapters compute in their own dtype,
    which may be wider than that of the weights; autocast casts them, too. The sum of a product and
    its adapter rounds once.

    All adapters read the same dropped `x`, so training saves one bit for each of its elements.
    Forward keeps `scaling * (dropout(x) @ lora_a.T)`, which has `rank` columns. If weights are
    frozen, `x` is saved for the gradients of `lora_a` alone, and recomputed where the `recompute`
    policy can. Recipes leave the op as it is; weights may be held encoded.

    `lora_a` is initialized kaiming-uniform with a = sqrt(5) and `lora_b` with zeros; `weight` and
    `bias` are initialized as in `PackedLinear`, and do not require gradients.

    Args:
        in_features: the number of columns of `x`.
        out_features: that of the output of each weight, or one number.
        rank: the rank of each adapter, or one number for all.
        scaling: the factor of each adapter, or one for all. Papers name it alpha / rank.
        dropout: the probability of zeroing an element of `x` for the adapters, in training.
        adapted: for each adapter, the index of its weight. None: one adapter for each weight.
        bias: whether each product has a bias.
        device: as in torch.
        dtype: that of the weights and biases.
        adapter_dtype: that of the adapters. None: `dtype`.
        accumulate_into_main_grad: that of `BasicLinear`, for weights that are trained.

    Raises:
        ValueError: a size or rank is below 1, lists of adapters have different lengths or are
            empty, an index is not that of a weight, a factor is not finite, `dropout` is no
            probability, or a flag is no bool.
    """

    _fixed_once_captured: ClassVar[tuple[str, ...]] = ("accumulate_into_main_grad",)
    _checks: ClassVar[Mapping[str, Check]] = {
        "in_features": check_size,
        "out_features": check_sizes,
        "p": check_probability,
        "accumulate_into_main_grad": check_bool,
    }

    in_features: int
    out_features: tuple[int, ...]
    adapted: tuple[int, ...]
    scaling: tuple[float, ...]
    p: float
    accumulate_into_main_grad: bool

    def __init__(
        self,
        in_features: int,
        out_features: int | Iterable[int],
        rank: int | Iterable[int] = 16,
        *,
        scaling: float | Iterable[float] = 1.0,
        dropout: float = 0.0,
        adapted: Iterable[int] | None = None,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        adapter_dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.in_features = in_features
        sizes = (out_features,) if isinstance(out_features, int) else out_features
        self.out_features = sizes  # type: ignore[assignment]
        self.p = dropout
        check_bool(op, "bias", bias)
        self.accumulate_into_main_grad = accumulate_into_main_grad
        count = len(self.out_features)
        self.adapted = tuple(range(count) if adapted is None else adapted)
        ranks = check_sizes(op, "rank", self._one_each(rank, "rank"))
        self.scaling = tuple(
            check_float(op, "scaling", each) for each in self._one_each(scaling, "scaling")
        )
        for index in self.adapted:
            if not isinstance(index, int) or not 0 <= index < count:
                raise ValueError(f"[{op}] adapted must be in [0, {count}), got {index!r}")
        for i, size in enumerate(self.out_features):
            self._add(f"weight{i}", (size, in_features), device, dtype)
        for i, size in enumerate(self.out_features):
            if bias:
                self._add(f"bias{i}", (size,), device, dtype)
            else:
                self.register_parameter(f"bias{i}", None)
        dtype = dtype if adapter_dtype is None else adapter_dtype
        for k, r in enumerate(ranks):
            self._add(f"lora_a{k}", (r, in_features), device, dtype, trains=True)
        for k, r in enumerate(ranks):
            size = self.out_features[self.adapted[k]]
            self._add(f"lora_b{k}", (size, r), device, dtype, trains=True)
        self.reset_parameters()

    def _one_each(self, value: Any, name: str) -> Sequence[Any]:
        """One value for each adapter."""
        count = len(self.adapted)
        found = tuple(value) if isinstance(value, Iterable) else (value,) * count
        if not found or len(found) != count:
            raise ValueError(
                f"[{type(self).__name__}] {name} must have one entry for each of {count} "
                f"adapters, got {value!r}"
            )
        return found

    def _add(
        self,
        name: str,
        sizes: tuple[int, ...],
        device: Any,
        dtype: torch.dtype | None,
        trains: bool = False,
    ) -> None:
        parameter = new_parameter(type(self).__name__, sizes, device, dtype)
        parameter.requires_grad_(trains)
        self.register_parameter(name, parameter)

    @property
    def num_weights(self) -> int:
        """The number of weights."""
        return len(self.out_features)

    @property
    def num_adapters(self) -> int:
        """The number of adapters."""
        return len(self.adapted)

    @property
    def drops(self) -> bool:
        """Whether adapters read a dropped input in training."""
        return self.p > 0

    def reset_parameters(self) -> None:
        """Initializes weights and `lora_a` again, and sets biases and `lora_b` to zero."""
        own = dict(self.named_parameters())
        for name, parameter in own.items():
            if name.startswith(("weight", "lora_a")):
                init_weight(parameter, None, self.in_features)
            else:
                nn.init.zeros_(parameter)
