"""Collectives along the rows (the first dimension) of the ranks of a process group.

`process_group` is a ProcessGroup, a 1-dimensional DeviceMesh, or None for all ranks. Its size is
read when the op is called; in a group of one rank the op passes its input through. All ranks must
call the op, in the same order and with equal shapes. Copies share the group; a pickled op finds it
by its name.
"""

from __future__ import annotations

from typing import Any

from ..op.base import BasicOperation
from ..op.process_group import Ranks, find_group, group_name, ranks_of
from ..op.view import View

__all__ = ["AllGather", "AllReduce", "ReduceScatter"]


class Collective(BasicOperation):
    """An op among the ranks of a process group."""

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group

    @property
    def process_group(self) -> Any:
        """The group; None: all ranks. Raises RuntimeError if this process has no group of its
        name."""
        name = self._name_of_group()
        return None if name is None else find_group(type(self).__name__, "process_group", name)

    @process_group.setter
    def process_group(self, value: Any) -> None:
        self._group_name = group_name(type(self).__name__, "process_group", value)

    def _name_of_group(self) -> str | None:
        return self._group_name

    def _ranks(self) -> Ranks:
        return ranks_of(self, "process_group", self._name_of_group())

    @property
    def group(self) -> str:
        """The name of the group, also for the group of all ranks."""
        return self._ranks().group

    @property
    def group_size(self) -> int:
        """The current number of its ranks."""
        return self._ranks().size

    def extra_repr(self) -> str:
        name = self._name_of_group()
        return "" if name is None else f"process_group={name!r}"


class AllGather(Collective, kind="AllGather"):
    """The rows of all ranks, in their order (Korthikanti et al. 2022, sequence parallelism).

    `x[n, ...]` → `[ranks * n, ...]` in the input's dtype. The gradient is the sum of all ranks'
    gradients for this rank's rows.

    `process_group` is a ProcessGroup, a 1-dimensional DeviceMesh, or None for all ranks. Raises
    ValueError if it is anything else.
    """


class ReduceScatter(Collective, kind="ReduceScatter"):
    """This rank's rows of the sum over all ranks (Korthikanti et al. 2022).

    `x[n, ...]` → `[n / ranks, ...]` in the input's dtype. Raises RuntimeError if the ranks do not
    divide n. The gradient is gathered.

    `process_group` is a ProcessGroup, a 1-dimensional DeviceMesh, or None for all ranks. Raises
    ValueError if it is anything else.
    """


class AllReduce(Collective, kind="AllReduce"):
    """The sum over all ranks.

    `x[n, ...]` → `[n, ...]` in the input's dtype. All ranks continue with the same tensor, so each
    already has its gradient, which is passed through (Megatron's g; Shoeybi et al. 2019).

    `process_group` is a ProcessGroup, a 1-dimensional DeviceMesh, or None for all ranks. Raises
    ValueError if it is anything else.
    """


class ReduceGradient(Collective, kind="ReduceGradient"):
    """The input, whose gradient is summed over all ranks (Megatron's f). It is placed before a
    product whose weight is split by rows."""


# ---- around a split product


class _SplitView(View):
    """A collective among the group of its owner."""

    _is_part = True

    def _name_of_group(self) -> str | None:
        name: str | None = self._parameter_owner._group_name  # type: ignore[assignment]
        return name

    def _ranks(self) -> Ranks:
        owner: Any = self._parameter_owner
        ranks = ranks_of(self, "tensor_parallel_group", owner._group_name)
        if ranks.size != owner.tensor_parallel_size:
            raise RuntimeError(
                f"[{type(owner).__name__}] tensor_parallel_group must have the "
                f"{owner.tensor_parallel_size} ranks that the weight is split over, "
                f"got {ranks.size}"
            )
        return ranks


class _GatherView(_SplitView, AllGather):
    pass


class _ReduceGradientView(_SplitView, ReduceGradient):
    pass


class _ScatterView(_SplitView, ReduceScatter):
    pass


class _ReduceView(_SplitView, AllReduce):
    pass


def collectives_around(product: Any) -> tuple[list[BasicOperation], list[BasicOperation]]:
    """The ops before a split product, and those after it and its bias."""
    sequence = product.sequence_parallel
    if product.tensor_parallel_mode == "column":
        return [_GatherView(product) if sequence else _ReduceGradientView(product)], []
    if product.tensor_parallel_mode == "row":
        return [], [_ScatterView(product) if sequence else _ReduceView(product)]
    return [], []


def between_collectives(product: Any) -> list[BasicOperation]:
    """A basic op that is a product; if it is split, its collectives are around it."""
    if product.tensor_parallel_mode is None:
        return [product]
    known = product.__dict__.get("_parts")
    key = (product.tensor_parallel_mode, product.sequence_parallel)
    # A copy of the module also copies the parts of the original.
    if (
        known is None
        or known[0] != key
        or not all(part._is_view_of(product) for part in (*known[1], *known[2]))
    ):
        known = product.__dict__["_parts"] = (key, *collectives_around(product))
    return [*known[1], product, *known[2]]
