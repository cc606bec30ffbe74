"""Process groups as ops store them: by name, so that copies share a group, and pickles contain
none."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch.distributed as dist

from .observers import ObservedMixin


class Ranks(NamedTuple):
    """A process group as plans see it."""

    group: str
    size: int


def group_name(op: str, argument: str, value: object) -> str | None:
    """The name of a ProcessGroup or of a 1-dimensional DeviceMesh. None, the world, stays None."""
    if value is None:
        return None
    if dist.is_available():
        if isinstance(value, dist.DeviceMesh) and value.ndim == 1:
            value = value.get_group()
        if isinstance(value, dist.ProcessGroup):
            return str(value.group_name)
    raise ValueError(
        f"[{op}] {argument} must be a ProcessGroup of which this rank is a member, a 1-dimensional "
        f"DeviceMesh or None, got {value!r}"
    )


def find_group(op: str, argument: str, name: str | None) -> Any:
    """The group of that name in this process; None: all ranks. Raises RuntimeError if there is
    none."""
    found = None
    if dist.is_available():
        try:
            found = dist.group.WORLD if name is None else _resolve(name)
        except RuntimeError:
            found = None
    if found is None:
        what = "" if name is None else f" {name!r}"
        raise RuntimeError(
            f"[{op}] {argument}{what} must exist in this process when it is used "
            "(torch.distributed.init_process_group), got none"
        )
    return found


def _resolve(name: str) -> Any:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


# The ops whose plans contain the size of a group, until it is destroyed.
_users: weakref.WeakKeyDictionary[Any, weakref.WeakSet[ObservedMixin]] = weakref.WeakKeyDictionary()


def ranks_of(op: ObservedMixin, argument: str, name: str | None) -> Ranks:
    """The group now. If it is destroyed, the op's plans are made again."""
    group = find_group(type(op).__name__, argument, name)
    users = _users.get(group)
    if users is None:
        users = _users[group] = weakref.WeakSet()
        weakref.finalize(group, _forget_plans, users).atexit = False
    users.add(op)
    return Ranks(str(group.group_name), int(group.size()))


def _forget_plans(users: weakref.WeakSet[ObservedMixin]) -> None:
    for op in list(users):
        op._make_groups_stale()
