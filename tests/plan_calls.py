"""Ops that only plans call, and that have no schema in torch, as functions that use `run_call`."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from transformer_ops import _C

_WORDS = re.compile(r'"[^"]*"|%|true|false|none')
RUN_CALL = torch.ops.transformer_ops.run_call


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "%"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


class PlanOp:
    """An op of plans, which is called like those of `torch.ops`."""

    tags: tuple[Any, ...] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        # torch parses the name up to its dot.
        self._schema = torch._C.parse_schema(_C.typed_op_schema(name))

    def arguments(self, *values: Any) -> tuple[str, list[Tensor]]:
        """The arguments of `run_call`."""
        return f"{self.name}({', '.join(map(_text, values))})", _tensors(values)

    def __call__(self, *values: Any) -> Any:
        results = RUN_CALL(*self.arguments(*values))
        assert isinstance(results, list)
        returns = self._schema.returns
        if str(returns[0].type) == "List[Tensor]":
            count = len(results) - len(returns) + 1
            return (results[:count], *results[count:]) if len(returns) > 1 else results
        return tuple(results) if len(returns) > 1 else results[0]


def plan_op(name: str) -> PlanOp:
    return PlanOp(name)


def called(func: Any, args: tuple[Any, ...]) -> tuple[str, list[Any]]:
    """The name and the arguments of a call that a dispatch mode sees."""
    name = func._schema.name.removeprefix("transformer_ops::")
    if name != "run_call":
        return name, list(args)
    text, tensors = args
    name, _, rest = text.partition("(")
    schema = torch._C.parse_schema(_C.typed_op_schema(name))
    # Quoted texts do not change; all other words are valid in Python.
    words = {"%": "next(left)", "true": "True", "false": "False", "none": "None"}
    code = _WORDS.sub(lambda found: words.get(found[0], found[0]), rest.removesuffix(")"))
    values = eval(f"[{code}]", {"left": iter(tensors), "inf": math.inf, "nan": math.nan})
    assert len(values) == len(schema.arguments)
    return name, values
