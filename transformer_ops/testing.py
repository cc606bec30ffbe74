"""Helpers to verify fusions."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fusion import registry
from .op.base import FusibleOperation
from .op.fused import FusedOperation
from .plan.plan import Plan, Step
from .sequential import Sequential

__all__ = ["check_fusion"]

_REGISTER = {
    "forward": registry.register_forward_fusion,
    "backward": registry.register_backward_fusion,
    "forward_backward": registry.register_forward_backward_fusion,
}
# (rtol, atol relative to the largest value): sums are in another order, and 16-bit numbers are
# rounded a different number of times.
_TOLERANCES = {
    torch.float64: (1e-8, 1e-10),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
}


class _Way(NamedTuple):
    """One way to run a list of ops."""

    name: str
    grad: bool
    compiled: bool


_WAYS = [
    _Way("eager", grad=True, compiled=False),
    _Way("eager without grad", grad=False, compiled=False),
    _Way("compiled", grad=True, compiled=True),
    _Way("compiled without grad", grad=False, compiled=True),
]


def check_fusion(
    func: Callable[..., Any],
    make_ops: Callable[[], Sequence[FusibleOperation]],
    *inputs: Tensor,
    kind: str = "forward",
    pattern: registry.PatternLike | None = None,
    guard: registry.Guard | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Verifies a fusion: that it fires on the ops, and that all numbers equal those of the unfused
    ops.

    `func` is registered only during the check. The output, the extra outputs and the gradients of
    `inputs`, which must all require one here, and of every parameter are compared: eager and under
    `torch.compile` (with `fullgraph=True` unless a Python forward has the single style), with and
    without grad.

    Args:
        func, pattern, guard: as for `register_forward_fusion`. A handle has its own pattern, guard
            and kind; a handle of a C++ rule is allowed, too.
        make_ops: returns the list of ops; both sides get the same parameters.
        inputs: the main input and the extra inputs.
        kind: "forward", "backward" or "forward_backward".
        rtol, atol: as for `torch.testing.assert_close`; None: by dtype, with atol relative to the
            largest value of each tensor.

    Raises:
        AssertionError: the fusion does not fire, or a number differs; the message says which.
        RuntimeError: `func` raises or returns a wrong list.
        TypeError, ValueError: an argument is wrong.
    """
    _check_arguments(func, make_ops, inputs, kind, rtol, atol)
    ops = _check_ops(make_ops())
    unfused = Sequential(*copy.deepcopy(ops))
    fused = Sequential(*ops)
    checked = _checked(func, kind, pattern, guard)
    with _disabled(list(registry.fusions())):
        expected = {way: _run(unfused, inputs, way, fullgraph=True) for way in _WAYS[:2]}
    with checked.registered():
        for way in _WAYS:
            fullgraph = way.compiled and _is_traceable(fused)
            actual = _run(fused, inputs, way, fullgraph)
            if way == _WAYS[0]:
                _check_fires(checked, fused.plans())
            reference = expected[_WAYS[0] if way.grad else _WAYS[1]]
            _compare(f"[{checked.name}] {way.name}:", actual, reference, rtol, atol)


class _Checked(NamedTuple):
    """The fusion to check: the name of its steps, their pass, and how to recognize them."""

    name: str
    kind: str
    registered: Callable[[], AbstractContextManager[Any]]
    is_step: Callable[[Step], bool]


def _checked(func: Any, kind: str, pattern: Any, guard: Any) -> _Checked:
    if isinstance(func, registry.FusionHandle):
        if pattern is not None or guard is not None:
            raise TypeError(
                "[check_fusion] pattern and guard must be left to the handle, got "
                f"{pattern!r} and {guard!r}"
            )
        if func.func is None:
            name = func.name
            return _Checked(name, func.pass_name, nullcontext, lambda step: step.name == name)
        kind, pattern, guard, func = func.pass_name, func.pattern, func.guard, func.func
    registry.check_kind(func, kind, pattern, guard)
    name = getattr(func, "__name__", type(func).__name__)
    made: list[FusedOperation] = []

    def recorded(given: list[FusibleOperation], **keywords: Any) -> Any:
        returned = func(list(given), **keywords)
        found = returned if isinstance(returned, list | tuple) else [returned]
        made.extend(op for op in found if isinstance(op, FusedOperation) and op not in given)
        return returned

    @contextmanager
    def registered() -> Iterator[None]:
        same = [h for h in registry.fusions() if h.func is func and h.pass_name == kind]
        register = _REGISTER[kind]
        with _disabled(same), register(recorded, name=name, pattern=pattern, guard=guard):
            yield

    return _Checked(name, kind, registered, lambda step: any(step.fused_op is op for op in made))


def _check_arguments(
    func: object,
    make_ops: object,
    inputs: Sequence[object],
    kind: object,
    rtol: object,
    atol: object,
) -> None:
    for name, value in (("func", func), ("make_ops", make_ops)):
        if not callable(value):
            raise TypeError(f"[check_fusion] {name} must be callable, got {value!r}")
    if not inputs:
        raise ValueError("[check_fusion] inputs must hold the main input at least, got none")
    for tensor in inputs:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"[check_fusion] inputs must be tensors, got {tensor!r}")
    if not isinstance(kind, str) or kind not in _REGISTER:
        raise ValueError(f"[check_fusion] kind must be one of {', '.join(_REGISTER)}, got {kind!r}")
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"[check_fusion] {name} must be a number or None, got {value!r}")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"[check_fusion] {name} must be finite and >= 0, got {value!r}")


def _check_ops(ops: object) -> list[FusibleOperation]:
    if not isinstance(ops, list | tuple):
        raise TypeError(f"[check_fusion] make_ops must return a list of ops, got {ops!r}")
    for op in ops:
        if not isinstance(op, FusibleOperation):
            raise TypeError(f"[check_fusion] make_ops must return FusibleOperations, got {op!r}")
    if not ops:
        raise ValueError("[check_fusion] make_ops must return at least one op, got []")
    return list(ops)


@contextmanager
def _disabled(handles: Sequence[registry.FusionHandle]) -> Iterator[None]:
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle.disabled())
        yield


def _is_traceable(module: Sequential) -> bool:
    """Whether its groups, as last called, need no graph break."""
    return all(group._is_traceable() for group in module._groups())


def _run(
    module: Sequential, inputs: Sequence[Tensor], way: _Way, fullgraph: bool
) -> dict[str, Tensor | None]:
    """Every number that has to agree, by a name for messages."""
    tensors = [tensor.detach().clone() for tensor in inputs]
    named = {f"input {i}": t for i, t in enumerate(tensors) if t.is_floating_point()}
    for tensor in named.values() if way.grad else ():
        tensor.requires_grad_()
    named |= {f"parameter {name}": p for name, p in module.named_parameters() if p.requires_grad}
    with torch.random.fork_rng(), torch.set_grad_enabled(way.grad):
        torch.manual_seed(0)
        found = _call(module, tensors, way.compiled, fullgraph)
        outputs = found if isinstance(found, tuple) else (found,)
        numbers: dict[str, Tensor | None] = {
            "extra output " + str(i - 1) if i else "output": t.detach()
            for i, t in enumerate(outputs)
        }
        differentiable = [tensor for tensor in outputs if tensor.requires_grad]
        if not way.grad or not differentiable:
            return numbers
        torch.manual_seed(1)
        given = [torch.randn_like(tensor) for tensor in differentiable]
        grads = torch.autograd.grad(differentiable, list(named.values()), given, allow_unused=True)
    numbers |= {f"gradient of {name}": g for name, g in zip(named, grads, strict=True)}
    return numbers


def _call(module: Sequential, tensors: Sequence[Tensor], compiled: bool, fullgraph: bool) -> Any:
    if not compiled:
        return module(*tensors)

    def call(*given: Tensor) -> Any:
        return module(*given)

    # Each check compiles `call` anew. The number of checks must not count as recompilations of a
    # model.
    limits = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20}
    with torch._dynamo.config.patch(limits):
        return torch.compile(call, fullgraph=fullgraph, backend="aot_eager")(*tensors)


def _check_fires(checked: _Checked, plans: Sequence[Plan]) -> None:
    steps = {
        "forward": [step for plan in plans for step in plan.forward],
        "backward": [step for plan in plans for step in plan.backward if not step.skipped],
    }
    for direction, found in steps.items():
        if direction not in checked.kind:
            continue
        if not any(map(checked.is_step, found)):
            got = ", ".join(f"{step.name}{list(step.ops)}" for step in found)
            near = (miss for plan in plans for miss in plan.near_misses)
            misses = (miss for miss in near if miss.fusion == checked.name)
            why = "".join(f"; at {list(miss.ops)}: {miss.reason}" for miss in misses)
            raise AssertionError(
                f"[{checked.name}] must fire in {direction}, got the steps {got}{why}"
            )


def _compare(
    where: str,
    actual: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    rtol: float | None,
    atol: float | None,
) -> None:
    missing = set(expected) ^ set(actual)
    if missing:
        raise AssertionError(f"{where} outputs must be the same, got {sorted(missing)} on one side")
    for name, wanted in expected.items():
        found = actual[name]
        if found is None and wanted is None:
            continue
        if found is None or wanted is None:
            other = wanted if found is None else found
            assert other is not None
            found, wanted = (torch.zeros_like(other) if t is None else t for t in (found, wanted))
        relative, part = _TOLERANCES.get(wanted.dtype, (0.0, 0.0))
        scale = wanted.detach().abs().nan_to_num(0, 0, 0).max().item() if wanted.numel() else 0.0
        label = f"{where} {name} differs from the unfused ops. "
        torch.testing.assert_close(
            found,
            wanted,
            rtol=relative if rtol is None else rtol,
            atol=part * scale if atol is None else atol,
            equal_nan=True,
            msg=label.__add__,
        )
