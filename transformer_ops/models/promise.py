"""What deferred logits are computed from.

In: a product, and what is done to its result, `logits / 2`. Out: the numbers, once they are read,
or the loss, without them.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .head_product import Form, HeadProduct

__all__ = ["Promise", "Step", "promise_of"]


class Step(NamedTuple):
    """What is computed of other logits: "to" (a dtype), "view" (a shape), "div", "mul" (a number),
    "add" (a number for each class), "tanh" or "clone"."""

    name: str
    value: Any = None

    def run(self, z: Tensor) -> Tensor:
        """The next logits."""
        if self.name == "to":
            return z.to(self.value)
        if self.name == "view":
            return z.view(self.value)
        if self.name in ("tanh", "clone"):
            return z.tanh() if self.name == "tanh" else z.clone()
        if self.name == "add":
            return z + self.value
        return z / self.value if self.name == "div" else z * self.value


class Promise:
    """What deferred logits are computed from, and their numbers once they are."""

    def __init__(
        self,
        product: HeadProduct,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parent: Tensor | None = None,
        step: Step | None = None,
    ) -> None:
        self.product, self.shape, self.dtype = product, shape, dtype
        self.parent, self.step = parent, step
        self.numbers: Tensor | None = None  # of a copy, as they were before its parent was written
        self.dense: Tensor | None = None  # the logits that everything reads and writes
        self.node: Any = None  # the `grad_fn` of `dense` before a write that autograd recorded
        self.has_loss = False
        self.children: weakref.WeakSet[Promise] = weakref.WeakSet()

    @property
    def is_view(self) -> bool:
        """Whether they share the memory of their parent."""
        return self.step is not None and self.step.name == "view"

    @property
    def is_open(self) -> bool:
        """Whether nobody can have written to them."""
        if self.is_view and self.parent is not None and not promise_of(self.parent).is_open:
            return False
        return self.dense is None

    def pure(self) -> Tensor:
        """The numbers as they were in forward."""
        if self.parent is None or self.step is None:
            return self.product.run()
        return self.step.run(promise_of(self.parent).pure())

    def take(self) -> Tensor:
        """The numbers, if they are known already."""
        found, self.numbers = self.numbers, None
        return self.pure() if found is None else found

    def fix(self, numbers: Tensor) -> None:
        """Computes all copies of these logits, which do not follow what is written to them."""
        for child in list(self.children):
            assert child.step is not None
            found = child.step.run(numbers)
            if child.is_view:
                child.fix(found)
            else:
                child.numbers = found

    @property
    def form(self) -> Form | None:
        """What these are of the product; None for what no loss takes."""
        steps: list[Step] = []
        promise = self
        while promise.parent is not None and promise.step is not None:
            steps.insert(0, promise.step)
            promise = promise_of(promise.parent)
        steps = [step for step in steps if step.name in ("div", "mul", "add", "tanh")]
        cap = None
        if [step.name for step in steps[-2:]] == ["tanh", "mul"]:
            cap = float(steps[-1].value)
            steps = [*steps[:-2], Step("mul", cap)]
        if any(step.name == "tanh" for step in steps) or (cap is not None and cap <= 0):
            return None
        over, under = (
            math.prod(step.value for step in steps if step.name == name) for name in ("mul", "div")
        )
        bias = None
        for step in steps:
            if step.name == "add":
                bias = step.value if bias is None else bias + step.value
            elif bias is not None:
                bias = step.run(bias)
        return Form(over / under, cap, bias)


def promise_of(logits: Tensor) -> Promise:
    """The promise of deferred logits."""
    found: Promise = vars(logits)["_promise"]
    return found
