"""Whole models that were written with torch's modules."""

from . import experts, modules, sums  # register rules

# isort: split
from . import heads  # the last rule counts where several begin with the same statement

# isort: split
from .fuse import fuse
from .report import FuseReport, FuseRow
from .rules import FuseRule, FuseSkip, register_fuse_rule
from .unfuse import unfuse, unfused

__all__ = [
    "FuseReport",
    "FuseRow",
    "FuseRule",
    "FuseSkip",
    "fuse",
    "register_fuse_rule",
    "unfuse",
    "unfused",
]
del experts, heads, modules, sums
