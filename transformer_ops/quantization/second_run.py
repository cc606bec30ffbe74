"""Forwards that run again in a backward pass, as in activation checkpointing. The second run has
the recipe and the scales of the first one.

`torch.utils.checkpoint` saves torch's own autocast state for the second run, but cannot save ours.
The first run therefore leaves a note on the object that torch makes for each checkpoint: the frame
of a non-reentrant one, the context of the autograd function of a reentrant one. Both are found on
Python's stack, and so are checkpoints of other libraries that are autograd functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from ..op.base import FusibleOperation
from .delayed import KeptScales
from .recipe import DelayedScaling, Recipe
from .state import STATE, Entry, enter_region, leave_region

__all__ = ["FirstRun", "FirstRunContext", "SecondRunContext", "enter", "leave"]

current_task = torch._C._current_graph_task_id
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_NAME = "_transformer_ops_first_run"


class FirstRun:
    """The state of the first run of a forward: the recipe around it, and the regions inside it."""

    def __init__(self) -> None:
        self.is_noted = False
        self.recipe: Recipe | None = None
        self.kept: KeptScales | None = None
        # The regions that it entered, in order, with their scales.
        self.regions: list[tuple[Recipe | None, KeptScales | None]] = []
        # The second run that is in progress, and the number of regions that it has entered.
        self._second: Any = None
        self._position = 0

    def note(self, recipe: Recipe | None, records: bool = True) -> None:
        """Records the recipe around it, unless one is already recorded. The first run `records`
        magnitudes, or leaves that to the second one."""
        if not self.is_noted:
            self.is_noted, self.recipe = True, recipe
            self.kept = _kept(recipe, records)

    def next_region(self, recipe: Recipe | None, second: Any) -> KeptScales | None:
        """The scales of a region that a second run enters. Raises RuntimeError if the first run
        entered another one there."""
        if second != self._second:
            self._second, self._position = second, 0
        known = self.regions[self._position : self._position + 1]
        if not known or _key(known[0][0]) != _key(recipe):
            raise _other_region(known[0][0] if known else "none", recipe)
        self._position += 1
        return known[0][1]


def _kept(recipe: Recipe | None, records: bool) -> KeptScales | None:
    if not isinstance(recipe, DelayedScaling):
        return None
    return KeptScales(recipe, STATE.kept, records=not records)


def _key(recipe: Recipe | None) -> str | None:
    return None if recipe is None else recipe.key


def _other_region(first: Any, second: Any) -> RuntimeError:
    return RuntimeError(
        "[autocast] a forward that runs again in a backward pass must enter the regions of its "
        f"first run, got the recipe {second} where the first run had {first}"
    )


# ---- the checkpoint that a call belongs to


class Checkpoint(NamedTuple):
    """A checkpoint whose function is running."""

    holder: Any  # torch's object
    is_second: bool
    run: int | None = None  # the number of the second run

    @property
    def is_reentrant(self) -> bool:
        """Whether its first run is without gradient mode, so that it records nothing."""
        return isinstance(self.holder, torch.autograd.function.FunctionCtx)

    @property
    def first_run(self) -> FirstRun | None:
        """The note on it."""
        found: FirstRun | None = vars(self.holder).get(_NAME)
        return found

    def make_first_run(self) -> FirstRun:
        """The note on it; one is made if there is none."""
        found: FirstRun = vars(self.holder).setdefault(_NAME, FirstRun())
        return found


def find_checkpoint() -> Checkpoint | None:
    """Returns the innermost checkpoint that is running."""
    return next(_running(), None)


def _running() -> Iterator[Checkpoint]:
    """Yields the checkpoints that are running, from the innermost outwards."""
    hooked = _of_hook()
    for found in _on_stack():
        if hooked is not None and not found.is_reentrant:
            # A composable checkpoint runs between two hooks of a module, and is not on the stack.
            if found.holder is not hooked.holder:
                yield hooked
            hooked = None
        yield found
    if hooked is not None:
        yield hooked


def _on_stack() -> Iterator[Checkpoint]:
    """Yields the checkpoints on Python's stack, from the innermost frame outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        look = _LOOKS.get(frame.f_code.co_name)
        found = None if look is None else look(frame)
        if found is not None:
            yield found
        frame = frame.f_back


def _of_hook() -> Checkpoint | None:
    """Returns the checkpoint whose hook packs saved tensors now."""
    hooks = _top_hooks(False)
    if hooks is None:
        return None
    function = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0])
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells or function.__module__ != "torch.utils.checkpoint":
        return None
    known = dict(zip(code.co_freevars, cells, strict=True))
    if "frame" in known:
        return Checkpoint(known["frame"].cell_contents, False)
    if "target_frame_ref" in known:
        holder = known["target_frame_ref"].cell_contents()
        return Checkpoint(holder, True, known["gid"].cell_contents)
    return None


def _is_torch(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def _non_reentrant(frame: FrameType) -> Checkpoint | None:
    """`checkpoint()` runs the function. Its generator owns the frame of the checkpoint."""
    generator = frame.f_locals.get("gen") if _is_torch(frame) else None
    if generator is None or generator.gi_frame is None:
        return None
    holder = generator.gi_frame.f_locals.get("new_frame")
    return None if holder is None else Checkpoint(holder, False)


def _non_reentrant_again(frame: FrameType) -> Checkpoint | None:
    """The hook that unpacks a saved tensor runs the function again."""
    holder = frame.f_locals.get("frame") if _is_torch(frame) else None
    return None if holder is None else Checkpoint(holder, True, frame.f_locals.get("gid"))


def _function_context(frame: FrameType) -> Any:
    if frame.f_code.co_varnames[:1] != ("ctx",):
        return None
    context = frame.f_locals.get("ctx")
    return context if isinstance(context, torch.autograd.function.FunctionCtx) else None


def _reentrant(frame: FrameType) -> Checkpoint | None:
    context = _function_context(frame)
    return None if context is None else Checkpoint(context, False)


def _reentrant_again(frame: FrameType) -> Checkpoint | None:
    """Another autograd function may call modules in its backward for its own reasons."""
    context = _function_context(frame)
    if context is None or not (_is_torch(frame) or _NAME in vars(context)):
        return None
    return Checkpoint(context, True, current_task())


_LOOKS: dict[str, Callable[[FrameType], Checkpoint | None]] = {
    "checkpoint": _non_reentrant,
    "_checkpoint_impl": _non_reentrant,
    "unpack_hook": _non_reentrant_again,
    "forward": _reentrant,
    "backward": _reentrant_again,
}


# ---- regions


def may_run_again() -> bool:
    """Whether calls now may be in the first or the second run of a checkpoint. It is cheap, and may
    be true needlessly: in a backward pass, under hooks of saved tensors, without gradient mode."""
    return current_task() != -1 or _top_hooks(False) is not None or not torch.is_grad_enabled()


def enter(region: Any, recipe: Recipe | None, update: Callable[[], None] | None) -> None:
    """Enters a region outside of compiled code, if `may_run_again()`. `update()` makes new scales;
    a second run uses those of the first run instead. Raises RuntimeError if there are none."""
    task, checkpoint = current_task(), find_checkpoint()
    kept = None
    if checkpoint is not None and checkpoint.is_second:
        if update is not None and checkpoint.is_reentrant and not _is_within_delayed(task):
            raise RuntimeError(
                "[autocast] a region of DelayedScaling must not be entered in a reentrant "
                "checkpoint, whose first run is without gradient mode and makes no scales: pass "
                "use_reentrant=False, or enter the region around the checkpoint"
            )
        run = checkpoint.first_run
        if run is None:
            raise _other_region("none", recipe)
        kept = run.next_region(recipe, checkpoint.run)
    elif task == -1:
        if update is not None:
            update()
    elif update is not None and not _is_within_delayed(task):
        raise RuntimeError(
            "[autocast] a region of DelayedScaling must not be entered in a backward pass, where "
            "scales do not change, got one that no checkpoint has entered before the pass (enter "
            "it around a nested checkpoint)"
        )
    if checkpoint is not None and not checkpoint.is_second:
        kept_later = _kept(recipe, not checkpoint.is_reentrant)
        checkpoint.make_first_run().regions.append((recipe, kept_later))
    _add_entry(region, task, None if checkpoint is None else checkpoint.holder, kept)


def _is_within_delayed(task: int) -> bool:
    return any(entry.task == task and entry.region.is_delayed for entry in STATE.entries)


def _add_entry(region: Any, task: int, holder: Any, kept: KeptScales | None) -> None:
    STATE.entries.append(Entry(region, task, holder, kept))
    STATE.kept = STATE.kept if kept is None else kept


def leave(region: Any) -> None:
    """Leaves a region; the order does not matter."""
    entries = STATE.entries
    for i in range(len(entries) - 1, -1, -1):
        if entries[i].region is region:
            if entries.pop(i).kept is not None:
                found = (entry.kept for entry in reversed(entries))
                STATE.kept = next((kept for kept in found if kept is not None), None)
            return


class _Region:
    """Calls within it have the recipe and the scales of a first run."""

    def __init__(self, recipe: Recipe | None, kept: KeptScales | None) -> None:
        self.recipe, self.kept = recipe, kept
        self.is_delayed = isinstance(recipe, DelayedScaling)

    def __enter__(self) -> None:
        _add_entry(self, current_task(), None, self.kept)
        enter_region(self.recipe, self.is_delayed)

    def __exit__(self, *exception: object) -> None:
        leave_region()
        leave(self)


class FirstRunContext:
    """Surrounds the first run of a forward, with a context of the caller inside."""

    def __init__(self, run: FirstRun, inner: AbstractContextManager[Any]) -> None:
        self.run, self.inner = run, inner

    def __enter__(self) -> None:
        self.inner.__enter__()
        checkpoint = find_checkpoint()
        if checkpoint is not None and not checkpoint.is_second:
            vars(checkpoint.holder)[_NAME] = self.run

    def __exit__(self, *exception: Any) -> Any:
        return self.inner.__exit__(*exception)


class SecondRunContext:
    """Surrounds each second run of it."""

    def __init__(self, run: FirstRun, inner: AbstractContextManager[Any]) -> None:
        self.run, self.inner = run, inner
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_Region(self.run.recipe, self.run.kept))
            stack.enter_context(self.inner)
            self._stacks.append(stack.pop_all())

    def __exit__(self, *exception: Any) -> Any:
        return self._stacks.pop().__exit__(*exception)


# ---- calls


def note_call() -> None:
    """Records the recipe of a call on the checkpoints whose first run it is in."""
    for checkpoint in _running():
        # The second run enters a region of its own if the first one did.
        is_inside = bool(STATE.entries) and STATE.entries[-1].holder is checkpoint.holder
        if checkpoint.is_second or is_inside:
            return
        checkpoint.make_first_run().note(STATE.recipe, not checkpoint.is_reentrant)


def region_of_call() -> _Region | None:
    """The region that a call in a backward pass has to enter: that of its first run. None if the
    call is not in a second run, or is already in the region. Raises RuntimeError if the first run
    was in a region that the second one has not entered."""
    if _is_in_region_of_the_pass():
        return None
    # A second run may make checkpoints of its own; their first run has the recipe around it.
    checkpoint = next((found for found in _running() if found.is_second), None)
    if checkpoint is None:
        return None
    run = checkpoint.first_run
    if run is None:
        return None if STATE.key is None else _Region(None, None)
    if not run.is_noted and run.regions:
        raise _other_region(run.regions[0][0], "none")
    if run.kept is None and _key(run.recipe) == STATE.key:
        return None
    return _Region(run.recipe, run.kept)


def _is_in_region_of_the_pass() -> bool:
    return bool(STATE.entries) and STATE.entries[-1].task == current_task()


def recipe_of_second_run() -> Recipe | None:
    """The current recipe of calls: in a second run, that of the first one."""
    if current_task() != -1 and not _is_in_region_of_the_pass():
        checkpoint = find_checkpoint()
        if checkpoint is not None and checkpoint.is_second:
            run = checkpoint.first_run
            return None if run is None else run.recipe
    return STATE.recipe


def _first_run_of_compiled_call() -> FirstRun | None:
    """The first run that a compiled call in a backward pass has to follow, if no region does that.
    No region can be entered for it, because guards are checked before it."""
    if _is_in_region_of_the_pass():
        return None
    checkpoint = next((found for found in _running() if found.is_second), None)
    return None if checkpoint is None else checkpoint.first_run or FirstRun()


def _lacks_region(run: FirstRun) -> bool:
    return not run.is_noted and bool(run.regions)


def key_of_call() -> str | None:
    """The key of the recipe of a compiled call in a backward pass. No graph is compiled for the key
    of a call that lacks a region of its first run."""
    run = _first_run_of_compiled_call()
    if run is None:
        return STATE.key
    return f"{run.regions[0][0]}, lacking" if _lacks_region(run) else _key(run.recipe)


def check_traced_call() -> None:
    """Called while a call is traced. Raises RuntimeError if it lacks a region of its first run."""
    if current_task() != -1 and _C.has_used_recipes():
        run = _first_run_of_compiled_call()
        if run is not None and _lacks_region(run):
            raise _other_region(run.regions[0][0], "none")


def state_of_call(owner: Any) -> dict[str, Tensor]:
    """The state of a module with scales that a call uses, by name: the module's own or, in a second
    run, that of the first one."""
    kept = STATE.kept
    if kept is None and current_task() != -1:
        run = _first_run_of_compiled_call()
        kept = None if run is None else run.kept
    return vars(owner) if kept is None else kept.state_of(owner)


_C.set_second_run(note_call, region_of_call, key_of_call, state_of_call)
# Compiled code reads the state of a call by these attributes of a module.
for _name in ("fp8_scale", "fp8_amax", "fp8_grad_amax"):
    setattr(FusibleOperation, f"_call_{_name}", property(_C.state_getter(_name)))
