"""How much Dynamo checks before a compiled module may run."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.guards as dynamo_guards
from torch import Tensor, nn


def count_guards(module: nn.Module, *inputs: Tensor) -> int:
    """Lines of the guard tree of one graph: the checks, and the reads that lead to them."""
    trees: list[str] = []

    def note(manager: Any, *_: Any) -> None:
        trees.append(str(manager))

    dynamo_guards.guard_manager_testing_hook_fn = note
    try:
        torch.compile(module, fullgraph=True, backend="eager")(*inputs)
    finally:
        dynamo_guards.guard_manager_testing_hook_fn = None
    (tree,) = trees
    return sum(line.lstrip("| ").startswith("+-") for line in tree.splitlines())
