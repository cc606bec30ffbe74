"""What ranks that reduce magnitudes must have in common, and the error if they do not."""

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

from .recipe import DelayedScaling
from .scales import has_run, name_of, owners_of_scales, reduced, state_version, tensors_of

# The version of the scales that ranks have agreed on, by the name of the group and the key.
_agreed: dict[tuple[str, str], int] = {}


class _Facts(NamedTuple):
    """One rank's recipe, and its modules: the name of each, and a checksum of its scales."""

    recipe: str
    modules: list[tuple[str, int]]
    run: list[tuple[str, int]]  # those that have run
    others: list[tuple[str, int]]


class _Survey(NamedTuple):
    """The modules of this rank, and what all ranks have in common."""

    modules: list[Any]
    run: list[Any]
    others: list[Any]
    is_known: bool  # the recipe is the same, and nothing has changed since ranks agreed
    same_modules: bool
    same_run: bool
    has_others: bool  # whether every rank has modules that have not run


def agree(recipe: DelayedScaling, group: Any) -> list[Any]:
    """The modules whose magnitudes are reduced: all of them if every rank has the same. If a rank
    has others, such as a copy for moving averages: those that have run, and copies that all ranks
    have.

    Raises RuntimeError on every rank of the group if modules that have run differ, or recipes, or
    scales. It takes one small reduction. Checksums are compared only after scales were made, loaded
    or dropped on some rank, or changed without this group.
    """
    found = _survey(recipe, group)
    if not (found.same_modules or found.same_run):
        # Deleted modules may wait for the garbage collector on some ranks.
        del found
        gc.collect()
        found = _survey(recipe, group)
    if found.is_known and found.same_modules:
        owners = found.modules
    elif found.is_known and found.same_run and not found.has_others:
        owners = found.run
    else:
        owners = _compare(found, recipe, group)
    _agreed[_place(recipe, group)] = state_version(recipe.key)
    if torch.distributed.get_world_size(group) > 1:
        reduced[recipe.key] = group.group_name
    return owners


def _place(recipe: DelayedScaling, group: Any) -> tuple[str, str]:
    return group.group_name, recipe.key


def _survey(recipe: DelayedScaling, group: Any) -> _Survey:
    modules = owners_of_scales(recipe.key)
    run = [owner for owner in modules if has_run(owner)]
    others = [owner for owner in modules if not has_run(owner)]
    is_known = _agreed.get(_place(recipe, group)) == state_version(recipe.key)
    mine = [is_known, _crc(repr(recipe)), *_count(modules), *_count(run), len(others)]
    largest, smallest = _extremes(mine, group)
    same = [a == b for a, b in zip(largest, smallest, strict=True)]
    return _Survey(
        modules,
        run,
        others,
        is_known=smallest[0] == 1 and same[1],
        same_modules=all(same[2:4]),
        same_run=all(same[4:6]),
        has_others=smallest[6] > 0,
    )


def _count(owners: Sequence[Any]) -> list[int]:
    return [len(owners), _crc(" ".join(map(name_of, owners)))]


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())


def _extremes(mine: Sequence[int], group: Any) -> tuple[list[int], list[int]]:
    """The largest and the smallest value of each number over all ranks."""
    both = torch.tensor([*mine, *(-number for number in mine)], device=_device_of(group))
    torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
    largest, smallest = both.view(2, -1).tolist()
    return largest, [-number for number in smallest]


def _device_of(group: Any) -> torch.device:
    """The CPU, which needs no synchronization, if the group can reduce there."""
    devices = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def _facts(owner: Any) -> tuple[str, int]:
    return name_of(owner), _sum_of(owner)


def _sum_of(owner: Any) -> int:
    found = 0
    for name, tensor in tensors_of(owner):
        if name in ("fp8_scale", "fp8_amax_history"):
            found = zlib.crc32(_bytes_of(tensor), found)
    return found


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(torch.uint8).flatten().tolist())


def _compare(survey: _Survey, recipe: DelayedScaling, group: Any) -> list[Any]:
    mine = _Facts(repr(recipe), *(list(map(_facts, rows)) for rows in survey[:3]))
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, mine, group=group)
    names = [[name for name, _ in facts.modules] for facts in found]
    same_modules = all(row == names[0] for row in names)
    for rank, facts in enumerate(found):
        _check_same(found[0], facts, rank, same_modules)
    if same_modules:
        return survey.modules
    counts = functools.reduce(operator.and_, (Counter(facts.others) for facts in found))
    known: dict[tuple[str, int], list[Any]] = {}
    for owner, facts in zip(survey.others, mine.others, strict=True):
        known.setdefault(facts, []).append(owner)
    shared = [owner for key in sorted(counts) for owner in known[key][: counts[key]]]
    return survey.run + shared


def _check_same(first: _Facts, other: _Facts, rank: int, same_modules: bool) -> None:
    if other.recipe != first.recipe:
        raise RuntimeError(
            "[autocast] recipe must be the same on all ranks of amax_reduction_group, got "
            f"{first.recipe} on rank 0 and {other.recipe} on rank {rank}"
        )
    one, two = (first.modules, other.modules) if same_modules else (first.run, other.run)
    names, other_names = ([name for name, _ in rows] for rows in (one, two))
    if other_names != names:
        raise RuntimeError(
            "[autocast] modules that run under the recipe must be the same on all ranks of "
            f"amax_reduction_group, got {_difference(names, other_names, rank)}"
        )
    changed = [a[0] for a, b in zip(one, two, strict=True) if a != b]
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
