"""Arguments that a constructor does not take: the error names the public class and shows a call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import transformer_ops as tops
from transformer_ops.quantization.quantizers import Quantizer

BASES = (tops.FusibleOperation, tops.Sequential, tops.OperationFuser, tops.recipe.Recipe, Quantizer)
PUBLIC = [getattr(tops, name) for name in tops.__all__]
PUBLIC += [getattr(tops.recipe, name) for name in tops.recipe.__all__]
CLASSES = [found for found in PUBLIC if inspect.isclass(found) and issubclass(found, BASES)]


def parameters_of(cls: type) -> list[inspect.Parameter]:
    found = inspect.signature(cls).parameters.values()
    return [p for p in found if not p.name.startswith("_")]


def positional_of(cls: type) -> list[inspect.Parameter]:
    return [p for p in parameters_of(cls) if p.kind is p.POSITIONAL_OR_KEYWORD]


def required_of(cls: type) -> dict[str, object]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        p.name: object() for p in parameters_of(cls) if p.kind in kinds and p.default is p.empty
    }


def takes_any(cls: type) -> bool:
    return any(p.kind is p.VAR_POSITIONAL for p in parameters_of(cls))


def too_many(cls: type) -> object:
    return cls(*[object()] * (len(positional_of(cls)) + 1))


def twice(cls: type) -> object:
    return cls(object(), **{positional_of(cls)[0].name: object()})


# What is wrong: (a call, what the message says, of which classes)
CALLS: dict[str, tuple[Callable[[Any], object], str, Callable[[type], object]]] = {
    "unexpected": (
        lambda cls: cls(**required_of(cls), no_such=1),
        "got an unexpected keyword argument 'no_such'",
        lambda cls: True,
    ),
    "missing": (lambda cls: cls(), "missing a required", required_of),
    "too many": (too_many, "too many positional arguments", lambda cls: not takes_any(cls)),
    "twice": (twice, "multiple values for argument", positional_of),
}
ROWS = [(cls, kind) for cls in CLASSES for kind, (*_, applies) in CALLS.items() if applies(cls)]


def test_the_table_has_every_class_and_every_kind() -> None:
    names = {cls.__name__ for cls, _ in ROWS}
    assert {"RMSNorm", "Linear", "Sequential", "DelayedScaling", "NVFP4Quantizer"} <= names
    assert set(tops.ops.__all__) <= names and {kind for _, kind in ROWS} == set(CALLS)


@pytest.mark.parametrize(
    ("cls", "kind"), ROWS, ids=[f"{cls.__name__}-{kind}" for cls, kind in ROWS]
)
def test_an_error_shows_the_class_and_what_it_takes(cls: type, kind: str) -> None:
    call, says, _ = CALLS[kind]
    name = cls.__name__
    with pytest.raises(TypeError, match=rf"^\[{name}\] {says}.*; it takes {name}\(") as found:
        call(cls)
    takes = str(found.value).partition("it takes ")[2]
    assert takes.endswith(")") and not re.search(r"__init__|\b_\w|[<>]", takes)
    written = re.findall(r"(\w+)(?:=|,|\)$)", takes)
    assert [p.name for p in parameters_of(cls)] == [
        w for w in written if w in inspect.signature(cls).parameters
    ]


def test_the_text_is_the_call_as_one_would_write_it() -> None:
    with pytest.raises(TypeError) as found:
        tops.RMSNorm(8, bias=True)  # type: ignore[call-arg]
    assert str(found.value) == (
        "[RMSNorm] got an unexpected keyword argument 'bias'; it takes RMSNorm(normalized_shape, "
        "eps=1e-05, elementwise_affine=True, device=None, dtype=None, *, zero_centered_gamma=False)"
    )
    with pytest.raises(TypeError, match=r"it takes Float8BlockScaling\(fp8_format=Format.E4M3\)"):
        tops.recipe.Float8BlockScaling(block=1)  # type: ignore[call-arg]


# ---- classes of users


class Inherits(tops.RMSNorm):
    """The constructor of the parent."""


class Native(tops.BasicOperation, kind="GELU"):
    """An op of a declaration, without a constructor."""


class Passes(tops.RMSNorm):
    """A constructor that gives the parent's what it does not take."""

    def __init__(self, size: int) -> None:
        super().__init__(size, bias=True)  # type: ignore[call-arg]


class Fails(tops.Sequential):
    """A constructor that fails on its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        len(size)  # type: ignore[arg-type]


USERS: dict[str, tuple[Callable[[], object], str]] = {
    "inherits": (
        lambda: Inherits(8, bias=True),  # type: ignore[call-arg]
        r"\[Inherits\] got an unexpected .*; it takes Inherits\(normalized_shape, ",
    ),
    "native": (lambda: Native(3), r"\[Native\] too many .*; it takes Native\(\)"),  # type: ignore[call-arg]
    "passes": (lambda: Passes(8), r"\[RMSNorm\] got an unexpected .*; it takes RMSNorm\("),
    "own": (lambda: Passes(8, 9), r"Passes\.__init__\(\) takes 2 positional"),  # type: ignore[call-arg]
    "fails": (lambda: Fails(8), "object of type 'int' has no len"),
    "argument": (lambda: tops.Sequential(3), r"\[Sequential\] modules must be .*got int"),
}


@pytest.mark.parametrize("name", USERS)
def test_classes_of_users_keep_their_errors(name: str) -> None:
    make, message = USERS[name]
    with pytest.raises(TypeError, match=f"^{message}"):
        make()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_signature_stays(cls: type) -> None:
    kinds = {p.kind for p in inspect.signature(cls).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    init = vars(cls).get("__init__")
    if init is not None:
        assert init.__name__ == "__init__" and init.__qualname__ == f"{cls.__name__}.__init__"


def test_the_parents_of_an_op_are_made_once() -> None:
    calls = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            calls.append(self)

    class Both(tops.Bias, Counts):
        pass

    both = Both(4)
    assert calls == [both] and both.bias.shape == (4,)
