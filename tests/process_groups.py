"""Process groups in one process: the other ranks have zeros.

A gather appends zeros, and a sum is this rank's tensor. Each collective is therefore its own exact
reference, and gather and scatter are transposes of each other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    _create_work_from_future,
    _register_process_group,
    _resolve_process_group,
)


def done(result: Any) -> Any:
    """Work that is finished."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class GroupOfZeros(dist.ProcessGroup):
    """Rank 0 of a group whose other ranks have zeros. `calls`: (collective, bytes of the input)."""

    def __init__(self, size: int, name: str) -> None:
        super().__init__(0, size)
        self._name = name
        self.calls: list[tuple[str, int]] = []

    def getGroupName(self) -> str:
        """The name, which torch reads."""
        return self._name

    def _note(self, name: str, tensors: list[Tensor]) -> None:
        self.calls.append((name, sum(tensor.nbytes for tensor in tensors)))

    @torch.no_grad()
    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Any:
        self._note("gather", inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            assert output.is_contiguous() and tensor.is_contiguous()
            output.zero_()
            output[: len(tensor)].copy_(tensor)
        return done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Any:
        return self.allgather_into_tensor_coalesced([output], [tensor])

    @torch.no_grad()
    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Any:
        self._note("scatter", inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            assert output.is_contiguous() and tensor.is_contiguous()
            output.copy_(tensor[: len(output)])
        return done(outputs)

    @torch.no_grad()
    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        self._note("reduce", tensors)
        return done(tensors)


_groups: dict[int, GroupOfZeros] = {}


def _gather_into(tensor: Tensor, size: int, name: str, *, out: Tensor) -> Tensor:
    group = _resolve_process_group(name)
    if isinstance(group, GroupOfZeros):
        group.all_gather_single(out, tensor)
        return out
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    return out.copy_(torch.ops._c10d_functional.wait_tensor(gather(tensor, size, name)))


# Groups of torch 2.11 and 2.12 refuse to compare a scatter of rows under DETAIL.
OLD_GROUPS = not hasattr(dist.ProcessGroup, "all_gather_single")
DETAIL = dist.DebugLevel.OFF if OLD_GROUPS else dist.DebugLevel.DETAIL


@functools.cache
def _take_over_the_gather() -> torch.library.Library:
    """Replaces the gather for old groups, because Python cannot override what this collective
    calls."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", _gather_into, device)
    return library


def group_of_zeros(size: int = 2) -> GroupOfZeros:
    """One group for each size, in every process that needs it."""
    if OLD_GROUPS:
        _take_over_the_gather()
    if size not in _groups:
        _groups[size] = GroupOfZeros(size, f"zeros{size}")
    group = _groups[size]
    try:
        _resolve_process_group(group.group_name)
    except RuntimeError:
        # A test has destroyed all groups.
        _register_process_group(group.group_name, group)
    return group
