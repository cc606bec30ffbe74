"""Tokens to their experts and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..op.base import BasicOperation, Check
from ..op.checks import check_index, check_size

__all__ = ["Combine", "Dispatch"]


class Dispatch(BasicOperation, kind="Dispatch"):
    """A copy of each token for each of its experts (Shazeer et al. 2017), sorted by expert.

    `x[..., h]` and the extra inputs `expert_ids[..., k]`, integers, and `probs[..., k]` →
    `[n, h]`, where n is the number of ids, and the extra outputs

    - `splits[local_experts]`, int64: the number of rows of each expert;
    - `permuted_probs[n]`: the probability of each row;
    - `positions[..., k]`, int32: the position of each copy, for `Combine`.

    Rows of one expert keep the order of their tokens. An id of -1 drops that copy: its position is
    -1, and there is a row of zeros at the end for it. If experts are split among processes, this
    one has `local_experts` of them (None: all) from `first_expert` on, and copies for others are
    dropped. Gradients go to `x` and `probs`. Raises RuntimeError for an id outside [-1,
    num_experts) on the CPU (on CUDA it is not checked), and for local experts beyond `num_experts`.
    Raises ValueError unless the numbers of experts are >= 1 and `first_expert` >= 0.
    """

    _checks: ClassVar[Mapping[str, Check]] = {
        "num_experts": check_size,
        "first_expert": check_index,
        "local_experts": check_size,
    }

    def __init__(
        self, num_experts: int, *, first_expert: int = 0, local_experts: int | None = None
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.first_expert = first_expert
        self.local_experts = num_experts if local_experts is None else local_experts


class Combine(BasicOperation, kind="Combine"):
    """The sum of the copies that `Dispatch` made of each token (Shazeer et al. 2017).

    `x[n, h]` and the extra input `positions[..., k]` of `Dispatch` → `[..., h]`, summed in float32
    (float64 for float64) in the order of k and rounded once. A position of -1 counts as zero. On
    the CPU, raises RuntimeError if a position is out of range, or given twice.
    """

    def __init__(self) -> None:
        super().__init__()
