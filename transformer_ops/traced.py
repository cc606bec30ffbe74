"""Plans with Python steps under torch.compile: one node of Dynamo's graph, which AOTAutograd then
traces through, or a graph break."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .op import BasicOperation
from .stand_ins import StandIns
from .walker import Kwargs, Walker, check_kwargs

# Position of a basic op, path of a tensor on it.
Place = tuple[int, str]
_PLAIN = (bool, int, float, complex, str, torch.dtype, type(None))


class Numbered:
    """Objects by number, which is how a graph finds them again."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, found: Any) -> int:
        """A new number for the object."""
        number = next(self._next)
        self._objects[number] = found
        return number

    def find(self, number: int) -> Any:
        """The object of a number."""
        return self._objects[number]


numbered = Numbered()


def number_of(walker: Walker) -> int:
    """The number by which `walk_in_graph` finds a walker; -1 where it needs a graph break."""
    if not _is_traceable(walker):
        return -1
    if walker.number is None:
        walker.number = numbered.add(walker)
    return walker.number


def _is_traceable(walker: Walker) -> bool:
    for step in walker.python_steps:
        op = walker.python_ops[step.python]  # type: ignore[index]
        # A single method may do anything; what it does to its context cannot be told apart.
        if step in walker.plan.forward and op._forward_style() == "single":
            return False
        # A fused op hangs on no module: its tensors would become constants.
        if op.is_fused_op and next(_tensor_paths(op), None) is not None:
            return False
        if any(hasattr(basic._parameter_owner, "parametrizations") for basic in op.basic_ops):
            return False
    return not any(attributes.get("accumulate_into_main_grad") for _, attributes in walker.plan.ops)


@torch._dynamo.assume_constant_result
def state_places(number: int) -> tuple[Place, ...]:
    """The tensors other than parameters that Python ops may read from themselves."""
    walker: Walker = numbered.find(number)
    return tuple(
        (i, path)
        for i, op in enumerate(walker.basic_ops)
        if op.is_python
        for path in _tensor_paths(op)
    )


@torch._dynamo.assume_constant_result
def plain_state(number: int) -> tuple[tuple[Place, Any], ...]:
    """The plain values of Python ops, which become constants of a trace."""
    walker: Walker = numbered.find(number)
    found = _plain_state(walker).items()
    return tuple((place, v) for place, v in found if place not in walker.changed_by_tracing)


def _tensor_paths(op: nn.Module) -> Iterator[str]:
    for start, module in _parts(op):
        yield from (start + name for name, buffer in module._buffers.items() if buffer is not None)
        yield from (start + name for name, v in vars(module).items() if isinstance(v, Tensor))


def _plain_state(walker: Walker) -> dict[Place, Any]:
    return {
        (i, start + name): value
        for i, op in enumerate(walker.basic_ops)
        if op.is_python
        for start, module in _parts(op)
        for name, value in vars(module).items()
        # NaN would differ from itself.
        if not name.startswith("_") and isinstance(value, _PLAIN) and value == value
    }


def _parts(op: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in op.named_modules():
        yield prefix + "." if prefix else "", module


def read(ops: Sequence[BasicOperation], place: Place) -> Any:
    """What lies at a place now."""
    found: Any = ops[place[0]]
    for name in place[1].split("."):
        found = getattr(found, name)
    return found


@torch._dynamo.allow_in_graph
def walk_in_graph(
    number: int, tensors: Sequence[Tensor], state: Sequence[Tensor], kwargs: Kwargs
) -> tuple[Tensor, ...]:
    """Run a walker with the tensors of a trace instead of those that its ops hold."""
    walker: Walker = numbered.find(number)
    check_kwargs(walker.basic_ops, kwargs)
    parameters = [tensor for op in walker.basic_ops for tensor in op._parameter_tensors()]
    real = [*parameters, *(read(walker.basic_ops, place) for place in state_places(number))]
    given = [*tensors[len(tensors) - len(parameters) :], *state]
    before = _plain_state(walker)
    outputs = walker.run(tensors, kwargs, StandIns(real, given, tracing=True))
    after = _plain_state(walker)
    # A method that counts its calls would be traced at each of them.
    walker.changed_by_tracing.update(
        place for place in before.keys() | after.keys() if before.get(place) != after.get(place)
    )
    return outputs
