"""The region in which weights are made quantized: `quantized_model_init`."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from ..op.scales import make_scales
from ..quantized_tensor import QuantizedTensor
from ..recipe import CustomRecipe, DelayedScaling, MXFP8BlockScaling, Recipe
from .region import current_recipe

__all__ = ["hold_quantized", "quantized_model_init"]


class _State(threading.local):
    def __init__(self) -> None:
        # The region of this thread, or None; and (region, outer) of the one around it.
        self.region: quantized_model_init | None = None
        self.outer: tuple[Any, ...] = ()


_STATE = _State()


class quantized_model_init:
    """Within this context, the weights of `Linear`, `BasicLinear`, `PackedLinear` and
    `GroupedLinear` are made as `QuantizedTensor`s in the format that the recipe has for weights:
    they take about a byte a number (half a byte in NVFP4) instead of two or four.
    Under `DelayedScaling`, too, each write makes the scale anew from the numbers.

    A region may lie within another one; `enabled=False` makes plain weights again. It counts for
    the modules that the thread that entered it constructs.

    Args:
        enabled: False for plain weights.
        recipe: whose format of weights is taken; None for the recipe of the surrounding
            `autocast`, and without one for `MXFP8BlockScaling()`.
        preserve_high_precision_init_val: keep what was quantized, on the CPU, until
            `weight.clear_high_precision_init_val()`, so that an optimizer can begin its master
            weights with `weight.get_high_precision_init_val()`.

    Raises:
        TypeError: `recipe` is none, or a flag no bool.
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
        # With the thread, not with this object, which several threads may enter.
        _STATE.outer = (_STATE.region, _STATE.outer)
        _STATE.region = self
        return self

    def __exit__(self, *exception: object) -> None:
        _STATE.region, _STATE.outer = _STATE.outer


def hold_quantized(op: Any) -> None:
    """For the constructor of a product: in the region, its owner's weight, or each tensor of its
    list, becomes quantized. Scales of delayed scaling are there from the start."""
    region = _STATE.region
    hold_scales(op)
    if region is None or region.recipe is None:
        return
    format = _weight_format(region.recipe, op)
    if format == "exact":
        return
    owner: Any = op._parameter_owner
    for name in op._names_in("weight"):
        plain = getattr(owner, name)
        # A parameter made as an inference tensor could never be trained.
        with torch.inference_mode(False), torch.no_grad():
            held: Any = nn.Parameter(QuantizedTensor.quantize(plain, format))
            if region.preserves:
                held._initial = plain.detach().clone().cpu()
        owner.register_parameter(name, held)


def hold_scales(op: Any) -> None:
    """For the constructor of an op that takes scales: within `autocast` with `DelayedScaling` it
    has them from the start."""
    recipe = current_recipe()
    if isinstance(recipe, DelayedScaling) and op._takes_scales:
        make_scales(op._parameter_owner, recipe.key)


def _weight_format(recipe: Recipe, op: Any) -> str:
    if isinstance(recipe, CustomRecipe):
        return recipe.formats_of("linear", op).split(", ")[1]
    return recipe.operands[1]
