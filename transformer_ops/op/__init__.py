"""What an op is to the fuser: base classes, and what their modules are checked for and made of."""

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
