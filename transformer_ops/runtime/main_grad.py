"""Weight gradients accumulated into `weight.main_grad` instead of being returned."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# The number of the backward pass that wrote last, for each buffer that is overwritten.
_LAST_PASS: Any = WeakTensorKeyDictionary()
_PLAIN = (Tensor, torch.nn.Parameter)


class Buffer(NamedTuple):
    """Where the gradient of a weight goes, and whether the first one of a backward pass takes the
    place of what is there."""

    tensor: Tensor
    overwrites: bool

    def is_first(self, backward_pass: int) -> bool:
        """Whether the next gradient takes the place of what is there. RuntimeError if a later pass
        has written to the buffer already."""
        if not self.overwrites:
            return False
        last = _LAST_PASS.get(self.tensor, 0)
        if 0 < backward_pass < last:
            raise RuntimeError(
                "[BasicLinear] gradients for a main_grad with overwrite_main_grad must come in the "
                "order of their backward passes, got one of a pass before the one that wrote last"
            )
        return last != backward_pass or backward_pass == 0

    def note(self, backward_pass: int) -> None:
        """Takes down that this pass has written to the buffer."""
        if self.overwrites:
            _LAST_PASS[self.tensor] = backward_pass


def check(weight: Tensor, own: Any = None, k: int = 0) -> None:
    """RuntimeError where a weight that accumulates, tensor k of those of the op `own`, has no
    `main_grad`, or one that does not fit."""
    if not weight.requires_grad:
        return
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        raise RuntimeError(f"{_named(own, k)} must have a main_grad to accumulate into, got none")
    if not _takes(buffer.shape, weight.shape) or not buffer.is_floating_point():
        raise RuntimeError(
            f"{_named(own, k)}.main_grad must have shape {list(weight.shape)} and hold floating "
            f"point numbers, got {list(buffer.shape)} of {buffer.dtype}"
        )


def _takes(buffer: torch.Size, grad: torch.Size) -> bool:
    """Whether a gradient can be added to a buffer, to whose shape it is broadcast."""
    if buffer == grad:
        return True
    tail = buffer[len(buffer) - len(grad) :]
    return len(buffer) >= len(grad) and all(b in (1, a) for a, b in zip(tail, grad, strict=True))


def _named(own: Any, k: int) -> str:
    if own is None:
        return "[BasicLinear] weight"
    return f"[{own._kind}] {own._names_in(own._parameter_names[0])[k]}"


def buffer_of(weight: Tensor, own: Any = None, k: int = 0) -> Buffer:
    """`weight.main_grad`, which has to be there; written where `overwrite_main_grad` is set."""
    check(weight, own, k)
    overwrites = bool(getattr(weight, "overwrite_main_grad", False))
    return Buffer(weight.main_grad, overwrites)  # type: ignore[attr-defined]


def takes_products(buffer: Tensor, weight: Tensor) -> bool:
    """Whether a product may add the gradient of the weight to the buffer itself."""
    return (
        type(buffer) in _PLAIN
        and type(weight) in _PLAIN
        and buffer.layout == torch.strided
        and buffer.shape == weight.shape
        and buffer.device == weight.device
        and buffer.is_floating_point()
    )


def accumulate(buffer: Buffer, grad: Tensor, backward_pass: int) -> None:
    """Adds `grad` to the buffer, or writes it there."""
    with torch.no_grad():
        if buffer.is_first(backward_pass):
            buffer.tensor.copy_(grad)
        else:
            buffer.tensor.add_(grad)


def is_marked(weight: Tensor) -> bool:
    """Whether the weight has `grad_added_to_main_grad`, which a backward sets to True."""
    return hasattr(weight, "grad_added_to_main_grad")


def for_autograd(weight: Tensor) -> Tensor | None:
    """None, or an empty-cost dummy for a marked weight, whose mark is now True."""
    if not is_marked(weight):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Hooks that wait for a gradient get one of the right shape without memory behind it.
    return weight.new_zeros(()).expand_as(weight)
