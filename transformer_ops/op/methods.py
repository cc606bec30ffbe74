"""Finds which forward and backward methods a Python op class defines, when the class is defined.

There are two families, `op_*` and `fuser_*`, each with two forward styles:

    single   {family}_forward
    split    {family}_forward_compute + {family}_forward_save_ctx
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Literal, NamedTuple, cast

Family = Literal["op", "fuser"]
Style = Literal["single", "split"]

FAMILIES: tuple[Family, ...] = ("fuser", "op")

# The keywords that a step passes; a method that takes **kwargs also gets quantizers and the rest.
KEYWORDS = (
    "basic_op_extra_inputs",
    "basic_op_kwargs",
    "next_op_input_quantizer",
    "prev_op_grad_output_quantizer",
)
# Only a method that names this keyword gets it: it is not part of the documented signature.
EXPLICIT_KEYWORDS = ("requires_grad",)


class Implementation(NamedTuple):
    """The source of a class's Python forward."""

    family: Family
    style: Style


def single_name(family: Family) -> str:
    """The name of the method that computes and saves at once."""
    return f"{family}_forward"


def split_names(family: Family) -> tuple[str, str]:
    """The names of the pair: compute, save-ctx."""
    return f"{family}_forward_compute", f"{family}_forward_save_ctx"


def _user_classes(cls: type) -> list[type]:
    """The user's part of the MRO: up to the native class, without our bases."""
    found: list[type] = []
    for klass in cls.__mro__:
        if vars(klass).get("_kind") is not None:
            break
        if "_is_contract" not in vars(klass):
            found.append(klass)
    return found


def _body_style(klass: type, family: Family) -> Style | None:
    if single_name(family) in vars(klass):
        return "single"
    if any(name in vars(klass) for name in split_names(family)):
        return "split"
    return None


def forward_style(cls: type, family: Family) -> Style | None:
    """The style of the most derived definition in one family; None if the user defined none."""
    for klass in _user_classes(cls):
        style = _body_style(klass, family)
        if style is not None:
            return style
    return None


def forward_implementation(
    cls: type, families: tuple[Family, ...] = FAMILIES
) -> Implementation | None:
    """The most derived forward of any of `families`; in one class body the first family wins."""
    for klass in _user_classes(cls):
        for family in families:
            style = _body_style(klass, family)
            if style is not None:
                return Implementation(family, style)
    return None


def backward_family(cls: type, families: tuple[Family, ...] = FAMILIES) -> Family | None:
    """The family of the most derived Python backward; None if the user defined none."""
    for klass in _user_classes(cls):
        for family in families:
            if f"{family}_backward" in vars(klass):
                return family
    return None


def check_methods(cls: type) -> None:
    """Raises TypeError for half a split pair, for both styles in one class body, or for `op_*`
    methods of a class with extra tensors."""
    classes = _user_classes(cls)
    _check_extra_tensors(cls, classes)
    for family in FAMILIES:
        single, pair = single_name(family), split_names(family)
        for klass in classes:
            halves = [name for name in pair if name in vars(klass)]
            if single in vars(klass) and halves:
                raise TypeError(
                    f"[{klass.__name__}] class body must define {single} or the pair "
                    f"{pair[0]} and {pair[1]}, got {single} and {' and '.join(halves)}"
                )
        if forward_style(cls, family) != "split":
            continue
        defined = [name for name in pair if any(name in vars(klass) for klass in classes)]
        if len(defined) < len(pair):
            raise TypeError(
                f"[{cls.__name__}] a split forward must have both {pair[0]} and {pair[1]}, "
                f"got only {defined[0]}"
            )


def _check_extra_tensors(cls: type, classes: list[type]) -> None:
    counts = [getattr(cls, f"num_extra_{what}", 0) for what in ("inputs", "outputs")]
    if not any(isinstance(count, int) and count for count in counts):
        return
    for family_of, rest in ((forward_implementation, "forward"), (backward_family, "backward")):
        if family_of(cls, ("op",)) is None or family_of(cls, ("fuser",)) is not None:
            continue
        raise TypeError(
            f"[{cls.__name__}] an op with extra tensors must define fuser_{rest} (or its split "
            f"pair) instead of the op_* methods, got {counts[0]} extra inputs and {counts[1]} "
            f"extra outputs"
        )


def accepted_keywords(cls: type) -> dict[str, tuple[str, ...]]:
    """For each forward method of `cls`, the keywords of a step that its signature accepts."""
    accepted = {}
    for family in FAMILIES:
        for name in (single_name(family), *split_names(family)):
            method = getattr(cls, name, None)
            if method is not None:
                accepted[name] = _keywords_of(method)
    return accepted


def _keywords_of(method: object) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(method).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return KEYWORDS
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return tuple(name for name in KEYWORDS if takes_any or name in parameters) + tuple(
        name for name in EXPLICIT_KEYWORDS if name in parameters
    )


def shown(value: object) -> str:
    """A value as an error names it: a class or a function by its name, others by their type, and by
    the value itself if it is short and plain. It never calls the value's own methods."""
    name = type(value).__name__
    if issubclass(type(value), type | FunctionType):
        return cast(Any, value).__name__
    if type(value) not in (type(None), bool, int, float, str):
        return name
    text = repr(value)
    return text if value is None else f"{name} {text}" if len(text) <= 40 else name


def is_text(value: object) -> bool:
    """Whether it is a str without lone surrogates, which C++ and files cannot take."""
    return type(value) is str and not any("\ud800" <= c <= "\udfff" for c in value)


def unpacked(op: object, method: str, returned: Any, names: str) -> tuple[Any, ...]:
    """What a method returned. Raises RuntimeError unless it is a tuple (or list) of what `names`
    lists."""
    count = names.count(",") + 1
    is_list = isinstance(returned, (tuple, list))
    if is_list and len(returned) == count:
        return tuple(returned)
    got = f"{len(returned)} values" if is_list else shown(returned)
    raise RuntimeError(f"[{type(op).__name__}] {method} must return ({names}), got {got}")
