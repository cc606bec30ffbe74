"""Patterns: the ops to which a user's fusion applies, entry by entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..op.base import BasicOperation, FusibleOperation
from ..op.methods import shown


@dataclass(frozen=True)
class PatternEntry:
    """One entry of a pattern: an op of one of these classes, which may be absent if `optional`."""

    classes: tuple[type[BasicOperation], ...]
    optional: bool = False

    @property
    def names(self) -> list[str]:
        return [cls.__name__ for cls in self.classes]

    def takes(self, op: BasicOperation) -> bool:
        return isinstance(op, self.classes)


Pattern = tuple[PatternEntry, ...]


def optional(*classes: type[BasicOperation]) -> PatternEntry:
    """An optional entry of a fusion's `pattern`: an op of one of the classes may fill it.

    If there are several matches, the fusion takes the one with the most ops.

    Raises:
        TypeError: there is no class, or an argument is no class of basic ops.
    """
    return PatternEntry(_check_classes(classes), optional=True)


def check_pattern(entries: object) -> Pattern:
    """Raises TypeError if an entry is no class of basic ops, and ValueError if all entries are
    optional."""
    if not isinstance(entries, list | tuple):
        raise TypeError(
            f"[fusion] pattern must be a list of classes of basic ops, got {shown(entries)}"
        )
    pattern = tuple(_entry(found) for found in entries)
    if all(entry.optional for entry in pattern):
        raise ValueError(
            f"[fusion] pattern must have an entry that is not optional, got {len(pattern)} that are"
        )
    return pattern


def _entry(found: Any) -> PatternEntry:
    if isinstance(found, PatternEntry):
        return found
    return PatternEntry(_check_classes(found if isinstance(found, tuple) else (found,)))


def _check_classes(classes: tuple[Any, ...]) -> tuple[type[BasicOperation], ...]:
    for cls in classes or (None,):
        if isinstance(cls, type) and issubclass(cls, BasicOperation):
            continue
        hint = ""
        if isinstance(cls, type) and issubclass(cls, FusibleOperation):
            hint = ", which stands for several: name those that its basic_ops hold"
        raise TypeError(f"[fusion] pattern must name classes of basic ops, got {shown(cls)}{hint}")
    return classes
