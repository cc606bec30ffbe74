"""Objects by number, so that a compiled graph can find them."""

from __future__ import annotations

import itertools
import weakref
from typing import Any


class Handles:
    """A number for each object, as long as the object lives."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, found: Any) -> int:
        """A new number for the object."""
        number = next(self._next)
        self._objects[number] = found
        return number

    def find(self, number: int) -> Any:
        """The object of a number."""
        return self._objects[number]


handles = Handles()
