"""Forwards that run again in a backward pass, as activation checkpointing has them: the second run
has the recipe and the scales of the first one.

`torch.utils.checkpoint` saves and restores torch's own autocast state and has no such place for
that of others. Its non-reentrant form packs saved tensors by a hook of its own, whose closure has
the object of the checkpoint: what the first run had is kept there, and the second run finds it. A
second run without that hook (reentrant checkpoints, checkpoints of other libraries) follows the
last call of the same group outside of a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import _C
from ..recipe import DelayedScaling, Recipe
from .delayed import KeptScales
from .state import STATE, Entry, set_recipe

__all__ = ["FirstRun", "FirstRunContext", "SecondRunContext", "enter", "leave"]

current_task = torch._C._current_graph_task_id
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_NAME = "_transformer_ops_first_run"
_CONTEXT = "context_fn=tops.quantization.checkpoint_contexts (with use_reentrant=False)"


class FirstRun:
    """What the first run of a forward had: the recipe around it, and the regions within it."""

    def __init__(self) -> None:
        self.is_noted = False
        self.recipe: Recipe | None = None
        self.kept: KeptScales | None = None
        # (key, scales) of each region within, in order.
        self.regions: list[tuple[str | None, KeptScales | None]] = []
        # The hook of the second run that goes on, and how many regions it has entered.
        self._second: Any = None
        self._position = 0

    def note(self, recipe: Recipe | None) -> None:
        """Takes the recipe around it, unless one was taken before."""
        if not self.is_noted:
            self.is_noted, self.recipe = True, recipe
            self.kept = KeptScales(recipe) if isinstance(recipe, DelayedScaling) else None

    def begin_again(self, second: Any) -> None:
        """A second run, named by any object, enters its first region."""
        self._second, self._position = second, 0

    def next_region(self, recipe: Recipe | None, second: Any) -> KeptScales | None:
        """The scales of a region that the second run enters. RuntimeError where the first run
        entered another one."""
        if second is not self._second:
            self.begin_again(second)
        key = None if recipe is None else recipe.key
        known = self.regions[self._position : self._position + 1]
        if not known or known[0][0] != key:
            first = "no region" if not known else known[0][0] or "a region without a recipe"
            raise RuntimeError(
                "[autocast] a forward that runs again in a backward pass must enter the regions of "
                f"its first run, {first}, got {key or 'a region without a recipe'}"
            )
        self._position += 1
        return known[0][1]


# ---- the checkpoint that a run belongs to


def top_pack() -> Any:
    """The hook that packs the tensors that are saved now, or None."""
    hooks = _top_hooks(False)
    return None if hooks is None else hooks[0]


def _in_closure(pack: Any, name: str) -> Any:
    function = getattr(pack, "_torchdynamo_orig_callable", pack)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None


def _is_checkpoint(found: Any) -> bool:
    return isinstance(found, torch.utils.checkpoint._CheckpointFrame)


def _first_run_at(pack: Any) -> FirstRun | None:
    """The run of a checkpoint that runs for the first time and packs by this hook."""
    checkpoint = _in_closure(pack, "frame")
    if _is_checkpoint(checkpoint):
        found: FirstRun = vars(checkpoint).setdefault(_NAME, FirstRun())
        return found
    return STATE.first_runs[-1] if STATE.first_runs else None


def _second_run_at(pack: Any) -> tuple[bool, FirstRun | None]:
    """Whether a checkpoint runs again that packs by this hook, and what its first run had."""
    reference = _in_closure(pack, "target_frame_ref")
    checkpoint = None if reference is None else reference()
    if not _is_checkpoint(checkpoint):
        return False, None
    return True, vars(checkpoint).get(_NAME)


# ---- regions


def may_run_again() -> bool:
    """Whether calls now are the first or the second run of a checkpoint, as far as can be told."""
    return current_task() != -1 or _top_hooks(False) is not None or bool(STATE.first_runs)


def enter(region: Any, recipe: Recipe | None, update: Callable[[], None] | None) -> None:
    """What entering a region outside of compiled code does, where `may_run_again()`. `update()`
    makes new scales; in a backward pass they are those of the first run instead. RuntimeError where
    none are known."""
    task, pack = current_task(), top_pack()
    if task == -1:
        if update is not None:
            update()
        run = _first_run_at(pack)
        if run is not None:
            _note_region(run, recipe)
        STATE.entries.append(Entry(region, task, pack, None))
        return
    kept = _kept_of_first_run(recipe, task, pack)
    if kept is not None:
        kept.__enter__()
    nested = None if _second_run_at(pack)[0] else _first_run_at(pack)
    if nested is not None:
        _note_region(nested, recipe)
    STATE.entries.append(Entry(region, task, pack, kept))


def _note_region(run: FirstRun, recipe: Recipe | None) -> None:
    kept = KeptScales(recipe) if isinstance(recipe, DelayedScaling) else None
    run.regions.append((None if recipe is None else recipe.key, kept))


def _kept_of_first_run(recipe: Recipe | None, task: int, pack: Any) -> KeptScales | None:
    is_again, run = _second_run_at(pack)
    if is_again and run is not None:
        return run.next_region(recipe, pack)
    is_within = any(e.task == task and e.region.is_delayed for e in STATE.entries)
    if isinstance(recipe, DelayedScaling) and not is_within:
        raise RuntimeError(
            "[autocast] a region of DelayedScaling must not be entered in a backward pass, where "
            "scales do not change, but by a checkpoint with use_reentrant=False that ran before "
            "outside of any; got one whose first run is not known"
        )
    return None


def leave(region: Any) -> None:
    """What leaving it does."""
    entries = STATE.entries
    if entries and entries[-1].region is region:
        kept = entries.pop().kept
        if kept is not None:
            kept.__exit__()


# ---- calls


class _Region:
    """Within it, calls have the recipe and the scales of a first run."""

    def __init__(self, recipe: Recipe | None, kept: KeptScales | None) -> None:
        self.recipe, self.kept = recipe, kept
        self.is_delayed = isinstance(recipe, DelayedScaling)

    def __enter__(self) -> None:
        if self.kept is not None:
            self.kept.__enter__()
        STATE.entries.append(Entry(self, current_task(), top_pack(), self.kept))
        STATE.outer = (STATE.recipe, STATE.is_delayed, STATE.outer)
        STATE.is_delayed = self.is_delayed or STATE.is_delayed
        set_recipe(self.recipe)

    def __exit__(self, *exception: object) -> None:
        recipe, STATE.is_delayed, STATE.outer = STATE.outer
        set_recipe(recipe)
        leave(self)


class FirstRunContext:
    """Around the first run of a forward; with a context of the caller's in it."""

    def __init__(self, run: FirstRun, inner: AbstractContextManager[Any]) -> None:
        self.run, self.inner = run, inner
        self._is_listed = False

    def __enter__(self) -> None:
        checkpoint = _in_closure(top_pack(), "frame")
        if _is_checkpoint(checkpoint):
            vars(checkpoint)[_NAME] = self.run
        else:
            STATE.first_runs.append(self.run)
            self._is_listed = True
        self.inner.__enter__()

    def __exit__(self, *exception: Any) -> Any:
        if self._is_listed:
            STATE.first_runs.pop()
        return self.inner.__exit__(*exception)


class SecondRunContext:
    """Around each second run of it."""

    def __init__(self, run: FirstRun, inner: AbstractContextManager[Any]) -> None:
        self.run, self.inner = run, inner
        self._regions: list[_Region] = []

    def __enter__(self) -> None:
        region = _Region(self.run.recipe, self.run.kept)
        region.__enter__()
        self._regions.append(region)
        self.run.begin_again(top_pack())
        self.inner.__enter__()

    def __exit__(self, *exception: Any) -> Any:
        found = self.inner.__exit__(*exception)
        self._regions.pop().__exit__()
        return found


def note_call() -> None:
    """A call under a recipe saves tensors by a hook: it may be the first run of a checkpoint."""
    pack = top_pack()
    if not STATE.entries or STATE.entries[-1].pack is not pack:
        run = _first_run_at(pack)
        if run is not None:
            run.note(STATE.recipe)


def region_of_call(has_run: bool, recipe: Recipe | None, same_scales: bool) -> _Region | None:
    """The region for a call in a backward pass, None to leave it in the one that is around.

    `has_run`: the group was called outside of backward passes, the last time under `recipe`; since
    then delayed scaling has the same scales. RuntimeError where the recipe or the scales of the
    first run are not known.
    """
    if STATE.entries and STATE.entries[-1].task == current_task():
        return None
    is_again, run = _second_run_at(top_pack())
    kept = None
    if is_again and run is not None and run.is_noted:
        recipe, kept = run.recipe, run.kept
    elif is_again:
        if not has_run and STATE.last is not None:
            raise RuntimeError(
                "[Sequential] a forward that runs again in a backward pass must have the recipe of "
                f"its first run, got none that is known: pass {_CONTEXT} to the checkpoint"
            )
        recipe = None
    elif not has_run:
        return None
    elif isinstance(recipe, DelayedScaling) and not same_scales:
        raise RuntimeError(
            "[Sequential] a forward that runs again in a backward pass must have the scales of its "
            f"first run, got other ones since: pass {_CONTEXT} to the checkpoint"
        )
    if kept is None and (recipe and recipe.key) == STATE.key:
        return None
    return _Region(recipe, kept)


def check_traced_call() -> None:
    """For a call that is traced: RuntimeError where a checkpoint from outside of compiled code runs
    it again without the recipe. The graph of the first run had one, or it would be used again."""
    if current_task() == -1 or STATE.last is None:
        return
    if STATE.entries and STATE.entries[-1].task == current_task():
        return
    is_again, run = _second_run_at(top_pack())
    if is_again and run is None:
        raise RuntimeError(
            "[Sequential] compiled code that runs again in a backward pass must have the recipe of "
            f"its first run, got none that is known: pass {_CONTEXT} to the checkpoint"
        )


_C.set_second_run(note_call, region_of_call)
