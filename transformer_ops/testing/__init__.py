"""Checks for authors of fusions, and of rules for `fuse`."""

from .fusion import FusionCheck, check_fusion

__all__ = ["FusionCheck", "check_fusion"]
