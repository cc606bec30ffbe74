"""A tensor that is held as codes and scales, and reads as the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from . import _C

__all__ = ["QuantizedTensor"]

_aten = torch.ops.aten
# What gives the same numbers, and so keeps the codes.
_SAME = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.detach.default,
}


class QuantizedTensor(Tensor):
    """`codes` and `scale` in a format of `torch.ops.transformer_ops.quantize`, seen as a tensor of
    `dtype` and of the shape that was quantized.

    As the weight of a `Linear` or `BasicLinear` it is decoded where the product reads it, in
    backward again: what stays in memory is the codes. Its gradient is a plain tensor.

    Every other operation of torch runs on the decoded numbers and gives plain tensors; one that
    writes into it, as optimizers do, decodes, runs and encodes again, so steps below half a code
    are lost. `detach()`, `clone()`, `to(device)` stay quantized, and so do rows of a matrix whose
    blocks are parts of a row; any other view is a copy. `to(dtype)` is plain.

    Args:
        codes, scale: what `torch.ops.transformer_ops.quantize(tensor, format)` returns.
        format: the name of that format.
        dtype: of the numbers.

    Raises:
        ValueError: a `dtype` that is not floating. Parts that do not fit the format are a
            RuntimeError where they are first decoded.
    """

    codes: Tensor
    scale: Tensor
    format: str
    _initial: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        scale: Tensor,
        format: str,
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        if not dtype.is_floating_point:
            raise ValueError(f"[QuantizedTensor] dtype must be floating, got {dtype}")
        shape = list(codes.shape)
        if codes.dtype == torch.uint8:
            shape[-1] *= 2  # two codes in a byte
        return Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=codes.device, requires_grad=requires_grad
        )

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        format: str,
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> None:
        self.codes = codes
        self.scale = scale
        self.format = format
        self._initial = None

    @classmethod
    def quantize(cls, tensor: Tensor, format: str) -> QuantizedTensor:
        """The numbers of a floating tensor, rounded to those of a format.

        Raises:
            RuntimeError: an unknown format; a tensor without dimensions.
            ValueError: an odd last dimension where two codes share a byte.
        """
        plain = decoded(tensor).detach()
        codes, scale = torch.ops.transformer_ops.quantize(plain.contiguous(), format)
        if codes.dtype == torch.uint8 and plain.shape[-1] % 2:
            raise ValueError(
                f"[QuantizedTensor] last dimension must be even for format '{format}', "
                f"got {plain.shape[-1]}"
            )
        return cls(codes, scale, format, tensor.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers as a plain tensor, rounded to the dtype of this one, then to `dtype`.
        Differentiable: the gradient is that of a copy."""
        found = _aten._to_copy.default(self, dtype=self.dtype)
        return cast(Tensor, found if dtype is None else found.to(dtype))

    def get_high_precision_init_val(self) -> Tensor | None:
        """What was quantized, on the CPU, under `quantized_model_init(
        preserve_high_precision_init_val=True)`; else None."""
        return self._initial

    def clear_high_precision_init_val(self) -> None:
        """Let go of it."""
        self._initial = None

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"QuantizedTensor(format='{self.format}', shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device='{self.device}', requires_grad={self.requires_grad})"
        )

    # ---- for torch

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As bytes: pickle, without torch.save, cannot take codes of 8-bit floating dtypes.
        parts = (self.codes.view(torch.uint8), self.codes.dtype, self.scale)
        state = (self.requires_grad, isinstance(self, nn.Parameter), self._initial)
        return _rebuild, (*parts, self.format, self.dtype, *state)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype]]:
        return ["codes", "scale"], (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: dict[str, Tensor], context: tuple[str, torch.dtype], size: Any, stride: Any
    ) -> QuantizedTensor:
        return QuantizedTensor(parts["codes"], parts["scale"], *context)

    def _stable_hash_for_caching(self) -> str:
        parts = [
            (tuple(part.shape), part.stride(), part.dtype) for part in (self.codes, self.scale)
        ]
        return str((self.format, self.dtype, self.device, self.requires_grad, parts))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QuantizedTensor):
            if func in _SAME:
                return first._with_parts(lambda part: func(part))
            if func is _aten._to_copy.default and kwargs.get("dtype") is None:
                return first._with_parts(lambda part: func(part, **kwargs))
            if func is _aten.slice.Tensor and not kwargs:
                rows = _sliced_rows(first, *args[1:])
                if rows is not None:
                    return rows
        if func is _aten.copy_.default and isinstance(first, QuantizedTensor):
            first._take(args[1])
            return first
        return _run_decoded(func, args, kwargs)

    def _with_parts(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        parts = function(self.codes), function(self.scale)
        return QuantizedTensor(*parts, self.format, self.dtype)

    def _take(self, source: Tensor) -> None:
        """Hold the numbers of `source`."""
        if not (isinstance(source, QuantizedTensor) and source.format == self.format):
            expanded = decoded(source).to(self.device, self.dtype).expand(self.shape)
            source = QuantizedTensor.quantize(expanded, self.format)
        if source.shape != self.shape:
            raise RuntimeError(
                f"[QuantizedTensor] source must have shape {tuple(self.shape)}, "
                f"got {tuple(source.shape)}"
            )
        self.codes.copy_(source.codes)
        self.scale.copy_(source.scale)

    def moved(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """The same codes on the device and with the dtype that `function`, as `Module._apply` has
        it, gives plain tensors."""
        probe = function(torch.empty(0, dtype=self.dtype, device=self.device))

        def move(part: Tensor) -> Tensor:
            if part.is_meta:
                return torch.empty_like(part, device=probe.device)
            return part.to(probe.device)

        dtype = probe.dtype if probe.dtype.is_floating_point else self.dtype
        found = QuantizedTensor(
            move(self.codes), move(self.scale), self.format, dtype, self.requires_grad
        )
        found._initial = self._initial
        return found


def decoded(tensor: Tensor) -> Tensor:
    """A plain tensor as it is, the numbers of a quantized one."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def with_parts(parameters: Iterable[Tensor | None]) -> list[Tensor]:
    """Parameters as a plan takes them: behind a quantized one its codes and scale, none for
    None."""
    found: list[Tensor] = []
    for tensor in parameters:
        if tensor is not None:
            found.append(tensor)
        if isinstance(tensor, QuantizedTensor):
            found += [tensor.codes, tensor.scale]
    return found


def _decode(tensor: QuantizedTensor) -> Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    found: Tensor = torch.ops.transformer_ops.dequantize(
        tensor.codes, tensor.scale, tensor.format, dtype
    )
    return found


def _run_decoded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any op on the numbers; what it writes into quantized tensors is encoded again."""
    plain: dict[int, Tensor] = {}

    def replace(tensor: QuantizedTensor) -> Tensor:
        return plain.setdefault(id(tensor), _decode(tensor))

    given_args, given_kwargs = tree_map_only(QuantizedTensor, replace, (args, kwargs))
    result = func(*given_args, **given_kwargs)
    written = _written(func, args, kwargs)
    back = {id(plain[id(tensor)]): tensor for tensor in written}
    with torch.no_grad():
        for tensor in written:
            tensor._take(plain[id(tensor)])
    leaves, spec = tree_flatten(result)
    return tree_unflatten([back.get(id(leaf), leaf) for leaf in leaves], spec)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[QuantizedTensor]:
    """The quantized tensors that an op writes into, by its schema."""
    found: dict[int, QuantizedTensor] = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, QuantizedTensor):
                found[id(leaf)] = leaf
    return list(found.values())


def _sliced_rows(
    tensor: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantizedTensor | None:
    """Rows of a matrix as a view of its codes; None where a block spans several."""
    has_row_scales = tensor.scale.dim() == 2 and tensor.scale.shape[0] == tensor.shape[0]
    if tensor.dim() != 2 or dim != 0 or step != 1 or not has_row_scales:
        return None
    return tensor._with_parts(lambda part: part[start:end])


def _rebuild(
    codes: Tensor,
    codes_dtype: torch.dtype,
    scale: Tensor,
    format: str,
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    initial: Tensor | None,
) -> QuantizedTensor:
    found: Any = QuantizedTensor(codes.view(codes_dtype), scale, format, dtype, requires_grad)
    if is_parameter:
        found = nn.Parameter(found, requires_grad)
    found._initial = initial
    return cast(QuantizedTensor, found)


torch.serialization.add_safe_globals([_rebuild])
# C++ takes parameters of this class by their parts.
_C.set_quantized_class(QuantizedTensor)
