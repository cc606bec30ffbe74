"""Runs ops or a model in one way, and collects all numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ways import LAYOUTS, SHAPES, Way


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


class Subject(ABC):
    """What a check runs: ops or a model, in every dtype and mode that a way asks for."""

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that require a gradient."""
        return list(self._parameters(Way()))

    @abstractmethod
    def _parameters(self, way: Way) -> dict[str, Tensor]:
        """The parameters that require a gradient, of the copy that runs in this way."""

    @abstractmethod
    def _callable(self, way: Way) -> Callable[..., Any]:
        """What runs in this way. It returns a tensor, or a tuple of tensors."""

    @abstractmethod
    def _is_traceable(self, way: Way) -> bool:
        """Whether a compiled call like the last one needs no graph break."""

    def run(self, inputs: Sequence[Tensor], way: Way) -> Numbers:
        """Every number that has to agree. Raises what the call raises."""
        parameters = self._parameters(way)
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
        changed = sources[0] if way.changed == "output" else wanted.get(way.changed)
        with _changed(changed):
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
        group = self._callable(way)
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
    found: list[Tensor] = []
    for tensor in inputs:
        made = tensor.detach().clone()
        if way.shape and made.shape[:-1] == leading:
            made = SHAPES[way.shape](made.reshape(-1, made.shape[-1]))
        if made.is_floating_point() and way.dtype is not None:
            made = made.to(way.dtype)
        if way.values == "inputs":
            made = _with_other_values(made)
        layout = LAYOUTS.get(way.layout)
        made = layout(made) if layout is not None else made
        wants_gradient = way.grad and way.input_grad and f"input {len(found)}" not in way.frozen
        found.append(made.requires_grad_(made.is_floating_point() and wants_gradient))
    return found


def change_attributes(module: Any, names: Iterable[str]) -> None:
    """Gives those of these attributes that are positive floats another value."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, float) and value > 0:
            setattr(module, name, 0.75 * value)


def _with_other_values(tensor: Tensor) -> Tensor:
    return tensor * 0.5 + 0.25 if tensor.is_floating_point() else tensor


def _gradients(outputs: Any, way: Way) -> list[Tensor]:
    torch.manual_seed(1)
    if way.layout == "expanded gradient":
        return [torch.randn((), dtype=t.dtype, device=t.device).expand(t.shape) for t in outputs]
    layout = LAYOUTS.get(way.layout) or torch.Tensor.contiguous
    return [layout(torch.randn(t.shape, dtype=t.dtype, device=t.device)) for t in outputs]


@contextmanager
def _changed(tensor: Tensor | None) -> Iterator[None]:
    """Changes a tensor in place in this scope."""
    if tensor is None:
        yield
        return
    # Autograd does not follow a detached tensor, but counts its changes.
    own, before = tensor.detach(), tensor.detach().clone()
    own.mul_(2).add_(1)
    try:
        yield
    finally:
        own.copy_(before)


def _share_memory(first: Tensor, second: Tensor) -> bool:
    if not first.numel() or not second.numel():
        return False
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _is_equal(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.detach().nan_to_num(7), second.nan_to_num(7))
