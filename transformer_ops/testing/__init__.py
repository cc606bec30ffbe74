"""Checks for authors of fusions, and of rules for `fuse`."""

from .comparison import FusionCheck
from .fusion import check_fusion

__all__ = ["FusionCheck", "check_fusion"]
