"""Weights that other libraries store quantized. A plan takes them as `QuantizedTensor`s, and has
their own class decode them, unless their codes and scales are those of a format of ours (NF4)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .quantized_tensor import QuantizedTensor

__all__ = ["as_quantized", "is_in_4_bits", "is_packed", "is_stored", "why_not_decoded"]

_FORMAT = "of its class"
_aten, _ops = torch.ops.aten, torch.ops.transformer_ops
_SAME = {_aten.detach.default, _aten.alias.default}


class _Codes(Tensor):
    """The codes of such a weight, in the shape of its numbers. The ops that decode codes call
    `dequantize()` of the weight."""

    weight: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, weight: Tensor, shape: torch.Size) -> _Codes:
        make = Tensor._make_wrapper_subclass
        return make(cls, shape, dtype=torch.int8, device=weight.device)

    def __init__(self, weight: Tensor, shape: torch.Size) -> None:
        self.weight = weight

    def _numbers(self, dtype: str) -> Tensor:
        if self.weight.requires_grad:
            raise RuntimeError(
                "[QuantizedTensor] weight that its class decodes must not require a gradient, got "
                f"a {type(self.weight).__name__} that does"
            )
        found = _numbers(self.weight)
        if type(found) is not Tensor or found.shape != self.shape:
            raise RuntimeError(
                f"[QuantizedTensor] dequantize() of {type(self.weight).__name__} must return a "
                f"plain tensor of shape {tuple(self.shape)}, got a {type(found).__name__} of "
                f"{tuple(found.shape)}"
            )
        return found.to(getattr(torch, dtype))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["weight"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _SAME:
            return _Codes(args[0].weight, args[0].shape)
        if func is _ops.dequantize.default:
            return args[0]._numbers(args[3])
        # dequantize.saved(%, %, %, "of its class", "bfloat16", none): a gradient, codes, scales
        if func is _ops.run_call.default and args[0].startswith("dequantize.saved("):
            return [args[1][1]._numbers(args[0].split('"')[-2])]
        raise NotImplementedError(
            f"[QuantizedTensor] a weight that another library stores must only be decoded, "
            f"got {func}"
        )


def _class_in(module: str, name: str) -> Any:
    """A class of another library, or no class if the library is not imported."""
    return getattr(sys.modules.get(module), name, ())


def is_in_4_bits(weight: object) -> bool:
    """Whether it is a weight of bitsandbytes that has been quantized."""
    is_of_class = isinstance(weight, _class_in("bitsandbytes.nn.modules", "Params4bit"))
    return is_of_class and getattr(weight, "quant_state", None) is not None


def is_stored(weight: object) -> bool:
    """Whether a weight is of a class of torchao, or of 4 bits of bitsandbytes, that says how to get
    its numbers."""
    torchao = _class_in("torchao.utils", "TorchAOBaseTensor")
    is_of_torchao = isinstance(weight, torchao) and hasattr(weight, "dequantize")
    return is_of_torchao or is_in_4_bits(weight)


def _numbers(weight: Any) -> Tensor:
    found: Tensor
    if is_in_4_bits(weight):
        functional: Any = sys.modules["bitsandbytes.functional"]
        found = functional.dequantize_4bit(weight.data, weight.quant_state)
    else:
        found = weight.detach().dequantize()
    return found


def is_packed(weight: Any) -> bool:
    """Whether bitsandbytes has packed a weight for products on the CPU, so that it cannot be
    decoded."""
    return bool(getattr(weight.quant_state, "packing_format_for_cpu", False))


def why_not_decoded(weight: Any) -> str | None:
    """The reason why the product of such a weight is not that of its numbers, or None."""
    name = type(weight).__name__
    if is_in_4_bits(weight) and is_packed(weight):
        return f"a {name} that is packed for inference"
    if any(value is not None for key, value in vars(weight).items() if key.startswith("act")):
        return f"a {name} that also quantizes the input"
    return f"a {name} that requires a gradient" if weight.requires_grad else None


def as_quantized(weight: Any, dtype: torch.dtype | None = None) -> Any:
    """The weight, as a plan takes it. `dtype`: of the product, if it is not that of the weight."""
    if type(weight) is nn.Parameter or isinstance(weight, QuantizedTensor) or not is_stored(weight):
        return weight
    state = weight.quant_state if is_in_4_bits(weight) else weight
    dtype = dtype or state.dtype
    if is_in_4_bits(weight) and _is_nf4(state):
        rows, columns = state.shape
        codes = weight.data.view(torch.uint8).view(rows, columns // 2)
        return QuantizedTensor(codes, state.absmax.view(rows, columns // 64), "nf4", dtype)
    scale = torch.empty(0, device=weight.device)
    return QuantizedTensor(_Codes(weight, state.shape), scale, _FORMAT, dtype)


def _is_nf4(state: Any) -> bool:
    """Whether codes and scales of bitsandbytes are those of our format."""
    in_blocks_of_rows = len(state.shape) == 2 and state.shape[1] % 64 == 0 and state.blocksize == 64
    is_plain = not state.nested and state.absmax.dtype == torch.float32
    return bool(state.quant_type == "nf4" and in_blocks_of_rows and is_plain)
