"""Classes of fused modules: each is a subclass of the module's own class, with the same `forward`
but for the statements that ops stand for."""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from ..peers import untraced
from ..plan.explain.explanation import Explanation
from ..sequential import Sequential
from .pattern import Names, Pattern, body_of, function_of, reads, tree_of, wrappers_of
from .region import Region
from .rules import FuseRule, FuseSkip, rules_named

__all__ = ["IS_OFF", "REGIONS", "FusedModule", "Site", "find_sites", "fused_class"]

# The attributes of a fused module that are ours.
REGIONS, IS_OFF = "_tops_regions", "_tops_is_off"


class Site(NamedTuple):
    """Statements of a class's method that a rule stands for."""

    rule: FuseRule
    names: Names
    start: int  # in the body of the function
    pattern: Pattern

    @property
    def end(self) -> int:
        """Where the statements behind it begin."""
        return self.start + len(self.pattern.statements)


def find_sites(kind: type[nn.Module], rules: Sequence[FuseRule]) -> tuple[Site, ...]:
    """Where rules match the class's methods, in order and apart from each other. Of two that
    overlap, the one that begins first counts, or else the one that is registered last."""
    sites: list[Site] = []
    for method in dict.fromkeys(rule.method for rule in rules):
        found = getattr(kind, method, None)
        if found is not None:
            sites += _sites_in(function_of(found), [r for r in rules if r.method == method])
    return tuple(sites)


def _sites_in(function: Any, rules: Sequence[FuseRule]) -> list[Site]:
    body = body_of(function)
    if body is None:
        return []
    found = [
        Site(rule, names, start, pattern)
        for rule in reversed(rules)
        for pattern in rule.patterns
        if pattern.fits(function)
        for start, names in pattern.find(body)
    ]
    sites: list[Site] = []
    for site in sorted(found, key=lambda site: site.start):
        is_apart = not sites or site.start >= sites[-1].end
        if is_apart and not reads(body[site.end :], _inner_names(site)):
            sites.append(site)
    return sites


def _inner_names(site: Site) -> set[str]:
    """The local variables that only the statements themselves assign."""
    pattern = site.pattern
    known = {*pattern.inputs, pattern.result}
    return {name for key, name in site.names.items() if len(key) == 1 and key not in known}


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
        region = self.regions[0]
        why_not = region.why_not(self._module)
        if why_not or region.sequential is None:
            return f"{region.rule.name}: {why_not or region.reason}"
        return region.sequential.explain()


class FusedModule(nn.Module):
    """What the class of a fused module has beside its own."""

    _tops_base: type[nn.Module]
    _tops_sites: tuple[Site, ...]

    @property
    def fused(self) -> FusedView:
        """Its ops, and their plans."""
        return FusedView(self)

    def _regions(self) -> list[Region]:
        found: list[Region] | None = self.__dict__.get(REGIONS)
        if found is None:
            found = [Region(site.rule, site.names) for site in self._tops_sites]
            self.__dict__[REGIONS] = found
        return found

    def _open_regions(self) -> int:
        if self.__dict__.get(IS_OFF, False):
            return 0
        return sum(region.is_open(self) << i for i, region in enumerate(self._regions()))

    # A bit for each region. Compiled graphs guard on it.
    _tops_open = property(untraced(_open_regions))

    def _tops_region(self, i: int, input: Any) -> Sequential | None:
        """The ops of a region, or None where the statements have to run."""
        # What torch.fx traces with is no tensor.
        if not isinstance(input, Tensor) or is_exporting():
            return None
        if not is_compiling():
            region = self._regions()[i]
            is_open = not self.__dict__.get(IS_OFF, False) and region.is_open(self)
            return region.sequential if is_open else None
        if not self._tops_open >> i & 1:
            return None
        found: Sequential = self.__dict__[REGIONS][i].sequential
        return found

    def __getstate__(self) -> dict[str, Any]:
        get = getattr(super(), "__getstate__", None)
        state = dict(self.__dict__ if get is None else get())
        return {name: value for name, value in state.items() if name not in (REGIONS, IS_OFF)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        names = tuple(site.rule.name for site in self._tops_sites)
        return _new, (self._tops_base, names), self.__getstate__()


def _new(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    kind = fused_class(base, find_sites(base, rules_named(dict.fromkeys(names))))
    return kind.__new__(kind)


_classes: dict[tuple[type[nn.Module], tuple[Any, ...]], type[nn.Module]] = {}


def fused_class(base: type[nn.Module], sites: tuple[Site, ...]) -> type[nn.Module]:
    """The class of modules of class `base` with ops at these sites. Made once. FuseSkip where its
    methods would not be wrapped as those of `base` are."""
    # A class whose method is replaced later is another one.
    key = (base, tuple((getattr(base, s.rule.method), s.rule, s.start, s.pattern) for s in sites))
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
            "__module__": base.__module__,
            "__qualname__": f"Fused{base.__qualname__}",
            "__doc__": base.__doc__,
        }
        found = type(f"Fused{base.__name__}", (FusedModule, base), names)
        for method in methods:
            # What a base class wraps around the methods of its subclasses is there again.
            if wrappers_of(getattr(found, method)) != wrappers_of(getattr(base, method)):
                raise FuseSkip(f"its {method} is wrapped, by a decorator or a patch")
        _classes[key] = found
    return found


def _rewritten(function: Any, sites: tuple[Site, ...], method: str) -> Any:
    """The function with, at each site, `region = self._tops_region(i)`, and either a call of it or
    the statements. Lines, globals and closure are those of the function."""
    tree = copy.deepcopy(tree_of(function))
    assert tree is not None
    text = isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant)
    body = tree.body[text:]
    for i, site in reversed(list(enumerate(sites))):
        if site.rule.method == method:
            body[site.start : site.end] = _choice(i, site, body[site.start : site.end])
    tree.body = [*tree.body[:text], *body]
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


def _choice(i: int, site: Site, statements: list[ast.stmt]) -> list[ast.stmt]:
    pattern, names = site.pattern, site.names
    assert pattern.result is not None
    extra = [names[key] for key in pattern.inputs if key != "H"]
    given = ", ".join([names["H"], *extra])
    call = f"self._tops_region({i}, {names['H']})"
    condition = f"(_tops_found := {call}) is not None"
    source = f"if {condition}:\n    {names[pattern.result]} = _tops_found({given})"
    choice = ast.parse(source).body[0]
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
