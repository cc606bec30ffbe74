"""Tensors of a trace that replace those that Python methods find on their modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class StandIns:
    """While it is entered, torch functions that get one of the tensors `real` use the one at the
    same index of `given` instead. Otherwise a trace would treat `self.weight` as a constant."""

    # In a trace: the class of the op whose methods run, for errors.
    user = ""

    def __init__(
        self, real: Sequence[Tensor] = (), given: Sequence[Tensor] = (), is_trace: bool = False
    ) -> None:
        self.is_trace = is_trace
        self.real, self.given = tuple(real), tuple(given)
        self._by_id = {id(r): g for r, g in zip(self.real, self.given, strict=True) if r is not g}
        self._mode: _Mode | None = None

    def with_given(self, given: Sequence[Tensor]) -> StandIns:
        """The same with other replacements."""
        return StandIns(self.real, given, self.is_trace) if self.real or self.is_trace else self

    def replace(self, value: Any) -> Any:
        """The replacement of a tensor; other values are returned unchanged."""
        return self._by_id.get(id(value), value)

    def __enter__(self) -> StandIns:
        if self._by_id or self.is_trace:
            self._mode = _Mode(self)
            self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*exception)
            self._mode = None


# A trace has no numbers.
_READS_NUMBERS = (
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.data_ptr,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__complex__,
    Tensor.__index__,
)


class _Mode(TorchFunctionMode):
    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        stand_ins = self._stand_ins
        if stand_ins.is_trace and func in _READS_NUMBERS:
            raise RuntimeError(
                f"[{stand_ins.user}] methods in a compiled graph must compute with tensors, got "
                f"Tensor.{func.__name__}, which reads their numbers"
            )
        replace = stand_ins.replace
        return func(*tree_map(replace, args), **tree_map(replace, kwargs or {}))
