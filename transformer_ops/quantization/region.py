"""The region of a recipe: `autocast`."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .. import _C
from ..recipe import MXFP8BlockScaling, Recipe

__all__ = ["autocast", "checkpoint_contexts", "current_recipe"]


class _State(threading.local):
    # In compiled code Dynamo guards on these two by value. Not in the class: there Dynamo of torch
    # 2.11 would find them for every thread.
    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.key: str | None = None
        # (recipe, outer) of the region around this one.
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

    Raises:
        TypeError: `recipe` is none, or `enabled` no bool.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"[autocast] enabled must be a bool, got {enabled!r}")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"[autocast] recipe must be one of transformer_ops.recipe, got {recipe!r}"
            )
        self.recipe = (recipe or MXFP8BlockScaling()) if enabled else None

    def __enter__(self) -> autocast:
        # With the thread, not with this object, which several threads may enter.
        STATE.outer = (STATE.recipe, STATE.outer)
        _set(self.recipe)
        return self

    def __exit__(self, *exception: object) -> None:
        recipe, STATE.outer = STATE.outer
        _set(recipe)


def _set(recipe: Recipe | None) -> None:
    STATE.recipe = recipe
    STATE.key = None if recipe is None else recipe.key


def current_recipe() -> Recipe | None:
    """The recipe of the innermost `autocast` of this thread; None outside of any."""
    return STATE.recipe


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False,
    context_fn=checkpoint_contexts)`: the second run of a forward, which happens in backward, has
    the recipe of the first one."""
    return nullcontext(), autocast(STATE.recipe is not None, STATE.recipe)
