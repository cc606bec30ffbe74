"""What each thread knows about the regions that it is in."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from .. import _C
from .recipe import Recipe

__all__ = ["COMPILED", "STATE", "Entry", "enter_region", "leave_region"]


class Entry(NamedTuple):
    """A region that is entered outside of compiled code, in a run of a checkpoint."""

    region: Any
    task: int  # the backward pass in which it was entered, -1 for none
    holder: Any  # torch's object of the checkpoint whose run entered it, or None
    kept: Any  # the scales of the first run, or None


class _State(threading.local):
    # Compiled code guards on some of the values. They are not class attributes, because Dynamo of
    # torch 2.11 would find those for every thread.
    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.key: str | None = None
        # The recipe of the region that was entered last.
        self.last: Recipe | None = None
        # Whether this is within a region of delayed scaling.
        self.is_delayed = False
        # Whether the innermost region was entered in compiled code.
        self.is_traced = False
        # The (recipe, is_delayed, is_traced, outer) of the surrounding region.
        self.outer: tuple[Any, ...] = ()
        # Whether gradient mode was on when the region was entered.
        self.with_grad = False
        # Regions that a run of a checkpoint has entered, the innermost last.
        self.entries: list[Entry] = []
        # The scales of the innermost entry that has some, which are those of a first run.
        self.kept: Any = None


STATE = _State()
# Calls of groups read `key` and `kept` from it.
_C.set_recipe_state(STATE)


class _Compiled:
    """The values that compiled code guards on, outside of regions within that code."""

    key = property(_C.key_of_compiled_call)


COMPILED = _Compiled()


def enter_region(recipe: Recipe | None, is_delayed: bool, is_traced: bool = False) -> None:
    """Sets the recipe of this thread's calls, until `leave_region()`."""
    STATE.outer = (STATE.recipe, STATE.is_delayed, STATE.is_traced, STATE.outer)
    STATE.is_delayed = is_delayed or STATE.is_delayed
    STATE.is_traced = is_traced
    _set_recipe(recipe)


def leave_region() -> None:
    recipe, STATE.is_delayed, STATE.is_traced, STATE.outer = STATE.outer
    _set_recipe(recipe)


def _set_recipe(recipe: Recipe | None) -> None:
    STATE.recipe = recipe
    if recipe is not None:
        STATE.last = recipe
    STATE.key = None if recipe is None else recipe.key
