"""What each thread knows of the regions that it is in."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from .. import _C
from ..recipe import Recipe

__all__ = ["STATE", "Entry", "set_recipe"]


class Entry(NamedTuple):
    """A region that is entered outside of compiled code, in a run of a checkpoint."""

    region: Any
    task: int  # the backward pass in which it was entered, -1 for none
    holder: Any  # torch's object of the checkpoint whose run entered it, or None
    kept: Any  # the scales that it has put in place, or None


class _State(threading.local):
    # Compiled code guards on the values of the first two. They are no class attributes, because
    # Dynamo of torch 2.11 would find those for every thread.
    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.key: str | None = None
        # The recipe of the region that was entered last.
        self.last: Recipe | None = None
        # Whether a region of delayed scaling is around.
        self.is_delayed = False
        # (recipe, is_delayed, outer) of the region around this one.
        self.outer: tuple[Any, ...] = ()
        # Whether gradient mode was on where the region was entered.
        self.with_grad = False
        # Regions that a run of a checkpoint has entered, the innermost last.
        self.entries: list[Entry] = []


STATE = _State()
# Calls of groups read `key` and `recipe` from it.
_C.set_recipe_state(STATE)


def set_recipe(recipe: Recipe | None) -> None:
    """Makes it the recipe of this thread's calls."""
    STATE.recipe = recipe
    if recipe is not None:
        STATE.last = recipe
    STATE.key = None if recipe is None else recipe.key
