"""What ranks that reduce magnitudes must have in common, and the error where they do not."""

from __future__ import annotations

import functools
import gc
import operator
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..op.scales import has_run, owners_of_scales, reduced, state_version, tensors_of
from ..recipe import DelayedScaling

# The state of the scales that ranks have agreed on, by the name of the group.
_agreed: dict[tuple[str, str], int] = {}


class _Facts(NamedTuple):
    """What one rank has: of each module its name, and a sum of its scales and history."""

    recipe: str
    run: list[tuple[str, int]]
    others: list[tuple[str, int]]  # modules that have not run: copies, or loaded ones


def agree(recipe: DelayedScaling, group: Any) -> list[Any]:
    """The modules that take part: those that have run, and of the others those that every rank has.

    RuntimeError on every rank of the group where other modules have run on some, or the recipe, or
    the scales and histories are others. It takes one small reduction; numbers are compared only
    after scales were made, loaded or dropped on some rank.
    """
    run, others, largest, smallest = _survey(recipe, group)
    if largest[:4] != smallest[:4]:
        # Modules that are gone may wait for the collector on some ranks.
        del run, others
        gc.collect()
        run, others, largest, smallest = _survey(recipe, group)
    is_same = largest[:4] == smallest[:4] and largest[0] == 1
    if is_same and smallest[4] == 0:
        others = []
    elif not is_same or largest[4:] != smallest[4:]:
        others = _compare(run, others, recipe, group)
    _agreed[_place(recipe, group)] = state_version(recipe.key)
    if torch.distributed.get_world_size(group) > 1:
        reduced.add(recipe.key)
    return run + others


def _place(recipe: DelayedScaling, group: Any) -> tuple[str, str]:
    return group.group_name, recipe.key


def _survey(
    recipe: DelayedScaling, group: Any
) -> tuple[list[Any], list[Any], list[int], list[int]]:
    """The modules that have run, the others, and the largest and smallest numbers of any rank:
    whether the state is known, the recipe, those that have run, the others."""
    owners = owners_of_scales(recipe.key)
    run = [owner for owner in owners if has_run(owner)]
    others = [owner for owner in owners if not has_run(owner)]
    is_known = _agreed.get(_place(recipe, group)) == state_version(recipe.key)
    mine = [is_known, _crc(repr(recipe)), len(run), _crc(_shapes(run))]
    mine += [len(others), _crc(_shapes(others))]
    return run, others, *_extremes(mine, group)


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


def _facts(owner: Any) -> tuple[str, int]:
    return f"{type(owner).__name__}({owner.extra_repr()})", _sum_of(owner)


def _sum_of(owner: Any) -> int:
    found = 0
    for name, tensor in tensors_of(owner):
        if name in ("fp8_scale", "fp8_amax_history"):
            found = zlib.crc32(_bytes_of(tensor), found)
    return found


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())


def _compare(
    run: Sequence[Any], others: Sequence[Any], recipe: DelayedScaling, group: Any
) -> list[Any]:
    """Of `others`, those that every rank has, in the same order on each."""
    mine = _Facts(repr(recipe), list(map(_facts, run)), list(map(_facts, others)))
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, mine, group=group)
    for rank, facts in enumerate(found):
        _check_same(found[0], facts, rank)
    counts = functools.reduce(operator.and_, (Counter(facts.others) for facts in found))
    known: dict[tuple[str, int], list[Any]] = {}
    for owner, facts in zip(others, mine.others, strict=True):
        known.setdefault(facts, []).append(owner)
    return [owner for key in sorted(counts) for owner in known[key][: counts[key]]]


def _check_same(first: _Facts, other: _Facts, rank: int) -> None:
    if other.recipe != first.recipe:
        raise RuntimeError(
            "[autocast] recipe must be the same on all ranks of amax_reduction_group, got "
            f"{first.recipe} on rank 0 and {other.recipe} on rank {rank}"
        )
    names, other_names = ([name for name, _ in facts.run] for facts in (first, other))
    if other_names != names:
        raise RuntimeError(
            "[autocast] modules that run under the recipe must be the same on all ranks of "
            f"amax_reduction_group, got {_difference(names, other_names, rank)}"
        )
    changed = [one[0] for one, two in zip(first.run, other.run, strict=True) if one != two]
    if changed:
        raise RuntimeError(
            "[autocast] scales and histories must be the same on all ranks of "
            f"amax_reduction_group, got others on rank {rank} than on rank 0 for "
            f"{_listed(changed)}; load a checkpoint on every rank, or call "
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
