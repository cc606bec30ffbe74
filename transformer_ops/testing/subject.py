"""Runs ops or a model in one way, and collects all numbers."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..op.hooks import HOOKS
from .ways import (
    ALL_DROPPED,
    ATTRIBUTES,
    AUTOCAST_AROUND,
    GRADIENTS,
    LAYOUTS,
    MORE_SHAPES,
    NO_ATTRIBUTE,
    OF_ONE_OP,
    OTHER_THREAD,
    OTHER_VALUES,
    PARAMETERS,
    SCOPES,
    SHAPES,
    STATES,
    VALUES,
    Way,
    step,
    strided,
    transposed,
)

# The state of the generator of random numbers after a call, among the numbers of the call.
RANDOM_STATE = "random state"
_PLAIN = (bool, int, float, str, type(None))


class Numbers(NamedTuple):
    """What a call gave.

    Attributes:
        tensors: outputs and gradients by a name for messages; a gradient may be None.
        shared: for each output the other tensors of the call whose memory it shares.
        differentiable: the outputs that require a gradient.
        changed: the tensors that the call changed in place, and the settings of the process that
            it left changed.
        strided: the outputs that are not contiguous, and the pairs of gradients that share memory.
    """

    tensors: dict[str, Tensor | None]
    shared: dict[str, frozenset[str]]
    differentiable: frozenset[str]
    changed: tuple[str, ...]
    strided: frozenset[str]


class Subject(ABC):
    """What a check runs: ops or a model, in every dtype and mode that a way asks for."""

    # Whether a call draws as many random numbers as the one that it is compared with.
    keeps_random_state = True
    # Whether small errors make small errors, as in no function with a kink.
    is_smooth = False
    # The inputs that must not require a gradient.
    constants: frozenset[str] = frozenset()

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that require a gradient."""
        return list(self._parameters(Way()))

    @property
    def attributes(self) -> list[str]:
        """What `attributes` of a way may be, for the attributes that its modules have."""
        modules, found = list(self._modules(Way())), list[str]()
        for name in ATTRIBUTES:
            count = sum(hasattr(module, name) for module in modules)
            found += [name] * (count > 0) + [name + OF_ONE_OP] * (count > 1)
            found += ["scale of 0", "scale of 1"] * (count > 0 and name == "scale")
        found += [ALL_DROPPED] * any(hasattr(module, "p") for module in modules)
        return found

    @abstractmethod
    def _parameters(self, way: Way) -> dict[str, Tensor]:
        """The parameters that require a gradient, of the copy that runs in this way."""

    @abstractmethod
    def _callable(self, way: Way) -> Callable[..., Any]:
        """What runs in this way. It returns a tensor, or a tuple of tensors."""

    @abstractmethod
    def _modules(self, way: Way) -> Iterable[nn.Module]:
        """The modules of the copy that runs in this way."""

    @abstractmethod
    def _is_traceable(self, way: Way) -> bool:
        """Whether a compiled call like the last one needs no graph break."""

    def find_constants(self, inputs: Sequence[Tensor]) -> frozenset[str]:
        """The inputs that must not require a gradient, such as the tables of RoPE."""
        found = set[str]()
        for name in (f"input {i}" for i, t in enumerate(inputs) if i and t.is_floating_point()):
            others = {f"input {i}" for i in range(len(inputs))} - {name}
            try:
                self._call(_prepared(inputs, Way(), others), Way())
            except RuntimeError as error:
                found |= {name} if "must not require a gradient" in str(error) else set()
        return frozenset(found)

    def run(self, inputs: Sequence[Tensor], way: Way) -> Numbers:
        """Every number that has to agree. Raises what the call raises."""
        parameters = self._parameters(way)
        frozen = [p for name, p in parameters.items() if name in way.frozen]
        with ExitStack() as stack:
            for parameter in frozen:
                parameter.requires_grad_(False)
                stack.callback(parameter.requires_grad_, True)
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.set_grad_enabled(way.grad))
            for parameter in parameters.values() if way.weights else ():
                stack.callback(setattr, parameter, "data", parameter.data)
                parameter.data = _not_contiguous(parameter.data)
            tensors = _prepared(inputs, way, way.frozen | self.constants)
            if way.values in ("data", "others"):
                self._call(tensors, way)
            if way.values == "others":
                self._replace_parameters(stack, way)
                parameters = self._parameters(way)
            change = step if way.values == "data" else PARAMETERS.get(way.values)
            for parameter in parameters.values():
                if change is not None:
                    stack.enter_context(_changed(parameter, change, is_seen=way.values != "data"))
            if way.scope in SCOPES:
                stack.enter_context(SCOPES[way.scope]())
            if way.inference:
                stack.enter_context(torch.inference_mode())
            return self._run_once(tensors, parameters, way)

    def _replace_parameters(self, stack: ExitStack, way: Way) -> None:
        """Gives the modules new parameters until the stack ends."""
        new: dict[int, nn.Parameter] = {}
        for module in self._modules(way):
            for name, old in module.named_parameters(recurse=False):
                made = nn.Parameter(old.detach() * 0.5, old.requires_grad)
                stack.callback(setattr, module, name, old)
                setattr(module, name, new.setdefault(id(old), made))

    def _run_once(
        self, tensors: list[Tensor], parameters: Mapping[str, Tensor], way: Way
    ) -> Numbers:
        inputs = {f"input {i}": tensor for i, tensor in enumerate(tensors)}
        named = inputs | {f"parameter {name}": p for name, p in parameters.items()}
        wanted = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        before = {name: tensor.detach().clone() for name, tensor in named.items()}
        torch.manual_seed(20)
        settings, given_first, state = _settings(), named, self._state(named, way)
        outputs = self._call(tensors, way)
        others = named | outputs
        shared = {
            name: frozenset(n for n, t in others.items() if n != name and _share_memory(output, t))
            for name, output in outputs.items()
        }
        numbers: dict[str, Tensor | None] = {n: t.detach().clone() for n, t in outputs.items()}
        if self.keeps_random_state and way.attributes != ALL_DROPPED:
            numbers[RANDOM_STATE] = torch.get_rng_state()
        sources = {name: t for name, t in outputs.items() if t.requires_grad}
        if way.only_output is not None:
            only = list(outputs)[way.only_output]
            sources = {name: t for name, t in sources.items() if name == only}
        strided = {name for name, t in outputs.items() if not t.is_contiguous()}
        if way.second == "call":
            before |= {name: tensor.detach().clone() for name, tensor in outputs.items()}
            named = named | outputs
        if sources and wanted:
            given = _gradients(sources.values(), way)
            before |= {f"gradient {i}": grad.clone() for i, grad in enumerate(given)}
            named = named | {f"gradient {i}": grad for i, grad in enumerate(given)}
            times = self._backward(tensors, sources, wanted, given, way)
            for time, grads in enumerate(times):
                live = {f"{n} {time}": g for n, g in grads.items() if g is not None}
                before |= {name: grad.clone() for name, grad in live.items()}
                named = named | live
                numbers |= grads
            strided |= _views_of_others(numbers)
        elif way.second == "call":
            self._other_call(tensors, way)
        changed = [n for n, old in before.items() if not _is_equal(named[n], old)]
        if not way.compiled:
            after = self._state(given_first, way)
            changed += [
                name
                for name in state | after
                if state.get(name, NO_ATTRIBUTE) != after.get(name, NO_ATTRIBUTE)
            ]
            changed += _restored(settings)
        return Numbers(numbers, shared, frozenset(sources), tuple(changed), frozenset(strided))

    def _state(self, named: Mapping[str, Tensor], way: Way) -> dict[str, Any]:
        """What a call must leave as it is, besides numbers."""
        found: dict[str, Any] = {}
        for name, tensor in named.items():
            found[f"requires_grad of {name}"] = tensor.requires_grad
            if not (way.changed or tensor.is_inference()):
                found[f"the version of {name}"] = tensor._version
            if tensor.is_leaf:
                found[f".grad of {name}"] = None if tensor.grad is None else id(tensor.grad)
                found[f"the attributes of {name}"] = sorted(vars(tensor))
                found[f"the hooks of {name}"] = len(tensor._backward_hooks or ())
                found[f"the memory of {name}"] = (tensor.data_ptr(), tensor.stride())
        for module in self._modules(way):
            kind, own = type(module).__name__, vars(module)
            for name, value in own.items():
                if name[0] != "_" and isinstance(value, _PLAIN):
                    found[f"{name} of a {kind}"] = value
            tensors = (*module._parameters, *module._buffers)
            found[f"the attributes of a {kind}"] = sorted(
                name for name in (*own, *tensors) if name[0] != "_"
            )
            found[f"the hooks of a {kind}"] = [len(own[hooks]) for hooks in HOOKS if hooks in own]
        return found

    def _other_call(self, tensors: Sequence[Tensor], way: Way) -> None:
        others = [VALUES[OTHER_VALUES](t.detach()).requires_grad_(t.requires_grad) for t in tensors]
        # More calls than a fusion may have buffers for in turn.
        for _ in range(4):
            self._call(others, way)

    def _backward(
        self,
        tensors: list[Tensor],
        sources: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        given: list[Tensor],
        way: Way,
    ) -> Iterator[dict[str, Tensor | None]]:
        if way.second == "call":
            self._other_call(tensors, way)
        times = 3 if way.second == "backward" else 1
        inputs = {f"input {i}": tensor for i, tensor in enumerate(tensors)}
        changed = {**inputs, **wanted, **sources}.get(way.changed)
        autocast: AbstractContextManager[Any] = nullcontext()
        if way.scope == AUTOCAST_AROUND:
            autocast = torch.autocast(tensors[0].device.type, torch.bfloat16)
        run = _in_thread if way.scope == OTHER_THREAD else _directly
        with self._other_state(way), _changed(changed, _nans), autocast:
            for time in range(times):
                # The last gradients are those of a single backward.
                factor = times - time
                grads = run(
                    torch.autograd.grad,
                    list(sources.values()),
                    list(wanted.values()),
                    given if factor == 1 else [factor * grad for grad in given],
                    allow_unused=True,
                    retain_graph=time < times - 1,
                )
                yield {f"gradient of {n}": g for n, g in zip(wanted, grads, strict=True)}

    @contextmanager
    def _other_state(self, way: Way) -> Iterator[None]:
        """Changes what modules are besides their tensors in this scope."""
        if way.changed not in STATES:
            yield
            return
        modules = list(self._modules(way))
        before = [vars(module).copy() for module in modules]
        for module in modules:
            if way.changed == "training":
                module.training = not module.training
            else:
                for name in {*ATTRIBUTES, *vars(module)}:
                    change_attribute(module, name)
        try:
            yield
        finally:
            for module, attributes in zip(modules, before, strict=True):
                for name, value in attributes.items():
                    if not isinstance(value, dict | set) and vars(module)[name] is not value:
                        setattr(module, name, value)

    def _call(self, tensors: Sequence[Tensor], way: Way) -> dict[str, Tensor]:
        group = self._callable(way)
        dtype = way.autocast or torch.bfloat16
        enabled = way.autocast is not None and way.exact is None
        with torch.autocast(tensors[0].device.type, dtype, enabled=enabled):
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


def _prepared(inputs: Sequence[Tensor], way: Way, frozen: Set[str]) -> list[Tensor]:
    leading = inputs[0].shape[:-1]
    found: list[Tensor] = []
    for tensor in inputs:
        made = tensor.detach().clone()
        is_per_row = made.shape == leading
        if way.shape and (is_per_row or made.shape[:-1] == leading):
            made = made.reshape(-1, 1 if is_per_row else made.shape[-1])
            made = (SHAPES | MORE_SHAPES)[way.shape](made)
            made = made.squeeze(-1) if is_per_row else made
        if made.is_floating_point() and way.dtype is not None:
            made = made.to(way.dtype)
        if made.is_floating_point() and way.input_dtype is not None and not found:
            made = made.to(way.input_dtype)
        if way.values in VALUES and (made.is_floating_point() or way.values == OTHER_VALUES):
            made = VALUES[way.values](made)
        if way.exact is not None and made.is_floating_point():
            made = made.double()
        layout = LAYOUTS.get(way.layout)
        made = layout(made) if layout is not None else made
        wants_gradient = way.grad and way.input_grad and f"input {len(found)}" not in frozen
        found.append(made.requires_grad_(made.is_floating_point() and wants_gradient))
    return found


def change_attribute(module: Any, name: str, to: str = "") -> bool:
    """Gives an attribute its other value of `ATTRIBUTES`, or the number `to`; one of floats others.
    False if the module does not have it."""
    value = getattr(module, name, NO_ATTRIBUTE)
    if value is NO_ATTRIBUTE or isinstance(value, Tensor):
        return False
    new = float(to) if to and value is not None else ATTRIBUTES.get(name, _other_floats)(value)
    if new is not value:
        setattr(module, name, new)
    return True


def _other_floats(value: Any, factor: float = 0.75) -> Any:
    """Smaller positive floats, also those of a tuple; any other value is itself."""
    if isinstance(value, tuple) and value and isinstance(value[0], float):
        return tuple(_other_floats(part, factor) for part in value)
    return factor * value if isinstance(value, float) and value > 0 else value


def with_attributes(way: Way, modules: Iterable[tuple[Any, Iterable[str]]]) -> None:
    """Gives attributes of modules the values of a way; the names are those of floats."""
    attribute = way.attributes.removesuffix(OF_ONE_OP)
    name, _, number = attribute.partition(" of ")
    for k, (module, names) in enumerate(modules):
        for own in names if name == "all" else ():
            value = getattr(module, own, None)
            other = _other_floats(value, 0.75 * 0.9**k)
            if other is not value:
                setattr(module, own, other)
        is_changed = name not in ("", "all") and change_attribute(module, name, number)
        if is_changed and attribute != way.attributes:
            return


def _gradients(outputs: Any, way: Way) -> list[Tensor]:
    torch.manual_seed(1)
    is_expanded = way.layout == "expanded gradient"
    layout = LAYOUTS.get(way.layout) or torch.Tensor.contiguous
    values = GRADIENTS.get(way.gradient, torch.Tensor.clone)
    dtypes = [t.dtype for t in outputs] if way.exact is None else way.exact
    found: list[Tensor] = []
    for t, dtype in zip(outputs, dtypes, strict=True):
        made = torch.randn(() if is_expanded else t.shape, dtype=dtype, device=t.device)
        made = values(made).to(t.dtype)
        found.append(made.expand(t.shape) if is_expanded else layout(made))
    return found


def _not_contiguous(tensor: Tensor) -> Tensor:
    return (transposed if tensor.dim() > 1 else strided)(tensor)


def _directly(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    return function(*args, **keywords)


def _in_thread(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **keywords).result()


def _nans(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor * 2 + 1


@contextmanager
def _changed(
    tensor: Tensor | None, change: Callable[[Tensor], Tensor], *, is_seen: bool = True
) -> Iterator[None]:
    """Changes a tensor in place in this scope."""
    if tensor is None:
        yield
        return
    # Autograd does not follow a detached tensor, but counts its changes. It does not count those
    # of `.data`.
    own, before = tensor.detach() if is_seen else tensor.data, tensor.detach().clone()
    own.copy_(change(before))
    try:
        yield
    finally:
        own.copy_(before)


# In the order of `set_flags`.
_CUDNN = ("enabled", "benchmark", "benchmark_limit", "deterministic")


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _numpy_state() -> Sequence[Any]:
    numpy = sys.modules.get("numpy")
    return () if numpy is None else numpy.random.get_state()


# What a call may find in any state, and has to leave so: how it is read, and set.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the cache of autocast": (
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
    ),
    "the filters of warnings": (
        lambda: list(warnings.filters),
        lambda filters: setattr(warnings, "filters", filters),
    ),
    "Python's random state": (random.getstate, random.setstate),
    "numpy's random state": (
        lambda: [getattr(part, "tolist", lambda p=part: p)() for part in _numpy_state()],
        lambda state: sys.modules["numpy"].random.set_state(tuple(state)),
    ),
    "the collector of garbage": (
        gc.isenabled,
        lambda on: gc.enable() if on else gc.disable(),
    ),
    "environment variables": (lambda: dict(os.environ), _set_environment),
    "the flags of oneDNN": (
        lambda: torch.backends.mkldnn.enabled,
        torch.backends.mkldnn.set_flags,
    ),
    "the flags of cuDNN": (
        lambda: [getattr(torch.backends.cudnn, flag) for flag in _CUDNN],
        lambda flags: torch.backends.cudnn.set_flags(*flags),
    ),
    "the flushing of denormal numbers": (
        lambda: not torch.full((1,), 1e-40, dtype=torch.float32).mul(2).any().item(),
        torch.set_flush_denormal,
    ),
}


def _settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def _restored(settings: dict[str, Any]) -> list[str]:
    """The settings that are others by now. They are as before afterwards."""
    changed = [name for name, value in _settings().items() if value != settings[name]]
    for name in changed:
        _SETTINGS[name][1](settings[name])
    return changed


def _views_of_others(numbers: Mapping[str, Tensor | None]) -> set[str]:
    """The gradients that are views of the memory of another one. Autograd copies a gradient that
    it was given twice, but not two views."""
    grads = [(n, g) for n, g in numbers.items() if n.startswith("gradient") and g is not None]
    return {
        f"{name} and {other}"
        for k, (name, first) in enumerate(grads)
        for other, second in grads[:k]
        if first is not second and _share_memory(first, second)
    }


def _share_memory(first: Tensor, second: Tensor) -> bool:
    if not first.numel() or not second.numel():
        return False
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _is_equal(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.detach().nan_to_num(7), second.nan_to_num(7))
