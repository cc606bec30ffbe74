"""Regions in which weights do not change."""

from __future__ import annotations

from torch.compiler import is_compiling

from .. import _C

__all__ = ["frozen_weights"]


class frozen_weights:
    """The caller promises not to change weights within this context, for example while gradients of
    several microbatches add up. Under a recipe, calls then round each weight once for each format,
    forward and backward, instead of at every call.

        with tops.frozen_weights():
            for x in microbatches:
                with tops.autocast(recipe=recipe):
                    y = model(x)
                loss(y).backward()
        optimizer.step()

    It applies only to the thread that entered it, which excludes backward on CUDA. Rounded weights
    take memory until the outermost context is left. Results do not change: a backward that runs
    later, a call of another thread, a weight that is new at each call (parametrized, distributed)
    and compiled code round as usual.

    Raises:
        RuntimeError: in a call, if a weight was modified in place since it was rounded.
    """

    def __enter__(self) -> frozen_weights:
        if not is_compiling():
            _C.enter_frozen_weights()
        return self

    def __exit__(self, *exception: object) -> None:
        if not is_compiling():
            _C.leave_frozen_weights()
