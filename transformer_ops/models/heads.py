"""The rule for the head of a language model and its loss.

In: statements such as `logits = self.lm_head(x)`. Out: in training, logits that are computed when
they are read, which a loss never does (`deferred`).
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..modules.views import is_torch
from ..op.borrowed import class_of
from .deferred import DeferredHead
from .pattern import Names
from .rules import FuseSkip, FuseUnfit, register_fuse_rule
from .statements import body_of, function_of
from .whole import name_of


def _has_loss(module: nn.Module) -> bool:
    """Whether its `forward` computes a loss, as the classes of transformers do."""
    if not hasattr(class_of(module), "loss_function"):
        return False
    body = body_of(function_of(class_of(module).forward)) or []
    calls = (node for one in body for node in ast.walk(one) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) == "self.loss_function" for call in calls)


def _head(module: Any, names: Names) -> list[nn.Module]:
    head = getattr(module, names["head"], None)
    outputs = getattr(module, "get_output_embeddings", None)
    if not _has_loss(module) or outputs is None or outputs() is not head or head is None:
        raise FuseUnfit(f"{names['head']} is no head of a language model")
    if not is_torch(head, nn.Linear):
        raise FuseSkip(f"{name_of(head)} is not a torch.nn.Linear")
    return [DeferredHead(head)]


def _trains(module: Any, input: Tensor) -> bool:
    """Whether a loss may follow that needs gradients. Compiled code and transforms compute the
    logits, and so does a model whose parameters are gathered only while `forward` runs."""
    is_plain = type(input) is Tensor and not is_compiling()
    return is_plain and module.training and torch.is_grad_enabled() and not _is_transformed()


def _is_transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


register_fuse_rule("head and loss", "L = self.any_head(H)", _head, when=_trains)
