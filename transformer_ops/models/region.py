"""A part of a module's `forward` that ops stand for, and when they may."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from torch import nn

from .. import _C
from ..op.base import FusibleOperation
from ..op.borrowed import Borrowed, add_guards, class_of, find_obstacle
from ..op.hooks import HOOKS
from ..op.tensor_parallel import is_dtensor
from ..runtime.policies import Policies
from ..sequential import Sequential
from .attention_ops import AttentionChoice, BorrowedAttention, attention_in, chosen
from .branches import may_run
from .pattern import Names, Steps
from .rules import FuseRule, FuseSkip
from .statements import Condition

__all__ = ["IS_OFF", "RECOMPUTE", "REGIONS", "Region", "set_recompute"]

# The attributes of a fused module that are ours.
REGIONS, IS_OFF = "_tops_regions", "_tops_is_off"
# The policy of its ops, unless it is the default.
RECOMPUTE = "_tops_recompute"

# Attributes of these classes are watched.
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
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
_OF_MODULE = vars(nn.Module()).keys() | {"forward", REGIONS, IS_OFF, RECOMPUTE}


class Region:
    """Ops in place of statements. They run as long as all modules that the statements call are as
    they were when the ops were made: of the same class, without hooks and without a `forward` of
    their own, with the same submodules, attributes and classes of parameters."""

    def __init__(self, rule: FuseRule, names: Names, conditions: Sequence[Condition] = ()) -> None:
        self.rule, self.names, self._conditions = rule, names, conditions
        self.sequential: Sequential | None = None
        self.reason = "not called yet"
        # Regions within this one, which nobody asks while this one runs.
        self.inside: list[Region] = []
        # With attention, the ops for each choice of its calls.
        self.attention: BorrowedAttention | None = None
        self.variants: dict[AttentionChoice, Sequential] = {}
        self._guards: _C.Guards | None = None
        self._calls = self._changes = 0
        self._is_closed = False

    def is_open(self, module: nn.Module) -> bool:
        """For a call: whether the ops may run. They are made, or refused, when they are first asked
        for, and when something has changed since."""
        if self._is_closed:
            return False
        self._calls += 1
        guards = self._guards
        if guards is None or not guards.hold():
            if guards is not None and self._changes_too_often():
                self._close(f"it changes from call to call: {guards.broken()}")
                return False
            self._look(module)
        return self.sequential is not None

    def forget(self) -> None:
        """Has the next call look again, and lets go of the modules that the last look saw."""
        self._guards = self.sequential = self.attention = None
        self.variants = {}

    def _changes_too_often(self) -> bool:
        self._changes += 1
        return self._changes > _MOST_CHANGES and 2 * self._changes > self._calls

    def _close(self, reason: str) -> None:
        """From now on the statements run."""
        self._is_closed, self.sequential, self.reason = True, None, reason

    def why_not(self, module: nn.Module) -> str:
        """For a report: why the ops would not run now, or an empty text."""
        if self._is_closed:
            return self.reason
        if self.sequential is not None and self._has_dtensors(module):
            return ""  # between two calls FSDP has split what it gathers for a call
        try:
            self.make(module)
        except FuseSkip as skip:
            return str(skip)
        return ""

    def may_run(self, module: nn.Module) -> bool:
        """Whether its statements are in no branch that attributes of the module rule out."""
        return may_run(module, self._conditions)

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """The modules that the statements call."""
        called = (getattr(module, name, None) for name in sorted(self._attributes()))
        return [part for part in called if isinstance(part, nn.Module)]

    def covered(self, module: nn.Module) -> Iterator[nn.Module]:
        """The modules that nobody calls while the ops run."""
        # The statements also call them where the rule has a condition.
        if self.rule.when is not None:
            return iter(())
        # What holds DTensors now may gather them for a call.
        is_ready = self.may_run(module) and (self._has_dtensors(module) or not self.why_not(module))
        return iter(_unique(self.parts(module)) if is_ready else ())

    def _has_dtensors(self, module: nn.Module) -> bool:
        own = module._parameters.values()
        return any(map(is_dtensor, (*own, *_parameters(self.parts(module)))))

    def _attributes(self) -> set[str]:
        """The attributes of the module that the statements read."""
        found = {name for key, name in self.names.items() if len(key) > 1}
        steps = [name for name in found if isinstance(name, Steps)]
        return (found - {*steps}).union(*(step.attributes for step in steps))

    def _look(self, module: nn.Module) -> None:
        """Makes the ops, or says why there are none; and what either takes for granted."""
        parts = self.parts(module)
        self.sequential, self.reason = None, ""
        self.attention, self.variants = None, {}
        ops: Sequence[nn.Module] = ()
        try:
            ops = self.make(module)
            _leave_guards_to_region(ops, [module, *_unique(parts)])
            self.sequential = _sequential_of(module, ops)
            self.attention = attention_in(ops)
        except FuseSkip as skip:
            self.reason = str(skip)
        if self.attention is not None:
            for other in self.inside:
                other.forget()
        own = {
            name
            for basic in _borrowed(ops)
            if any(owner is module for owner in basic._owners())
            for name in basic._watched
        }
        self._guards = self._guards_of(module, parts, self._attributes() | own)

    @staticmethod
    def _guards_of(
        module: nn.Module, parts: Sequence[nn.Module], attributes: Set[str]
    ) -> _C.Guards:
        guards = _C.Guards()
        for name in _GLOBAL_HOOKS:
            guards.add_size(vars(nn.modules.module), name, "there are other hooks for all modules")
        for name in sorted(attributes & module._modules.keys()):
            guards.add_value(module._modules, name, f"{name} is another module")
        for name in sorted(attributes & vars(module).keys()):
            guards.add_value(vars(module), name, f"{name} has changed")
        own = "the module"
        add_guards(guards, module, own, tensors=module._parameters, is_called=False)
        for part in _unique(parts):
            _guard(guards, part, _name_in(module, part))
        return guards

    def make_variant(self, module: nn.Module, choice: AttentionChoice) -> Sequential:
        """The ops for one choice of the calls of attention."""
        if len(self.variants) >= _MOST_VARIANTS:
            self.variants.clear()
        ops = chosen(self.make(module), choice)
        _leave_guards_to_region(ops, [module, *_unique(self.parts(module))])
        found = self.variants[choice] = _sequential_of(module, ops)
        return found

    def make_variants(self, module: nn.Module) -> None:
        """Those that a traced call may choose."""
        choices = [] if self.attention is None else self.attention.choices()
        for choice in choices:
            if choice not in self.variants:
                self.make_variant(module, choice)

    def make(self, module: nn.Module) -> Sequence[nn.Module]:
        """The ops; FuseSkip where they may not run now."""
        kind: Any = type(module)
        for name, method in getattr(kind, "_tops_methods", {}).items():
            if getattr(kind._tops_base, name) is not method:
                raise FuseSkip(f"its class has another {name}")
        ops = self._ops(module)
        self._check(self.parts(module))
        for basic in _borrowed(ops):
            if module in basic._owners():
                basic.__dict__["_is_called"] = False
                obstacle = basic._obstacle()
                if obstacle is not None:
                    raise FuseSkip(obstacle)
        return ops

    @staticmethod
    def _check(parts: Sequence[nn.Module]) -> None:
        if any(vars(nn.modules.module).get(name) for name in _GLOBAL_HOOKS):
            raise FuseSkip("there are hooks for all modules")
        for part in _unique(parts):
            kind = class_of(part)
            obstacle = find_obstacle(part, kind.forward, part._parameters)
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
        is_list = isinstance(ops, Sequence) and all(isinstance(op, nn.Module) for op in ops)
        if not is_list or not ops:
            raise FuseSkip(f"the rule {self.rule.name} gave {type(ops).__name__} in place of ops")
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
    values = [k for k, v in own.items() if k not in _OF_MODULE and type(v) in _WATCHED]
    add_guards(
        guards,
        part,
        name,
        values=values,
        tensors=part._parameters,
        children=part._modules,
    )


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
