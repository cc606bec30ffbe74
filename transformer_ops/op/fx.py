"""Calls that `torch.fx.symbolic_trace` records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx import Proxy


def symbolic_call(
    module: nn.Module, input: Proxy, extra_inputs: Any, kwargs: Mapping[str, Any]
) -> Proxy:
    """Records a call of a module as one node.

    A tracer treats the modules of `torch.nn` as leaves and traces into all others. It cannot trace
    into the C++ program of an op or a Sequential.
    """
    tracer: Any = input.tracer
    name = tracer.path_of_module(module)
    if not name:
        kind = type(module).__name__
        raise TypeError(
            f"[{kind}] module to trace must be one that holds the {kind}, which becomes a node of "
            f"the graph, got the {kind} itself; trace torch.nn.Sequential(module)"
        )
    found: Proxy = tracer.create_proxy("call_module", name, (input, *extra_inputs), dict(kwargs))
    return found
