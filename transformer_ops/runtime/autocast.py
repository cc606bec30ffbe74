"""Python steps under autocast: they see what native steps see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..op.base import BasicOperation
from ..plan.plan import Plan
from ..quantization.quantized_tensor import QuantizedTensor
from .stand_ins import StandIns


class Autocast:
    """The casts of one plan; they do nothing if the plan was made without autocast."""

    def __init__(self, plan: Plan) -> None:
        self.dtype: torch.dtype | None = None
        if plan.autocast is not None:
            self.dtype = getattr(torch, plan.autocast)

    def cast(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """A tensor of an op that computes in `dtype`."""
        if dtype is None or dtype != self.dtype or tensor.dtype != torch.float32:
            return tensor
        return in_dtype(tensor, dtype)

    def stand_ins(
        self,
        ops: Sequence[BasicOperation],
        dtypes: Sequence[torch.dtype | None],
        others: StandIns,
    ) -> StandIns:
        """`others`, with the parameters of the ops in the dtypes in which they compute."""
        if self.dtype is None:
            return others
        real, given = [], []
        for parameter, dtype in _parameters(ops, dtypes):
            own = others.replace(parameter)
            cast = self.cast(own, dtype)
            if cast is not own:
                real.append(parameter)
                given.append(cast)
        if not real:
            return others
        return StandIns([*others.real, *real], [*others.given, *given], others.is_trace)

    def cast_saved(
        self,
        tensors: Sequence[Tensor | None],
        which: Callable[[int], bool],
        dtype: torch.dtype | None,
    ) -> tuple[Tensor | None, ...]:
        """The saved tensors, of which those at the indices `which` are parameters."""
        if self.dtype is None:
            return tuple(tensors)
        return tuple(
            self.cast(tensor, dtype) if tensor is not None and which(k) else tensor
            for k, tensor in enumerate(tensors)
        )

    def in_backward(self, grad: Tensor) -> AbstractContextManager[object]:
        """The autocast state of forward, which autograd does not restore."""
        device = grad.device.type
        if self.dtype is None:
            is_other = torch.is_autocast_enabled(device)
            return torch.autocast(device, enabled=False) if is_other else nullcontext()
        # A cached cast has no history, so forward calls in the surrounding region must not use it.
        return torch.autocast(device, self.dtype, cache_enabled=False)


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The input of a step that computes in `dtype`."""
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    cast = tensor.to(dtype)
    # Methods ask which gradients they have to compute. Inside the node a cast has no history.
    return cast.requires_grad_() if tensor.requires_grad else cast


def _parameters(
    ops: Sequence[BasicOperation], dtypes: Sequence[torch.dtype | None]
) -> Iterable[tuple[Tensor, torch.dtype | None]]:
    for op, dtype in zip(ops, dtypes, strict=True):
        for parameter in op._parameter_tensors():
            if isinstance(parameter, Tensor) and not isinstance(parameter, QuantizedTensor):
                yield parameter, dtype
