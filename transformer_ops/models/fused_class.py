"""Classes of fused modules: each is a subclass of the module's own class, with the same `forward`
but for the statements that ops stand for."""

from __future__ import annotations

import ast
import copy
import enum
import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from ..guard_groups import untraced
from ..op.quantizers import passed_over
from ..plan.explain.explanation import Explanation
from ..sequential import Sequential
from .attention import AttentionInputs
from .pattern import INPUT, Arguments, Found, Pattern, Scope, arguments_in
from .region import IS_OFF, REGIONS, Region
from .rules import Condition, FuseRule, FuseSkip, FuseUnfit, rules_named
from .statements import blocks_of, body_of, function_of, tree_of, windows_of, wrappers_of

__all__ = ["FusedModule", "Site", "find_sites", "fused_class"]


class Site(NamedTuple):
    """Statements of a class's method that a rule stands for."""

    rule: FuseRule
    pattern: Pattern
    found: Found  # in the body of the function

    def region(self) -> Region:
        """Ops in its place, for one module."""
        return Region(self.rule, self.found.names, self.found.window.conditions)

    @property
    def arguments(self) -> Arguments | None:
        """What a call of an attention module among its steps is given; None if there is none."""
        return arguments_in(self.found.names)

    def contains(self, other: Site) -> bool:
        """Whether all lines of another one, of the same method, are its own."""
        first, last = self.found.window.lines
        start, end = other.found.window.lines
        is_inside = first <= start and end <= last and (first, last) != (start, end)
        return is_inside and self.rule.method == other.rule.method

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Which one of the class it is."""
        return self.rule.name, self.pattern.text, *self.found.window.lines

    def is_apart_from(self, other: Site) -> bool:
        """Whether they have no line of a method in common."""
        first, last = self.found.window.lines
        start, end = other.found.window.lines
        is_apart = last < start or first > end
        return is_apart or self.rule.method != other.rule.method


def find_sites(module: nn.Module, rules: Sequence[FuseRule]) -> tuple[Site, ...]:
    """Where rules gain something in the methods of a module, in order and apart from each other. Of
    two that overlap, one that fits now counts before one that does not, then the one that begins
    first, and then the one that is registered last."""
    candidates = all_sites(type(module), tuple(rules))
    found = [(site, _fit(module, site)) for site in candidates]
    # Whether attention runs as an op depends on the call; if it cannot, the sites within run.
    attention = [pair for pair in found if pair[0].arguments is not None]
    whole = _apart(attention)
    halves = _apart([(s, fit) for s, fit in attention if any(one.contains(s) for one in whole)])
    outer = [*whole, *halves]
    inner = _apart(
        [
            (site, fit)
            for site, fit in found
            if site.arguments is None
            and all(site.is_apart_from(other) or other.contains(site) for other in outer)
        ]
    )
    return tuple(sorted([*outer, *inner], key=lambda site: site.found.window.lines))


def _apart(found: Sequence[tuple[Site, _Fit]]) -> list[Site]:
    sites: list[Site] = []
    for wanted in (_Fit.NOW, _Fit.LATER):
        for site, fit in found:
            if fit is wanted and all(site.is_apart_from(other) for other in sites):
                sites.append(site)
    return sites


class _Fit(enum.Enum):
    NOW = 1
    LATER = 2  # something is in the way
    NEVER = 3


def _fit(module: nn.Module, site: Site) -> _Fit:
    region = site.region()
    try:
        region.make(module)
    except FuseUnfit:
        return _Fit.NEVER
    except FuseSkip:
        return _Fit.LATER
    return _Fit.NOW if region.may_run(module) else _Fit.LATER


def all_sites(kind: type[nn.Module], rules: tuple[FuseRule, ...]) -> list[Site]:
    """Where rules match the class's methods, by method and in order."""
    methods = [(name, getattr(kind, name, None)) for name in dict.fromkeys(r.method for r in rules)]
    return [
        site
        for name, method in methods
        if method is not None
        for site in _sites_in(function_of(method), tuple(r for r in rules if r.method == name))
    ]


@functools.lru_cache(maxsize=1024)
def _sites_in(function: Any, rules: tuple[FuseRule, ...]) -> list[Site]:
    body = body_of(function)
    if body is None:
        return []
    scope, windows = Scope.of(function), windows_of(body)
    found = [
        Site(rule, pattern, place)
        for rule in reversed(rules)
        for pattern in rule.patterns
        for place in pattern.find(windows, scope)
        if _may_stand_for(place)
    ]
    return sorted(found, key=lambda site: site.found.window.lines[0])


def _may_stand_for(place: Found) -> bool:
    """Whether nothing but weights of attention is read later, which ops do not give."""
    arguments, window = arguments_in(place.names), place.window
    return all(window.value.seconds[name] == arguments for name in window.others)


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
        called = [one for one in regions if one.sequential is not None]
        region = next((one for one in (*called, *regions) if one.may_run(self._module)), regions[0])
        why_not = region.why_not(self._module)
        if why_not or region.sequential is None:
            return f"{region.rule.name}: {why_not or region.reason}"
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

    def _open_regions(self) -> int:
        if self.__dict__.get(IS_OFF, False):
            return 0
        found = 0
        for i, region in enumerate(self._regions()):
            if region.is_open(self):
                region.make_variants(self)
                found |= 1 << i
        return found

    # A bit for each region. Compiled graphs guard on it.
    _tops_open = property(untraced(_open_regions))

    def _tops_region(self, i: int, input: Any) -> Sequential | None:
        """The ops of a region, or None where the statements have to run."""
        region = self._tops_ready(i, input)
        return None if region is None else region.sequential

    def _tops_ready(self, i: int, input: Any) -> Region | None:
        # What torch.fx traces with is no tensor.
        if not isinstance(input, Tensor) or is_exporting():
            return None
        condition = self._tops_conditions[i]
        if condition is not None and not condition(self, input):
            return None
        if not is_compiling():
            region: Region = self._regions()[i]
            is_open = not self.__dict__.get(IS_OFF, False) and region.is_open(self)
            return region if is_open else None
        if not self._tops_open >> i & 1:
            return None
        found: Region = self.__dict__[REGIONS][i]
        return found

    def _tops_attention(
        self, i: int, input: Any, args: tuple[Any, ...], kwargs: dict[str, Any], weights: bool
    ) -> tuple[Region, Sequential, AttentionInputs] | None:
        """The ops of a region with attention that is given these arguments, and what they take; or
        None where the statements have to run. `weights`: whether its weights are wanted."""
        region = self._tops_ready(i, input)
        if region is None:
            return None
        attention = region.attention
        assert attention is not None
        found = attention.call.inputs(attention.module, args, kwargs, weights)
        if found is None:
            return None
        sequential = region.variants.get(found.choice)
        if sequential is None:
            if is_compiling():
                return None
            sequential = region.make_variant(self, found.choice)
        if not is_compiling():
            region.sequential = sequential  # the last one that ran
        return region, sequential, found

    def _tops_run(
        self, found: tuple[Region, Sequential, AttentionInputs], input: Tensor, *others: Tensor
    ) -> Any:
        """Runs what `_tops_attention` has found. The op that takes the other tensors is behind
        attention."""
        region, sequential, given = found
        result = sequential(input, *given.extra_inputs, *others)
        if given.cache is None:
            return result
        attention = region.attention
        assert attention is not None
        output, rows = result
        attention.call.fill(attention.module, given.cache, rows)
        return output

    def __repr__(self) -> str:
        return f"Fused{super().__repr__()}"

    def __getstate__(self) -> dict[str, Any]:
        get = getattr(super(), "__getstate__", None)
        state = dict(self.__dict__ if get is None else get())
        return {name: value for name, value in state.items() if name not in (REGIONS, IS_OFF)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        keys = tuple(site.key for site in self._tops_sites)
        return _new, (self._tops_base, keys), self.__getstate__()


def _new(base: type[nn.Module], keys: tuple[tuple[str, str, int, int], ...]) -> nn.Module:
    rules = rules_named(dict.fromkeys(name for name, *_ in keys))
    known = {site.key: site for site in all_sites(base, rules)}
    kind = fused_class(base, tuple(known[key] for key in keys))
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
            method: _rewritten(function_of(getattr(base, method)), sites, method)
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
        _classes[key] = found
    return found


def _with_wrappers(
    base: type[nn.Module], names: dict[str, Any], methods: Sequence[str]
) -> type[nn.Module]:
    """A fused class of these attributes, with what is wrapped around the methods of its base."""
    found: type[nn.Module] = type(base.__name__, (FusedModule, base), names)
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
    if not wrapped:
        return found
    return type(base.__name__, (FusedModule, base), {**names, **wrapped})


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
    def found(self: FusedModule, *args: Any, **kwargs: Any) -> Any:
        now = getattr(self._tops_base, method)
        if now is not self._tops_methods[method]:
            return now(self, *args, **kwargs)
        return wrapped(self, *args, **kwargs)

    return found


def _rewritten(function: Any, sites: tuple[Site, ...], method: str) -> Any:
    """The function with, at each site, `region = self._tops_region(i)`, and either a call of it or
    the statements; and before them, a call of what the class has now, where somebody replaced the
    method. Lines, globals and closure are those of the function."""
    tree = copy.deepcopy(tree_of(function))
    assert tree is not None
    text = isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant)
    body = tree.body[text:]
    own = [(i, site) for i, site in enumerate(sites) if site.rule.method == method]
    for place, block in reversed(list(enumerate(blocks_of(body)))):
        of_block = [(i, site) for i, site in own if site.found.window.block == place]
        block[:] = _with_choices(block, 0, of_block)
    tree.body = [*tree.body[:text], _call_of_another(tree, method), *body]
    tree.decorator_list, tree.returns = [], None
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [default and ast.Constant(None) for default in tree.args.kw_defaults]
    code = _compiled(tree, function.__code__)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__annotations__ = dict(function.__annotations__)
    made.__doc__ = function.__doc__
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    return made


def _call_of_another(tree: ast.FunctionDef, method: str) -> ast.stmt:
    given = tree.args
    own, *arguments = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if given.vararg is not None:
        arguments.append(f"*{given.vararg.arg}")
    arguments += [f"{argument.arg}={argument.arg}" for argument in given.kwonlyargs]
    if given.kwarg is not None:
        arguments.append(f"**{given.kwarg.arg}")
    source = (
        f"if {own}._tops_base.{method} is not {own}._tops_methods[{method!r}]:\n"
        f"    return {own}._tops_base.{method}({', '.join([own, *arguments])})"
    )
    found = ast.parse(source).body[0]
    for node in ast.walk(found):
        ast.copy_location(node, tree.body[0])
    return found


def _with_choices(
    statements: list[ast.stmt], first: int, sites: list[tuple[int, Site]]
) -> list[ast.stmt]:
    """Statements of a block, from number `first` on, with these sites in place of theirs. Sites may
    contain each other."""
    found: list[ast.stmt] = []
    at = 0
    while at < len(statements):
        here = [(i, site) for i, site in sites if site.found.window.start == first + at]
        if not here:
            found.append(statements[at])
            at += 1
            continue
        outer = max(here, key=lambda pair: pair[1].found.window.end)
        window = outer[1].found.window
        end = window.end - first
        inside = [
            (i, site)
            for i, site in sites
            if (i, site) != outer and window.start <= site.found.window.start < window.end
        ]
        found += _choice(*outer, _with_choices(statements[at:end], window.start, inside))
        at = end
    return found


def _choice(i: int, site: Site, statements: list[ast.stmt]) -> list[ast.stmt]:
    names, window = site.found.names, site.found.window
    extra = [names[key] for key in site.pattern.inputs if key != INPUT]
    what = "return" if window.value.target is None else f"{window.value.target} ="
    arguments, source = site.arguments, names[INPUT]
    # What is more than a name is computed once.
    input = source if source.isidentifier() else "_tops_input"
    given_input = source if input == source else f"({input} := {source})"
    if arguments is None:
        condition = f"self._tops_region({i}, {given_input})"
        call = f"_tops_found({', '.join([input, *extra])})"
    else:
        args = "".join(f"{ast.unparse(argument)}, " for argument in arguments.args)
        keywords = ", ".join(ast.unparse(keyword) for keyword in arguments.keywords)
        given = f"({args}), dict({keywords}), {bool(window.others)}"
        condition = f"self._tops_attention({i}, {given_input}, {given})"
        call = f"self._tops_run({', '.join(['_tops_found', input, *extra])})"
    others = "".join(f"    {name} = None\n" for name in sorted(window.others))
    text = f"if (_tops_found := {condition}) is not None:\n{others}    {what} {call}"
    choice = ast.parse(text).body[0]
    assert isinstance(choice, ast.If)
    for node in ast.walk(choice):
        ast.copy_location(node, statements[0])
    choice.orelse = statements
    return [choice]


def _compiled(tree: ast.FunctionDef, original: types.CodeType) -> types.CodeType:
    # Free variables are those of a function around it.
    names = original.co_freevars
    inner: list[ast.stmt] = [tree, ast.Return(ast.Name(tree.name, ast.Load()))]
    outer = ast.parse("def _tops_outer(): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.args.args = [ast.arg(name) for name in names]
    outer.body = inner
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code: Any = compile(module, original.co_filename, "exec", dont_inherit=True)
    for name in ("_tops_outer", tree.name):
        code = next(
            c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name
        )
    found: types.CodeType = code
    return found
