"""Checks for authors of fusions, and of rules for `fuse`."""

from .comparison import FusionCheck
from .fuse_rule import check_fuse_rule
from .fusion import check_fusion

__all__ = ["FusionCheck", "check_fuse_rule", "check_fusion"]
