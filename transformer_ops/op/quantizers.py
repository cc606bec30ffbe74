"""What `torch.ao.quantization` passes over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["passed_over"]


def passed_over(why: Callable[[Any], str]) -> Any:
    """An attribute `qconfig`, which `torch.ao.quantization` sets on each module, and then quantizes
    those of exact classes that it knows. Setting it is a warning with this text, unless it is
    empty."""

    def get(module: Any) -> Any:
        try:
            return vars(module)["qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None

    def set_and_warn(module: Any, value: Any) -> None:
        vars(module)["qconfig"] = value
        text = why(module)
        if text:
            warnings.warn(text, stacklevel=4)

    def delete(module: Any) -> None:
        del vars(module)["qconfig"]

    return property(get, set_and_warn, delete)
