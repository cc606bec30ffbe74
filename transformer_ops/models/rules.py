"""Rules of `fuse`: statements in the `forward` of a module, and the ops that stand for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

from torch import SymBool, Tensor, nn

from ..base.locks import new_lock
from ..op.methods import is_text, shown
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
        TypeError: an argument has the wrong type.
        ValueError: a rule of that name is there, or `statements` are no statements that read an `H`
            and assign a variable in the end. A call in which `when` raises, or
            returns no bool, is a RuntimeError.
    """
    texts = _check_arguments(name, statements, make, method, when)
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


def _check_arguments(
    name: object, statements: object, make: object, method: object, when: object
) -> list[str]:
    """The texts of the statements. Raises TypeError if an argument has the wrong type."""
    for what, value in (("name", name), ("method", method)):
        if not is_text(value):
            raise TypeError(f"[register_fuse_rule] {what} must be a str, got {shown(value)}")
    texts = list(statements) if isinstance(statements, list | tuple) else [statements]
    for text in texts or (statements,):
        if not is_text(text):
            raise TypeError(
                f"[register_fuse_rule] statements must be a str or a list of str, got {shown(text)}"
            )
    for what, value, rule in (("make", make, ""), ("when", when, " or None")):
        if not (callable(value) or (rule and value is None)):
            raise TypeError(
                f"[register_fuse_rule] {what} must be callable{rule}, got {shown(value)}"
            )
    return cast(list[str], texts)


def _named(name: str, when: Condition) -> Condition:
    """The condition with the name of its rule in errors."""

    @functools.wraps(when, ("__name__", "__doc__"))
    def condition(module: Any, tensor: Tensor) -> bool:
        try:
            found = when(module, tensor)
        except Exception as error:
            raise RuntimeError(
                f"[fuse] when of the rule {name} must not raise, got {type(error).__name__}: "
                f"{error}"
            ) from error
        if not isinstance(found, bool | SymBool):
            raise RuntimeError(
                f"[fuse] when of the rule {name} must return a bool, got {shown(found)}"
            )
        return found

    return condition


def rules_named(names: Iterable[str | FuseRule] | None) -> tuple[FuseRule, ...]:
    """The rules of these names, or all, in the order of their registration. ValueError for a name
    that no rule has."""
    with _lock:
        known = dict(_rules)
    if names is None:
        return tuple(known.values())
    if isinstance(names, str | Tensor) or not isinstance(names, Iterable):
        raise TypeError(f"[fuse] rules must be a list of rules or names, got {shown(names)}")
    found = []
    for name in names:
        if not isinstance(name, FuseRule) and (type(name) is not str or name not in known):
            listed = ", ".join(known)
            raise ValueError(f"[fuse] rules must be some of {listed}, got {shown(name)}")
        found.append(name if isinstance(name, FuseRule) else known[name])
    order = list(known.values())
    return tuple(sorted(found, key=lambda r: order.index(r) if r in order else len(order)))
