"""The state of delayed scaling: scales, and the magnitudes from which they are computed.

The module that owns the weight of a product holds the state. Each tensor has three entries, for
input, weight and output gradient:

    fp8_scale          [3]     a tensor is multiplied by it before it is rounded
    fp8_amax           [3]     the largest magnitudes of forward since the last region; -1 for none
    fp8_grad_amax      [3]     the same for backward
    fp8_amax_history   [n, 3]  the magnitudes of earlier regions, the latest one first
    fp8_largest        [3]     the largest number of each format

In a `GroupedLinear` all but the last have one more dimension: groups.

The tensors are attributes and entries of the state dict. They are not in `buffers()`, because
wrappers would change them: DDP broadcasts buffers from rank 0 at each forward if they exist when it
wraps the module, and FSDP1 casts them to `buffer_dtype`. Only `named_buffers(recurse=False)` of the
module itself lists them, which torch.distributed.checkpoint and the device moves of FSDP call.
"""

from __future__ import annotations

import warnings
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting

from ..base.locks import new_lock
from .number_format import FORMATS

__all__ = ["drop_scales", "has_scales", "make_scales", "note_run", "owners_of_scales"]

NAMES = ("fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_amax_history", "fp8_largest")
# The attribute of a module whose calls have recorded magnitudes.
RUN = "_scales_have_run"
# The name by which ranks compare modules.
NAME = "_scales_name"
# The attribute of a module that was loaded from a state dict without scales before it had any.
NOT_LOADED = "_scales_not_loaded"
_lock = new_lock()
# This is not torch's own generator, which users may have seeded.
_probes = torch.Generator()
# The modules with scales, by the key of their recipes, sorted by the number of the module, which
# gives the same order on each rank of a program. Lists of references, because a region needs 6 us
# to go through a dictionary of weak values. Lists are replaced, never changed, so readers need no
# lock.
_owners: dict[str, list[tuple[int, weakref.ref[nn.Module]]]] = {}
# The keys of recipes whose magnitudes are reduced over ranks, and the name of the group.
reduced: dict[str, str] = {}
# How often scales of that key were made, loaded or dropped, or a module ran for the first time.
_versions: dict[str, int] = {}
# The length of each list when dead references were last removed from it.
_counted: dict[str, int] = {}


def has_scales(owner: nn.Module) -> bool:
    return "_scales_key" in owner.__dict__


def tensors_of(owner: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of the state, if there is one."""
    if has_scales(owner):
        yield from ((name, owner.__dict__[name]) for name in NAMES)


def key_of(owner: nn.Module) -> str:
    """The key of the recipes that the scales are for."""
    found: str = owner.__dict__["_scales_key"]
    return found


def owners_of_scales(key: str) -> list[nn.Module]:
    """The modules with scales for recipes of this key, in the order in which they were made."""
    return [owner for _, known in _owners.get(key, ()) if (owner := known()) is not None]


def state_version(key: str) -> int:
    """Changes when scales are made, loaded or dropped, other than by a region."""
    return _versions.get(key, 0)


def _note_change(owner: nn.Module) -> None:
    note_change(key_of(owner))


def note_change(key: str) -> None:
    """Makes ranks compare the scales of that key before they reduce magnitudes again."""
    _versions[key] = _versions.get(key, 0) + 1


def register_scales(owner: nn.Module) -> None:
    """Makes a module with scales take part in regions. Fake scales have no numbers to update."""
    if has_scales(owner):
        if not isinstance(owner.__dict__["fp8_scale"], torch._subclasses.FakeTensor):
            with _lock:
                _list_owner(owner, is_one=True)
        _note_change(owner)


def register_copy(owner: nn.Module) -> None:
    """Registers a module that got its attributes from another one."""
    name = owner.__dict__.pop(NAME, None)
    if has_scales(owner):
        owner.__dict__[NAME] = "a copy of " + (name or name_of(owner)).removeprefix("a copy of ")
    register_scales(owner)


def name_of(owner: nn.Module) -> str:
    """The name by which ranks compare modules. It is cached, because each region asks for it."""
    known: str | None = owner.__dict__.get(NAME)
    if known is None:
        known = owner.__dict__[NAME] = f"{type(owner).__name__}({owner.extra_repr()})"
    return known


def has_run(owner: nn.Module) -> bool:
    """Whether a call of the module has recorded magnitudes. If not, ranks may lack it: it may be a
    copy for moving averages."""
    return RUN in owner.__dict__


def warn_of_a_start(owner: nn.Module) -> None:
    """Warns, before a call makes scales, if a state dict without scales was loaded."""
    if owner.__dict__.pop(NOT_LOADED, False) and not has_scales(owner):
        warnings.warn(
            f"[{type(owner).__name__}] scales of delayed scaling begin at 1, because the state "
            "dict that was loaded has none: if its checkpoint has them, call "
            "tops.quantization.make_scales(model, recipe) before the model is asked for its keys",
            stacklevel=2,
        )


def note_run(owner: nn.Module) -> None:
    """Records that a call of the module records magnitudes."""
    if not has_run(owner):
        owner.__dict__[RUN] = True
        _note_change(owner)


def _list_owner(owner: nn.Module, is_one: bool) -> None:
    """Adds the module to the owners, or removes it. Deleted modules are removed only when the list
    is twice as long as the last time, because adding one must not go through all others."""
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
    """Makes the state for recipes of this key if there is none, with scales of 1. It is on the
    device of the parameters, or on `device` if there are no parameters. An unused state of another
    key is replaced. Raises RuntimeError if that state is used, if ranks share the experts, and if
    an export would have to make the state."""
    check_key(owner, key)
    owner.__dict__.pop(NOT_LOADED, None)
    if has_scales(owner) and key_of(owner) != key:
        drop_scales(owner)
    if not has_scales(owner):
        if is_exporting():
            # A program has the constants that exist when it is traced.
            raise RuntimeError(
                f"[{type(owner).__name__}] scales must be made before torch.export, by "
                f"tops.quantization.make_scales(model, recipe) or a call, got none for '{key}'"
            )
        _set_new(owner, key, _device_of(owner, device))
    elif owner.__dict__["fp8_scale"].is_meta or _is_elsewhere(owner, device):
        _set_new(owner, key, _device_of(owner, device))


def check_key(owner: nn.Module, key: str) -> None:
    """Raises the errors of `make_scales` for a module and the key of a recipe."""
    if getattr(owner, "_are_experts_shared", False):
        raise RuntimeError(
            f"[{type(owner).__name__}] recipe must be one without delayed scales where ranks share "
            f"the experts, got '{key}': a checkpoint would keep the scales of one rank alone"
        )
    if has_scales(owner) and key_of(owner) != key and not is_new(owner):
        raise RuntimeError(
            f"[{type(owner).__name__}] scales must be for the recipe '{key}', got those for "
            f"'{key_of(owner)}'; tops.quantization.reset_scales(model) drops them"
        )


# Called with a module before its scales are replaced or dropped, other than by a region.
listeners: list[Callable[[nn.Module], None]] = []


def _tell(owner: nn.Module) -> None:
    if has_scales(owner):
        for listener in listeners:
            listener(owner)


def _device_of(owner: nn.Module, otherwise: torch.device | str) -> torch.device | str:
    known = (p.device for p in owner._parameters.values() if p is not None)
    return next(known, otherwise)


def _is_elsewhere(owner: nn.Module, device: torch.device | str) -> bool:
    """Whether new scales of a module without parameters are on another device than its calls."""
    is_other = owner.__dict__["fp8_scale"].device.type != torch.device(device).type
    return is_other and not owner._parameters and is_new(owner)


def renew_scales(owner: nn.Module) -> None:
    """Sets the scales of a module to 1 again, because its parameters are new."""
    if has_scales(owner):
        _set_new(owner, key_of(owner), owner.__dict__["fp8_scale"].device)


def _set_new(owner: nn.Module, key: str, device: torch.device | str) -> None:
    _tell(owner)
    *formats, length = key.split(", ")
    rows, shape = int(length.removeprefix("delayed ")), _shape(owner)

    def filled(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=device)

    # Inference tensors would not allow later calls to write to them.
    with torch.inference_mode(False), torch.no_grad():
        numbers = [FORMATS[format].largest for format in formats]
        largest = torch.tensor(numbers, dtype=torch.float32, device=device)
        owner.__dict__.update(
            fp8_scale=filled(1, *shape),
            fp8_amax=filled(-1, *shape),
            fp8_grad_amax=filled(-1, *shape),
            fp8_amax_history=filled(0, rows, *shape),
            fp8_largest=largest,
            _scales_key=key,
        )
    register_scales(owner)


def is_new(owner: nn.Module) -> bool:
    """Whether the state is still the initial one: no magnitude was recorded or loaded."""
    state = dict(tensors_of(owner))
    first = {"fp8_scale": 1, "fp8_amax": -1, "fp8_grad_amax": -1, "fp8_amax_history": 0}
    return state["fp8_scale"].is_meta or all(
        bool((state[name] == value).all()) for name, value in first.items()
    )


def _shape(owner: nn.Module) -> tuple[int, ...]:
    """The shape of the scales."""
    groups: int | None = getattr(owner, "num_groups", None)
    return (3,) if groups is None else (3, groups)


def drop_scales(owner: nn.Module) -> None:
    _tell(owner)
    with _lock:
        _list_owner(owner, is_one=False)
        _note_change(owner)
    for name in (*NAMES, "_scales_key", RUN):
        owner.__dict__.pop(name, None)


# ---- moving and loading


def save_scales(
    owner: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool
) -> None:
    """Adds the state to a state dict. Warns if it lacks magnitudes of other ranks."""
    for name, tensor in tensors_of(owner):
        destination[prefix + name] = tensor if keep_vars else tensor.detach()
    if has_scales(owner) and key_of(owner) in reduced and _has_records(owner):
        warnings.warn(
            f"[{type(owner).__name__}] a state dict lacks the magnitudes that other ranks have met "
            "since the last region: call tops.quantization.update_scales(recipe, group) on every "
            "rank before",
            stacklevel=2,
        )


def _has_records(owner: nn.Module) -> bool:
    records = (owner.__dict__[name] for name in ("fp8_amax", "fp8_grad_amax"))
    return any(bool((record >= 0).any()) for record in records if not record.is_meta)


def move_scales(owner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Applies `Module._apply(function)` to the state. It stays in float32, whatever the dtype of
    the parameters. If `function` empties tensors (`to_empty`), scales start at 1 again."""
    if not has_scales(owner):
        return
    scale = owner.__dict__["fp8_scale"]
    is_fake = isinstance(scale, torch._subclasses.FakeTensor)
    # All dtypes can represent these numbers, and memory does not hold them by chance.
    probe = torch.randint(1, 256, (8,), generator=_probes).float()
    moved = function(
        torch.empty_like(scale) if scale.is_meta or is_fake else probe.to(scale.device)
    )
    if not moved.is_meta and not is_fake:
        if scale.is_meta or not torch.equal(moved.to("cpu", torch.float32), probe):
            _set_new(owner, key_of(owner), moved.device)
            return
    for name, tensor in tensors_of(owner):
        to = function(tensor) if moved.dtype == torch.float32 else tensor.to(moved.device)
        owner.__dict__[name] = to


def scale_errors(owner: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
    """The errors in the scales of a state dict, for a module that has or may get scales."""
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
    if has_scales(owner) and key_of(owner) != key and not is_new(owner):
        return [
            f"{what} must be for the recipe '{key_of(owner)}', got those for '{key}'; "
            "tops.quantization.reset_scales(model) has it take any"
        ]
    return []


def _key_in(owner: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> str | None:
    """The key of complete scales; None if they do not fit together, or do not fit the module."""
    *rows, history, largest = (state_dict[prefix + name] for name in NAMES)
    shape = _shape(owner)
    if history.dim() == 0 or len(history) == 0 or tuple(history.shape[1:]) != shape:
        return None
    if any(tuple(row.shape) != shape for row in rows) or tuple(largest.shape) != (3,):
        return None
    names = {
        row.largest: row.name
        for row in FORMATS.values()
        if row.has_one_scale and row.scale == "float32"
    }
    formats = [names.get(number) for number in largest.tolist()]
    if None in formats:
        return None
    return ", ".join([*map(str, formats), f"delayed {len(history)}"])


def make_room(owner: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Makes the state that `load_scales` loads, for a state dict without errors."""
    if prefix + "fp8_scale" in state_dict:
        key = _key_in(owner, state_dict, prefix)
        assert key is not None
        make_scales(owner, key)


def load_scales(
    owner: nn.Module, state_dict: Mapping[str, Any], prefix: str, unexpected_keys: list[str]
) -> None:
    """Loads the scales of a state dict. Without any, the module's own scales stay."""
    loaded = {name: state_dict[prefix + name] for name in NAMES if prefix + name in state_dict}
    if not loaded:
        if not has_scales(owner):
            owner.__dict__[NOT_LOADED] = True
        return
    make_room(owner, state_dict, prefix)  # parameters may have left the meta device since
    _tell(owner)
    unexpected_keys[:] = [key for key in unexpected_keys if key.removeprefix(prefix) not in loaded]
    device = owner.__dict__["fp8_scale"].device
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in loaded.items():
            # These are new tensors, because backward may have saved the old ones.
            owner.__dict__[name] = tensor.detach().to(device, torch.float32, copy=True).contiguous()
    _note_change(owner)
