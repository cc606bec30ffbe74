"""A part of a module's `forward` that ops stand for, and when they may.

In: a module and a site in its class. Out: something to call in place of the statements, or None if
they have to run, because a hook, another class or another value of what they read is in the way.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.utils.parametrize import is_parametrized

from .. import _C
from ..modules.sequential import Sequential
from ..modules.views import BorrowedLinear
from ..op.base import FusibleOperation
from ..op.borrowed import Borrowed, add_guards, class_of, find_obstacle, has_stored
from ..op.hooks import HOOKS
from ..op.methods import shown
from ..op.tensor_parallel import is_dtensor
from ..op.view import View
from ..quantization.stored import is_in_4_bits, is_packed
from ..runtime.policies import Policies
from .attention_ops import AttentionChoice, BorrowedAttention, attention_in, chosen
from .branches import may_run
from .captures import Captures, captures_of
from .facts import Facts, Watcher
from .pattern import Names, Steps, arguments_in
from .reads import Source, objects_of, reads_of_function
from .rules import FuseRule, FuseSkip, FuseUnfit
from .statements import function_of
from .whole import name_of
from .widths import Routed, Widths, widths_of
from .windows import Condition

__all__ = ["IS_OFF", "RECOMPUTE", "REGIONS", "Region", "State", "set_recompute"]

# The attributes of a fused module that are ours.
REGIONS, IS_OFF = "_tops_regions", "_tops_is_off"
# The policy of its ops, unless it is the default.
RECOMPUTE = "_tops_recompute"

# Attributes of these classes are watched, also where statements do not name them.
_WATCHED = (
    bool,
    int,
    float,
    str,
    tuple,
    functools.partial,
    types.BuiltinFunctionType,
    types.FunctionType,
)
# So often the ops are made again, in less than twice as many calls, before the statements run for
# good.
_MOST_CHANGES = 32
# A module with attention is called in few ways.
_MOST_VARIANTS = 16
# So many states of the modules have ops at a time: adapters that are on and off, weights that are
# tensors in `functional_call`.
_MOST_STATES = 4
# Nobody calls these.
_CONTAINERS = (nn.ModuleDict, nn.ParameterDict)
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)


class State:
    """What statements read and call, and what runs then: ops, or the statements."""

    def __init__(self, module: nn.Module | None = None, parts: Sequence[nn.Module] = ()) -> None:
        # The module owns them.
        self.guards = _C.Guards(module)
        self.modules = list(map(id, parts))
        self.sequential: Sequential | None = None
        self.reason = "not called yet"
        # With attention, the ops for each choice of its calls.
        self.attention: BorrowedAttention | None = None
        # Whether the statements give all its results, as a pair.
        self.gives_pair = False
        self.variants: dict[AttentionChoice, Sequential] = {}
        self.widths: Widths | Routed | None = None
        self.captures: list[Captures] = []
        # No graph can contain what a class of another library does to decode a weight.
        self.may_compile = True
        # The linear layers of bitsandbytes, which cast their input and their output.
        self.in_4_bits: list[Any] = []

    def may_take(self, input: Tensor, others: tuple[Any, ...]) -> bool:
        """Whether the ops may run on these tensors, in the current call."""
        if not self.may_compile and is_compiling():
            return False
        if self.captures and any(found.are_on() for found in self.captures):
            return False
        if self.in_4_bits and not all(_takes(one, input) for one in self.in_4_bits):
            return False
        return self.widths is None or self.widths.fit(input, others)

    @property
    def run(self) -> Callable[..., Any] | None:
        """Runs the ops."""
        ops = self.sequential
        if ops is None or not isinstance(self.widths, Routed):
            return ops
        is_on = torch.is_autocast_enabled("cpu")
        return functools.partial(_run_without_autocast, ops) if is_on else ops


def _run_without_autocast(ops: Sequential, *tensors: Tensor) -> Any:
    # Autocast does not know the grouped products of torch, which these ops replace.
    with torch.autocast("cpu", enabled=False):
        return ops(*tensors)


def _takes(module: Any, input: Tensor) -> bool:
    """Whether a linear layer of bitsandbytes multiplies in the dtype of the input, and its weight
    can be decoded."""
    kind, dtype = input.device.type, input.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    is_same = bool(input.dtype == dtype == module.compute_dtype)
    return is_same and not is_packed(module.weight)


_NO_STATE = State()


class Region:
    """Ops in place of statements. They run as long as all that the statements read is as it was
    when the ops were made: the classes, hooks, submodules, attributes and classes of parameters of
    the modules that they call, and the functions."""

    def __init__(
        self,
        rule: FuseRule,
        names: Names,
        source: Source,
        conditions: Sequence[Condition] = (),
        extra_inputs: int = 0,
    ) -> None:
        self._extra_inputs = extra_inputs  # variables that the statements read besides the input
        self.rule, self.names, self._conditions = rule, names, conditions
        self._source = source
        # Regions within this one, which nobody asks while this one runs.
        self.inside: list[Region] = []
        self.state = _NO_STATE
        self._states: list[State] = []  # the last one that was current comes last
        self._calls = self._changes = 0
        # While these hold, the statements run.
        self._closed: _C.Guards | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """Makes the region of a copied module, which has no ops yet."""
        found = copy.copy(self)
        found.forget()
        found.inside = copy.deepcopy(self.inside, memo)
        return found

    @property
    def sequential(self) -> Sequential | None:
        """The ops, or None where the statements run. With attention, those of the last call."""
        return self.state.sequential

    def is_open(self, module: nn.Module) -> bool:
        """For a call: whether the ops may run. They are made, or refused, when they are first asked
        for, and when something has changed since."""
        if self._closed is not None:
            if self._closed.hold():
                return False
            self._closed, self._calls, self._changes = None, 0, 0
        self._calls += 1
        state = self.state
        if state is _NO_STATE or not state.guards.hold():
            known = next((one for one in self._states if one.guards.hold()), None)
            if known is not None:
                self._states.remove(known)
                self._states.append(known)
                self.state = known
            elif state is not _NO_STATE and self._changes_too_often():
                self._close(module, f"it changes from call to call: {state.guards.broken()}")
                return False
            else:
                self._look(module)
        return self.state.sequential is not None

    def forget(self) -> None:
        """Has the next call look again, and lets go of the modules that the last look saw."""
        self.state, self._states = _NO_STATE, []

    def _changes_too_often(self) -> bool:
        self._changes += 1
        return self._changes > _MOST_CHANGES and 2 * self._changes > self._calls

    def _close(self, module: nn.Module, reason: str) -> None:
        """From now on the statements run, until other modules take the place of these."""
        self.forget()
        self.state = State()
        self.state.reason = reason
        self._closed = _C.Guards(None)
        for part in _unique(self.parts(module)):
            self._closed.add_type(part, "")
            for name in part._modules:
                self._closed.add_value(part._modules, name, "")
        for name in self._attributes(module) & module._modules.keys():
            self._closed.add_value(module._modules, name, "")

    def why_not(self, module: nn.Module) -> str:
        """For a report: why the ops would not run now, or an empty text."""
        if self._closed is not None and self._closed.hold():
            return self.state.reason
        if self.sequential is not None and self._has_dtensors(module):
            return ""  # between two calls FSDP has split what it gathers for a call
        try:
            self.check(module)
        except FuseSkip as skip:
            return str(skip)
        return ""

    def check(self, module: nn.Module) -> None:
        """FuseSkip with the reason where the ops may not run now."""
        self._make_watched(_C.Guards(None), module)

    def may_run(self, module: nn.Module) -> bool:
        """Whether its statements are in no branch that attributes of the module rule out."""
        return may_run(module, self._conditions)

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """The modules that the statements call."""
        found = {**module._modules, **vars(module)}
        called = (found.get(name) for name in sorted(self._attributes(module)))
        return [part for part in called if isinstance(part, nn.Module)]

    def covered(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules that nobody calls while the ops run."""
        # The statements also call them where the rule has a condition.
        if self.rule.when is not None:
            return iter(())
        is_ready = self.may_run(module) and (self._is_split(module) or not self.why_not(module))
        return iter(_unique(self.parts(module)) if is_ready else ())

    def _is_split(self, module: nn.Module) -> bool:
        """Whether it holds DTensors now, which it may gather for a call, and nothing else is in the
        way."""
        try:
            return self._has_dtensors(module) and bool(self._ops(module))
        except FuseSkip:
            return False

    def _has_dtensors(self, module: nn.Module) -> bool:
        own = module._parameters.values()
        return any(map(is_dtensor, (*own, *_parameters(self.parts(module)))))

    def _attributes(self, module: nn.Module) -> set[str]:
        """The attributes of the module that the statements read, also in its methods."""
        found = {name for key, name in self.names.items() if len(key) > 1}
        steps = [name for name in found if isinstance(name, Steps)]
        called = [own["chunk"] for one in steps for _, own in one.list if "chunk" in own]
        methods = (function_of(getattr(class_of(module), name)) for name in called)
        in_methods = (chain[0] for method in methods for chain in reads_of_function(method).own)
        return (found - {*steps}).union(in_methods, *(step.attributes for step in steps))

    def _look(self, module: nn.Module) -> None:
        """Makes the ops, or says why there are none; and what either takes for granted."""
        parts = _unique(self.parts(module))
        state = State(module, parts)
        ops: Sequence[nn.Module] = ()
        try:
            ops = self._make_watched(state.guards, module)
            _leave_guards_to_region(ops, [module, *parts])
            state.sequential = _sequential_of(module, ops)
            given, attention = arguments_in(self.names), attention_in(ops)
            state.attention, is_whole = attention, given is not None and not given.is_first
            state.gives_pair = is_whole and attention is not None and attention.call.gives_pair
            state.widths = widths_of(ops)
            state.captures = [found for one in parts if (found := captures_of(one))]
            state.in_4_bits = [
                owner
                for op in _borrowed(ops)
                for owner, name in op._decoded_places()
                if is_in_4_bits(owner._parameters.get(name))
            ]
            state.may_compile = not any(map(has_stored, _borrowed(ops)))
            state.reason = ""
        except FuseSkip as skip:
            state.reason = str(skip)
            with contextlib.suppress(FuseSkip):
                # What they call may change again, such as a function that a global module calls.
                self._add_facts_of_parts(Facts(state.guards), module)
        self._add_guards(state.guards, module, ops)
        if state.attention is not None:
            for other in self.inside:
                other.forget()
        # Modules that are not here any more are let go.
        known = [one for one in self._states if one.modules == state.modules]
        self.state, self._states = state, [*known[1 - _MOST_STATES :], state]

    def _make_watched(self, guards: _C.Guards, module: nn.Module) -> Sequence[nn.Module]:
        """Makes the ops, and adds what the statements depend on. FuseSkip for what cannot be
        watched."""
        facts = Facts(guards)
        # These come first: to read a property may do something.
        try:
            facts.add_reads(self._source.function, self._source.reads, module, "the module")
        except FuseSkip as skip:
            # Modules of attention are no properties, but functions of a loss are.
            raise skip if arguments_in(self.names) is None else FuseUnfit(str(skip)) from None
        ops = self.make(module)
        self._add_facts_of_parts(facts, module)
        for basic in _borrowed(ops):
            if isinstance(basic, Watcher):
                basic.add_facts(facts)
        return ops

    def _add_facts_of_parts(self, facts: Facts, module: nn.Module) -> None:
        for part in _unique(self.parts(module)):
            facts.add_module(part, _name_in(module, part))

    def _add_guards(self, guards: _C.Guards, module: nn.Module, ops: Sequence[nn.Module]) -> None:
        """Adds what is known of all modules, whatever the statements read."""
        for name in _GLOBAL_HOOKS:
            guards.add_size(vars(nn.modules.module), name, "there are other hooks for all modules")
        own = {
            name
            for basic in _borrowed(ops)
            if any(owner is module for owner in basic._owners())
            for name in basic._watched
        }
        for name in sorted(self._attributes(module) & module._modules.keys()):
            guards.add_value(module._modules, name, f"{name} is another module")
        for name in sorted((self._attributes(module) | own) & vars(module).keys()):
            guards.add_value(vars(module), name, f"{name} has changed")
        tensors = module._parameters
        add_guards(guards, module, "the module", tensors=tensors, is_called=False)
        for part in _unique(self.parts(module)):
            _guard(guards, part, _name_in(module, part))

    def make_variant(self, module: nn.Module, choice: AttentionChoice) -> Sequential:
        """The ops for one choice of the calls of attention."""
        variants = self.state.variants
        if len(variants) >= _MOST_VARIANTS:
            variants.clear()
        ops = chosen(self.make(module), choice)
        _leave_guards_to_region(ops, [module, *_unique(self.parts(module))])
        found = variants[choice] = _sequential_of(module, ops)
        return found

    def traced_states(self, module: nn.Module) -> str:
        """The states of the ops that a traced call may choose."""
        attention, ops = self.state.attention, [self.state.sequential]
        if attention is not None:
            known = self.state.variants
            for choice in attention.choices():
                if choice not in known:
                    self.make_variant(module, choice)
            ops = [known.get(choice) for choice in attention.choices()]
        return " ".join(one._traced_state for one in ops if one is not None) or "none"

    def make(self, module: nn.Module) -> Sequence[nn.Module]:
        """The ops; FuseSkip where they may not run now."""
        kind: Any = type(module)
        for name, method in getattr(kind, "_tops_methods", {}).items():
            if getattr(kind._tops_base, name) is not method:
                raise FuseSkip(f"its class has another {name}")
        function, reads, objects = self._source
        if objects_of(function, reads) != objects:
            raise FuseSkip("a name in its statements means something else than before")
        parametrized = (
            one for one in (module, *_unique(self.parts(module))) if is_parametrized(one)
        )
        if (one := next(parametrized, None)) is not None:
            # To read such a parameter computes it.
            raise FuseSkip(f"{name_of(one)} has parametrizations")
        ops = self._ops(module)
        if (attention := attention_in(ops)) is not None and attention.call.rest is not None:
            # Its input is that of the region, and its statements give the result.
            if [*map(type, ops)] != [*map(type, attention.call.ops(attention.module))]:
                raise FuseUnfit("what attention gives is changed by statements that are no ops")
        widths = widths_of(ops)
        if widths is not None and len(widths.others) != self._extra_inputs:
            raise FuseSkip(
                f"the rule {self.rule.name} gave ops with {len(widths.others)} extra inputs for "
                f"statements with {self._extra_inputs}"
            )
        for op in (*ops, *_borrowed(ops)):
            if isinstance(op, View | BorrowedLinear):
                op._let_go_of(module)
        self._check(self.parts(module), ops)
        for basic in _borrowed(ops):
            if module in basic._owners():
                basic.__dict__["_is_called"] = False
            obstacle = basic._obstacle()
            if obstacle is not None:
                raise FuseSkip(obstacle)
        return ops

    @staticmethod
    def _check(parts: Sequence[nn.Module], ops: Iterable[nn.Module]) -> None:
        if any(vars(nn.modules.module).get(name) for name in _GLOBAL_HOOKS):
            raise FuseSkip("there are hooks for all modules")
        decoded = {(id(one), name) for op in _borrowed(ops) for one, name in op._decoded_places()}
        for part in _unique(parts):
            kind = class_of(part)
            if kind in _CONTAINERS:
                continue
            obstacle = find_obstacle(
                part,
                kind.forward,
                part._parameters,
                has_known_hooks=captures_of(part) is not None,
                encoded=[name for name in part._parameters if (id(part), name) in decoded],
            )
            if obstacle is not None:
                raise FuseSkip(f"{kind.__name__}: {obstacle}")
        devices = {parameter.device for parameter in _parameters(parts)}
        if len(devices) > 1:
            raise FuseSkip(f"its parameters are on {', '.join(sorted(map(str, devices)))}")

    def _ops(self, module: nn.Module) -> Sequence[nn.Module]:
        try:
            ops = self.rule.make(module, self.names)
        except FuseSkip:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise FuseSkip(f"the rule {self.rule.name} raised {what}") from error
        if not isinstance(ops, list | tuple):
            raise FuseSkip(f"the rule {self.rule.name} gave {shown(ops)} in place of ops")
        for k, op in enumerate(ops):
            if not isinstance(op, nn.Module):
                raise FuseSkip(f"the rule {self.rule.name} gave {shown(op)} in place of op {k}")
        if not ops:
            raise FuseSkip(f"the rule {self.rule.name} gave an empty list in place of ops")
        return ops


def _borrowed(ops: Iterable[nn.Module]) -> list[Borrowed]:
    """The basic ops that stand for modules of other libraries."""
    fusible = (op for op in ops if isinstance(op, FusibleOperation))
    return [basic for op in fusible for basic in op.basic_ops if isinstance(basic, Borrowed)]


def _leave_guards_to_region(ops: Iterable[nn.Module], modules: Sequence[nn.Module]) -> None:
    """Has the groups of ops not look again at modules that the region looks at."""
    looked_at = set(map(id, modules))
    for basic in _borrowed(ops):
        if all(id(owner) in looked_at for owner in basic._owners()):
            basic.__dict__["_is_guarded"] = False


def _parameters(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for part in parts for parameter in part.parameters()]


def _unique(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules with all that are inside of them."""
    found = {id(inner): inner for part in parts for inner in part.modules()}
    return list(found.values())


def _guard(guards: _C.Guards, part: nn.Module, name: str) -> None:
    own = vars(part)
    # Nobody reads attributes of torch's classes but their statements.
    is_of_torch = class_of(part).__module__.startswith("torch.nn.")
    values = [k for k, v in own.items() if k[0] != "_" and type(v) in _WATCHED and not is_of_torch]
    add_guards(
        guards,
        part,
        name,
        values=values,
        tensors=part._parameters,
    )
    guards.add_items(own, "_modules", f"{name} has other submodules, or another order of them")


def _name_in(module: nn.Module, part: nn.Module) -> str:
    return next((name for name, found in module.named_modules() if found is part), "a part")


def set_recompute(module: nn.Module, recompute: str) -> None:
    """Sets the policy of a fused module's ops."""
    before = module.__dict__.get(RECOMPUTE, Policies().recompute)
    if recompute == before:
        return
    module.__dict__[RECOMPUTE] = recompute
    for region in module.__dict__.get(REGIONS, ()):
        region.forget()


def _sequential_of(module: nn.Module, ops: Sequence[nn.Module]) -> Sequential:
    recompute = module.__dict__.get(RECOMPUTE, Policies().recompute)
    return Sequential(*ops, recompute=recompute)
