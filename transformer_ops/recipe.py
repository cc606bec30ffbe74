"""Recipes of quantized products: the formats of their operands, as immutable values."""

from .quantization.recipe import *  # noqa: F403
from .quantization.recipe import __all__ as __all__
