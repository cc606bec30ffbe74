"""Rules for whole modules: norms and products that no other rule covers.

In: a module whose `forward` is `return F.linear(x, self.weight, self.bias)`, or that of a norm.
Out: one op, where it saves bytes or time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base.cpu import processor
from ..modules.views import BorrowedLinear, is_torch, view
from ..quantization.quantized_tensor import QuantizedTensor
from ..quantization.stored import is_stored
from .norms import NORMS_OF_INPUT_DTYPE, NORMS_THAT_PROMOTE, norm
from .pattern import Names
from .rules import FuseSkip, FuseUnfit, register_fuse_rule


def _norm(module: Any, names: Names) -> list[nn.Module]:
    op = view(module) if is_torch(module, nn.RMSNorm) else norm(module)
    if op is None:
        raise FuseSkip(f"{type(module).__name__} is no norm that ops know")
    return [op]


def _is_of_dtype(module: Any, input: Tensor) -> bool:
    """Whether the result has the dtype of the input: these norms promote it to the weight's."""
    return module.weight is None or bool(input.dtype == module.weight.dtype)


register_fuse_rule("norm", NORMS_THAT_PROMOTE, _norm, when=_is_of_dtype)
register_fuse_rule("norm of any dtype", NORMS_OF_INPUT_DTYPE, _norm)


def _is_better(module: Any, input: Tensor) -> bool:
    """Whether our product saves fewer bytes than torch's, or takes less time:
    `csrc/wrappers/product.cpp` and `widened_product.cpp` have what was measured."""
    if type(module.weight) is not nn.Parameter:
        return isinstance(module.weight, QuantizedTensor)
    if input.device.type != "cpu":
        return False
    dtype = input.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    return dtype in _faster_dtypes


# Filled when the first product is fused: the processor is asked no sooner.
_faster_dtypes: set[torch.dtype] = set()


def _product(module: Any, names: Names) -> list[nn.Module]:
    found = processor()
    faster = {
        torch.float32: found.prefers_onednn,
        torch.bfloat16: not found.multiplies_bfloat16,
        torch.float16: not found.multiplies_float16,
    }
    _faster_dtypes.update(dtype for dtype, is_faster in faster.items() if is_faster)
    dtype = module.weight.dtype
    # Autocast takes float32 to bfloat16.
    dtypes = {dtype, torch.bfloat16} if dtype == torch.float32 else {dtype}
    if is_stored(module.weight):
        raise FuseUnfit(f"its weight is a {type(module.weight).__name__}, which multiplies alone")
    is_encoded = isinstance(module.weight, QuantizedTensor)
    if not is_encoded and not dtypes & _faster_dtypes:
        raise FuseUnfit("torch multiplies as fast on this processor")
    return [BorrowedLinear(module)]


register_fuse_rule(
    "product", "return F.linear(H, self.weight, self.bias)", _product, when=_is_better
)
