"""Chooses the experts of each token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..op.base import BasicOperation, Check
from ..op.checks import check_bool, check_dtype, check_size
from ..op.parameters import new_parameter

__all__ = ["Router"]

_SCORES = ("softmax", "sigmoid")


def _check_score(op: str, name: str, value: object) -> str:
    if not isinstance(value, str) or value not in _SCORES:
        raise ValueError(f"[{op}] {name} must be one of {', '.join(_SCORES)}, got {value!r}")
    return value


class Router(BasicOperation, kind="Router"):
    """Passes its input through, and returns the experts of each token and their probabilities.

    `x[..., in_features]` → the same tensor, and the extra outputs

    - `expert_ids[..., top_k]`, int32: the experts with the highest scores, the highest first;
    - `probs[..., top_k]`, float32 (float64 for float64 weights): their scores, divided by their
      sum with `normalize`;
    - `aux_loss`, a number of the dtype of `probs`: num_experts times the sum over experts of
      (its share of the copies) (its mean score), which is 1 where all experts get as much (Fedus
      et al. 2021). Add it to the loss, times a small factor, or hide it.

    The scores are the softmax, or the sigmoid, of `x @ weight.T` in the accumulate dtype. The
    product is in the dtype of `weight[num_experts, in_features]`, to which `x` is cast. `balanced`
    adds a buffer `balance[num_experts]` of zeros. It is added to the scores when experts are
    chosen, but to no probability (Wang et al. 2024, auxiliary-loss-free balancing); the training
    code updates it. Raises ValueError if sizes are below 1, if `top_k` is above `num_experts`, for
    another score, or if flags are no bools.
    """

    _checks: ClassVar[Mapping[str, Check]] = {
        "in_features": check_size,
        "num_experts": check_size,
        "top_k": check_size,
        "score": _check_score,
        "normalize": check_bool,
    }

    in_features: int
    num_experts: int
    top_k: int
    weight: nn.Parameter
    balance: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize: bool = True,
        balanced: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.in_features = in_features
        self.num_experts = num_experts
        self.top_k = top_k
        if self.top_k > self.num_experts:
            raise ValueError(
                f"[{op}] top_k must be at most num_experts, {num_experts}, got {top_k}"
            )
        self.score = score
        self.normalize = normalize
        check_bool(op, "balanced", balanced)
        check_dtype(op, dtype)
        self.weight = new_parameter(op, (self.num_experts, self.in_features), device, dtype)
        with torch.inference_mode(False):
            zeros = torch.zeros(self.num_experts, device=device) if balanced else None
        self.register_buffer("balance", zeros)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes `weight` again, kaiming-uniform with a = sqrt(5), and sets `balance` to
        zeros."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.balance is not None:
            nn.init.zeros_(self.balance)
