"""Delayed scaling from region to region: how scales follow from the magnitudes of earlier calls."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from ..locks import new_lock
from ..op.base import FusibleOperation
from ..op.scales import drop_scales, has_scales, owners_of_scales
from ..recipe import DelayedScaling

__all__ = ["KeptScales", "reset_scales", "update_scales"]

_lock = new_lock()


def update_scales(recipe: DelayedScaling, group: Any = None) -> None:
    """Takes what calls have met since the last time into the histories, and makes new scales of
    them. A tensor that none met, or one with an infinity or NaN in it, leaves both as they are.

    All products of the process whose scales are for recipes of this key take part: with a process
    group, over whose ranks magnitudes are reduced at once, each rank must have the same.
    """
    reduce = None
    if group is not None and recipe.reduce_amax:
        maximum = torch.distributed.ReduceOp.MAX
        reduce = partial(torch.distributed.all_reduce, op=maximum, group=group)
    with _lock:
        owners: list[Any] = owners_of_scales(recipe.key)
        for known in _kept:
            if (kept := known()) is not None:
                for owner in owners:
                    kept.note(owner)
        buffers = [owner._buffers for owner in owners]
        _C.update_scales(buffers, recipe.margin, recipe.amax_compute_algo == "most_recent", reduce)


def reset_scales(model: nn.Module) -> None:
    """Drops what delayed scaling keeps in a model's products: scales begin at 1 again, for a recipe
    of any formats and length of history."""
    with _lock:
        for module in model.modules():
            if isinstance(module, FusibleOperation) and has_scales(module):
                drop_scales(module)
                for holder in module._current_holders():
                    holder._plans_changed()


class KeptScales:
    """The scales of a recipe as they were when this was made. Within its context calls use those,
    and what they meet goes nowhere."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self._key = recipe.key
        self._old: dict[int, Tensor] = {}
        self._around: list[list[tuple[Any, Tensor, Tensor]]] = []
        with _lock:
            _kept[:] = [known for known in _kept if known() is not None]
            _kept.append(weakref.ref(self))

    def note(self, owner: Any) -> None:
        """Called before the module gets a new scale."""
        self._old.setdefault(owner._number, owner._buffers["fp8_scale"])

    def __enter__(self) -> None:
        with _lock:
            owners: list[Any] = owners_of_scales(self._key)
            found = [(o, o._buffers["fp8_scale"], o._buffers["fp8_amax"]) for o in owners]
            self._around.append(found)
            for owner, scale, amax in found:
                owner._buffers["fp8_scale"] = self._old.get(owner._number, scale)
                owner._buffers["fp8_amax"] = amax.clone()

    def __exit__(self, *exception: object) -> None:
        with _lock:
            for owner, scale, amax in self._around.pop():
                owner._buffers["fp8_scale"] = scale
                owner._buffers["fp8_amax"] = amax


# A list: a region goes through it.
_kept: list[weakref.ref[KeptScales]] = []
