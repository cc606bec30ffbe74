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
_lock = new_lock()


def update_scales(recipe: DelayedScaling, group: Any = None) -> None:
    """Takes what calls have met since the last time into the histories, and makes new scales of
    them. A tensor that none met, or one with an infinity or NaN in it, leaves both as they are.

    All products of the process whose scales are for recipes of this key take part: with a process
    group, over whose ranks magnitudes are reduced at once, each rank must have the same.
    """
    by_device: defaultdict[torch.device, list[Any]] = defaultdict(list)
    with _lock, torch.inference_mode(False), torch.no_grad():
        for owner in owners_of_scales(recipe.key):
            by_device[owner._buffers["fp8_scale"].device].append(owner)  # type: ignore[union-attr]
        for owners in by_device.values():
            _update(recipe, group if recipe.reduce_amax else None, owners)


def _update(recipe: DelayedScaling, group: Any, owners: list[Any]) -> None:
    def rows(name: str) -> list[Tensor]:
        return [owner._buffers[name] for owner in owners]

    met = torch.maximum(_take_amaxes(rows("fp8_amax")), _take_amaxes(rows("fp8_grad_amax")))
    # Not every reduction knows that NaN is larger than numbers.
    met = torch.where(met.isnan(), torch.inf, met)
    if group is not None:
        torch.distributed.all_reduce(met, torch.distributed.ReduceOp.MAX, group=group)
    is_new = (met >= 0) & met.isfinite()
    if met.device.type == "cpu" and not is_new.any():
        return
    history = torch.stack(rows("fp8_amax_history"))
    later = torch.cat([met.unsqueeze(1), history[:, :-1]], dim=1)
    history = torch.where(is_new.unsqueeze(1), later, history)
    amax = history[:, 0] if recipe.amax_compute_algo == "most_recent" else history.amax(1)
    most = torch.finfo(torch.float32).max
    scale = (torch.stack(rows("fp8_largest")) / amax).clamp(max=most) / 2.0**recipe.margin
    is_usable = is_new & (amax > 0) & (scale > 0) & scale.isfinite()
    scale = torch.where(is_usable, scale, torch.stack(rows("fp8_scale")))
    kept = list(_kept)
    for i, owner in enumerate(owners):
        for scales in kept:
            scales.note(owner)
        owner._buffers["fp8_amax_history"].copy_(history[i])
        # A new tensor: what backward has saved is what forward used.
        owner._buffers["fp8_scale"] = scale[i].clone()


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
