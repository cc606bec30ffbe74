"""Where rules match the methods of a class.

In: a module and rules. Out: the sites, which are statements, the rule and the names that its
placeholders stand for. Of two that overlap, one counts.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from ..op.borrowed import class_of
from .pattern import Arguments, Found, Pattern, Scope, arguments_in, calls_in
from .reads import Objects, Source, objects_of, reads_of
from .region import Region
from .rules import FuseRule, FuseSkip, FuseUnfit
from .statements import function_of
from .windows import Window, windows_of

__all__ = ["Site", "SiteKey", "all_sites", "blocked_sites", "find_sites"]


# The rule, its statements, the lines of the method, and what is assumed there.
SiteKey = tuple[str, str, int, int, str]


class Site(NamedTuple):
    """Statements of a class's method that a rule stands for."""

    rule: FuseRule
    pattern: Pattern
    found: Found  # in the body of the function
    source: Source

    def region(self) -> Region:
        """Ops in its place, for one module."""
        found, extra = self.found, len(self.pattern.inputs) - 1
        return Region(self.rule, found.names, self.source, found.window.conditions, extra)

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
    def key(self) -> SiteKey:
        """Which one of the class it is."""
        window = self.found.window
        assumed = " and ".join(map(str, window.assumed))
        return self.rule.name, self.pattern.text, *window.lines, assumed

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
    found = [(site, _fit(module, site)) for site in candidates if not site.found.window.obstacle]
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


def blocked_sites(
    module: nn.Module, rules: Sequence[FuseRule], found: Sequence[Site]
) -> list[Site]:
    """Where a rule would gain something if other statements were not in the way, outside of what
    was found."""
    blocked = [
        (site, _fit(module, site))
        for site in all_sites(class_of(module), tuple(rules))
        if site.found.window.obstacle
        and all(site.is_apart_from(other) or _is_more(site, other) for other in found)
    ]
    return [site for site in _apart(blocked) if _fit(module, site) is _Fit.NOW]


def _is_more(site: Site, inner: Site) -> bool:
    return site.contains(inner) and site.rule is not inner.rule


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
        region.check(module)
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
        for site in _sites_in(
            function_of(method),
            tuple(rule for rule in rules if rule.method == name),
            objects_of(function_of(method)),
        )
    ]


@functools.lru_cache(maxsize=1024)
def _sites_in(function: Any, rules: tuple[FuseRule, ...], objects: Objects) -> list[Site]:
    windows = windows_of(function)
    if not windows:
        return []
    scope = Scope.of(function)
    found = [
        Site(rule, pattern, place, _source(function, place.window))
        for rule in reversed(rules)
        for pattern in rule.patterns
        for place in pattern.find(windows, scope)
        if _may_stand_for(place)
    ]
    return sorted(found, key=lambda site: site.found.window.lines[0])


def _source(function: Any, window: Window) -> Source:
    tests = (test for test, _ in window.assumed)
    reads = reads_of((*window.statements, *tests), function.__code__)
    return Source(function, reads, objects_of(function, reads))


def _may_stand_for(place: Found) -> bool:
    """Whether nothing but weights of attention is read later, which ops do not give. Two calls of
    attention would have two lists of arguments, of which a region passes one."""
    arguments, window = arguments_in(place.names), place.window
    return len(calls_in(place.names)) < 2 and all(
        window.value.seconds[name] == arguments for name in window.others
    )
