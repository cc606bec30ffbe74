"""Quantized products: the region of a recipe, and what its formats do to a model's tensors."""

from ..quantized_tensor import QuantizedTensor
from . import quantizer_of as _quantizer_of  # noqa: F401
from .available import (
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from .delayed import make_scales, reset_scales, update_scales
from .frozen import frozen_weights
from .model_init import quantized_model_init
from .region import autocast, checkpoint_contexts, current_recipe
from .statistics import Report, Row, report

__all__ = [
    "QuantizedTensor",
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
    "quantized_model_init",
    "report",
    "reset_scales",
    "update_scales",
]
