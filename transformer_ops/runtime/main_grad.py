"""Weight gradients that are accumulated into `weight.main_grad` instead of being returned."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _C

# The numbers of buffers that are overwritten. In compiled code they are constants, read from this
# attribute of the buffer, on which Dynamo guards.
_NUMBERS: Any = WeakTensorKeyDictionary()
_NUMBER = "_transformer_ops_number"
_counter = itertools.count(1)
_PLAIN = (Tensor, torch.nn.Parameter)


class Buffer(NamedTuple):
    """The buffer of a weight's gradient, and whether the first gradient of a backward pass
    overwrites it. `number` is that of the buffer in compiled code, which does not know about other
    writes in the pass."""

    tensor: Tensor
    overwrites: bool
    number: int | None = None

    def is_first(self, backward_pass: int) -> bool:
        """Whether the next gradient overwrites the buffer. Raises RuntimeError if a later pass has
        already written to it. In compiled code it never does: the buffer is zeroed when the first
        gradient comes."""
        if not self.overwrites:
            return False
        if self.number is not None:
            torch.ops.transformer_ops.begin_main_grad_(self.tensor, self.number)
            return False
        last = _C.last_pass_of(number_of(self.tensor))
        if 0 < backward_pass < last:
            raise RuntimeError(
                "[BasicLinear] gradients for a main_grad with overwrite_main_grad must come in the "
                "order of their backward passes, got one of a pass before the one that wrote last"
            )
        return last != backward_pass or backward_pass == 0

    def note(self, backward_pass: int) -> None:
        """Records that this pass has written to the buffer."""
        if self.overwrites and self.number is None:
            _C.note_pass_of(number_of(self.tensor), backward_pass)


def number_of(buffer: Tensor) -> int:
    """The number of a buffer that is overwritten. It is assigned when it is first needed."""
    found: int | None = _NUMBERS.get(buffer)
    if found is None:
        found = _NUMBERS[buffer] = next(_counter)
        weakref.finalize(buffer, _C.forget_passes_of, found)
    setattr(buffer, _NUMBER, found)
    return found


def check(weight: Tensor, own: Any = None, k: int = 0) -> None:
    """Raises RuntimeError if a weight that accumulates (tensor k of the op `own`) has no
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
    name = type(own._parameter_owner).__name__
    return f"[{name}] {own._names_in(own._parameter_names[0])[k]}"


def buffer_of(weight: Tensor, own: Any = None, k: int = 0) -> Buffer:
    """The required `weight.main_grad`; it is overwritten if `overwrite_main_grad` is set."""
    check(weight, own, k)
    overwrites = bool(getattr(weight, "overwrite_main_grad", False))
    return Buffer(weight.main_grad, overwrites)  # type: ignore[attr-defined]


def traced_buffer_of(
    weight: Tensor, own: Any = None, k: int = 0
) -> tuple[Tensor, bool, int | None]:
    """The same for a trace, after `number_of` the buffer was called."""
    tensor, overwrites, _ = buffer_of(weight, own, k)
    return tensor, overwrites, getattr(tensor, _NUMBER) if overwrites else None


def takes_products(buffer: Tensor, weight: Tensor) -> bool:
    """Whether a product may add the weight's gradient to the buffer directly."""
    return (
        type(buffer) in _PLAIN
        and type(weight) in _PLAIN
        and buffer.layout == torch.strided
        and buffer.shape == weight.shape
        and buffer.device == weight.device
        and buffer.is_floating_point()
    )


def accumulate(buffer: Buffer, grad: Tensor, backward_pass: int) -> None:
    """Adds `grad` to the buffer, or overwrites it."""
    with torch.no_grad():
        if buffer.is_first(backward_pass):
            buffer.tensor.copy_(grad)
        else:
            buffer.tensor.add_(grad)


def is_marked(weight: Tensor) -> bool:
    """Whether the weight has `grad_added_to_main_grad`, which a backward sets to True."""
    return hasattr(weight, "grad_added_to_main_grad")


def for_autograd(weight: Tensor) -> Tensor | None:
    """Returns None, or a dummy without memory for a marked weight, and sets the weight's mark to
    True."""
    if not is_marked(weight):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # Hooks that wait for a gradient get one with the right shape, but without memory.
    return weight.new_zeros(()).expand_as(weight)
