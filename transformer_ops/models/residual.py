"""Rules for norms and feed-forwards inside of residual sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..ops.add_extra_input import AddExtraInput
from ..ops.constant_scale import ConstantScale
from ..ops.make_extra_output import MakeExtraOutput
from .parts import linear, norm, part, parts_of_sum_and_norm, product_and_activation
from .pattern import Names
from .rules import register_fuse_rule

_CHANNEL = "residual"


def _begin() -> nn.Module:
    return MakeExtraOutput().set_extra_output_channel(0, _CHANNEL, output_to_caller=False)


def _end() -> nn.Module:
    return AddExtraInput().set_extra_input_channel(0, _CHANNEL)


# ---- a norm before the feed-forward, or behind it, inside of the sum


def _inside(module: Any, names: Names) -> Sequence[nn.Module]:
    ops: list[nn.Module] = []
    for name in ("first", "second", "third"):
        if name in names:
            ops += part(getattr(module, names[name]))
    if "factor" in names:
        ops.append(ConstantScale(float(getattr(module, names["factor"]))))
    return [_begin(), *ops, _end()]


# norm, feed-forward; feed-forward, norm (OLMo 2); norm, feed-forward, norm (Gemma 2 and 3);
# norm, feed-forward, dropout (ViT)
_CALLS = [f"H = self.any_{name}(H)" for name in ("first", "second", "third")]
_SUMS = ("R + H", "H + R", "R + self.any_third(H)", "R + H * self.any_factor")
_IN_STATEMENTS = [
    "\n".join(["R = H", *_CALLS[:count], f"H = {total}"])
    for count in (2, 3)
    for total in _SUMS
    if count == 2 or "third" not in total
]
# Blocks of nanoGPT.
_IN_ONE = ["H = H + self.any_second(self.any_first(H))"]
register_fuse_rule("residual", _IN_STATEMENTS + _IN_ONE, _inside)


# ---- a norm of the sum (BERT)


def _sum_and_norm(module: Any, names: Names) -> Sequence[nn.Module]:
    down, drop, normed = (getattr(module, names[name]) for name in ("down", "drop", "norm"))
    return [linear(down), *part(drop), AddExtraInput(), norm(normed)]


register_fuse_rule(
    "sum and norm",
    """
    H = self.any_down(H)
    H = self.any_drop(H)
    H = self.any_norm(H + X)
    """,
    _sum_and_norm,
)


def _feed_forward_and_norm(module: Any, names: Names) -> Sequence[nn.Module]:
    down, drop, normed = parts_of_sum_and_norm(getattr(module, names["output"]))
    ops = product_and_activation(getattr(module, names["intermediate"]))
    return [_begin(), *ops, linear(down), *part(drop), _end(), norm(normed)]


register_fuse_rule(
    "feed-forward, sum and norm",
    """
    Y = self.any_intermediate(H)
    Z = self.any_output(Y, H)
    """,
    _feed_forward_and_norm,
    method="feed_forward_chunk",
)
