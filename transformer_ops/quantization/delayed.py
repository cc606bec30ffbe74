"""Delayed scaling between regions: how scales follow from the magnitudes of earlier calls."""

from __future__ import annotations

import warnings
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from ..base.locks import new_lock
from ..op.base import FusibleOperation
from . import scales
from .agreement import agree
from .recipe import DelayedScaling
from .scales import drop_scales, has_scales, owners_of_scales

__all__ = ["KeptScales", "make_scales", "reset_scales", "update_scales"]

_lock = new_lock()
# By key, the version of the scales at which a missing group was last searched for.
_looked_at: dict[str, int] = {}


def update_scales(recipe: DelayedScaling, amax_reduction_group: Any = None) -> None:
    """Makes new scales from the magnitudes that calls have recorded since the last time, as a
    region of `recipe` does when it is entered. Magnitudes that are not finite are dropped.

    In a run with an `amax_reduction_group`, call it on every rank before you save a checkpoint:
    otherwise the checkpoint has the magnitudes of one rank only. The next region then finds no new
    magnitudes, so the run continues with the same scales as without the call.

    It updates all modules of the process whose scales are for these formats and this length of the
    history. With a process group, it reduces the magnitudes of all ranks first, of the modules that
    every rank has.

    Raises:
        TypeError: `recipe` is no `DelayedScaling`.
        RuntimeError: on every rank, if modules that have run, recipes or scales differ between
            ranks; nothing has changed then.
    """
    group = amax_reduction_group
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(f"[update_scales] recipe must be a DelayedScaling, got {recipe!r}")
    if group is not None and not hasattr(group, "group_name"):
        raise TypeError(
            f"[update_scales] amax_reduction_group must be a process group or None, got {group!r}"
        )
    reduce, key = None, recipe.key
    if recipe.reduce_amax:
        if group is None:
            if _looked_at.get(key) != scales.state_version(key):
                _warn_without_group(key)
        else:
            maximum = torch.distributed.ReduceOp.MAX
            reduce = partial(torch.distributed.all_reduce, op=maximum, group=group)
    with _lock:
        owners = agree(recipe, group) if reduce else owners_of_scales(key)
        for known in _kept:
            if (kept := known()) is not None:
                for owner in owners:
                    kept.note(owner)
        if key in scales.reduced and (group is None or group.group_name != scales.reduced[key]):
            # Ranks may have other scales now.
            scales.note_change(key)
        tensors = [vars(owner) for owner in owners]
        _C.update_scales(tensors, recipe.margin, recipe.amax_compute_algo == "most_recent", reduce)


def _warn_without_group(key: str) -> None:
    _looked_at[key] = scales.state_version(key)
    distributed = torch.distributed
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        warnings.warn(
            "[autocast] DelayedScaling without an amax_reduction_group keeps scales of its own on "
            "each rank, and a checkpoint holds those of one rank: pass the group, or "
            "reduce_amax=False to keep them so",
            stacklevel=4,
        )


def make_scales(model: nn.Module, recipe: DelayedScaling) -> None:
    """Makes the state of delayed scaling in every product of `model` that has none: all scales are
    1, and the state dict has their keys from now on. Without it the first call makes the state.

    Call it before `torch.distributed.checkpoint` loads a model: it loads the keys that the model
    has. (`load_state_dict` makes scales itself if the state dict has them.) Products that are
    constructed within `autocast` with `DelayedScaling` have scales from the start.

    Raises:
        TypeError: `recipe` is no `DelayedScaling`.
        RuntimeError: a product has scales for other formats or another length of the history, or
            experts that ranks share; then nothing has changed.
    """
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(f"[make_scales] recipe must be a DelayedScaling, got {recipe!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"[make_scales] model must be an nn.Module, got {model!r}")
    found = [m for m in model.modules() if isinstance(m, FusibleOperation) and m._takes_scales]
    for module in found:
        scales.check_key(module, recipe.key)
    for module in found:
        scales.make_scales(module, recipe.key)


def reset_scales(model: nn.Module) -> None:
    """Drops the delayed scaling state of a model's products: scales start at 1 again, for a recipe
    of any formats and history length."""
    with _lock:
        for module in model.modules():
            if isinstance(module, FusibleOperation) and has_scales(module):
                drop_scales(module)
                for observer in module._current_observers():
                    observer._plans_changed()


class KeptScales:
    """The scales of a recipe at the time when this object was made, for the calls of a second run.

    `inner`: the scales that calls of this thread use now. Unless it `records`, magnitudes of calls
    are dropped.
    """

    def __init__(
        self, recipe: DelayedScaling, inner: KeptScales | None = None, *, records: bool = False
    ) -> None:
        self.recipe, self.records = recipe, records
        with _lock:
            # By the number of a module, the scale that it had, if it has another one now.
            self._old: dict[int, Tensor] = {} if inner is None else dict(inner._old)
            # This receives magnitudes that are dropped. Compiled code checks whether it is the same
            # object.
            self._dropped: dict[int, Tensor] = {}
            _kept[:] = [known for known in _kept if known() is not None]
            _kept.append(weakref.ref(self))

    def note(self, owner: Any) -> None:
        """Called before the module gets a new scale."""
        self._old.setdefault(owner._number, owner.fp8_scale)

    def state_of(self, owner: Any) -> dict[str, Tensor]:
        """The state of a module for a call."""
        # Dispatch modes must count the same calls in both runs.
        with _lock, torch._C._DisableTorchDispatch():
            found = dict(scales.tensors_of(owner))
            found["fp8_scale"] = self._old.get(owner._number, found["fp8_scale"])
            if not self.records:
                amax = self._dropped.get(owner._number)
                if amax is None:
                    amax = self._dropped[owner._number] = found["fp8_amax"].clone()
                found["fp8_amax"] = amax
            return found


# This is a list, because a region iterates over it.
_kept: list[weakref.ref[KeptScales]] = []


def _note_replaced(owner: nn.Module) -> None:
    for known in _kept:
        if (kept := known()) is not None:
            kept.note(owner)


scales.listeners.append(_note_replaced)
