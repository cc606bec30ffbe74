"""What guards of fused modules see: each change, and each way back."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from transformer_ops import _C


class Base:
    scale = 1


def world() -> tuple[dict[str, Any], type[Any], nn.Module]:
    table = {"number": 1.0, "hooks": {}, "same": "text"}
    table |= {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    return table, type("Kind", (Base,), {}), nn.Linear(2, 2)


def guards_on(table: dict[str, Any], kind: type[Any], owner: nn.Module) -> _C.Guards:
    guards = _C.Guards(owner)
    for key in ("number", "same", "absent"):
        guards.add_value(table, key, key)
    guards.add_size(table, "hooks", "hooks")
    guards.add_shape(table, "weight", "shape")
    guards.add_type_of_value(table, "weight", "kind of weight")
    guards.add_type_of_value(table, "bias", "dtype of bias")
    guards.add_class_attribute(kind, "scale", "scale")
    guards.add_class_attribute(kind, "other", "other")
    guards.add_value(vars(owner), "training", "training")
    guards.add_type(owner, "kind of owner")
    return guards


def edits(table: dict[str, Any], kind: type[Any], owner: nn.Module) -> list[tuple[str, Any, Any]]:
    """Each with the text of its guard, and with the way back."""
    weight, bias, hooks = table["weight"], table["bias"], table["hooks"]
    linear = type(owner)
    other = type("Other", (linear,), {})
    return [
        ("number", lambda: table.update(number=2.0), lambda: table.update(number=1.0)),
        ("absent", lambda: table.update(absent=None), lambda: table.pop("absent")),
        ("same", lambda: table.pop("same"), lambda: table.update(same="".join("text"))),
        # These change nothing in the dict itself.
        ("hooks", lambda: hooks.update(a=1), hooks.clear),
        (
            "shape",
            lambda: setattr(weight, "data", torch.ones(3)),
            lambda: setattr(weight, "data", torch.ones(2, 3)),
        ),
        ("scale", lambda: setattr(Base, "scale", 2), lambda: setattr(Base, "scale", 1)),
        ("other", lambda: setattr(kind, "other", 2), lambda: delattr(kind, "other")),
        ("training", owner.eval, owner.train),
        (
            "kind of owner",
            lambda: setattr(owner, "__class__", other),
            lambda: setattr(owner, "__class__", linear),
        ),
        (
            "kind of weight",
            lambda: table.update(weight=nn.Parameter(weight)),
            lambda: table.update(weight=weight),
        ),
        (
            "dtype of bias",
            lambda: setattr(bias, "data", torch.ones(2, dtype=torch.float64)),
            lambda: setattr(bias, "data", torch.ones(2)),
        ),
    ]


def test_guards_see_every_change_and_every_way_back() -> None:
    rng = random.Random(0)
    table, kind, owner = world()
    guards = guards_on(table, kind, owner)
    known = edits(table, kind, owner)
    changed: set[str] = set()
    for _ in range(500):
        text, change, undo = rng.choice(known)
        if text in changed:
            undo()
            changed.remove(text)
        else:
            change()
            changed.add(text)
        table[str(rng.randrange(5))] = rng.random()  # which no guard watches
        for _ in range(rng.randrange(3)):
            assert guards.hold() == (not changed), (changed, guards.broken())
            assert changed or guards.broken() is None
            assert not changed or guards.broken() in changed
