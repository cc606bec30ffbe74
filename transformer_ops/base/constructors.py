"""Constructor errors that name the user's class, and the arguments that it takes."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)

_PACKAGE = __name__.partition(".")[0]


def names_its_arguments(cls: Class) -> Class:
    """Decorates a class of this package: arguments that its constructor does not take raise a
    TypeError that shows the correct call. Users' classes keep their own errors.
    """
    init = vars(cls).get("__init__")
    if init is not None and cls.__module__.partition(".")[0] == _PACKAGE:
        cls.__init__ = _checked(init)  # type: ignore[misc]
    return cls


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError:
            error = _error_of_arguments(init, self, args, kwargs)
            if error is None:
                raise
            raise error from None

    return __init__


def _error_of_arguments(
    init: Callable[..., None], self: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TypeError | None:
    """Returns None if the arguments fit, so that the constructor itself failed."""
    signature = inspect.signature(init)
    try:
        signature.bind(self, *args, **kwargs)
    except TypeError as error:
        # A subclass may have its own constructor that calls this one.
        owner = next(c for c in type(self).__mro__ if _unwrapped(c) is init)
        call = f"{owner.__name__}({_arguments(signature)})"
        return TypeError(f"[{owner.__name__}] {error}; it takes {call}")
    return None


def _unwrapped(cls: Any) -> object:
    return inspect.unwrap(cls.__init__)


def _arguments(signature: inspect.Signature) -> str:
    _, *parameters = signature.parameters.values()
    public = [_plain(p) for p in parameters if not p.name.startswith("_")]
    return str(inspect.Signature(public))[1:-1]


class _Shown(str):
    """A default as a user would write it."""

    __repr__ = str.__str__


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    if isinstance(default, enum.Enum):
        default = _Shown(default)
    return parameter.replace(annotation=parameter.empty, default=default)
