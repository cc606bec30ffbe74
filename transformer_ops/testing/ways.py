"""The ways in which a check runs a list of ops, and the numbers that it compares."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser import OperationFuser
from ..op.base import FusibleOperation
from ..sequential import Sequential

# (rtol, atol relative to the largest value): sums are in another order, and 16-bit numbers are
# rounded a different number of times.
_TOLERANCES = {
    torch.float64: (1e-8, 1e-10),
    torch.float32: (1e-4, 1e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
}
WITHOUT = "eager without a gradient for "
# All subsets of so many parameters are frozen; of more, each one and all but each one.
_MOST_SUBSETS = 4


class Way(NamedTuple):
    """One way to run a list of ops. `name` says what differs from an eager call in training.

    Attributes:
        frozen: the parameters that require no gradient; `input_grad`: whether the inputs do.
        only_output: the only output with a gradient; None: all have one.
        second: "backward" runs it twice; "call" runs another call between forward and backward.
        changed: a parameter that is changed in place between forward and backward.
        values: "inputs" or "parameters" have other values than before.
    """

    name: str = "eager"
    grad: bool = True
    compiled: bool = False
    training: bool = True
    autocast: bool = False
    dtype: torch.dtype | None = None
    recompute: str = "cheap"
    shape: str = ""
    layout: str = ""
    frozen: frozenset[str] = frozenset()
    input_grad: bool = True
    only_output: int | None = None
    second: str = ""
    changed: str = ""
    values: str = ""

    def reference(self) -> Way:
        """The way in which the unfused ops run to give the same numbers."""
        layout = self.layout if self.layout == "expanded gradient" else ""
        return self._replace(
            name="", compiled=False, recompute="cheap", layout=layout, second="", changed=""
        )


def eager_ways(
    parameters: Sequence[str], dtype: torch.dtype, outputs: int, alone: bool
) -> Iterator[Way]:
    """Every eager way for ops with these parameters, an input of the dtype and so many outputs."""
    for recompute in ("cheap", "none", "products"):
        for way in _ways(parameters, dtype, outputs):
            name = way.name + f', recompute="{recompute}"' * (recompute != "cheap")
            yield way._replace(name=name, recompute=recompute)
    for name in parameters if alone else ():
        yield Way(f"{name} changed in place before backward", changed=name)


def _ways(parameters: Sequence[str], dtype: torch.dtype, outputs: int) -> Iterator[Way]:
    yield Way()
    yield Way("eager without grad", grad=False)
    for frozen, input_grad in itertools.product(_subsets(parameters), (True, False)):
        if frozen or not input_grad:
            without = [*sorted(frozen), *["the input"] * (not input_grad)]
            name = WITHOUT + ", ".join(without)
            yield Way(name, frozen=frozen, input_grad=input_grad)
    for shape in _SHAPES:
        yield Way(shape, shape=shape)
        yield Way(f"{shape}, without grad", shape=shape, grad=False)
    for layout in _LAYOUTS:
        yield Way(layout, layout=layout)
        yield Way(f"three dimensions, {layout}", shape="three dimensions", layout=layout)
    for other in (torch.float64, torch.float32, torch.bfloat16):
        if other != dtype:
            name = str(other).removeprefix("torch.")
            yield Way(name, dtype=other)
    yield Way("autocast", autocast=True)
    yield Way("autocast without grad", autocast=True, grad=False)
    yield Way("autocast, three dimensions", autocast=True, shape="three dimensions")
    for name in parameters:
        yield Way(f"autocast, {name} frozen", autocast=True, frozen=frozenset([name]))
    yield Way("eval", training=False)
    yield Way("eval without grad", training=False, grad=False)
    yield Way("inputs of other values", values="inputs")
    yield Way("after an optimizer step", values="parameters")
    yield Way("a second backward", second="backward")
    yield Way("another call before backward", second="call")
    for k in range(outputs if outputs > 1 else 0):
        yield Way(f"a gradient of output {k} alone", only_output=k)


def compiled_ways(parameters: Sequence[str]) -> Iterator[Way]:
    """The ways to run under torch.compile. They take longer, so there are few."""
    yield Way("compiled")
    yield Way("compiled without grad", grad=False)
    yield Way("compiled, three dimensions", shape="three dimensions")
    yield Way("compiled, no rows", shape="no rows")
    yield Way("compiled, autocast", autocast=True)
    yield Way("compiled, eval", training=False)
    for name in parameters[:1]:
        yield Way(f"compiled, {name} frozen", frozen=frozenset([name]))


def _subsets(names: Sequence[str]) -> Iterator[frozenset[str]]:
    count = len(names)
    sizes = range(count + 1) if count <= _MOST_SUBSETS else sorted({0, 1, count - 1, count})
    for size in sizes:
        yield from map(frozenset, itertools.combinations(names, size))


# Each takes the rows of an input, [n, columns].
_SHAPES = {
    "one dimension": lambda rows: rows[0],
    "three dimensions": lambda rows: torch.stack([rows, rows.flip(0)]),
    "one row": lambda rows: rows[:1],
    "no rows": lambda rows: rows[:0],
}


def _strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() else tensor


def _swapped(tensor: Tensor) -> Tensor:
    return tensor.movedim(0, 1).contiguous().movedim(1, 0) if tensor.dim() > 1 else tensor


# How the inputs and the gradients of the outputs lie in memory.
_LAYOUTS = {
    "strided input and gradient": _strided,
    "transposed input and gradient": _transposed,
    "input and gradient with swapped dimensions": _swapped,
    "expanded gradient": None,
}


class Numbers(NamedTuple):
    """What a call gave.

    Attributes:
        tensors: outputs and gradients by a name for messages; a gradient may be None.
        shared: for each output the other tensors of the call whose memory it shares.
        differentiable: the outputs that require a gradient.
        changed: the inputs, parameters and gradients that the call changed in place.
    """

    tensors: dict[str, Tensor | None]
    shared: dict[str, frozenset[str]]
    differentiable: frozenset[str]
    changed: tuple[str, ...]


class Subject:
    """A list of ops, or a run of their basic ops, in every dtype and mode that a way asks for."""

    def __init__(self, ops: Sequence[FusibleOperation], run: slice | None = None) -> None:
        self._ops = ops
        self._run = run
        self._copies: dict[tuple[torch.dtype | None, bool], list[FusibleOperation]] = {}
        self._groups: dict[tuple[Any, ...], Any] = {}

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that require a gradient."""
        return list(self._parameters(self._copy(Way())))

    def kinds(self) -> list[str]:
        """The classes of its basic ops."""
        found = [basic for op in self._ops for basic in op.basic_ops]
        return [str(op._kind or type(op).__name__) for op in found[self._run or slice(None)]]

    def group(self, way: Way) -> Any:
        """The Sequential, or the OperationFuser of a run, that a way calls."""
        ops = self._copy(way)
        key = (way.dtype, way.training, way.recompute)
        if key not in self._groups:
            basic = [basic for op in ops for basic in op.basic_ops]
            self._groups[key] = (
                Sequential(*ops, recompute=way.recompute)
                if self._run is None
                else OperationFuser(basic[self._run], recompute=way.recompute)
            )
        return self._groups[key]

    def plans(self, way: Way) -> list[Any]:
        """The plans of its last call in this way."""
        group = self.group(way)
        return list(group.plans()) if self._run is None else [group.plan()]

    def slots_read(self, way: Way) -> set[tuple[int, str]]:
        """The (op, slot) pairs that the backward of its last call in this way reads."""
        group = self.group(way)
        members = group._groups() if self._run is None else [group]
        return {pair for one in members for pair in one._group.last.program.slots_read}

    def _is_traceable(self, way: Way) -> bool:
        """Whether its groups, as last called, need no graph break."""
        group = self.group(way)
        members = group._groups() if self._run is None else [group]
        return all(one._is_traceable() for one in members)

    def _copy(self, way: Way) -> list[FusibleOperation]:
        key = (way.dtype, way.training)
        if key not in self._copies:
            made: list[FusibleOperation] = copy.deepcopy(list(self._ops))
            for op in made:
                op.to(way.dtype) if way.dtype is not None else op
                op.train(op.training and way.training)
            self._copies[key] = made
        return self._copies[key]

    def _parameters(self, ops: Sequence[FusibleOperation]) -> dict[str, Tensor]:
        basic = [basic for op in ops for basic in op.basic_ops][self._run or slice(None)]
        used = {id(parameter) for op in basic for parameter in op.parameters()}
        return {
            f"{i}.{name}": parameter
            for i, op in enumerate(ops)
            for name, parameter in op.named_parameters()
            if parameter.requires_grad and id(parameter) in used
        }

    def run(self, inputs: Sequence[Tensor], way: Way) -> Numbers:
        """Every number that has to agree. Raises what the call raises."""
        parameters = self._parameters(self._copy(way))
        frozen = [p for name, p in parameters.items() if name in way.frozen]
        with ExitStack() as stack:
            for parameter in frozen:
                parameter.requires_grad_(False)
                stack.callback(parameter.requires_grad_, True)
            for parameter in parameters.values() if way.values == "parameters" else ():
                stack.enter_context(_changed(parameter))
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.set_grad_enabled(way.grad))
            return self._run_once(_prepared(inputs, way), parameters, way)

    def _run_once(
        self, tensors: list[Tensor], parameters: Mapping[str, Tensor], way: Way
    ) -> Numbers:
        inputs = {f"input {i}": tensor for i, tensor in enumerate(tensors)}
        named = inputs | {f"parameter {name}": p for name, p in parameters.items()}
        wanted = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        before = {name: tensor.detach().clone() for name, tensor in named.items()}
        torch.manual_seed(0)
        outputs = self._call(tensors, way)
        others = named | outputs
        shared = {
            name: frozenset(n for n, t in others.items() if n != name and _share_memory(output, t))
            for name, output in outputs.items()
        }
        numbers: dict[str, Tensor | None] = {n: t.detach().clone() for n, t in outputs.items()}
        sources = {name: t for name, t in outputs.items() if t.requires_grad}
        if way.only_output is not None:
            only = list(outputs)[way.only_output]
            sources = {name: t for name, t in sources.items() if name == only}
        if sources and wanted:
            given = _gradients(sources.values(), way)
            before |= {f"gradient {i}": grad.clone() for i, grad in enumerate(given)}
            named = named | {f"gradient {i}": grad for i, grad in enumerate(given)}
            for grad in self._backward(tensors, list(sources.values()), wanted, given, way):
                numbers |= grad
        changed = tuple(n for n, old in before.items() if not _is_equal(named[n], old))
        return Numbers(numbers, shared, frozenset(sources), changed)

    def _backward(
        self,
        tensors: list[Tensor],
        sources: list[Tensor],
        wanted: Mapping[str, Tensor],
        given: list[Tensor],
        way: Way,
    ) -> Iterator[dict[str, Tensor | None]]:
        if way.second == "call":
            others = [_with_other_values(tensor.detach()) for tensor in tensors]
            self._call([t.requires_grad_(t.is_floating_point()) for t in others], way)
        times = 2 if way.second == "backward" else 1
        with _changed(wanted.get(f"parameter {way.changed}")):
            for time in range(times):
                grads = torch.autograd.grad(
                    sources,
                    list(wanted.values()),
                    given,
                    allow_unused=True,
                    retain_graph=time < times - 1,
                )
                yield {f"gradient of {n}": g for n, g in zip(wanted, grads, strict=True)}

    def _call(self, tensors: Sequence[Tensor], way: Way) -> dict[str, Tensor]:
        group = self.group(way)
        with torch.autocast(tensors[0].device.type, torch.bfloat16, enabled=way.autocast):
            found = _compiled(group, self._is_traceable(way), tensors) if way.compiled else None
            found = group(*tensors) if found is None else found
        outputs = found if isinstance(found, tuple) else (found,)
        return {"extra output " + str(i - 1) if i else "output": t for i, t in enumerate(outputs)}


def _compiled(group: Any, fullgraph: bool, tensors: Sequence[Tensor]) -> Any:
    def call(*given: Tensor) -> Any:
        return group(*given)

    # Each check compiles `call` anew. The number of checks must not count as recompilations of a
    # model.
    limits = {"recompile_limit": 2**20, "accumulated_recompile_limit": 2**20}
    with torch._dynamo.config.patch(limits):
        return torch.compile(call, fullgraph=fullgraph, backend="aot_eager")(*tensors)


def _prepared(inputs: Sequence[Tensor], way: Way) -> list[Tensor]:
    leading = inputs[0].shape[:-1]
    found = []
    for tensor in inputs:
        made = tensor.detach().clone()
        if way.shape and made.shape[:-1] == leading:
            made = _SHAPES[way.shape](made.reshape(-1, made.shape[-1]))
        if made.is_floating_point() and way.dtype is not None:
            made = made.to(way.dtype)
        if way.values == "inputs":
            made = _with_other_values(made)
        layout = _LAYOUTS.get(way.layout)
        made = layout(made) if layout is not None else made
        found.append(made.requires_grad_(made.is_floating_point() and way.grad and way.input_grad))
    return found


def _with_other_values(tensor: Tensor) -> Tensor:
    return tensor * 0.5 + 0.25 if tensor.is_floating_point() else tensor


def _gradients(outputs: Any, way: Way) -> list[Tensor]:
    torch.manual_seed(1)
    if way.layout == "expanded gradient":
        return [torch.randn((), dtype=t.dtype, device=t.device).expand(t.shape) for t in outputs]
    layout = _LAYOUTS.get(way.layout) or torch.Tensor.contiguous
    return [layout(torch.randn(t.shape, dtype=t.dtype, device=t.device)) for t in outputs]


@contextmanager
def _changed(parameter: Tensor | None) -> Iterator[None]:
    """Changes a parameter in place in this scope."""
    if parameter is None:
        yield
        return
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.mul_(2).add_(1)
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.copy_(before)


def _share_memory(first: Tensor, second: Tensor) -> bool:
    if not first.numel() or not second.numel():
        return False
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _is_equal(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.detach().nan_to_num(7), second.nan_to_num(7))


def compare(
    where: str,
    way: Way,
    actual: Numbers,
    expected: Numbers,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Raises AssertionError unless the fused ops gave what the unfused ones did."""
    missing = set(expected.tensors) ^ set(actual.tensors)
    if missing:
        raise AssertionError(f"{where} outputs must be the same, got {sorted(missing)} on one side")
    if actual.differentiable != expected.differentiable:
        raise AssertionError(
            f"{where} the outputs that require a gradient must be "
            f"{sorted(expected.differentiable)}, got {sorted(actual.differentiable)}"
        )
    for name, wanted in expected.tensors.items():
        found = actual.tensors[name]
        if found is None and wanted is None:
            continue
        if found is None or wanted is None:
            other = wanted if found is None else found
            assert other is not None
            found, wanted = (torch.zeros_like(other) if t is None else t for t in (found, wanted))
        dtype = torch.bfloat16 if way.autocast else wanted.dtype
        relative, part = _TOLERANCES.get(dtype, (0.0, 0.0))
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
    if actual.changed:
        names = ", ".join(actual.changed)
        raise AssertionError(f"{where} {names} must not change, got changes in place")
    for name, shared in actual.shared.items() if not way.compiled else ():
        extra = sorted(shared - expected.shared[name])
        if extra:
            raise AssertionError(
                f"{where} {name} must have memory of its own, as that of the unfused ops, got that "
                f"of {', '.join(extra)}"
            )


def unfused_scope(handles: Sequence[Any]) -> ExitStack:
    """A scope without these fusions."""
    stack = ExitStack()
    for handle in handles:
        stack.enter_context(handle.disabled())
    return stack
