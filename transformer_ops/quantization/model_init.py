"""The region in which weights are created quantized: `quantized_model_init`."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from .quantized_tensor import QuantizedTensor
from .recipe import DelayedScaling, MXFP8BlockScaling, Recipe
from .region import current_recipe
from .scales import make_scales

__all__ = ["hold_quantized", "quantized_model_init"]


class _State(threading.local):
    def __init__(self) -> None:
        # The region of this thread, or None; and (region, outer) of the surrounding one.
        self.region: quantized_model_init | None = None
        self.outer: tuple[Any, ...] = ()


_STATE = _State()


class quantized_model_init:
    """Within this context, the weights of `Linear`, `BasicLinear`, `PackedLinear` and
    `GroupedLinear` are created as `QuantizedTensor`s in the recipe's format for weights. They take
    about a byte for each number (half a byte in NVFP4) instead of two or four. Also under
    `DelayedScaling`, each write computes the scale again from the numbers.

    Regions may nest; `enabled=False` creates plain weights again. A region applies to the modules
    that its thread constructs.

    Args:
        enabled: False for plain weights.
        recipe: the recipe whose format for weights is used; None for the recipe of the surrounding
            `autocast`, and without one for `MXFP8BlockScaling()`.
        preserve_high_precision_init_val: keep the tensors before quantization, on the CPU, until
            `weight.clear_high_precision_init_val()`, so that an optimizer can initialize its master
            weights with `weight.get_high_precision_init_val()`.

    Raises:
        TypeError: `recipe` is no recipe, or a flag is no bool.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        flags = {
            "enabled": enabled,
            "preserve_high_precision_init_val": preserve_high_precision_init_val,
        }
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise TypeError(f"[quantized_model_init] {name} must be a bool, got {value!r}")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                "[quantized_model_init] recipe must be one of transformer_ops.recipe, "
                f"got {recipe!r}"
            )
        self.recipe = (recipe or current_recipe() or MXFP8BlockScaling()) if enabled else None
        self.preserves = preserve_high_precision_init_val

    def __enter__(self) -> quantized_model_init:
        # The thread stores this, not this object, because several threads may enter it.
        _STATE.outer = (_STATE.region, _STATE.outer)
        _STATE.region = self
        return self

    def __exit__(self, *exception: object) -> None:
        _STATE.region, _STATE.outer = _STATE.outer


def hold_quantized(op: Any) -> None:
    """The constructor of a product calls this. In the region, its owner's weight, or each tensor of
    its list, becomes quantized. Scales of delayed scaling exist from the start."""
    region = _STATE.region
    hold_scales(op)
    if region is None or region.recipe is None:
        return
    format = region.recipe.operands_of(op)[1]
    if format == "exact":
        return
    owner: Any = op._parameter_owner
    for name in op._names_in("weight"):
        plain = getattr(owner, name)
        # A parameter created as an inference tensor could never be trained.
        with torch.inference_mode(False), torch.no_grad():
            held: Any = nn.Parameter(QuantizedTensor.quantize(plain, format))
            if region.preserves:
                held._initial = plain.detach().clone().cpu()
        owner.register_parameter(name, held)


def hold_scales(op: Any) -> None:
    """The constructor of an op with scales calls this. Within `autocast` with `DelayedScaling`, the
    op has scales from the start."""
    recipe = current_recipe()
    if isinstance(recipe, DelayedScaling) and op._takes_scales:
        make_scales(op._parameter_owner, recipe.key)
