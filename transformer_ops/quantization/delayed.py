"""Delayed scaling from region to region: how scales follow from the magnitudes of earlier calls."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from ..locks import new_lock
from ..op.base import FusibleOperation
from ..op.scales import drop_scales, has_scales, owners_of_scales
from ..recipe import DelayedScaling

__all__ = ["KeptScales", "reset_scales", "update_scales"]

_take_amaxes = torch.ops.transformer_ops.take_amaxes_.default
_next_scales = torch.ops.transformer_ops.next_scales_.default
_lock = new_lock()


def update_scales(recipe: DelayedScaling, group: Any = None) -> None:
    """Takes what calls have met since the last time into the histories, and makes new scales of
    them. A tensor that none met, or one with an infinity or NaN in it, leaves both as they are.

    All products of the process whose scales are for recipes of this key take part: with a process
    group, over whose ranks magnitudes are reduced at once, each rank must have the same.
    """
    by_device: defaultdict[torch.device, list[Any]] = defaultdict(list)
    with _lock:
        for owner in owners_of_scales(recipe.key):
            by_device[owner._buffers["fp8_scale"].device].append(owner)  # type: ignore[union-attr]
        for owners in by_device.values():
            _update(recipe, group if recipe.reduce_amax else None, owners)


def _update(recipe: DelayedScaling, group: Any, owners: list[Any]) -> None:
    buffers = [owner._buffers for owner in owners]

    def rows(name: str) -> list[Tensor]:
        return [found[name] for found in buffers]

    met = _take_amaxes(rows("fp8_amax"), rows("fp8_grad_amax"))
    if group is not None:
        torch.distributed.all_reduce(met, torch.distributed.ReduceOp.MAX, group=group)
    is_most_recent = recipe.amax_compute_algo == "most_recent"
    parts = rows("fp8_amax_history"), rows("fp8_scale"), rows("fp8_largest")
    scales = _next_scales(met, *parts, recipe.margin, is_most_recent)
    for kept in list(_kept):
        for owner in owners:
            kept.note(owner)
    for found, scale in zip(buffers, scales, strict=True):
        found["fp8_scale"] = scale


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
            _kept.add(self)

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


_kept: weakref.WeakSet[KeptScales] = weakref.WeakSet()
