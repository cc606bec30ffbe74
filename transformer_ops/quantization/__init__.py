"""Quantized numbers: formats, recipes, quantizers and tensors, regions, scales, statistics."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .available import (
        is_fp8_available,
        is_fp8_block_scaling_available,
        is_mxfp8_available,
        is_nvfp4_available,
    )
    from .delayed import make_scales, reset_scales, update_scales
    from .frozen import frozen_weights
    from .model_init import quantized_model_init
    from .quantize_model import QuantizedWeights, quantize_
    from .quantized_tensor import QuantizedTensor
    from .region import autocast, checkpoint_contexts, current_recipe
    from .statistics import Report, Row, report

# The ops import the formats and the scales of this package, and its regions import the ops.
_HOMES = {
    "QuantizedTensor": "quantized_tensor",
    "QuantizedWeights": "quantize_model",
    "Report": "statistics",
    "Row": "statistics",
    "autocast": "region",
    "checkpoint_contexts": "region",
    "current_recipe": "region",
    "frozen_weights": "frozen",
    "is_fp8_available": "available",
    "is_fp8_block_scaling_available": "available",
    "is_mxfp8_available": "available",
    "is_nvfp4_available": "available",
    "make_scales": "delayed",
    "quantize_": "quantize_model",
    "quantized_model_init": "model_init",
    "report": "statistics",
    "reset_scales": "delayed",
    "update_scales": "delayed",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Lists the public API, loaded or not."""
    return sorted(__all__)


__all__ = [
    "QuantizedTensor",
    "QuantizedWeights",
    "Report",
    "Row",
    "autocast",
    "checkpoint_contexts",
    "current_recipe",
    "frozen_weights",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_scales",
    "quantize_",
    "quantized_model_init",
    "report",
    "reset_scales",
    "update_scales",
]
