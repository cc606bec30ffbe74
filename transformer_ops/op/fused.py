"""Base class of the fused ops that users write in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from . import methods
from .base import BasicOperation, FusibleOperation


class FusedOperation(FusibleOperation):
    """Several basic ops that the user's Python methods run as one step.

    A subclass implements `fuser_forward`, or the pair `fuser_forward_compute` and
    `fuser_forward_save_ctx`, or `fuser_backward`, or a forward and a backward. It owns no
    parameters: these stay with `basic_ops`.
    """

    _is_contract: ClassVar[bool] = True

    def __init__(self, basic_ops: Sequence[BasicOperation]) -> None:
        """Raises TypeError unless `basic_ops` is a list of basic ops, ValueError if it is empty."""
        super().__init__()
        name = type(self).__name__
        if not isinstance(basic_ops, list | tuple | Iterator):
            got = methods.shown(basic_ops)
            raise TypeError(f"[{name}] basic_ops must be a list of basic ops, got {got}")
        ops = tuple(basic_ops)
        for op in ops:
            if not isinstance(op, BasicOperation):
                raise TypeError(
                    f"[{name}] basic_ops must hold BasicOperation only, got {type(op).__name__}"
                )
        if not ops:
            raise ValueError(
                f"[{name}] basic_ops must not be empty, got {methods.shown(basic_ops)}"
            )
        # It is a tuple, so that nn.Module does not register the ops a second time.
        self._basic_ops = ops

    @classmethod
    def _method_families(cls) -> tuple[methods.Family, ...]:
        return ("fuser",)

    @property
    def is_fused_op(self) -> bool:
        return True

    @property
    def training(self) -> bool:
        """The flag of the first of its ops. Setting it here changes nothing."""
        return self._basic_ops[0].training

    @training.setter
    def training(self, value: bool) -> None:
        pass

    @property
    def basic_ops(self) -> list[BasicOperation]:
        return list(self._basic_ops)

    @property
    def supports_forward(self) -> bool:
        """Whether the class defines a forward."""
        return self._python_forward is not None

    @property
    def supports_backward(self) -> bool:
        """Whether the class defines `fuser_backward`."""
        return self._python_backward is not None

    def extra_repr(self) -> str:
        return ", ".join(type(op).__name__ for op in self._basic_ops)
