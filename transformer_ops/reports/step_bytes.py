"""The bytes of memory that one training step of a module holds at its peak."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from .. import _C
from ..base.sharding import sharding_restored, storages
from ..op.tensor_parallel import is_dtensor
from .progress import progress
from .tables import html_table, size_text

__all__ = ["StepBytes", "restored", "step_bytes"]

_BAR = 32  # characters of the longest bar in a terminal
_TITLES = {
    "parameters": "parameters and buffers",
    "inputs": "inputs",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "saved": "saved for backward",
    "scratch": "scratch",
}


class StepBytes(NamedTuple):
    """The bytes that a training step holds when it holds most: as text, as a dict, and as a table
    in a notebook.

    Attributes:
        parameters: the parameters and the buffers of the module.
        inputs: the tensors among the arguments.
        gradients: the gradients of parameters and of inputs that are in memory at the peak, and
            every `main_grad`.
        optimizer_states: the tensors in the states of the optimizers.
        saved: what forward allocated and backward has not freed yet at the peak. Tensors that are
            saved but were there before (inputs, parameters) do not count a second time.
        scratch: everything else that is in memory at the peak.
    """

    parameters: int
    inputs: int
    gradients: int
    optimizer_states: int
    saved: int
    scratch: int

    @property
    def peak(self) -> int:
        """The sum of all."""
        return sum(self)

    def as_dict(self) -> dict[str, int]:
        """For JSON: the attributes and `"peak"`."""
        return {**self._asdict(), "peak": self.peak}

    def titled(self) -> dict[str, int]:
        """The attributes by what a reader calls them."""
        return {title: getattr(self, name) for name, title in _TITLES.items()}

    def __str__(self) -> str:
        lines = [f"a step holds {size_text(self.peak)} at its peak"]
        for title, count in self.titled().items():
            share = count / (self.peak or 1)
            bar = "#" * round(_BAR * share)
            lines.append(f"  {title:22} {size_text(count):>10} {share:>5.0%}  {bar}".rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = {**self.titled(), "peak": self.peak}
        cells = [(title, size_text(count)) for title, count in rows.items()]
        return html_table(("", "bytes at the peak"), cells)


def step_bytes(
    module: Callable[..., Any],
    *args: Any,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> StepBytes:
    """Runs training steps of a module on these arguments and returns the exact bytes that a step
    holds at its peak.

    A step is forward, loss, backward, and `step()` of every optimizer; it begins without gradients.
    The second of two steps counts: the first one makes plans and states of optimizers. Bytes are
    those that the allocators of torch and the pool of this library hand out, on the device of the
    first parameter. The own buffers of libraries such as oneDNN do not count.

    Parameters, buffers, gradients, states of optimizers and of torch's random numbers are
    afterwards as before. What forward does to other objects stays, and so do the magnitudes that a
    recipe with delayed scaling records. A module whose parameters have hooks, or an optimizer,
    needs memory for a copy of the parameters, which is not part of the result.

    Args:
        module: an `nn.Module`, or one that `torch.compile` returned.
        *args: arguments of the module.
        optimizer: an optimizer or several, such as one for each parameter that steps in a hook of
            backward. Without one, there are no states and no step.
        loss: computes the loss from the output. By default it is the output itself, its attribute
            `loss` or its item "loss".
        **kwargs: arguments of the module.

    Raises:
        TypeError: `module` is not a module, or `optimizer` is not one.
        ValueError: there is no loss.
        RuntimeError: a profiler is active on this thread.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"[memory] module must be an nn.Module, got {module!r}")
    optimizers = _optimizers(optimizer)
    with sharding_restored(module):
        return _step_bytes(module, args, kwargs, optimizers, loss)


def _step_bytes(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    optimizers: list[Optimizer],
    loss: Callable[[Any], Tensor] | None,
) -> StepBytes:
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    tensors = [*module.parameters(), *inputs]
    leaves = [
        tensor for tensor in dict.fromkeys(tensors) if tensor.requires_grad and tensor.is_leaf
    ]
    device = tensors[0].device if tensors else torch.device("cpu")
    log = _C.AllocationLog()

    def step(count: Callable[[], int]) -> _Marks:
        return _step(lambda: _loss_of(module(*args, **kwargs), loss), leaves, optimizers, count)

    with restored(module, leaves, optimizers), progress("bytes of a step", 2) as advance:
        step(lambda: 0)
        advance()
        for tensor in leaves:
            tensor.grad = None
        gc.collect()
        before = _before(module, inputs, optimizers, device)
        log.begin()
        try:
            marks = step(log.count)
        finally:
            events = log.end()
        return _at_peak([event[:2] for event in events if event[2] == str(device)], marks, before)


Mark = tuple[int, int]  # how many events came before, and the address of a storage


class _Marks(NamedTuple):
    """What a step notes."""

    forward_end: int  # how many events came before
    loss: Mark
    gradients: list[Mark]
    states: list[Mark]


def _step(
    forward: Callable[[], Tensor],
    leaves: list[Tensor],
    optimizers: list[Optimizer],
    count: Callable[[], int],
) -> _Marks:
    """A step. `count()` is the number of events that came before."""
    gradients: list[Mark] = []
    for tensor in leaves:
        tensor.grad = None

    def note(tensor: Tensor) -> None:
        if tensor.grad is not None:
            gradients.extend((count(), address) for address in storages(tensor.grad))

    with ExitStack() as hooks:
        for tensor in leaves:
            hooks.callback(_hook_first(tensor, note))
        loss = forward()
        forward_end = count()
        (address,) = storages(loss)
        loss.backward()
    for tensor in leaves:
        note(tensor)
    for optimizer in optimizers:
        optimizer.step()
    states = [(count(), state) for tensor in _states(optimizers) for state in storages(tensor)]
    return _Marks(forward_end, (forward_end, address), gradients, states)


def _hook_first(tensor: Tensor, hook: Callable[[Tensor], None]) -> Callable[[], None]:
    """Calls the hook before those that may release the gradient. Returns what removes it."""
    handle = tensor.register_post_accumulate_grad_hook(hook)
    hooks: Any = tensor._post_accumulate_grad_hooks
    others = [item for item in hooks.items() if item[0] != handle.id]
    hooks.clear()  # torch calls them in the order in which the dict received them
    hooks.update([(handle.id, hook), *others])
    return handle.remove


class _Block:
    """A range of memory from its allocation to its release, which are numbers of events."""

    def __init__(self, address: int, count: int, begin: int) -> None:
        self.address, self.count, self.begin = address, count, begin
        self.end: float = inf

    def is_live(self, events: int) -> bool:
        """Whether it is in memory after so many events."""
        return self.begin < events <= self.end


def _blocks(events: list[tuple[int, int]]) -> tuple[list[_Block], int]:
    """All blocks, and the number of events after which most bytes are in memory."""
    blocks: list[_Block] = []
    live: dict[int, _Block] = {}
    total = most = peak = 0
    for number, (address, count) in enumerate(events):
        if count > 0:
            live[address] = _Block(address, count, number)
            blocks.append(live[address])
            total += count
        elif address in live:  # else it was there before the step
            block = live.pop(address)
            block.end = number
            total -= block.count
        if total > most:
            most, peak = total, number + 1
    return blocks, peak


def _at_peak(
    events: list[tuple[int, int]], marks: _Marks, before: dict[str, dict[int, int]]
) -> StepBytes:
    """Names what is in memory at the peak. What was there before is there all the time."""
    blocks, peak = _blocks(events)

    def at(mark: Mark) -> set[_Block]:
        return {block for block in blocks if block.address == mark[1] and block.is_live(mark[0])}

    kinds = {
        "optimizer_states": set().union(*map(at, marks.states)),
        "gradients": set().union(*map(at, marks.gradients)),
        "saved": {block for block in blocks if block.is_live(marks.forward_end)} - at(marks.loss),
    }
    names = {name: sum(found.values()) for name, found in before.items()}
    names |= {"saved": 0, "scratch": 0}
    for block in blocks:
        if block.is_live(peak):
            kind = next((kind for kind, found in kinds.items() if block in found), "scratch")
            names[kind] += block.count
    return StepBytes(**names)


def _optimizers(given: Any) -> list[Optimizer]:
    if given is None:
        return []
    found = [given] if isinstance(given, Optimizer) else given
    is_list = isinstance(found, Iterable) and not isinstance(found, str)
    found = list(found) if is_list else [found]
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"[memory] optimizer must be a torch.optim.Optimizer or several, got {optimizer!r}"
            )
    return found


def _loss_of(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor:
    found: Any
    if loss is not None:
        found = loss(output)
    elif isinstance(output, Mapping):
        found = output.get("loss")
    else:
        found = getattr(output, "loss", output)
    if not isinstance(found, Tensor) or found.numel() != 1:
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else found
        raise ValueError(
            "[memory] loss must compute one number from the output of the module, got "
            f"{kind if found is not None else 'None'}"
        )
    return found


def _states(optimizers: list[Optimizer]) -> list[Tensor]:
    leaves = tree_leaves([[dict(state) for state in o.state.values()] for o in optimizers])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _before(
    module: nn.Module, inputs: list[Tensor], optimizers: list[Optimizer], device: torch.device
) -> dict[str, dict[int, int]]:
    """The bytes that are there before a step by attribute of the result and by address, each
    address once."""
    main_grads = [vars(parameter).get("main_grad") for parameter in module.parameters()]
    groups = {
        "parameters": [*module.parameters(), *module.buffers()],
        "inputs": inputs,
        "optimizer_states": _states(optimizers),
        "gradients": [tensor for tensor in main_grads if tensor is not None],
    }
    seen: set[int] = set()
    found: dict[str, dict[int, int]] = {}
    for name, tensors in groups.items():
        here = [tensor for tensor in tensors if tensor.device == device]
        new = {k: v for tensor in here for k, v in storages(tensor).items() if k not in seen}
        seen |= new.keys()
        found[name] = new
    return found


@contextmanager
def restored(
    module: nn.Module, leaves: list[Tensor], optimizers: list[Optimizer]
) -> Iterator[None]:
    """Leaves gradients, buffers, parameters, states of optimizers and random numbers afterwards as
    they were."""
    grads = [tensor.grad for tensor in leaves]
    attributes = [(tensor, dict(vars(tensor))) for tensor in leaves]
    changed = [vars(tensor)["main_grad"] for tensor in leaves if "main_grad" in vars(tensor)]
    buffers = [(inner, dict(inner._buffers)) for inner in module.modules()]
    changed += [tensor for _, names in buffers for tensor in names.values() if tensor is not None]
    hooked = any(tensor._post_accumulate_grad_hooks for tensor in leaves)
    if optimizers or hooked:
        changed += leaves
    states = [_OptimizerState(optimizer) for optimizer in optimizers]
    changed += _states(optimizers)
    # A DTensor changes on this rank, whatever the others do.
    changed = [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in changed]
    copies = [(tensor, tensor.detach().clone()) for tensor in changed]
    device = leaves[0].device if leaves else torch.device("cpu")
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for state in states:
                state.restore()
            with torch.no_grad():
                for tensor, values in copies:
                    # A graph that has saved a tensor must not see that it was written.
                    if not torch.equal(tensor, values):
                        tensor.copy_(values)
            for inner, names in buffers:
                inner._buffers.clear()
                inner._buffers.update(names)
            for tensor, names in attributes:
                vars(tensor).clear()
                vars(tensor).update(names)
            for tensor, grad in zip(leaves, grads, strict=True):
                tensor.grad = grad


class _OptimizerState:
    """What an optimizer has beside the values of its tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.states = [(key, state, _copied(state)) for key, state in optimizer.state.items()]
        self.groups = [(group, _copied(group)) for group in optimizer.param_groups]

    def restore(self) -> None:
        """The same objects with the same tensors."""
        self.optimizer.state.clear()
        for key, state, items in self.states:
            self.optimizer.state[key] = state
            state.clear()
            state.update(items)
        for group, items in self.groups:
            group.clear()
            group.update(items)


def _copied(items: dict[str, Any]) -> dict[str, Any]:
    """Tensors and lists of parameters as they are, other values copied."""
    kept = lambda name, value: name == "params" or isinstance(value, Tensor)  # noqa: E731
    return {k: v if kept(k, v) else copy.deepcopy(v) for k, v in items.items()}
