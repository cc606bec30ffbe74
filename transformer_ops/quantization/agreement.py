"""What ranks that reduce magnitudes must have in common, and the error where they do not."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..op.scales import has_run, state_version, tensors_of
from ..recipe import DelayedScaling

# The state of the scales that ranks have agreed on, by the name of the group.
_agreed: dict[tuple[str, str], int] = {}


class _Facts(NamedTuple):
    """What one rank has."""

    recipe: str
    run: list[str]
    others: list[str]  # modules that have not run: copies, or loaded before the first call
    sums: list[int]  # of the scales and history of each module, in this order


def agree(owners: Sequence[Any], recipe: DelayedScaling, group: Any) -> list[Any]:
    """The modules that take part: those that have run, and others as far as every rank has them.

    RuntimeError on every rank of the group where other modules have run on some, or the recipe, or
    the scales and histories are others. It takes one small reduction; numbers are compared only
    after scales were made, loaded or dropped on some rank.
    """
    run = [owner for owner in owners if has_run(owner)]
    others = [owner for owner in owners if not has_run(owner)]
    place = (group.group_name, recipe.key)
    version = state_version(recipe.key)
    is_known = _agreed.get(place) == version
    mine = [_crc(repr(recipe)), len(run), _crc(_shapes(run)), is_known]
    mine += [len(others), _crc(_shapes(others))]
    largest, smallest = _extremes(mine, group)
    shared = smallest[4]
    if largest[:4] != smallest[:4] or not is_known or (shared and largest[4:] != smallest[4:]):
        shared = _compare(run, others, recipe, group)
    _agreed[place] = version
    return run + others[:shared]


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())


def _shapes(owners: Sequence[Any]) -> str:
    return str([tuple(owner.fp8_scale.shape) for owner in owners])


def _extremes(mine: Sequence[int], group: Any) -> tuple[list[int], list[int]]:
    """The largest and the smallest of each number on any rank."""
    both = torch.tensor([*mine, *(-number for number in mine)], device=_device_of(group))
    torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
    largest, smallest = both.view(2, -1).tolist()
    return largest, [-number for number in smallest]


def _device_of(group: Any) -> torch.device:
    """The CPU, which needs no synchronization, where the group can reduce there."""
    devices = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def _name(owner: Any) -> str:
    return f"{type(owner).__name__}({owner.extra_repr()})"


def _sum_of(owner: Any) -> int:
    found = 0
    for name, tensor in tensors_of(owner):
        if name in ("fp8_scale", "fp8_amax_history"):
            found = zlib.crc32(_bytes_of(tensor), found)
    return found


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())


def _compare(run: Sequence[Any], others: Sequence[Any], recipe: DelayedScaling, group: Any) -> int:
    """How many of `others` every rank has."""
    sums = [_sum_of(owner) for owner in (*run, *others)]
    mine = _Facts(repr(recipe), list(map(_name, run)), list(map(_name, others)), sums)
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, mine, group=group)
    first: _Facts = found[0]
    rows = zip(*(facts.others for facts in found), strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda names: len(set(names)) == 1, rows))
    for rank, facts in enumerate(found):
        _check_same(first, facts, rank, len(first.run) + shared)
    return shared


def _check_same(first: _Facts, other: _Facts, rank: int, count: int) -> None:
    if other.recipe != first.recipe:
        raise RuntimeError(
            "[autocast] recipe must be the same on all ranks of amax_reduction_group, got "
            f"{first.recipe} on rank 0 and {other.recipe} on rank {rank}"
        )
    if other.run != first.run:
        raise RuntimeError(
            "[autocast] modules that run under the recipe must be the same on all ranks of "
            f"amax_reduction_group, got {_difference(first.run, other.run, rank)}"
        )
    names = [
        name
        for name, one, two in zip(
            [*first.run, *first.others][:count], first.sums, other.sums, strict=False
        )
        if one != two
    ]
    if names:
        raise RuntimeError(
            "[autocast] scales and histories must be the same on all ranks of "
            f"amax_reduction_group, got others on rank {rank} than on rank 0 for "
            f"{_listed(names)}; load a checkpoint on every rank, or call "
            "tops.quantization.reset_scales(model) on every rank"
        )


def _difference(first: Sequence[str], other: Sequence[str], rank: int) -> str:
    texts = [f"{len(first)} on rank 0 and {len(other)} on rank {rank}"]
    one, two = Counter(first), Counter(other)
    for where, more in ((0, one - two), (rank, two - one)):
        if more:
            texts.append(f"on rank {where} alone {_listed(list(more.elements()))}")
    return "; ".join(texts)


def _listed(names: list[str], most: int = 8) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
