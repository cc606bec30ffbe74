"""The region of a recipe: `autocast`."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.compiler import is_compiling

from .. import _C
from ..recipe import DelayedScaling, MXFP8BlockScaling, Recipe
from .delayed import KeptScales, update_scales

__all__ = ["autocast", "checkpoint_contexts", "current_recipe"]


class _State(threading.local):
    # In compiled code Dynamo guards on these two by value. Not in the class: there Dynamo of torch
    # 2.11 would find them for every thread.
    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.key: str | None = None
        # That of the region entered last.
        self.last: Recipe | None = None
        # Whether a region of delayed scaling is around.
        self.is_delayed = False
        # (recipe, is_delayed, outer) of the region around this one.
        self.outer: tuple[Any, ...] = ()


STATE = _State()
# Calls of groups read `key` from it.
_C.set_recipe_state(STATE)


class autocast:
    """Within this context, products of ops run on quantized operands: those of `recipe`.

    A context may lie within another one; `enabled=False` is exact again. It counts for the calls
    of the thread that entered it; backward keeps to the recipe of its forward, wherever it runs.

    Args:
        enabled: False for exact operands.
        recipe: one of `transformer_ops.recipe`; None for `MXFP8BlockScaling()`.
        amax_reduction_group: the process group over whose ranks `DelayedScaling` reduces the
            magnitudes that scales are made of; no other recipe keeps any.

    Where a thread enters a region of `DelayedScaling` that lies in no other one, with gradient mode
    on, scales are made of what calls have met until then.

    Raises:
        TypeError: `recipe` is none, `enabled` no bool, or the group no process group.
        RuntimeError: on entering such a region of `DelayedScaling` in compiled code.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"[autocast] enabled must be a bool, got {enabled!r}")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"[autocast] recipe must be one of transformer_ops.recipe, got {recipe!r}"
            )
        if amax_reduction_group is not None and not _is_group(amax_reduction_group):
            raise TypeError(
                "[autocast] amax_reduction_group must be a process group or None, "
                f"got {amax_reduction_group!r}"
            )
        self.recipe = (recipe or MXFP8BlockScaling()) if enabled else None
        self.amax_reduction_group = amax_reduction_group

    def __enter__(self) -> autocast:
        is_delayed = isinstance(self.recipe, DelayedScaling)
        if is_delayed and not STATE.is_delayed:
            if is_compiling():
                raise RuntimeError(
                    "[autocast] a region of DelayedScaling must be entered outside of compiled "
                    "code, where scales are made, got one within"
                )
            # No inference tensors, which nobody could save for backward.
            if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                update_scales(self.recipe, self.amax_reduction_group)  # type: ignore[arg-type]
        # With the thread, not with this object, which several threads may enter.
        STATE.outer = (STATE.recipe, STATE.is_delayed, STATE.outer)
        STATE.is_delayed = is_delayed or STATE.is_delayed
        _set(self.recipe)
        return self

    def __exit__(self, *exception: object) -> None:
        recipe, STATE.is_delayed, STATE.outer = STATE.outer
        _set(recipe)


class _SecondRun(autocast):
    """The region of a forward that runs again in backward: the scales are those of the first run,
    and nothing is recorded twice."""

    def __init__(self, recipe: DelayedScaling) -> None:
        super().__init__(recipe=recipe)
        self._kept = KeptScales(recipe)

    def __enter__(self) -> autocast:
        STATE.outer = (STATE.recipe, STATE.is_delayed, STATE.outer)
        STATE.is_delayed = True
        _set(self.recipe)
        self._kept.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._kept.__exit__(*exception)
        super().__exit__(*exception)


def _is_group(found: object) -> bool:
    distributed = torch.distributed
    return distributed.is_available() and isinstance(found, distributed.ProcessGroup)


def _set(recipe: Recipe | None) -> None:
    STATE.recipe = recipe
    if recipe is not None:
        STATE.last = recipe
    STATE.key = None if recipe is None else recipe.key


def current_recipe() -> Recipe | None:
    """The recipe of the innermost `autocast` of this thread; None outside of any."""
    return STATE.recipe


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False,
    context_fn=checkpoint_contexts)`: the second run of a forward, which happens in backward, has
    the recipe of the first one, and its scales."""
    if isinstance(STATE.recipe, DelayedScaling):
        return nullcontext(), _SecondRun(STATE.recipe)
    return nullcontext(), autocast(STATE.recipe is not None, STATE.recipe)
