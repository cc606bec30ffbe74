"""Weights whose gradients accumulate, or are computed after backward, as C++ asks for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import _C
from . import delayed, main_grad

# An op, and the index of a tensor of its weight.
Weight = tuple[int, int]


class WeightCall:
    """The weights of one call of a plan.

    Attributes:
        plan: the `HostPlan`.
        buffers: by weight, the buffers that a trace uses instead of those of the weights.
        given_pass: the pass that the gradients belong to, if it is not the one that runs.
    """

    def __init__(
        self, plan: Any, buffers: Mapping[Weight, main_grad.Buffer], given_pass: int | None
    ) -> None:
        self.plan = plan
        self.buffers = buffers
        self.given_pass = given_pass
        # Weight gradients that Python steps computed, to be returned later, by op.
        self.finished: dict[int, delayed.Finished] = {}

    def backward_pass(self) -> int:
        """The number of the pass that the gradients belong to: the one that runs, or that left
        them."""
        return _C.current_backward_pass() if self.given_pass is None else self.given_pass

    def accumulation(self, op: int) -> tuple[list[Tensor], bool] | None:
        """The buffers to which a product may add its weight gradients, and whether it overwrites
        them."""
        weights = self.plan.weights_of(op)
        if len(weights) > 1 and not all(weight.requires_grad for weight in weights):
            return None
        own = [main_grad.buffer_of(weight) for weight in weights]
        if not all(map(main_grad.takes_products, (b.tensor for b in own), weights)):
            return None
        given = [self.buffers.get((op, k), buffer) for k, buffer in enumerate(own)]
        backward_pass = self.backward_pass()
        overwrites = {buffer.is_first(backward_pass) for buffer in given}
        if len(overwrites) > 1:
            return None
        # If one parameter is in two positions, its gradients are added.
        if len({id(buffer.tensor) for buffer in given}) < len(given):
            return None
        return [buffer.tensor for buffer in given], overwrites.pop()

    def accumulate(self, op: int, k: int, grad: Tensor | None) -> Tensor | None:
        """Adds the gradient of tensor k of a weight to its buffer, unless a product did. Returns
        the gradient for autograd."""
        if op in self.plan.delaying:
            # A Python step has already computed it.
            if grad is not None:
                self._finished(op, k).grads[k] = grad
            return None
        return self.accumulate_now(op, k, grad)

    def _finished(self, op: int, k: int) -> delayed.Finished:
        """The object that collects tensor k of this backward's gradients."""
        found = self.finished.get(op)
        if found is None or any(grad is not None for grad in found.grads[k:]):
            found = self.finished[op] = delayed.Finished(len(self.plan.weight_names[op]))
            self.delay(op, found)
        return found

    def accumulate_now(self, op: int, k: int, grad: Tensor | None) -> Tensor | None:
        """The same for a gradient that is not computed later."""
        weight = self.plan.weight_of(op, k)
        buffer = self.buffers.get((op, k)) or main_grad.buffer_of(weight)
        backward_pass = self.backward_pass()
        if grad is not None:
            main_grad.accumulate(buffer, grad, backward_pass)
        buffer.note(backward_pass)
        return main_grad.for_autograd(weight)

    def delay(self, op: int, product: delayed.Product) -> None:
        """Stores the call that computes the gradient of an op's weight until its
        `backward_dw()`."""
        own: Any = self.plan.basic_ops[op]
        own._delay(functools.partial(finish, self.plan, op, product, self.backward_pass()))


def finish(plan: Any, op: int, product: delayed.Product, backward_pass: int) -> None:
    """Computes the gradient that backward left, and passes it to its buffer or to autograd."""
    call, weights = plan.start(backward_pass=backward_pass), plan.weights_of(op)
    if op not in plan.accumulating:
        delayed.give_to_autograd(weights, product.run)
        return
    target = call.accumulation(op)
    is_added = target is not None and product.run_into(*target)
    grads = [None] * len(weights) if is_added else product.run()
    dummies = [
        call.accumulate_now(op, k, grad)
        if weight.requires_grad and (is_added or grad is not None)
        else None
        for k, (weight, grad) in enumerate(zip(weights, grads, strict=True))
    ]
    if any(dummy is not None for dummy in dummies):
        delayed.give_to_autograd(weights, lambda: dummies)
