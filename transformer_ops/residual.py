"""Residual: a residual connection around modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from .constructors import names_its_arguments
from .op.channels import PrivateChannel
from .ops import AddExtraInput, MakeExtraOutput
from .sequential import Sequential


@names_its_arguments
class Residual(Sequential):
    """`x + f(x)` with `f` the modules in order, as in `Sequential(Residual(RMSNorm(8), ...))`.

    Takes what a `Sequential` takes: modules (ops, other Residuals, any `nn.Module`), one list of
    modules, or one dict of named modules, and its keyword arguments. It stands for
    `MakeExtraOutput`, the modules, and `AddExtraInput` on a channel of its own.

    A Sequential lays these out among its own modules, so that fusions go across the ends of a
    Residual; `recompute` and `saved` are then those of the Sequential. A Residual is called as a
    module instead where it has hooks, a `forward` of its own, or other policies that it was given.
    A slice is a Residual of these modules.

    Raises:
        TypeError: an argument that is no module.
        ValueError: no modules; those of `Sequential`.
    """

    def __init__(
        self,
        *modules: Any,
        recompute: str = "cheap",
        saved: str = "exact",
        saved_inputs: bool = False,
    ) -> None:
        super().__init__(*modules, recompute=recompute, saved=saved, saved_inputs=saved_inputs)
        if not self._modules:
            raise ValueError("[Residual] modules must be at least one, got none")
        channel = PrivateChannel("residual")
        fork = MakeExtraOutput().set_extra_output_channel(0, channel, output_to_caller=False)
        # Past nn.Module: they have no state, and no place among the modules.
        self.__dict__["_ends"] = (fork, AddExtraInput().set_extra_input_channel(0, channel))

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        fork, join = self.__dict__["_ends"]
        ends: tuple[nn.Module, nn.Module] = (
            fork._replicate_for_data_parallel(),
            join._replicate_for_data_parallel(),
        )
        replica.__dict__["_ends"] = ends
        return replica
