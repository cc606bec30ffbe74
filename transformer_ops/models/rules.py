"""Rules of `fuse`: statements in the `forward` of a module, and the ops that stand for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..locks import new_lock
from .pattern import INPUT, Names, Pattern

__all__ = ["FuseRule", "FuseSkip", "FuseUnfit", "register_fuse_rule", "rules_named"]

# (module, the names that the placeholders stand for) -> ops; FuseSkip with the reason for none.
# (module, the tensor that the ops would take) -> whether they run, or the statements.
Condition = Callable[[Any, Tensor], bool]
MakeOps = Callable[[Any, Names], Sequence[nn.Module]]


class FuseSkip(Exception):
    """Says why a rule leaves a module alone."""


class FuseUnfit(FuseSkip):
    """Says why a rule gains nothing in a module, which no report mentions."""


class FuseRule(NamedTuple):
    """What `register_fuse_rule` returns.

    Attributes:
        name: what reports call it.
        patterns: the statements, in all ways in which they may be written.
        make: gives the ops.
        method: the method that has them.
        when: whether the ops run for a tensor that they are given; None for always.
    """

    name: str
    patterns: tuple[Pattern, ...]
    make: MakeOps
    method: str
    when: Condition | None = None

    def remove(self) -> None:
        """Later calls of `fuse` do not use the rule. KeyError if it was removed before."""
        with _lock:
            del _rules[self.name]


_lock = new_lock()
_rules: dict[str, FuseRule] = {}


def register_fuse_rule(
    name: str,
    statements: str | Sequence[str],
    make: MakeOps,
    *,
    method: str = "forward",
    when: Condition | None = None,
) -> FuseRule:
    """Adds a rule to `fuse`: where a method of a module's class computes what these statements do,
    ops run in their place.

    In `statements`, single upper-case letters stand for local variables, attributes that begin with
    `any_` for attributes of any name, `H = self.any_norm(H)`, and names that begin with `any_` for
    numbers, `H = H * any_scale`. `H` is the tensor that the ops take: a variable, or a part of one
    (`x[:, i, :]`). Other variables that are read before they are assigned are extra inputs of the
    ops, in the order of reading. What the last statement assigns or returns is what they give.
    Names of variables, the division into statements and the order of the terms of a sum do not
    matter. Pass a list of texts if the same computation can be written in several ways.

    `make(module, names)` returns the ops for a module, which may be views of its submodules
    (`tops.view`), or raises `tops.FuseSkip` with a reason. `names` has, for each placeholder (`H`,
    `norm`, `scale`), the text in the source. With `when`, the ops run only where
    `when(module, tensor)` is true, of the tensor that they are given.

    Raises:
        ValueError: a rule of that name is there, or `statements` are no statements that read an `H`
            and assign a variable in the end. A call in which `when` raises is a RuntimeError.
    """
    texts = [statements] if isinstance(statements, str) else statements
    try:
        patterns = tuple(map(Pattern, texts))
    except SyntaxError as error:
        raise ValueError(f"[fuse] statements must be Python, got {error}") from None
    for pattern in patterns:
        if not pattern.is_expression or INPUT not in pattern.inputs:
            raise ValueError(
                "[fuse] statements must read an H and compute one value, which the last one "
                f"assigns or returns, got {pattern.text!r}"
            )
    condition = None if when is None else _named(name, when)
    rule = FuseRule(name, patterns, make, method, condition)
    with _lock:
        if name in _rules:
            raise ValueError(f"[fuse] name must be new, got '{name}', which is registered")
        _rules[name] = rule
    return rule


def _named(name: str, when: Condition) -> Condition:
    """The condition with the name of its rule in errors."""

    @functools.wraps(when)
    def condition(module: Any, tensor: Tensor) -> bool:
        try:
            return when(module, tensor)
        except Exception as error:
            raise RuntimeError(
                f"[fuse] when of the rule {name} must not raise, got {type(error).__name__}: "
                f"{error}"
            ) from error

    return condition


def rules_named(names: Iterable[str | FuseRule] | None) -> tuple[FuseRule, ...]:
    """The rules of these names, or all, in the order of their registration. ValueError for a name
    that no rule has."""
    with _lock:
        known = dict(_rules)
    if names is None:
        return tuple(known.values())
    found = []
    for name in names:
        if not isinstance(name, FuseRule) and name not in known:
            listed = ", ".join(known)
            raise ValueError(f"[fuse] rules must be some of {listed}, got {name!r}")
        found.append(name if isinstance(name, FuseRule) else known[name])
    order = list(known.values())
    return tuple(sorted(found, key=lambda r: order.index(r) if r in order else len(order)))
