"""What delayed scaling keeps with an op: scales, and what they are made of.

All are buffers of the module that owns the op's weight, with a place each for input, weight and
output gradient:

    fp8_scale          [3]     by which a tensor is multiplied before it is rounded
    fp8_amax           [3]     the largest magnitudes that forward has met since; -1 for none
    fp8_grad_amax      [3]     the same of backward
    fp8_amax_history   [n, 3]  those of earlier regions, the latest one first
    fp8_largest        [3]     the largest number of each format

Of a `GroupedLinear` all but the last have one more dimension, of groups.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting

from ..locks import new_lock

__all__ = ["drop_scales", "has_scales", "make_scales", "owners_of_scales"]

NAMES = ("fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_amax_history", "fp8_largest")
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_lock = new_lock()
# By the key of their recipes, sorted by the number of the module, which is the same order on each
# rank of a program. Lists of references, as each region reads them: it costs a region 6 us to go
# through a dictionary of weak values. Nobody changes a list, so who reads needs no lock.
_owners: dict[str, list[tuple[int, weakref.ref[nn.Module]]]] = {}
# How many there were when those that are gone were last taken out.
_counted: dict[str, int] = {}


def has_scales(owner: nn.Module) -> bool:
    return "fp8_scale" in owner._buffers


def key_of(owner: nn.Module) -> str:
    """The key of the recipes that the buffers are for."""
    found: str = owner.__dict__["_scales_key"]
    return found


def owners_of_scales(key: str) -> list[nn.Module]:
    """The modules whose buffers are for recipes of this key, in the order they were made in."""
    return [owner for _, known in _owners.get(key, ()) if (owner := known()) is not None]


def register_scales(owner: nn.Module) -> None:
    """For a module that got its buffers as a copy, too. Fake ones have no numbers to change."""
    if has_scales(owner) and not isinstance(owner.fp8_scale, torch._subclasses.FakeTensor):
        with _lock:
            _list_owner(owner, is_one=True)


def _list_owner(owner: nn.Module, is_one: bool) -> None:
    """Adds the module to the owners, or removes it. Modules that are gone are looked for only when
    the list is twice as long as it was the last time: adding one must not look at all others."""
    key, number = key_of(owner), cast(int, owner._number)
    known = _owners.get(key, [])
    entries = [(number, weakref.ref(owner))] * is_one
    place = bisect_left(known, number, key=itemgetter(0))
    after = place + (place < len(known) and known[place][0] == number)
    known = [*known[:place], *entries, *known[after:]]
    if len(known) > 2 * _counted.get(key, 8):
        known = [entry for entry in known if entry[1]() is not None]
        _counted[key] = len(known)
    _owners[key] = known


def make_scales(owner: nn.Module, key: str, device: torch.device | str = "cpu") -> None:
    """Buffers for recipes of this key, all scales 1, where there are none: on the device of the
    parameters, or on `device` where there are no parameters. RuntimeError where there are some for
    another key, for experts that ranks share, and where an export would have to make them."""
    if getattr(owner, "_are_experts_shared", False):
        raise RuntimeError(
            f"[{type(owner).__name__}] recipe must be one without delayed scales where ranks share "
            f"the experts, got '{key}': a checkpoint would keep the scales of one rank alone"
        )
    if not has_scales(owner):
        if is_exporting():
            # The buffers that a program may have are known before it is traced.
            raise RuntimeError(
                f"[{type(owner).__name__}] scales must be made before torch.export, by a call "
                f"with the recipe, got none for '{key}'"
            )
        *formats, length = key.split(", ")
        known = [p.device for p in owner._parameters.values() if p is not None]
        _add(owner, key, formats, int(length.removeprefix("delayed ")), [*known, device][0])
    elif key_of(owner) != key:
        raise RuntimeError(
            f"[{type(owner).__name__}] scales must be for the recipe '{key}', got those for "
            f"'{key_of(owner)}'; tops.quantization.reset_scales(model) drops them"
        )


def _add(
    owner: nn.Module, key: str, formats: list[str], length: int, device: torch.device | str
) -> None:
    shape = _shape(owner)

    def filled(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=device)

    # No inference tensors: later calls write to them.
    with torch.inference_mode(False), torch.no_grad():
        owner.register_buffer("fp8_scale", filled(1, *shape))
        owner.register_buffer("fp8_amax", filled(-1, *shape))
        owner.register_buffer("fp8_grad_amax", filled(-1, *shape))
        owner.register_buffer("fp8_amax_history", filled(0, length, *shape))
        largest = torch.tensor([_LARGEST[format] for format in formats], dtype=torch.float32)
        owner.register_buffer("fp8_largest", largest.to(device))
    owner.__dict__["_scales_key"] = key
    register_scales(owner)


def _shape(owner: nn.Module) -> tuple[int, ...]:
    """Of the scales."""
    groups: int | None = getattr(owner, "num_groups", None)
    return (3,) if groups is None else (3, groups)


def drop_scales(owner: nn.Module) -> None:
    with _lock:
        _list_owner(owner, is_one=False)
    for name in NAMES:
        owner._buffers.pop(name, None)
    owner.__dict__.pop("_scales_key", None)


# ---- moving and loading


def moved_with(
    owner: nn.Module, function: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """What `Module._apply` is to call in place of `function`: the buffers stay in float32."""
    if not has_scales(owner):
        return function
    buffers = {id(owner._buffers[name]) for name in NAMES}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in buffers:
            return function(tensor)
        probe = function(torch.empty_like(tensor))
        return function(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

    return move


def scale_errors(owner: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """What is wrong with the buffers of a state dict, for a module that has or may get some."""
    found = [name for name in NAMES if isinstance(state_dict.get(prefix + name), Tensor)]
    what = f"[{type(owner).__name__}] scales of delayed scaling"
    if not found:
        return []
    if len(found) < len(NAMES):
        missing = ", ".join(prefix + name for name in NAMES if name not in found)
        return [f"{what} must be loaded together, got none of {missing}"]
    key = _key_in(owner, state_dict, prefix)
    if key is None:
        return [f"{what} must be {', '.join(NAMES)} of one module, got tensors that do not fit"]
    if has_scales(owner) and key_of(owner) != key:
        return [
            f"{what} must be for the recipe '{key_of(owner)}', got those for '{key}'; "
            "tops.quantization.reset_scales(model) has it take any"
        ]
    return []


def _key_in(owner: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> str | None:
    """Of complete buffers, None where they do not fit together, or the module."""
    *rows, history, largest = (state_dict[prefix + name] for name in NAMES)
    shape = _shape(owner)
    if history.dim() == 0 or len(history) == 0 or tuple(history.shape[1:]) != shape:
        return None
    if any(tuple(row.shape) != shape for row in rows) or tuple(largest.shape) != (3,):
        return None
    names = {number: name for name, number in _LARGEST.items()}
    formats = [names.get(number) for number in largest.tolist()]
    if None in formats:
        return None
    return ", ".join([*map(str, formats), f"delayed {len(history)}"])


def make_room(owner: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Buffers for those of a state dict without errors, where the module has none."""
    if prefix + "fp8_scale" in state_dict and not has_scales(owner):
        key = _key_in(owner, state_dict, prefix)
        assert key is not None
        make_scales(owner, key)


def without_scales(missing: list[str], prefix: str) -> list[str]:
    """A state dict may do without scales: those there are stay."""
    own = {prefix + name for name in NAMES}
    return [key for key in missing if key not in own]
