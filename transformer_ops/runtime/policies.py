"""The settings of a group's owner for its plans."""

from __future__ import annotations

from typing import NamedTuple


class Policies(NamedTuple):
    """`recompute`, `saved` and `saved_inputs` of a `Sequential` or an `OperationFuser`."""

    recompute: str = "cheap"
    saved: str = "exact"
    saved_inputs: bool = False

    def checked(self, op: str) -> Policies:
        """Returns itself. Raises ValueError or TypeError if a value is not allowed."""
        if self.recompute not in ("none", "cheap", "products"):
            raise ValueError(
                f'[{op}] recompute must be "none", "cheap" or "products", got {self.recompute!r}'
            )
        if self.saved not in ("exact", "fp8", "int8"):
            raise ValueError(f'[{op}] saved must be "exact", "fp8" or "int8", got {self.saved!r}')
        if not isinstance(self.saved_inputs, bool):
            raise TypeError(f"[{op}] saved_inputs must be a bool, got {self.saved_inputs!r}")
        if self.saved_inputs and self.saved == "exact":
            raise ValueError(
                f'[{op}] saved_inputs must go with saved="fp8" or "int8", got saved="exact"'
            )
        return self
