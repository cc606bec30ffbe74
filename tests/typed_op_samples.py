"""Arguments of every typed op, recorded from the rows of `op_cases.py` and `fusion_cases.py`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from fusion_cases import CASES as FUSIONS
from op_cases import CASES, OpCase
from plan_calls import called, plan_op
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

import transformer_ops as tops
from transformer_ops import _C

ROWS = 3
# These are read before any test loads ops of its own.
PAIRS = dict(_C.typed_op_pairs())
RECOMPUTED = sorted(name for name in _C.plan_ops() if name.startswith("recompute_"))
NAMES = sorted([*PAIRS, *RECOMPUTED])
Sample = list[Any]


def overload(name: str) -> Any:
    """The typed op of a name."""
    return plan_op(name) if name in RECOMPUTED else getattr(torch.ops.transformer_ops, name).default


class Recorder(TorchDispatchMode):
    """Records the arguments of typed ops, once for each set of constants, ranks, dtypes and
    Nones."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[str, dict[Any, Sample]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "transformer_ops":
            assert not kwargs and len(args) == len(func._schema.arguments)
            name, values = called(func, args)
            form = lambda v: (v.dim(), v.dtype) if isinstance(v, Tensor) else repr(v)  # noqa: E731
            leaves, spec = tree_flatten(values)
            key = (*map(form, leaves), str(spec))
            # A call may get the last reference to a tensor, and write to it.
            sample = tree_map_only(Tensor, lambda v: v.detach().clone(), values)
            self.samples.setdefault(name, {})[key] = sample
        return func(*args, **(kwargs or {}))


def _run(module: torch.nn.Module, inputs: list[Tensor], twice: bool = False) -> None:
    outputs = module(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [output for output in outputs if output.requires_grad]
    grads = [torch.randn_like(output) for output in wanted]
    if twice:
        torch.autograd.grad(wanted, inputs, grads, create_graph=True)
    else:
        torch.autograd.backward(wanted, grads)


def _before_product(case: OpCase, dtype: torch.dtype, product: torch.dtype) -> tops.Sequential:
    """The op in a model in which backward recomputes its output from its input, for a product after
    it."""
    op = case.build(dtype)
    outputs = op(*case.inputs(dtype, (ROWS, *case.row)))
    width = (outputs[0] if isinstance(outputs, tuple) else outputs).shape[-1]
    ops = (tops.GELU(), op, tops.ConstantScale(0.5), tops.BasicLinear(width, 8, dtype=product))
    return tops.Sequential(*ops, recompute="products")


def _modules(dtype: torch.dtype) -> Iterator[tuple[torch.nn.Module, list[Tensor]]]:
    other = torch.float32 if dtype == torch.float64 else torch.float64
    for case in CASES:
        shape = (ROWS, *case.row)
        yield case.build(dtype), case.inputs(dtype, shape)
        # No product follows a loss.
        for product in () if case.accumulates_output else (dtype, other):
            yield _before_product(case, dtype, product), case.inputs(dtype, shape)
    for fusion in FUSIONS:
        x = torch.randn(ROWS, 16, dtype=dtype, requires_grad=True)
        inputs = [tensor.detach().requires_grad_() for tensor in fusion.inputs(x)]
        yield tops.Sequential(*fusion.make()).to(dtype), inputs
    # Backward recomputes what a fused product returns.
    for op in (tops.GELU(), tops.SwiGLU(), tops.LayerNorm(32)):
        x = torch.randn(ROWS, 16, dtype=dtype, requires_grad=True)
        module = tops.Sequential(tops.Linear(16, 32), op, recompute="products")
        yield module.to(dtype), [x]


@functools.cache
def _recorded(dtype: torch.dtype) -> dict[str, list[Sample]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        recorder = Recorder()
        for module, inputs in _modules(dtype):
            with recorder:
                _run(module, inputs)
        for case in CASES:
            # Only second derivatives call some of the ops.
            if case.distributed:
                with recorder:
                    _run(case.build(dtype), case.inputs(dtype, (ROWS, *case.row)), twice=True)
    return {name: list(rows.values()) for name, rows in recorder.samples.items()}


def samples(name: str, dtype: torch.dtype = torch.float64) -> list[Sample]:
    """Arguments for one typed op: one set for each combination of constants, ranks, dtypes and
    Nones in the rows. Raises KeyError if no row calls the op."""
    return _recorded(dtype)[name]
