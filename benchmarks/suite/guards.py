"""How much Dynamo checks before a compiled module may run."""

from __future__ import annotations

import timeit
from typing import Any, NamedTuple

import torch
import torch._dynamo.guards as dynamo_guards
from torch import Tensor, nn

CHECKS = 500


class Guards(NamedTuple):
    """The guards of one graph."""

    lines: int  # of their tree: the checks, and the reads that lead to them
    checks: int  # that run before a call which passes all of them
    us: float  # microseconds that checking them takes


def look_at_guards(module: nn.Module, *inputs: Tensor, repeat: int = 5) -> Guards:
    """The guards of the graph of a module, checked `repeat` times CHECKS times."""
    found: list[Guards] = []

    def note(manager: Any, local_scope: dict[str, Any], *_: Any) -> None:
        lines = str(manager).splitlines()
        count = sum(line.lstrip("| ").startswith("+-") for line in lines)
        check, scope = manager.root.check, dict(local_scope)
        checked = manager.root.check_verbose(scope)
        assert checked.result
        times = timeit.repeat(lambda: check(scope), number=CHECKS, repeat=repeat)
        found.append(Guards(count, checked.num_guards_executed, 1e6 * min(times) / CHECKS))

    dynamo_guards.guard_manager_testing_hook_fn = note
    try:
        torch.compile(module, fullgraph=True, backend="eager")(*inputs)
    finally:
        dynamo_guards.guard_manager_testing_hook_fn = None
    (guards,) = found
    return guards


def count_guards(module: nn.Module, *inputs: Tensor) -> int:
    """Lines of the guard tree of one graph."""
    return look_at_guards(module, *inputs, repeat=1).lines
