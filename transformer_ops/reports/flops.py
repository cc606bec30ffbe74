"""FLOP formulas of typed ops, for `torch.utils.flop_counter`.

One formula serves every typed op: its declaration names the matrices by which it multiplies rows
(`products` in `csrc/op/typed_op.h`). It counts what torch's formulas count for the unfused model: 2
M N K for each product, and in backward the products that the output mask selects.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import _C

_COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Gives `FlopCounterMode` the formula of every typed op that multiplies and has none yet.

    The counter loads Triton, which takes longer than this package, and most programs count nothing.
    If it is not imported yet, the formulas are added when it is.
    """
    if _COUNTER in sys.modules:
        # Another thread may be importing it.
        _register_in(import_module(_COUNTER))
    elif not any(isinstance(finder, _CounterFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CounterFinder())


class _CounterFinder:
    """Adds the formulas at the end of the counter's import, and does not change other imports."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _COUNTER else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run_module = loader.exec_module

        def run_and_register(module: Any) -> None:
            run_module(module)
            _register_in(module)

        loader.exec_module = run_and_register
        return spec


def _register_in(counter: Any) -> None:
    only_in_plans = frozenset(_C.plan_ops())
    by_text: dict[str, Formula] = {}
    for name, *row in _C.counted_ops():
        namespace, _, base = name.partition("::")
        if base in only_in_plans:
            by_text[base] = Formula(torch._C.parse_schema(_C.typed_op_schema(base)), *row)
            continue
        packet = getattr(getattr(torch.ops, namespace), base)
        if packet not in counter.flop_registry:
            formula = Formula(packet.default._schema, *row)
            counter.register_flop_formula(packet, get_raw=True)(formula)
    run_call = torch.ops.transformer_ops.run_call
    if run_call not in counter.flop_registry:
        count_call = functools.partial(_count_call, by_text)
        counter.register_flop_formula(run_call, get_raw=True)(count_call)
    for name in ("plan_forward", "plan_backward"):
        packet = getattr(torch.ops.transformer_ops, name)
        if packet not in counter.flop_registry:
            count = functools.partial(_count_pass, counter, getattr(_C, name))
            counter.register_flop_formula(packet, get_raw=True)(count)


# One argument of a call by text (csrc/op/run_call.h).
_ARGUMENT = re.compile(r'\[[^]]*\]|"[^"]*"|[^, ()]+')


def _count_call(
    formulas: dict[str, Formula], call: str, tensors: list[Tensor], *, out_val: list[Tensor]
) -> int:
    """The number of operations of an op that only plans call. Its constants do not matter."""
    target, _, text = call.partition("(")
    formula = formulas.get(target)
    if formula is None:
        return 0
    rest, values = iter(tensors), list[Any]()
    for argument in _ARGUMENT.findall(text):
        if argument == "%":
            values.append(next(rest))
        else:
            values.append([next(rest) for _ in range(argument.count("%"))])
    return formula(*values, out_val=out_val)


def _count_pass(
    counter: Any, run: Any, plan: str, *lists: list[Tensor], out_val: Any = None
) -> int:
    """The number of operations of a pass that compiled code calls as one op: the sum of those of
    its typed ops, without their work."""
    with counter.FlopCounterMode(display=False) as found:
        run(plan, *([tensor.to("meta") for tensor in tensors] for tensors in lists))
    return int(found.get_total_flops())


class Formula:
    """The formula of one typed op.

    Args:
        schema: the schema of the op.
        results: the results that each flag of its output mask selects.
        products: for each matrix, the results of a backward that need the gradient of the rows.
        rows: the argument or result that has the rows, if it is not the first one.
        rows_are_numbers: whether each number of `rows` counts as a row.
        of_heads: the number of products of all rows of the input with each other, in heads.
    """

    def __init__(
        self,
        schema: Any,
        results: list[str],
        products: list[tuple[str, list[str]]],
        rows: str,
        rows_are_numbers: bool,
        of_heads: int,
    ) -> None:
        self._arguments = [argument.name for argument in schema.arguments]
        self._returned = [result.name for result in schema.returns]
        self._results, self._products = results, products
        self._is_backward = results[0].startswith("grad_")
        self._rows = rows or (self._arguments if self._is_backward else self._returned)[0]
        self._rows_are_numbers = rows_are_numbers
        self._of_heads = of_heads

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        """The number of operations of a call with these tensors."""
        outputs = out_val if isinstance(out_val, tuple | list) else (out_val,)
        values = dict(zip(self._arguments, args, strict=False)) | kwargs
        values |= zip(self._returned, outputs, strict=True)
        return 2 * sum(self._multiplications(values))

    def _multiplications(self, values: dict[str, Any]) -> Iterator[int]:
        if self._of_heads:
            *batches, rows, _ = values["input"].shape
            width = values["num_heads"] * values["head_dim"]
            yield self._of_heads * prod(batches) * rows * rows * width
        if self._is_backward and values.get("gradients_in") == "forward":
            return  # forward has made the gradients, and counts them
        rows, splits = self._count_rows(values), values.get("splits")
        # Each row is multiplied by the matrix of its group, or by all matrices.
        groups = 1 if splits is None else max(len(splits), 1)
        mask = values.get("output_mask", [True] * len(self._results))
        asked = {name for name, is_asked in zip(self._results, mask, strict=True) if is_asked}
        for matrix, needed_for in self._products:
            if not self._is_backward or asked.intersection(needed_for):
                yield rows * _count_numbers(values[matrix]) // groups
            if not self._is_backward:
                if _is_made(values.get("grads_input")):
                    yield rows * _count_numbers(values[matrix])
                if _is_made(values.get(f"grads_{matrix}")):
                    yield rows * _count_numbers(values[matrix])
            gradient = f"grad_{matrix}"
            if gradient in asked:
                found = values["main_grad"] if "main_grad" in values else values[gradient]
                # If an element is a pair of codes, a sum over rows is one over pairs.
                of_rows = _codes_in_an_element(values[self._rows])
                yield of_rows * rows * _count_numbers(found) // groups

    def _count_rows(self, values: dict[str, Any]) -> int:
        splits = values.get("splits")
        if splits is not None and _has_data(splits):
            return int(splits.sum())
        shape = values[self._rows].shape
        return prod(shape if self._rows_are_numbers else shape[:-1])


def _count_numbers(matrix: Tensor | list[Tensor]) -> int:
    tensors = matrix if isinstance(matrix, list) else [matrix]
    return sum(tensor.numel() * _codes_in_an_element(tensor) for tensor in tensors)


def _is_made(gradient: Tensor | None) -> bool:
    """Whether a forward op has made this gradient."""
    return gradient is not None and gradient.numel() > 0


def _codes_in_an_element(tensor: Tensor) -> int:
    return 2 if tensor.dtype == torch.uint8 else 1


def _has_data(tensor: Tensor) -> bool:
    # A fake tensor has its own class.
    return type(tensor) is Tensor and not tensor.is_meta
