"""Products of one input with several weights; the outputs are next to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..op.base import Attribute, BasicOperation, Check
from ..op.checks import check_bool, check_size, check_sizes
from ..op.parameters import new_parameter
from ..op.tensor_parallel import SplitProductMixin, shard_size
from ..quantization.model_init import hold_quantized
from .basic_linear import check_rng_tracker, init_weight
from .collective import between_collectives

__all__ = ["PackedLinear"]


class PackedLinear(BasicOperation, SplitProductMixin, kind="PackedLinear"):
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
    of `BasicLinear`; each weight has its own `main_grad`.

    With `tensor_parallel_mode="column"`, each weight and bias is split by its own rows over the
    ranks of `tensor_parallel_group`: a rank has `out_features[i] / ranks` rows of each. The output
    has this rank's part of each product side by side: queries, keys and values of some heads, or
    matching columns of gate and up, which need no `glu_interleave_size`. The collectives, the group
    and `sequence_parallel` are those of `BasicLinear`. The ops behind it get the number of heads of
    a rank, for example `Attention(heads // ranks, kv_heads // ranks)`.

    Raises ValueError if sizes are below 1 or there are none, if a flag is no bool, if the tracker
    is not callable, for `tensor_parallel_mode="row"` and the errors of `BasicLinear` about ranks.
    """

    _modes: ClassVar[tuple[str, ...]] = ("column",)
    _mode_rule: ClassVar[str] = (
        '"column" or None, because each weight is split by its own rows ("row" is for a Linear)'
    )
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
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.in_features = in_features
        self.out_features = out_features  # type: ignore[assignment]
        check_bool(op, "bias", bias)
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self._rng_state_tracker_function = check_rng_tracker(op, rng_state_tracker_function)
        self._split(tensor_parallel_mode, tensor_parallel_group, sequence_parallel)
        for i, size in enumerate(self.local_out_features):
            weight = new_parameter(op, (size, self.in_features), device, dtype)
            self.register_parameter(f"weight{i}", weight)
        for i, size in enumerate(self.local_out_features):
            parameter = new_parameter(op, (size,), device, dtype) if bias else None
            self.register_parameter(f"bias{i}", parameter)
        self.reset_parameters()
        hold_quantized(self)

    @property
    def num_weights(self) -> int:
        """The number of weights."""
        return len(self.out_features)

    @property
    def local_out_features(self) -> tuple[int, ...]:  # type: ignore[override]
        """The number of rows of each weight on this rank."""
        ranks = 1 if self.tensor_parallel_mode is None else self.tensor_parallel_size
        return self._shards(ranks)

    def _shards(self, ranks: int) -> tuple[int, ...]:
        sizes = enumerate(self.out_features)
        return tuple(
            shard_size(type(self).__name__, f"out_features[{i}]", n, ranks) for i, n in sizes
        )

    def _check_split(self, mode: str, ranks: int) -> None:
        self._shards(ranks)

    @property
    def basic_ops(self) -> list[BasicOperation]:
        """Itself, after its collective if it is split."""
        return between_collectives(self)

    def _attributes(self) -> dict[str, Attribute]:
        return {**super()._attributes(), "out_features": list(self.local_out_features)}

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
        text += ", accumulate_into_main_grad=True" * self.accumulate_into_main_grad
        return text + self._tensor_parallel_repr()
