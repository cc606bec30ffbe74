"""The region of a recipe: `autocast`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.compiler import is_compiling

from .delayed import update_scales
from .recipe import DelayedScaling, MXFP8BlockScaling, Recipe
from .second_run import (
    FirstRun,
    FirstRunContext,
    SecondRunContext,
    enter,
    leave,
    may_run_again,
    recipe_of_second_run,
)
from .state import STATE, enter_region, leave_region

__all__ = ["autocast", "checkpoint_contexts", "current_recipe"]


class autocast:
    """Within this context, products of ops run on operands quantized according to `recipe`.

    Contexts may nest; `enabled=False` is exact again. A context applies to the calls of the thread
    that entered it. Backward uses the recipe of its forward, wherever it runs.

    Args:
        enabled: False for exact operands.
        recipe: one of `transformer_ops.recipe`; None for `MXFP8BlockScaling()`.
        amax_reduction_group: the process group over whose ranks `DelayedScaling` reduces
            magnitudes. Other recipes do not use it.

    Entering an outermost region of `DelayedScaling` with gradient mode on makes new scales from the
    magnitudes that calls have recorded before.

    Raises:
        TypeError: `recipe` is not a recipe, `enabled` not a bool, or the group not a process group.
        RuntimeError: on entering an outermost region of `DelayedScaling` in compiled code, or in a
            backward pass that does not run a checkpoint again.
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

    @property
    def is_delayed(self) -> bool:
        """Whether its recipe is a `DelayedScaling`."""
        return isinstance(self.recipe, DelayedScaling)

    def __enter__(self) -> autocast:
        is_delayed = isinstance(self.recipe, DelayedScaling)
        if not is_compiling():
            STATE.with_grad = torch.is_grad_enabled()
            if may_run_again():
                enter(self, self.recipe, self._update if is_delayed else None)
            elif is_delayed:
                self._update()
        elif is_delayed and not STATE.is_delayed:
            raise RuntimeError(
                "[autocast] a region of DelayedScaling must be entered outside of compiled "
                "code, where scales are made, got one within"
            )
        # The thread stores this, not this object, because several threads may enter it.
        enter_region(self.recipe, is_delayed, is_compiling())
        return self

    def _update(self) -> None:
        # Scales that are inference tensors could not be saved for backward.
        if (
            torch.is_grad_enabled()
            and not STATE.is_delayed
            and not torch.is_inference_mode_enabled()
        ):
            update_scales(self.recipe, self.amax_reduction_group)  # type: ignore[arg-type]

    def __exit__(self, *exception: object) -> None:
        leave_region()
        if not is_compiling():
            leave(self)


def _is_group(found: object) -> bool:
    distributed = torch.distributed
    return distributed.is_available() and isinstance(found, distributed.ProcessGroup)


def current_recipe() -> Recipe | None:
    """The recipe of the innermost `autocast` of this thread; None outside of any."""
    return STATE.recipe if is_compiling() else recipe_of_second_run()


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_contexts(context_fn: Callable[[], Contexts] | None = None) -> Contexts:
    """Returns two contexts for `torch.utils.checkpoint.checkpoint(..., use_reentrant=False,
    context_fn=checkpoint_contexts)`, which runs a forward again in the backward pass. The second
    run has the recipe and the scales of the first one.

    Calls follow their first run without it, too, both eager and compiled. It is for programs that
    list the contexts of every library.

    Args:
        context_fn: makes two further contexts, such as `create_selective_checkpoint_contexts` with
            a policy: `context_fn=partial(checkpoint_contexts, further)`. None for none.

    Raises:
        TypeError: `context_fn` is not callable.
    """
    if context_fn is not None and not callable(context_fn):
        raise TypeError(
            f"[checkpoint_contexts] context_fn must be callable or None, got {context_fn!r}"
        )
    if is_compiling():
        # The graph contains the recipe. torch requires two dispatch modes there.
        return (context_fn or _recompute_all)()
    run = FirstRun()
    run.note(recipe_of_second_run())
    first, second = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
    return FirstRunContext(run, first), SecondRunContext(run, second)


def _recompute_all() -> Contexts:
    checkpoint = torch.utils.checkpoint
    policy = checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    found: Contexts = checkpoint.create_selective_checkpoint_contexts(lambda *_, **__: policy)
    return found
