"""Checks of constructor arguments and attributes: each returns the value or raises ValueError."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Sizes and attributes are int64 in C++.
_MAXIMUM = 2**63 - 1


def check_int(op: str, name: str, value: object, *, minimum: int) -> int:
    """An int (no bool) that is at least `minimum`."""
    rule = f"must be an int >= {minimum}"
    if isinstance(value, (bool, torch.Tensor)) or not hasattr(value, "__index__"):
        raise ValueError(f"[{op}] {name} {rule}, got {value!r}")
    number = operator.index(value)
    if number > _MAXIMUM:
        raise ValueError(f"[{op}] {name} must be an int < 2**63, got {value!r}")
    if number < minimum:
        raise ValueError(f"[{op}] {name} {rule}, got {value!r}")
    return number


def check_size(op: str, name: str, value: object) -> int:
    """An int (no bool) that is at least 1."""
    return check_int(op, name, value, minimum=1)


def check_index(op: str, name: str, value: object) -> int:
    """An int (no bool) that is at least 0."""
    return check_int(op, name, value, minimum=0)


def check_any_int(op: str, name: str, value: object) -> int:
    """An int (no bool) of 64 bits."""
    return check_int(op, name, value, minimum=-_MAXIMUM)


def check_optional_size(op: str, name: str, value: object) -> int | None:
    """None, or an int (no bool) that is at least 1."""
    return None if value is None else check_size(op, name, value)


def check_sizes(op: str, name: str, value: object) -> tuple[int, ...]:
    """An int >= 1, or at least one of them, as a tuple."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, torch.Tensor)):
        sizes = tuple(check_size(op, f"each size of {name}", size) for size in value)
        if not sizes:
            raise ValueError(f"[{op}] {name} must have at least one size, got {value!r}")
        return sizes
    return (check_size(op, name, value),)


def check_shape(op: str, name: str, value: object) -> tuple[int, ...]:
    """Ints >= 0, one of which may be -1, as a tuple."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, torch.Tensor)):
        raise ValueError(f"[{op}] {name} must be a sequence of ints, got {value!r}")
    sizes = tuple(check_int(op, f"each size of {name}", size, minimum=-1) for size in value)
    if sizes.count(-1) > 1:
        raise ValueError(f"[{op}] {name} must have at most one -1, got {sizes}")
    if -1 in sizes and 0 in sizes:
        raise ValueError(f"[{op}] {name} must not have a -1 beside a 0, got {sizes}")
    return sizes


def check_bool(op: str, name: str, value: object) -> bool:
    """A bool, not something that only behaves like one."""
    if not isinstance(value, bool):
        raise ValueError(f"[{op}] {name} must be a bool, got {value!r}")
    return value


def one_of(*values: str) -> Callable[[str, str, object], str]:
    """The check of a text that is one of these."""

    def check(op: str, name: str, value: object) -> str:
        if not isinstance(value, str) or value not in values:
            raise ValueError(f"[{op}] {name} must be one of {', '.join(values)}, got {value!r}")
        return value

    return check


def check_approximate(op: str, name: str, value: object) -> str:
    """The name of a form of GELU, as in `torch.nn.GELU`."""
    if not isinstance(value, str) or value not in ("none", "tanh"):
        raise ValueError(f"[{op}] {name} must be 'none' or 'tanh', got {value!r}")
    return value


def check_optional_float(op: str, name: str, value: object) -> float | None:
    """None, or a finite number."""
    return None if value is None else check_float(op, name, value)


def check_float(op: str, name: str, value: object) -> float:
    """A finite number."""
    return _check_number(op, name, value, "must be a finite number", -math.inf, math.inf)


def check_not_negative(op: str, name: str, value: object) -> float:
    """A finite number >= 0."""
    return _check_number(op, name, value, "must be a finite number >= 0", 0.0, math.inf)


def check_optional_not_negative(op: str, name: str, value: object) -> float | None:
    """None, or a finite number >= 0."""
    return None if value is None else check_not_negative(op, name, value)


def check_positive(op: str, name: str, value: object) -> float:
    """A finite number > 0."""
    smallest = math.ulp(0.0)
    return _check_number(op, name, value, "must be a finite number > 0", smallest, math.inf)


def check_optional_positive(op: str, name: str, value: object) -> float | None:
    """None, or a finite number > 0."""
    return None if value is None else check_positive(op, name, value)


def check_probability(op: str, name: str, value: object) -> float:
    """A number in [0, 1]."""
    return _check_number(op, name, value, "must be a number in [0, 1]", 0.0, 1.0)


def _check_number(
    op: str, name: str, value: object, rule: str, lowest: float, highest: float
) -> float:
    number = math.nan
    given = value
    if isinstance(given, torch.Tensor) and _is_number(given):
        value = given.item()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not (math.isfinite(number) and lowest <= number <= highest):
        raise ValueError(f"[{op}] {name} {rule}, got {given!r}")
    return number


def _is_number(tensor: torch.Tensor) -> bool:
    # A tensor that requires a gradient would get none as a plain number.
    return tensor.dim() == 0 and not tensor.requires_grad and not tensor.is_meta


def check_dtype(op: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """None, or one of the dtypes that have kernels."""
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise ValueError(f"[{op}] dtype must be one of {names} or None, got {dtype!r}")
    return dtype
