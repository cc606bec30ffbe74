"""The language-model head and its loss in one op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from ..op.base import BasicOperation, Check
from ..op.checks import (
    check_any_int,
    check_bool,
    check_not_negative,
    check_optional_positive,
    check_optional_size,
    check_probability,
    check_size,
    one_of,
)
from ..op.parameters import new_parameter
from .basic_linear import init_weight

__all__ = ["LinearCrossEntropy"]


class LinearCrossEntropy(BasicOperation, kind="LinearCrossEntropy"):
    """The cross entropy of `x @ weight.T + bias`, as at the end of a language model. The logits are
    computed by chunks of rows: those of all rows never exist at the same time.

    `x[..., in_features]` and the extra input `target[...]` (int64 or int32) → the loss in float32
    (float64 for float64 weights): one number, or one for each target with `reduction="none"`. With
    the logits z, or `softcap * tanh(z / softcap)` in their place, the loss of a row is

        lse - (1 - label_smoothing) * z[target] - label_smoothing * mean(z) + z_loss * lse**2

    where lse is log(sum(exp(z))). Without the last term it is that of `F.cross_entropy`; the last
    term keeps lse near 0 (Chowdhery et al. 2022, PaLM). Rows whose target is `ignore_index` have no
    loss and do not count in the mean, which is NaN if no row counts. The gradients are then 0, also
    if the sum is divided by 0 items. On the CPU such rows are not computed, if they are a sixteenth
    or more; and a target that is neither a class nor `ignore_index` raises IndexError before
    anything is computed. CUDA computes all rows, and does not check targets.

    `gradients_in="forward"` computes the gradients together with the loss, from the logits of each
    chunk: three products, as without chunks. They are saved instead of the input, and backward only
    multiplies them by the gradient of the loss. Second derivatives raise NotImplementedError.
    `"backward"` saves the input and lse, and computes the logits again: four products, but less
    memory between forward and backward. Rows with `reduction="none"` have gradients of their own,
    which only this can compute. The default is `"backward"` for "none", else `"forward"`.

    With `log_probs=True` there is an extra output with the log-probability of each target, and with
    `accuracy=True` another one with the share of the rows that count whose target has the largest
    logit. No gradient passes through them. The loss with `reduction="none"` is differentiable.

    `chunk` is the number of rows of a chunk. The default is 256, and more if there are few classes.
    For 16-bit weights it is at least a sixteenth of all rows, because each chunk rounds the
    gradient of the weight once.

    `weight[num_classes, in_features]` is initialized kaiming-uniform with a = sqrt(5), and the bias
    with zeros. Raises ValueError if a size or `chunk` is below 1, `label_smoothing` lies outside
    [0, 1], `softcap` is not positive, `z_loss` is negative, or another option has no such value.
    """

    _checks: ClassVar[Mapping[str, Check]] = {
        "in_features": check_size,
        "num_classes": check_size,
        "ignore_index": check_any_int,
        "label_smoothing": check_probability,
        "softcap": check_optional_positive,
        "z_loss": check_not_negative,
        "reduction": one_of("mean", "sum", "none"),
        "gradients_in": one_of("forward", "backward"),
        "chunk": check_optional_size,
    }

    in_features: int
    num_classes: int
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    gradients_in: str
    chunk: int | None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        reduction: str = "mean",
        gradients_in: str | None = None,
        chunk: int | None = None,
        log_probs: bool = False,
        accuracy: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self.in_features = in_features
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.z_loss = z_loss
        self.reduction = reduction
        if gradients_in is None:
            gradients_in = "backward" if reduction == "none" else "forward"
        self.gradients_in = gradients_in
        if (self.reduction, self.gradients_in) == ("none", "forward"):
            raise ValueError(
                f"[{op}] gradients_in must be 'backward' where reduction is 'none', got 'forward'"
            )
        self.chunk = chunk
        for name, value in (("bias", bias), ("log_probs", log_probs), ("accuracy", accuracy)):
            check_bool(op, name, value)
        returned = enumerate((log_probs, accuracy))
        self._unreturned = tuple(i for i, is_returned in returned if not is_returned)
        self.weight = new_parameter(op, (self.num_classes, self.in_features), device, dtype)
        shape = (self.num_classes,)
        self.bias = new_parameter(op, shape, device, dtype) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes `weight` again, and sets the bias to zeros."""
        init_weight(self.weight, None, self.in_features)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
