"""Modules that FSDP2 shards, and the local storages of tensors."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["is_gathered", "sharding_restored", "storages"]


def storages(tensor: Tensor) -> dict[int, int]:
    """The bytes of its storages on this rank by address. A tensor of a subclass may have
    several."""
    if not hasattr(tensor, "__tensor_flatten__"):
        storage = tensor.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    found: dict[int, int] = {}
    for part in parts:
        if isinstance(part, Tensor):  # the mesh of a DTensor is none
            found |= storages(part)
    return found


def is_gathered(module: nn.Module) -> bool:
    """Whether FSDP2 gathers parameters of the module for its calls."""
    return bool(_sharded(module))


def _sharded(module: nn.Module) -> list[Any]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", ())
    return [inner for inner in module.modules() if isinstance(inner, kind)]


@contextmanager
def sharding_restored(module: nn.Module) -> Iterator[None]:
    """In the block, parameters that FSDP2 shards are sharded when no call runs. Afterwards, also
    after an error in the middle of a step, what was sharded is sharded again, and gradients are
    those from before."""
    found = _sharded(module)
    gathered = [inner for inner in found if _changes_by(inner.reshard, inner)]
    grads = [(parameter, parameter.grad) for parameter in module.parameters()] if found else []
    try:
        yield
    finally:
        _reset(found)
        for parameter, grad in grads:
            parameter.grad = grad
        for inner in gathered:
            inner.unshard()


def _changes_by(action: Callable[[], None], module: nn.Module) -> bool:
    """Runs the action. Does the module have other parameters afterwards?"""
    before = list(module.parameters())
    action()
    return any(map(operator.is_not, before, module.parameters()))


def _reset(found: list[Any]) -> None:
    """Shards all parameters. FSDP2 forgets a step that an error has ended."""
    inside = {id(inner) for outer in found for inner in outer.modules() if inner is not outer}
    for outer in found:
        reset = getattr(outer, "reset_iter_state", None)
        if id(outer) in inside or reset is None:
            continue
        try:
            reset()
        except RuntimeError:  # the module is a part of a sharded one, which alone can do this
            pass
    for inner in found:
        inner.reshard()
