"""Classes of fused modules: each is a subclass of the module's own class, with the same `forward`
but for the statements that ops stand for.

In: a class and the sites in its methods. Out: the subclass, made once, which has the name of its
base.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from ..base.guard_groups import untraced
from ..base.marks import outside_of_jit_trace
from ..modules.sequential import Sequential
from ..op.hooks import HOOKS
from ..op.quantizers import passed_over
from ..plan.explain.explanation import Explanation
from .attention_ops import AttentionInputs
from .region import IS_OFF, REGIONS, Region
from .rewriting import rewritten
from .rules import Condition, FuseSkip, rules_named
from .sites import Site, SiteKey, all_sites
from .statements import function_of, wrappers_of

__all__ = ["FusedModule", "fused_class"]


_count_modes = torch._C._len_torch_function_stack


def _sees_functions() -> bool:
    """Whether a TorchFunctionMode is active, which sees each function that statements call. The one
    that is there for a default device is none."""
    from torch.utils._device import DeviceContext

    count = _count_modes()
    return count > 0 and not all(
        isinstance(torch._C._get_function_stack_at(i), DeviceContext) for i in range(count)
    )


class FusedView:
    """What runs in a fused module."""

    def __init__(self, module: FusedModule) -> None:
        self._module = module

    @property
    def regions(self) -> list[Region]:
        """The parts of its `forward` that ops stand for."""
        return self._module._regions()

    def explain(self) -> Explanation | str:
        """The plan of the last call; or why there is none."""
        regions = self.regions
        # The ops with attention are made for each kind of call.
        called = [
            one
            for one in regions
            if one.sequential is not None and (one.state.variants or not one.state.attention)
        ]
        region = next((one for one in (*called, *regions) if one.may_run(self._module)), regions[0])
        why_not = region.why_not(self._module)
        if why_not or region.sequential is None:
            return f"{region.rule.name}: {why_not or region.state.reason}"
        return region.sequential.explain()


def _why_passed_over(module: FusedModule) -> str:
    from torch.ao.quantization import quantization_mappings as known

    kind = module._tops_base
    tables = (
        known.get_default_dynamic_quant_module_mappings(),
        known.get_default_static_quant_module_mappings(),
    )
    if not any(kind in table for table in tables):
        return ""
    return (
        f"[fuse] torch.ao.quantization passes over each {kind.__name__} that ops run, as it looks "
        "for the exact class: call tops.unfuse(model) before it, and tops.fuse(model) after it"
    )


class FusedModule(nn.Module):
    """What the class of a fused module has beside its own."""

    _tops_base: type[nn.Module]
    _tops_sites: tuple[Site, ...]
    _tops_methods: dict[str, Any]  # of the base, which the methods here were made from
    _tops_made: dict[str, Any]  # the methods here
    _tops_conditions: tuple[Condition | None, ...]

    qconfig = passed_over(_why_passed_over)

    @property
    def fused(self) -> FusedView:
        """Its ops, and their plans."""
        return FusedView(self)

    def _regions(self) -> list[Region]:
        found: list[Region] | None = self.__dict__.get(REGIONS)
        if found is None:
            found = [site.region() for site in self._tops_sites]
            pairs = list(zip(self._tops_sites, found, strict=True))
            for site, region in pairs:
                region.inside = [inner for other, inner in pairs if site.contains(other)]
            self.__dict__[REGIONS] = found
        return found

    def _open_regions(self) -> tuple[str, ...]:
        regions = self._regions()
        if self.__dict__.get(IS_OFF, False) or _sees_functions():
            return ("",) * len(regions)
        return tuple(one.traced_states(self) if one.is_open(self) else "" for one in regions)

    # For each region the states of its ops, or nothing where its statements run. Compiled graphs
    # guard on it: to ask a region changes its state, and Dynamo asks in any order.
    _tops_open = property(untraced(_open_regions))

    def _tops_region(self, i: int, input: Any, *others: Any) -> Callable[..., Any] | None:
        """The ops of a region that is given these tensors, or None where the statements have to
        run."""
        region = self._tops_ready(i, input, others)
        return None if region is None else region.state.run

    def _tops_ready(self, i: int, input: Any, others: tuple[Any, ...]) -> Any:
        """The region, or None where its statements have to run."""
        # What torch.fx traces with is no tensor.
        if not isinstance(input, Tensor) or is_exporting():
            return None
        if is_compiling():
            is_open = bool(self._tops_open[i])
            region: Any = self.__dict__[REGIONS][i] if is_open else None
        elif self.__dict__.get(IS_OFF, False) or (_count_modes() and _sees_functions()):
            return None
        elif torch._C._get_tracing_state() is not None:
            with outside_of_jit_trace():
                return self._tops_ready(i, input, others)
        else:
            region = (self.__dict__.get(REGIONS) or self._regions())[i]
            is_open = region.is_open(self)
        # The condition is asked last: it may read properties, which run code of a changed model.
        condition = self._tops_conditions[i]
        if not is_open or (condition is not None and not condition(self, input)):
            return None
        return region if region.state.may_take(input, others) else None

    def _tops_attention(
        self,
        i: int,
        input: Any,
        others: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weights: bool | None,
    ) -> tuple[Region, Sequential, AttentionInputs] | None:
        """The ops of a region with attention that is given these arguments, and what they take; or
        None where the statements have to run. `others`: the tensors that they add. `weights`:
        whether its weights are wanted; None if only hooks of this module would see them."""
        region = self._tops_ready(i, input, others)
        if region is None:
            return None
        state = region.state
        attention = state.attention
        assert attention is not None
        call = attention.call
        if not call.gives_pair:
            weights = False
        elif weights is None:
            weights = any(map(self.__dict__.get, HOOKS))
        named = call.given(args, kwargs)
        found = None if named is None else call.inputs(attention.module, input, named, weights)
        if found is None:
            return None
        sequential = state.variants.get(found.choice)
        if sequential is None:
            if is_compiling():
                return None
            with outside_of_jit_trace():
                sequential = region.make_variant(self, found.choice)
        if state.sequential is not sequential and not is_compiling():
            state.sequential = sequential  # the last one that ran
        return region, sequential, found

    def _tops_run(
        self, found: tuple[Region, Sequential, AttentionInputs], input: Tensor, *others: Tensor
    ) -> Any:
        """Runs what `_tops_attention` has found. The op that takes the other tensors is behind
        attention."""
        region, sequential, given = found
        output = sequential(input, *given.extra_inputs, *others)
        attention = region.state.attention
        assert attention is not None
        if given.cache is not None:
            output, rows = output
            attention.call.fill(attention.module, *given.cache, rows)
        result = attention.call.finish(attention.module, input, output)
        is_part = attention.call.gives_pair and not region.state.gives_pair
        return result[0] if is_part else result

    def _replicate_for_data_parallel(self) -> Any:
        replica = super()._replicate_for_data_parallel()
        replica.__dict__.pop(REGIONS, None)
        return replica

    def __repr__(self) -> str:
        return f"Fused{super().__repr__()}"

    def __getstate__(self) -> dict[str, Any]:
        get = getattr(super(), "__getstate__", None)
        state = dict(self.__dict__ if get is None else get())
        return {name: value for name, value in state.items() if name not in (REGIONS, IS_OFF)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "_tops_sites" not in vars(type(self)):  # a subclass that somebody made
            return super().__reduce_ex__(protocol)
        keys = tuple(site.key for site in self._tops_sites)
        return _new, (self._tops_base, keys), self.__getstate__()


def _new(base: type[nn.Module], keys: tuple[SiteKey, ...]) -> nn.Module:
    rules = rules_named(dict.fromkeys(name for name, *_ in keys))
    known = {site.key: site for site in all_sites(base, rules)}
    # Somebody may have replaced the method since.
    sites = tuple(known[key] for key in keys if key in known)
    kind = fused_class(base, sites) if sites else base
    return kind.__new__(kind)


_classes: dict[tuple[Any, ...], type[nn.Module]] = {}


def fused_class(base: type[nn.Module], sites: tuple[Site, ...]) -> type[nn.Module]:
    """The class of modules of class `base` with ops at these sites. Made once. Its methods are
    wrapped as those of `base` are; FuseSkip where they cannot be. It has the name of `base`, which
    many tools go by: checkpoints of transformers, wrap policies, device maps."""
    # A class whose method is replaced later is another one.
    methods_of = tuple(getattr(base, site.rule.method) for site in sites)
    key = (base, methods_of, tuple((site.rule, site.key) for site in sites))
    found = _classes.get(key)
    if found is None:
        methods = {
            method: rewritten(function_of(getattr(base, method)), sites, method)
            for method in dict.fromkeys(site.rule.method for site in sites)
        }
        names = {
            **methods,
            "_tops_base": base,
            "_tops_sites": sites,
            "_tops_methods": {method: getattr(base, method) for method in methods},
            "_tops_conditions": tuple(site.rule.when for site in sites),
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
        }
        found = _with_wrappers(base, names, list(methods))
        found._tops_made = {method: getattr(found, method) for method in methods}  # type: ignore[attr-defined]
        _classes[key] = found
    return found


def _with_wrappers(
    base: type[nn.Module], names: dict[str, Any], methods: Sequence[str]
) -> type[nn.Module]:
    """A fused class of these attributes, with what is wrapped around the methods of its base."""
    found = _subclass(base, names)
    wrapped = {}
    for name in methods:
        # What a base class wraps around the methods of its subclasses is there again. A class
        # between them, as `fully_shard` makes one, has it twice.
        own, wanted = (
            list(dict.fromkeys(wrappers_of(getattr(kind, name)))) for kind in (found, base)
        )
        if own == wanted:
            continue
        if wanted[: len(own)] != own:
            raise FuseSkip(f"its {name} is wrapped in another way than those of its subclasses")
        inside = getattr(base, name)
        while hasattr(inside, "__wrapped__") and wrappers_of(inside)[0] in own:
            inside = inside.__wrapped__
        wrapped[name] = _unless_patched(_wrapped_as(inside, names[name], name), name)
    return _subclass(base, {**names, **wrapped}) if wrapped else found


def _subclass(base: type[nn.Module], names: dict[str, Any]) -> type[nn.Module]:
    """The class with these attributes and no others: a method that its base has wrapped for it
    would be the one of today."""
    found: type[nn.Module] = type(base.__name__, (FusedModule, base), names)
    for name, value in list(vars(found).items()):
        if name not in names and isinstance(value, types.FunctionType):
            delattr(found, name)
    return found


def _wrapped_as(original: Any, inner: Any, method: str) -> Any:
    """The function in what is wrapped around the innermost function of another one: decorators, or
    patches that call what they replace. FuseSkip for wrappers that are no functions with what they
    call as a free variable, and for those that look for themselves."""
    if not hasattr(original, "__wrapped__"):
        return inner
    wrapped = original.__wrapped__
    cells = getattr(original, "__closure__", None) or ()
    contents = [_contents_of(cell) for cell in cells]
    is_known = inspect.isfunction(original) and sum(found is wrapped for found in contents) == 1
    if not is_known or any(found is original for found in contents):
        code = getattr(original, "__code__", None)
        name = type(original).__name__ if code is None else code.co_name
        raise FuseSkip(f"its {method} is wrapped in {name}, which can hold no other function")
    # The other variables, and what they count, belong to both.
    new = types.CellType(_wrapped_as(wrapped, inner, method))
    closure = (
        new if found is wrapped else cell for cell, found in zip(cells, contents, strict=True)
    )
    made = types.FunctionType(
        original.__code__,
        original.__globals__,
        original.__name__,
        original.__defaults__,
        tuple(closure),
    )
    made.__kwdefaults__ = original.__kwdefaults__
    functools.update_wrapper(made, original)
    made.__wrapped__ = new.cell_contents  # type: ignore[attr-defined]
    return made


def _contents_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None


def _unless_patched(wrapped: Any, method: str) -> Any:
    """The function, or what the class has now, where somebody replaced the method since."""

    @functools.wraps(wrapped)
    def found(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FusedModule):
            now = getattr(self._tops_base, method)
            if now is not self._tops_methods[method]:
                return now(self, *args, **kwargs)
        return wrapped(self, *args, **kwargs)

    return found
