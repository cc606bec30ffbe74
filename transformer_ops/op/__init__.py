"""Ops as the fuser sees them: base classes, checks of their modules, and their parts."""

from .base import Attribute, BasicOperation, Check, FusibleOperation
from .context import OperationContext
from .fused import FusedOperation

__all__ = [
    "Attribute",
    "BasicOperation",
    "Check",
    "FusedOperation",
    "FusibleOperation",
    "OperationContext",
]
