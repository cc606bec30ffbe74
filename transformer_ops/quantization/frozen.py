"""Regions in which weights do not change."""

from __future__ import annotations

from torch.compiler import is_compiling

from .. import _C

__all__ = ["frozen_weights"]


class frozen_weights:
    """Within this context the caller does not change weights, as while gradients of several
    microbatches add up: under a recipe, calls round each weight once for each format, forward and
    backward, instead of at every call.

        with tops.frozen_weights():
            for x in microbatches:
                with tops.autocast(recipe=recipe):
                    y = model(x)
                loss(y).backward()
        optimizer.step()

    It counts for the thread that entered it and for no other, which leaves out backward on CUDA.
    Rounded weights take their memory until the outermost context is left. What is computed does
    not change: a backward that runs later, a call of another thread, a weight that is made anew
    at each call (parametrized, distributed) and compiled code round as ever.

    Raises:
        RuntimeError: in a call with a weight that was modified in place since it was rounded.
    """

    def __enter__(self) -> frozen_weights:
        if not is_compiling():
            _C.enter_frozen_weights()
        return self

    def __exit__(self, *exception: object) -> None:
        if not is_compiling():
            _C.leave_frozen_weights()
