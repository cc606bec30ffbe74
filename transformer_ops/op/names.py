"""The user's names for the basic ops of a group, for error texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from .base import BasicOperation, FusibleOperation
from .channels import PrivateChannel


class OpName(NamedTuple):
    """The class that a user wrote, and its path in the `whole`, such as "1" or "1.0".

    The path is empty for an op that is called alone. `is_part`: the basic op is a part of a
    container, such as Linear.
    """

    name: str
    path: str
    whole: str
    is_part: bool

    @property
    def suffix(self) -> str:
        """The end of an error that begins with the name."""
        return f" (op {self.path} of the {self.whole})" if self.path else ""

    def __str__(self) -> str:
        return f"op {self.path} ({self.name})" if self.path else self.name


def names_of(modules: Sequence[nn.Module], paths: Iterable[str], whole: str) -> list[OpName]:
    """The name of each basic op of the modules, from the path of the module that contains it."""
    return [
        _name_of(module, basic, path, whole)
        for module, path in zip(modules, paths, strict=True)
        if isinstance(module, FusibleOperation)
        for basic in module.basic_ops
    ]


def _name_of(module: nn.Module, basic: BasicOperation, path: str, whole: str) -> OpName:
    owner = basic.owner
    name = type(module if owner is basic else owner).__name__
    around, dot, _ = path.rpartition(".")
    if dot and (not around or around.endswith(".")):
        # This is an end of a Residual, whose path has an empty name.
        name, path = "Residual", around.rstrip(".")
    return OpName(name, path, whole, module is not basic)


class WantedInputs(NamedTuple):
    """The number and the names of the extra inputs that a caller has to pass, for an error text."""

    caller: str
    number: int
    purpose: str
    others: str = ""


def check_count(wanted: WantedInputs, got: int) -> None:
    """Raises ValueError if the number of extra inputs is wrong."""
    if got != wanted.number:
        raise ValueError(
            f"[{wanted.caller}] extra inputs must be {wanted.number}{wanted.purpose}, "
            f"got {got}{wanted.others}"
        )


def wanted_inputs(
    caller: str,
    ops: Sequence[BasicOperation],
    names: Sequence[OpName],
    is_fed: Iterable[Sequence[bool]],
) -> WantedInputs:
    """`is_fed`: for each op and each of its extra inputs, whether another op feeds it."""
    wanted, others = [], []
    for op, name, row in zip(ops, names, is_fed, strict=True):
        fields = zip(op._extra_input_names(), op._input_channels, row, strict=True)
        for field, channel, fed in fields:
            where = f"{field} of {name}" if name.path else field
            if not fed:
                wanted.append(where)
            elif not isinstance(channel, PrivateChannel):
                others.append(f"; {where} comes from channel {channel!r}")
    purpose = f" for {' and '.join(wanted)}" if wanted else ""
    return WantedInputs(caller, len(wanted), purpose, "".join(others))
