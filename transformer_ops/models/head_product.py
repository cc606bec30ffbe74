"""The product of a head that is not computed yet, and losses of it.

In: the rows and the weight of `self.lm_head(x)`. Out: the logits, if somebody reads them, or the
loss of each row, which takes them by chunks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Form", "HeadProduct", "frames"]


class Form(NamedTuple):
    """What logits are of the product z: `y = scale * z + bias`, or `cap * tanh(y / cap)`."""

    scale: float
    cap: float | None
    bias: Tensor | None  # which has no gradient


def frames() -> Iterator[FrameType]:
    """The functions that run in this thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


class HeadProduct:
    """`hidden @ weight.T + bias` of the tensors that forward saw. It knows what their numbers were,
    and raises if they are others when they are needed.

    `.data` moves a tensor to other memory, so it has aliases of the tensors. A write through
    `.data` changes no version, so it has sums of the bits of each row.
    """

    def __init__(self, tensors: tuple[Tensor, Tensor, Tensor | None], dtype: torch.dtype) -> None:
        hidden, weight, bias = tensors
        self.hidden, self.weight = hidden.detach(), weight.detach()
        self.bias = None if bias is None else bias.detach()
        self.needs = tuple(t is not None and t.requires_grad for t in tensors)
        self.dtype, self.device = dtype, self.hidden.device
        self._marks = self._read_marks()
        self._sums = self._read_sums()
        frame = next(f for f in frames() if _is_foreign(f))
        self._forward = id(frame), frame.f_code

    @staticmethod
    def of(hidden: Tensor, weight: Any, bias: Any) -> HeadProduct | None:
        """The product; None if the tensors do not fit each other."""
        device = hidden.device
        dtype = weight.dtype
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        elif hidden.dtype != dtype:
            return None
        plain = (Tensor, torch.nn.Parameter)
        for tensor, shape in (
            (weight, (weight.shape[0], hidden.shape[-1])),
            *([] if bias is None else [(bias, (weight.shape[0],))]),
        ):
            fits = tensor.shape == shape and tensor.device == device
            if not fits or type(tensor) not in plain or tensor.dtype != weight.dtype:
                return None
        if hidden.dim() < 2 or device.type == "meta" or weight.shape[0] == 0:
            return None
        return HeadProduct((hidden, weight, bias), dtype)

    def _tensors(self) -> tuple[Tensor, ...]:
        found = (self.hidden, self.weight, self.bias)
        return tuple(t for t in found if t is not None)

    def _read_marks(self) -> list[tuple[int, int, int]]:
        return [
            (
                0 if t.is_inference() else t._version,
                t.untyped_storage().data_ptr(),
                t.untyped_storage().nbytes(),
            )
            for t in self._tensors()
        ]

    def _read_sums(self) -> list[Tensor]:
        with torch.no_grad():
            return [_sums_of_bits(t) for t in self._tensors()]

    def check(self, is_loss: bool = False) -> None:
        """Raises RuntimeError if the numbers have changed. A loss within the forward that made the
        logits need not look at all of them."""
        is_same = self._read_marks() == self._marks
        if is_same and not (is_loss and self._runs()):
            is_same = all(map(torch.equal, self._read_sums(), self._sums))
        if not is_same:
            raise RuntimeError(
                "[fuse] logits must be read before the weight of the head or its input changes in "
                "place, got a change: read them before optimizer.step()"
            )

    def _runs(self) -> bool:
        return any((id(f), f.f_code) == self._forward for f in frames())

    def run(self) -> Tensor:
        """The product of all rows, without gradients."""
        self.check()
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            return F.linear(self.hidden.to(self.dtype), self.weight.to(self.dtype), bias)

    def gradients(
        self, grad: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> list[Tensor | None]:
        """The gradients of these three, which may be differentiated again."""
        with torch.autocast(self.device.type, enabled=False):
            grad = grad.to(self.dtype)
            rows = grad.reshape(-1, grad.shape[-1])
            return [
                (grad @ weight.to(self.dtype)).to(hidden.dtype) if self.needs[0] else None,
                (rows.t() @ hidden.flatten(0, -2).to(self.dtype)).to(weight.dtype)
                if self.needs[1]
                else None,
                rows.sum(0).to(bias.dtype) if bias is not None and self.needs[2] else None,
            ]

    # ---- losses

    def _given(self, form: Form) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the op takes. It has no scale, so the rows are scaled."""
        rows, bias = self.hidden.flatten(0, -2), self.bias
        if form.scale != 1:
            rows, bias = rows * form.scale, None if bias is None else bias * form.scale
        if form.bias is not None:
            bias = form.bias if bias is None else bias + form.bias
        bias = None if bias is None else bias.to(self.dtype)
        return rows.to(self.dtype), self.weight.to(self.dtype), bias

    def policy(self, target: Tensor, options: dict[str, Any]) -> str:
        """Whether the gradients are made in "forward" or in "backward". Rows have gradients of
        their own. If few rows count, to compute their logits twice is cheap, and the gradient of
        the weight is large."""
        if options["reduction"] == "none":
            return "backward"
        # Gradients of a mean in float16 are made for the sum, which only forward can.
        if self.device.type != "cpu" or self.dtype == torch.float16:
            return "forward"
        count = int((target != options["ignore_index"]).sum())
        return "backward" if 4 * count <= self.hidden.shape[-1] else "forward"

    def loss(
        self, form: Form, target: Tensor, options: dict[str, Any], policy: str, wanted: Any
    ) -> tuple[Tensor, ...]:
        """The loss, what multiplies the gradients, and the gradients of (rows, weight, bias) that
        are wanted; they are empty if they are made in backward."""
        with torch.autocast(self.device.type, enabled=False):
            loss, _, _, *made = torch.ops.transformer_ops.linear_cross_entropy(
                *self._given(form), target, *_values(options, form), policy, None, True, *wanted
            )
        return loss, *made

    def loss_gradients(
        self,
        form: Form,
        target: Tensor,
        options: dict[str, Any],
        policy: str,
        grad: Tensor,
        made: list[Tensor],
    ) -> list[Tensor | None]:
        """The gradients of (hidden, weight, bias), of what `loss` made."""
        statistics, *parts = made
        grad = grad.to(statistics.dtype)
        if policy == "backward":
            self.check()
            parts = torch.ops.transformer_ops.linear_cross_entropy_backward(
                grad.contiguous(),
                *(*self._given(form), target, statistics, None, None, None),
                *(*_values(options, form), "backward", None, self.needs),
            )
        else:
            # It is 0 if no row counts, whatever the gradient of the loss is.
            factor = torch.where(statistics == 0, statistics, grad * statistics)[0]
            parts = [_scaled(part, factor) for part in parts]
        found: list[Tensor | None] = []
        for tensor, part, needed, scaled in zip(
            (self.hidden, self.weight, self.bias),
            parts,
            self.needs,
            (True, False, True),
            strict=True,
        ):
            if tensor is None or not needed:
                found.append(None)
                continue
            part = part * form.scale if scaled and form.scale != 1 else part
            found.append(part.to(tensor.dtype).view(tensor.shape))
        return found


def _values(options: dict[str, Any], form: Form) -> tuple[Any, ...]:
    smoothing, reduction = options["label_smoothing"], options["reduction"]
    return options["ignore_index"], smoothing, form.cap, 0.0, reduction


def _scaled(part: Tensor, factor: Tensor) -> Tensor:
    """A part that forward made, times the gradient of the loss; in place if no backward follows."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return part * factor
    is_one = factor.is_cpu and factor.item() == 1
    return part if is_one else part.mul_(factor)


def _is_foreign(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] not in ("transformer_ops", "torch")


def _sums_of_bits(tensor: Tensor) -> Tensor:
    """A sum for each row of the bits as integers: the sums differ if any number does, except if
    numbers of a row change places."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    lanes = 8 // tensor.element_size()
    if rows.shape[-1] % lanes or rows.storage_offset() % lanes:
        rows = F.pad(rows, (0, -rows.shape[-1] % lanes)).clone()
    return rows.contiguous().view(torch.int64).sum(-1)
