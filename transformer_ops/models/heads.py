"""The rule for the head of a language model and its loss.

In: statements such as `logits = self.lm_head(x)`, or `logits = self.cls(x)` with a dense layer, an
activation and a norm before the product. Out: in training, the ops of these, and logits that are
computed when they are read, which a loss never does (`deferred`).
"""

from __future__ import annotations

import ast
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..modules.views import BorrowedLinear, is_torch
from ..op.borrowed import class_of
from .deferred import DeferredHead
from .parts import ops_of
from .pattern import Names, arguments_in
from .rules import FuseSkip, FuseUnfit, register_fuse_rule
from .statements import body_of, function_of
from .whole import name_of

# What computes a loss, in the `forward` of the classes of transformers.
_LOSSES = ("self.loss_function", "CrossEntropyLoss", "nn.CrossEntropyLoss", "F.cross_entropy")


def _has_loss(module: nn.Module) -> bool:
    """Whether its `forward` computes a loss."""
    body = body_of(function_of(class_of(module).forward)) or []
    calls = (node for one in body for node in ast.walk(one) if isinstance(node, ast.Call))
    names = {ast.unparse(call.func) for call in calls}
    losses = (name for name, one in module._modules.items() if type(one) is nn.CrossEntropyLoss)
    return not names.isdisjoint((*_LOSSES, *(f"self.{name}" for name in losses)))


def _head(module: Any, names: Names) -> list[nn.Module]:
    steps: Any = names["steps"]
    head = getattr(module, steps.list[-1][1].get("part", ""), None)
    outputs: Any = getattr(module, "get_output_embeddings", None)
    inner = head.modules() if isinstance(head, nn.Module) and outputs is not None else ()
    last = next((one for one in inner if one is outputs()), None)
    if last is None or not _has_loss(module):
        raise FuseUnfit(f"{steps} is no head of a language model")
    if arguments_in(names) is not None:
        raise FuseUnfit("attention is among its steps")
    if not is_torch(last, nn.Linear):
        raise FuseSkip(f"{name_of(last)} is not a torch.nn.Linear")
    *ops, product = ops_of(module, steps)
    first: Any = product.basic_ops[0]
    if not isinstance(product, BorrowedLinear) or first._owners() != [last]:
        raise FuseSkip("the product of the head is not its last step")
    return [*ops, DeferredHead(last, _after(module, names))]


def _after(module: Any, names: Names) -> Callable[[Tensor], Tensor] | None:
    """What the statement does to the product."""
    if "call" in names:
        if names["call"] not in ("float", "contiguous"):
            raise FuseUnfit(f"{names['call']} changes the logits")
        return operator.methodcaller(names["call"])
    if "factor" in names:
        factor = getattr(module.config, names["factor"])
        if type(factor) not in (int, float):
            raise FuseUnfit(f"{names['factor']} is no number")
        return lambda logits: logits * factor
    if "row" in names:
        owner, row = weakref.ref(module), names["row"]  # the module has these ops
        if not isinstance(getattr(module, row), Tensor):
            raise FuseUnfit(f"{row} is no tensor")
        return lambda logits: logits + getattr(owner(), row)
    return None


def _trains(module: Any, input: Tensor) -> bool:
    """Whether a loss may follow that needs gradients. Compiled code and transforms compute the
    logits, and so does a model whose parameters are gathered only while `forward` runs."""
    is_plain = type(input) is Tensor and not is_compiling()
    return is_plain and module.training and torch.is_grad_enabled() and not _is_transformed()


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


register_fuse_rule(
    "head and loss",
    [
        "L = any_steps(H)",
        "L = any_steps(H).any_call()",
        "L = any_steps(H) + self.any_row",
        "L = any_steps(H) * self.config.any_factor",
    ],
    _head,
    when=_trains,
)
