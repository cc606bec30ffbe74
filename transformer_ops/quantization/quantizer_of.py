"""The quantizers of ops, by the recipe that they follow."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .. import _C
from ..op.base import quantizers_by
from .number_format import FORMATS
from .quantizers import Float8Quantizer, NVFP4Quantizer, Quantizer, quantizer_for
from .recipe import DelayedScaling, NVFP4BlockScaling
from .scales import has_scales, key_of
from .second_run import state_of_call
from .state import STATE

_PLACES = ("input", "weight", "grad_output")


def quantizer_of(op: Any, mode: str, i: int) -> Quantizer | None:
    if mode not in ("forward", "backward"):
        raise ValueError(f"[{op._get_name()}] mode must be 'forward' or 'backward', got {mode!r}")
    recipe = STATE.recipe or STATE.last
    roles = _roles(op, mode)
    if recipe is None or i not in range(len(roles)):
        return None
    place = _PLACES.index(roles[i])
    if isinstance(recipe, DelayedScaling):
        group = i // (2 if mode == "forward" else 1)
        return _delayed(recipe, op, place, group)
    found = quantizer_for(recipe.operands_of(op)[place])
    if isinstance(recipe, NVFP4BlockScaling) and roles[i] != "weight":
        assert isinstance(found, NVFP4Quantizer)
        is_random = roles[i] == "grad_output" and not recipe.disable_stochastic_rounding
        found = dataclasses.replace(
            found, with_rht=not recipe.disable_rht, stochastic_rounding=is_random
        )
    return found


def _roles(op: Any, mode: str) -> list[str]:
    """The tensors of an op that a recipe may quantize; for a grouped op, group by group."""
    if op.is_python or op._kind is None:
        return []
    operands: list[str] = list(_C.declaration(op._kind)["operands"])
    if "weight" in operands:
        of_one = operands if mode == "forward" else ["grad_output"]
        return of_one * getattr(op, "num_groups", 1)
    name = "input" if mode == "forward" else "grad_output"
    return [name] if operands and getattr(op, f"rounds_{name}") else []


def _delayed(recipe: DelayedScaling, op: Any, place: int, group: int) -> Quantizer | None:
    if not op._takes_scales:
        return None
    dtype, owner = FORMATS[recipe.operands[place]].dtype, op._parameter_owner
    assert dtype is not None
    if not has_scales(owner) or key_of(owner) != recipe.key:
        return Float8Quantizer(torch.ones(()), torch.zeros(()), dtype)
    state = state_of_call(owner)
    amax = state["fp8_grad_amax" if place == 2 else "fp8_amax"][place]
    scale = state["fp8_scale"][place]
    if scale.dim():
        scale, amax = scale[group], amax[group]
    return Float8Quantizer(scale, amax, dtype)


quantizers_by(quantizer_of)
