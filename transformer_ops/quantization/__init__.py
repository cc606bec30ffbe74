"""Quantized products: the region of a recipe, and what its formats do to a model's tensors."""

from .region import autocast, checkpoint_contexts, current_recipe
from .statistics import Report, Row, report

__all__ = ["Report", "Row", "autocast", "checkpoint_contexts", "current_recipe", "report"]
