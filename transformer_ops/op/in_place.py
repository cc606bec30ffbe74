"""`inplace=True` of torch.nn: accepted if overwriting the tensor is not observable."""

from __future__ import annotations

from collections.abc import Sequence

from .base import BasicOperation

# These ops may return their own input; a branch is read again.
_HANDS_ON = ("Identity", "Reshape", "ConstantScale", "Dropout", "DropPath")
_BRANCHES = ("MakeExtraOutput", "Router", "Quantize")


def check_in_place(ops: Sequence[BasicOperation]) -> None:
    """Raises ValueError if an op of a group would have to overwrite a tensor that is also read
    elsewhere: the input of the group, or of a branch."""
    for i, op in enumerate(ops):
        if not op.inplace:
            continue
        makers = [other for other in ops[:i] if other._kind not in _HANDS_ON]
        if not makers or makers[-1]._kind in _BRANCHES:
            got = f"the input of op {ops.index(makers[-1])}, a branch" if makers else "the caller's"
            raise ValueError(
                f"[{type(op).__name__}] inplace=True must follow an op that makes its input, got "
                f"{got}: no op overwrites that; leave inplace out"
            )
