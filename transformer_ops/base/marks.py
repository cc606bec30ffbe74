"""What Dynamo has to know about functions, without loading Dynamo.

The decorators of `torch.compiler` import `torch._dynamo`, which takes as long as `import torch`. A
program that compiles nothing should not wait for it. Each mark sets the attributes that the
decorator sets, and Dynamo reads them when it traces. `torch.compiler.allow_in_graph` sets none, so
compile/groups.py calls it during the trace.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Same as `torch.compiler.assume_constant_result`: a trace calls the function and stores the
    result."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Reason(threading.local):
    """A reason that is only known during a trace. Dynamo reads its text when the graph breaks."""

    text = ""

    def __str__(self) -> str:
        return self.text


def disabled(reason: str | Reason | None = None) -> Callable[[Function], Function]:
    """Same as `torch.compiler.disable`: the graph breaks at the call, for this reason.

    Calling the function loads Dynamo. If no trace may be running, check `may_be_traced` first.
    """

    def mark(function: Function) -> Function:
        wrapped: Any = torch._disable_dynamo(function)
        wrapped._torchdynamo_disable = True
        wrapped._torchdynamo_disable_msg = reason
        found: Function = wrapped
        return found

    return mark


@contextmanager
def outside_of_jit_trace() -> Iterator[None]:
    """In this scope sizes are numbers: `torch.jit.trace` makes tensors of them."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def may_be_traced() -> bool:
    """Whether a trace is running, or Dynamo may compile the frames that are called from here."""
    return is_dynamo_compiling() or "torch._dynamo" in sys.modules
