"""Sequential: a list of modules in which consecutive fusible ops form planned groups."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn, no_grad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import Proxy

from ..base import guard_groups
from ..base.constructors import names_its_arguments
from ..base.handles import handles
from ..base.marks import constant, disabled, may_be_traced
from ..compile.groups import traced_segment
from ..op.base import FusibleOperation
from ..op.fx import symbolic_call
from ..op.hooks import HookDicts, has_hooks
from ..op.methods import shown
from ..op.names import check_count
from ..op.observers import Observer
from ..op.state_dict import modules_with_known_shapes, shape_mismatches
from ..op.view import owners_of
from ..plan.explain.explanation import Explanation
from ..plan.plan import Plan
from ..runtime.layout import (
    Layout,
    call_group,
    explain_segments,
    group_of,
    has_plans,
    hooked_now,
    layout_content,
    lenders_are_same,
    make_layout,
    run_segments,
)
from ..runtime.policies import Policies
from .fuser import OperationFuser

OpKwargs = Mapping[Any, dict[str, Any]]


class _Flat(NamedTuple):
    """The modules that a Sequential lays out."""

    names: list[str]
    modules: list[nn.Module]
    residuals: list[tuple[Sequential, tuple[nn.Module | None, ...], bool]]


@names_its_arguments
class Sequential(nn.Module, Observer):
    """Modules in order; each maximal run of fusible ops forms one group.

    Takes modules, one list of modules, or one dict of named modules. Modules that are no
    `FusibleOperation` run between groups and are called with only the main tensor.

    Args:
        recompute: "cheap": the output of an op that costs little compared to a matrix product
            (norms, activations, gated linear units, dropout, scales, biases, RoPE, ...) is not
            saved for backward if it can be recomputed from tensors that are saved anyway;
            "products": nor is the output of a matrix product (`Linear`, `PackedLinear`), unless a
            recipe or its quantized weight rounds the operands; "none": everything that backward
            reads is saved.
        saved: the format in which main tensors are saved for backward. "exact": unchanged; "fp8":
            as E4M3 codes with a power-of-two scale for each 128 elements of a row, 1.03 bytes for
            each element; "int8": as integers with such a scale, of the same size, and more precise
            unless a few elements of a block are far larger than the others. Outputs stay exact, but
            gradients become approximate. Statistics, masks and parameters are saved unchanged, and
            so is everything that Python ops and ops with hooks save.
        saved_inputs: also save the input and the outputs in that format. This saves memory if
            nothing else keeps them until backward.

    Raises:
        TypeError: an argument is no module.
        ValueError: `recompute` or `saved` has another value; `saved_inputs` is set with "exact";
            the channels of the ops do not match (at the first call).
        NotImplementedError: second derivatives, or a transform of torch.func, if `saved` is not
            "exact".
    """

    # The ops before and after its modules, for a Residual.
    _ends: ClassVar[tuple[nn.Module, nn.Module] | None] = None
    # The owners of modules that are parts.
    _owners: tuple[nn.Module, ...] = ()

    def __init__(
        self,
        *modules: Any,
        recompute: str = "cheap",
        saved: str = "exact",
        saved_inputs: bool = False,
    ) -> None:
        super().__init__()
        self._policies = Policies(recompute, saved, saved_inputs).checked("Sequential")
        self._layout: Layout | None = None
        # (the layout it was made for, modules that are called because they write to buffers, such a
        # layout)
        self._split_layout: tuple[Layout, tuple[int, ...], Layout] | None = None
        self._guard_group: guard_groups.GuardGroup | None = None
        self._edits = 0
        self._number = handles.add(self)
        if len(modules) == 1 and isinstance(modules[0], list | tuple):
            modules = tuple(modules[0])
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, module in modules[0].items():
                self.add_module(name, _check_module(module))
        else:
            for i, module in enumerate(modules):
                self.add_module(str(i), _check_module(module))

    @property
    def recompute(self) -> str:
        """The policy: "none", "cheap" or "products". Setting it drops the cached plans."""
        return self._policies.recompute

    @recompute.setter
    def recompute(self, value: str) -> None:
        self._set_policies(recompute=value)

    @property
    def saved(self) -> str:
        """The format of tensors saved for backward: "exact", "fp8" or "int8". Setting it drops the
        cached plans; with "exact", `saved_inputs` is False."""
        return self._policies.saved

    @saved.setter
    def saved(self, value: str) -> None:
        inputs = self._policies.saved_inputs and value != "exact"
        self._set_policies(saved=value, saved_inputs=inputs)

    @property
    def saved_inputs(self) -> bool:
        """Whether the input and the outputs are also saved in that format. Setting it drops the
        cached plans."""
        return self._policies.saved_inputs

    @saved_inputs.setter
    def saved_inputs(self, value: bool) -> None:
        self._set_policies(saved_inputs=value)

    def _set_policies(self, **changes: Any) -> None:
        if is_dynamo_compiling():
            self._set_policies_untraced(**changes)
            return
        self._policies = self._policies._replace(**changes).checked("Sequential")
        self._edits += 1
        self._layout = None

    @disabled("policies of a Sequential must be set outside of compiled code")
    def _set_policies_untraced(self, **changes: Any) -> None:
        # A trace sets them on the Sequential itself, which has the new ones when the traced call
        # ends.
        self._set_policies(**changes)

    # ---- container

    def _get(self) -> list[nn.Module]:
        return [module for module in self._modules.values() if module is not None]

    def _flat(self) -> _Flat:
        flat = _Flat([], [], [])
        self._add_to(flat, "", self._policies)
        return flat

    def _add_to(self, flat: _Flat, prefix: str, policies: Policies) -> None:
        if self._ends is not None:
            flat.names.append(prefix + ".0")
            flat.modules.append(self._ends[0])
        for name, module in self._modules.items():
            if isinstance(module, Sequential) and module._ends is not None:
                joined = module._is_joined(policies)
                flat.residuals.append((module, tuple(module._modules.values()), joined))
                if joined:
                    module._add_to(flat, f"{prefix}{name}.", policies)
                    continue
            if module is not None:
                flat.names.append(prefix + name)
                flat.modules.append(module)
        if self._ends is not None:
            flat.names.append(prefix + ".1")
            flat.modules.append(self._ends[1])

    def _is_joined(self, policies: Policies) -> bool:
        """Whether a surrounding Sequential with these policies lays out the modules instead of
        calling this one."""
        is_ours = type(self).forward is Sequential.forward and "forward" not in self.__dict__
        follows = self._policies in (Policies(), policies)
        return is_ours and follows and not has_hooks((self,))

    def _module_at(self, name: str) -> nn.Module:
        """A module by a name of `_flat`: names of modules, or an empty name and the index of the
        end."""
        first, dot, rest = name.partition(".")
        if not first:
            assert self._ends is not None
            return self._ends[int(rest)]
        found = self._modules[first]
        assert found is not None
        if not dot:
            return found
        assert isinstance(found, Sequential)
        return found._module_at(rest)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Same as `nn.Module.add_module`."""
        super().add_module(name, module)
        self._owners += owners_of([] if module is None else [module])

    def _set(self, modules: Iterable[nn.Module], names: Iterable[str] | None = None) -> None:
        if is_dynamo_compiling():
            self._set_untraced(modules, names)
            return
        found = [_check_module(module) for module in modules]
        labels = list(names) if names is not None else [str(i) for i in range(len(found))]
        self._modules = dict(zip(labels, found, strict=True))
        self._owners = owners_of(found)
        self._edits += 1
        self._layout = None

    @disabled("modules of a Sequential must be edited outside of compiled code")
    def _set_untraced(self, *arguments: Any) -> None:
        # A trace edits the Sequential itself, whose state it guards on.
        self._set(*arguments)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._get())

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._like_this(dict(list(self._modules.items())[index]))
        return self._get()[self._index(index)]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        names = list(self._modules)
        modules = self._get()
        modules[self._index(index)] = module
        self._set(modules, names)

    def __delitem__(self, index: int | slice) -> None:
        names = list(self._modules)
        modules = self._get()
        places = range(len(modules))[index] if isinstance(index, slice) else [self._index(index)]
        gone = set(places)
        kept = [
            (n, m) for i, (n, m) in enumerate(zip(names, modules, strict=True)) if i not in gone
        ]
        numbered = names == [str(i) for i in range(len(names))]
        self._set([m for _, m in kept], None if numbered else [n for n, _ in kept])

    def _index(self, index: int) -> int:
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(
                f"[Sequential] index must be in [-{len(self)}, {len(self)}), got {place}"
            )
        return place % len(self)

    def append(self, module: nn.Module) -> Sequential:
        """Adds a module at the end."""
        return self.insert(len(self), module)

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        """Adds modules at the end."""
        _check_not_residual(modules)
        found = [_check_module(module) for module in modules]
        for module in found:
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Inserts a module before `index`, as `list.insert` does."""
        _check_module(module)
        names, modules = list(self._modules), self._get()
        place = slice(operator.index(index), None).indices(len(modules))[0]
        modules.insert(place, module)
        if names == [str(i) for i in range(len(names))]:
            self._set(modules)
        else:
            names.insert(place, _free_name(names))
            self._set(modules, names)
        return self

    def pop(self, index: int = -1) -> nn.Module:
        """Removes and returns a module."""
        module: nn.Module = self[self._index(index)]
        del self[index]
        return module

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        if not isinstance(other, Iterable):
            return NotImplemented
        _check_not_residual(other)
        return self._like_this(*self, *other)

    def _like_this(self, *modules: Any) -> Sequential:
        # A subclass may have its own arguments.
        made = type(self)(*modules)
        made._set_policies(**self._policies._asdict())
        return made

    def __iadd__(self, other: Iterable[nn.Module]) -> Sequential:
        _check_not_residual(other)
        return self.extend(list(other))

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica._layout = None
        replica._split_layout = None
        replica._guard_group = None
        replica._number = handles.add(replica)
        return replica

    def __getstate__(self) -> dict[str, Any]:
        # This omits what Module.compile() stores, which would run the original.
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_layout": None, "_split_layout": None, "_guard_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = handles.add(self)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Same as `nn.Module.load_state_dict`, but a wrong shape leaves everything unchanged.

        Only pre-hooks know what fits a module that has them. An error for such a module may come
        when others are already loaded, as in `nn.Module`.
        """
        mismatches = [
            message
            for prefix, module in modules_with_known_shapes(self)
            for message in shape_mismatches(module, state_dict, prefix)
        ]
        if mismatches:
            lines = "\n\t".join(mismatches)
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self).__name__}:\n\t{lines}"
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    # ---- call

    def forward(
        self, input: Tensor, *extra_inputs: Tensor, op_kwargs: OpKwargs | None = None
    ) -> Any:
        """Runs the modules. Extra inputs go to the ops that take them, in order. Extra outputs are
        returned in order: the result is a tensor, or a flat tuple (output, extra outputs...).

        Args:
            op_kwargs: keyword arguments for Python ops, by module or by index in the Sequential.

        Raises:
            ValueError: extra inputs are missing or surplus; a key of `op_kwargs` is unknown.
            RuntimeError: a tensor does not fit an op.
        """
        if is_compiling():
            traced = _layout_constant(self._traced_state)
            # The modules are looked up by name, because Dynamo then guards only on those that are
            # read.
            modules = [
                self._modules[name] if "." not in name else self._module_at(name)
                for name in traced.names
            ]
            return self._run(traced, modules, input, extra_inputs, op_kwargs)  # type: ignore[arg-type]
        if isinstance(input, Proxy):
            kwargs = {} if op_kwargs is None else {"op_kwargs": op_kwargs}
            return symbolic_call(self, input, extra_inputs, kwargs)
        layout = self._layout
        if layout is None or not _is_current(layout, self._modules, self._policies):
            layout = self._make_layout()
        if layout.whole is None and layout.lenders is not None:
            layout = self._with_current_hooks(layout)
        if layout.whole is not None:
            if op_kwargs is None:
                # The fastest way: C++ returns None if Python has to handle the call.
                output = layout.whole._call(input, *extra_inputs)
                if output is not None:
                    return output
            layout = self._with_current_hooks(layout)
        return self._run(layout, list(layout.modules), input, extra_inputs, op_kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Same as `nn.Module.compile`. Only Sequentials that were equal to this one at their first
        call share its limit of recompilations."""
        super().compile(*args, **kwargs)
        if self._compiled_call_impl is not None:
            first = functools.partial(self._compiled_first_call, (args, kwargs))
            self._compiled_call_impl = first

    def _compiled_first_call(self, options: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        self._state()
        assert self._guard_group is not None
        compiled = self._guard_group.compiled(type(self)._call_impl, *options)
        self._compiled_call_impl = functools.partial(compiled, self)
        return self._compiled_call_impl(*args, **kwargs)

    def _slow_forward(self, *input: Any, **kwargs: Any) -> Any:
        # torch.jit.trace checks its graph without gradients, and compares all calls. An op of the
        # graph has its gradient in any case.
        with no_grad():
            return super()._slow_forward(*input, **kwargs)

    def _run(
        self,
        layout: Layout,
        modules: list[nn.Module],
        input: Tensor,
        extra_inputs: tuple[Tensor, ...],
        op_kwargs: OpKwargs | None,
    ) -> Any:
        check_count(layout.wanted, len(extra_inputs))
        kwargs = self._kwargs_by_op(modules, op_kwargs) if op_kwargs else {}
        if kwargs and any(getattr(module, "_takes_buffers", False) for module in modules):
            called = self._modules_with_buffers(modules, kwargs)
            if called:
                run = self._run_untraced if may_be_traced() else self._run_into_buffers
                return run(called, input, extra_inputs, kwargs)
        call = traced_segment if is_compiling() else call_group
        return run_segments(layout, modules, input, extra_inputs, kwargs, call)

    @staticmethod
    def _modules_with_buffers(
        modules: list[nn.Module], kwargs: dict[int, dict[str, Any]]
    ) -> tuple[int, ...]:
        """The indices of the modules that write to buffers of the caller."""
        called, position = [], 0
        for i, module in enumerate(modules):
            if not isinstance(module, FusibleOperation):
                continue
            if module._takes_buffers and kwargs.get(position):
                called.append(i)
            position += len(module.basic_ops)
        return tuple(called)

    @disabled("buffers of the caller's must be given outside of compiled code")
    def _run_untraced(self, *arguments: Any) -> Any:
        return self._run_into_buffers(*arguments)

    def _run_into_buffers(
        self,
        called: tuple[int, ...],
        input: Tensor,
        extra_inputs: tuple[Tensor, ...],
        kwargs: dict[int, dict[str, Any]],
    ) -> Any:
        base = self._with_current_hooks(self._current_layout())
        split = self._split_layout
        if split is None or split[0] is not base or split[1] != called:
            layout = make_layout(
                base.modules, self._policies, OperationFuser, base.names, "Sequential", called
            )
            self._split_layout = split = (base, called, layout)
        return run_segments(split[2], base.modules, input, extra_inputs, kwargs, call_group)

    def _kwargs_by_op(
        self, modules: list[nn.Module], op_kwargs: OpKwargs
    ) -> dict[int, dict[str, Any]]:
        by_module: dict[int, dict[str, Any]] = {}
        own = [module for module in self._modules.values() if module is not None]
        for key, given in op_kwargs.items():
            named = key
            if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < len(own):
                named = own[key]
            places = [i for i, module in enumerate(modules) if module is named]
            if named is not key and len(own) == len(modules):
                places = [key]
            if not places or not isinstance(modules[places[0]], FusibleOperation):
                raise ValueError(
                    "[Sequential] op_kwargs keys must be fusible ops of the Sequential or their "
                    f"indices, got {shown(key)}"
                )
            for place in places:
                by_module[place] = given
        by_op: dict[int, dict[str, Any]] = {}
        position = 0
        for i, module in enumerate(modules):
            if not isinstance(module, FusibleOperation):
                continue
            for _ in module.basic_ops:
                if i in by_module:
                    by_op[position] = by_module[i]
                position += 1
        return by_op

    # ---- layout

    def _current_layout(self) -> Layout:
        layout = self._layout
        if layout is None or not _is_current(layout, self._modules, self._policies):
            layout = self._make_layout()
        return layout

    def _with_current_hooks(self, layout: Layout) -> Layout:
        """The layout for calls in which C++ does not check for hooks."""
        if not lenders_are_same(layout):
            self._op_changed()
            layout = self._make_layout()
        elif layout.whole is not None and hooked_now(layout) != layout.hooked:
            layout = self._make_layout()
        return layout

    def _make_layout(self) -> Layout:
        names, modules, residuals = self._flat()
        fusible = [module for module in modules if isinstance(module, FusibleOperation)]
        members = [op for module in fusible for op in (module, *module.basic_ops)]
        if self._layout is not None and self._layout.modules != tuple(modules):
            self._edits += 1
        for op in members:
            op._add_observer(self)
        layout = make_layout(modules, self._policies, OperationFuser, names, "Sequential")
        layout = layout._replace(
            children=tuple(self._modules.values()),
            residuals=tuple(residuals),
        )
        for op in members:
            op.__dict__["_channels_captured"] = True
        self._layout = layout
        return layout

    def _op_changed(self) -> None:
        """An op has other basic ops, hooks or another `forward` than when it was laid out."""
        # The order matters: a layout that another thread makes meanwhile must not have the old
        # state.
        self._edits += 1
        self._layout = None

    def _plans_changed(self) -> None:
        """An attribute that an op's plans depend on has changed."""
        self._edits += 1
        layout = self._layout
        if layout is not None:
            self._layout = layout._replace(state="")

    def _state(self) -> str:
        """The same text for all Sequentials that one compiled graph can serve."""
        layout = self._with_current_hooks(self._current_layout())
        if not layout.state:
            edits, state = self._edits, guard_groups.digest(layout_content(layout))
            layout = layout._replace(state=state)
            self._guard_group = guard_groups.join(self, state, self._guard_group)
            # A graph that was made for an equal Sequential finds the groups by their own states.
            for segment in layout.segments:
                if segment.group is not None:
                    segment.group._shared_state()
            if self._edits == edits:
                self._layout = layout
        assert self._guard_group is not None
        self._guard_group.note_asked(self)
        return layout.state

    # Everything that a compiled graph guards on, besides what it reads from the modules.
    _traced_state = property(guard_groups.untraced(_state))

    # ---- inspecting plans

    def plans(self) -> list[Plan]:
        """One `Plan` for each group of the last call. Raises RuntimeError before the first call."""
        return [group._plan("[Sequential] plans()") for group in self._groups()]

    def _groups(self) -> list[OperationFuser]:
        asked = "[Sequential] plans()"
        layout = self._layout_of_the_last_call(asked)
        found = (group_of(segment, layout.modules, asked) for segment in layout.segments)
        return [group for group in found if group is not None]

    def _layout_of_the_last_call(self, asked: str) -> Layout:
        if self._layout is None:
            raise RuntimeError(f"{asked} must follow a call, got none so far")
        layout = self._current_layout()
        if not has_plans(layout) and self._guard_group is not None:
            # A compiled graph was made for another Sequential in the same state.
            others = (other._layout for other in self._guard_group.members())
            found = (other for other in others if other is not None and other.state == layout.state)
            return next(filter(has_plans, found), layout)
        return layout

    def explain(self) -> Explanation:
        """The plans of the last call for reading: text, a table in a notebook, or an SVG."""
        asked = "[Sequential] explain()"
        return explain_segments(self._layout_of_the_last_call(asked), asked)


def _is_current(
    layout: Layout, modules: Mapping[str, nn.Module | None], policies: Policies
) -> bool:
    if tuple(modules.values()) != layout.children:
        return False
    for residual, children, joined in layout.residuals:
        if tuple(residual._modules.values()) != children:
            return False
        if residual._is_joined(policies) != joined:
            return False
    # If the layout is one group, C++ checks for hooks at every call.
    return layout.whole is not None or hooked_now(layout) == layout.hooked


@constant
def _layout_constant(state: str) -> Layout:
    found = (other._layout for other in guard_groups.find(state))
    same = [layout for layout in found if layout is not None and layout.state == state]
    # The first one is being traced. Its groups are read last, for the same reason.
    return [_for_traces(layout) for layout in reversed(same)][-1]


def _for_traces(layout: Layout) -> Layout:
    # Dynamo keeps a constant forever, so it must not refer to a module or a group.
    segments = tuple(
        segment._replace(group=None, group_state=segment.group and segment.group._shared_state())
        for segment in layout.segments
    )
    return layout._replace(
        modules=(),
        hooks=HookDicts(()),
        segments=segments,
        lenders=None,
        whole=None,
        children=(),
        residuals=(),
    )


def _check_module(module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise TypeError(f"[Sequential] modules must be nn.Modules, got {type(module).__name__}")
    return module


def _check_not_residual(modules: Any) -> None:
    # Its modules alone would lose the addition.
    if isinstance(modules, Sequential) and modules._ends is not None:
        raise TypeError(
            "[Sequential] modules to add must be a list, or a Sequential that is no Residual, got "
            "a Residual: write [residual]"
        )


def _free_name(names: list[str]) -> str:
    return next(str(i) for i in range(len(names) + 1) if str(i) not in names)
