"""Residual: a residual connection around modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..base.constructors import names_its_arguments
from ..op.channels import PrivateChannel
from ..ops import AddExtraInput, MakeExtraOutput
from .sequential import Sequential


@names_its_arguments
class Residual(Sequential):
    """`x + f(x)`, where `f` is the modules in order, as in `Sequential(Residual(RMSNorm(8), ...))`.

    It takes what a `Sequential` takes: modules (ops, other Residuals, any `nn.Module`), one list of
    modules, or one dict of named modules, and its keyword arguments. It is equivalent to
    `MakeExtraOutput`, the modules, and `AddExtraInput` connected by its own channel.

    A Sequential includes these ops among its own modules, so that fusions can cross the ends of a
    Residual; `recompute` and `saved` are then those of the Sequential. A Residual is called as a
    module instead if it has hooks, a `forward` of its own, or other policies of its own. A slice is
    a Residual of the selected modules.

    Raises:
        TypeError: an argument is no module.
        ValueError: there are no modules; also the errors of `Sequential`.
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
        # This bypasses nn.Module: these ops have no state, and are not among the modules.
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
