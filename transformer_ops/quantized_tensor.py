"""A tensor that is held as codes and scales, and reads as the numbers that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from . import _C
from .number_format import FORMATS, format_with

__all__ = ["QuantizedTensor"]

_aten = torch.ops.aten
# Formats with one scale for a tensor, any float, and those whose scale is a power of two instead.
_POWERS = {
    row.name: format_with(row.element, "power of two").name
    for row in FORMATS.values()
    if row.has_one_scale and row.scale == "float32"
}
# What gives the same numbers, and so keeps the codes.
_SAME = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.lift_fresh.default,
}


class QuantizedTensor(Tensor):
    """`codes` and `scale` in a format of `torch.ops.transformer_ops.quantize`, seen as a tensor of
    `dtype` and of the shape that was quantized.

    As a weight of a `Linear`, `BasicLinear`, `PackedLinear` or `GroupedLinear`, it is
    decoded where the product reads it, in backward again: what stays in memory is the codes. Its
    gradient is a plain tensor.

    Every other operation of torch runs on the decoded numbers and gives plain tensors; one that
    writes into it, as optimizers do, decodes, runs and encodes again, so steps below half a code
    are lost. `detach()`, `clone()` and `to(device)` stay quantized. Where blocks are parts of a
    row, so do runs of a matrix's rows, its flat view, and what FSDP2 makes of it. Any other view is
    a copy. `to(dtype)` is plain.

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
        # A view shares the version counter of its tensor, and an inference tensor has none. So the
        # wrapper is one if its codes are, in whatever mode it is made.
        make = Tensor._make_wrapper_subclass
        if _has_other_mode(codes):
            with _mode_of(codes):
                found = make(cls, shape, dtype=dtype, device=codes.device)
        else:
            found = make(cls, shape, dtype=dtype, device=codes.device)
        # Outside of the mode: torch refuses a gradient of an inference tensor.
        return cast(QuantizedTensor, found.requires_grad_() if requires_grad else found)

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
            RuntimeError: an unknown format; a tensor that is not floating.
            ValueError: an odd last dimension, or none, where two codes share a byte.
        """
        plain = decoded(tensor).detach()
        codes, scale = torch.ops.transformer_ops.quantize(plain.contiguous(), format)
        if codes.dtype == torch.uint8 and (plain.dim() == 0 or plain.shape[-1] % 2):
            raise ValueError(
                f"[QuantizedTensor] last dimension must be even for format '{format}', "
                f"got {plain.shape[-1] if plain.dim() else 'none'}"
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
        parts = (_viewed(self.codes, torch.uint8), self.codes.dtype, self.scale)
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
            if func is _aten.copy_.default:
                first._take(args[1])
                return first
            if func in _VIEWS and not any(kwargs.values()):
                found = _VIEWS[func](first, *args[1:])
                if found is not None:
                    return found
            if first.is_inference() or torch.is_inference_mode_enabled():
                # Elsewhere autograd takes composite ops apart before they come here.
                found = func.decompose(*args, **kwargs)
                if found is not NotImplemented:
                    return found
            if func.is_view and _has_other_mode(first):
                with _mode_of(first):
                    return _run_decoded(func, args, kwargs)
        return _run_decoded(func, args, kwargs)

    def _with_parts(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        parts = function(self.codes), function(self.scale)
        return QuantizedTensor(*parts, self.format, self.dtype)

    def _take(self, source: Tensor) -> None:
        """Hold the numbers of `source`, which is broadcast."""
        if not _broadcasts(source.shape, self.shape):
            raise RuntimeError(
                f"[QuantizedTensor] source of copy_ must broadcast to shape {tuple(self.shape)}, "
                f"got {tuple(source.shape)}"
            )
        if not (
            isinstance(source, QuantizedTensor)
            and _have_same_parts(source, self)
            and source.shape == self.shape
        ):
            expanded = decoded(source).to(self.device, self.dtype).expand(self.shape)
            source = _encoded(expanded, self.format)
        self.codes.copy_(source.codes)
        self.scale.copy_(source.scale)

    # ---- for FSDP2, which gathers codes and scales in place of numbers

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """What is gathered. ValueError for rows that the ranks do not divide."""
        if outer_size[0] % mesh.size():
            raise ValueError(
                f"[QuantizedTensor] rows must be divisible by the {mesh.size()} ranks that share "
                f"them, got {outer_size[0]}"
            )
        # Gloo knows no 8-bit floating dtypes.
        return (self.codes.view(torch.uint8), self.scale), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: QuantizedTensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """The whole tensor, and the tensors that hold it."""
        codes, scale = gathered[0].view(self.codes.dtype), gathered[1]
        if out is not None:
            out.codes, out.scale = codes, scale
            return None
        return QuantizedTensor(codes, scale, self.format, param_dtype), gathered

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


def _viewed(codes: Tensor, dtype: torch.dtype) -> Tensor:
    # It is the only view of torch that takes the mode of its caller, not that of its tensor.
    with _mode_of(codes):
        return codes.view(dtype)


def decoded(tensor: Tensor) -> Tensor:
    """A plain tensor as it is, the numbers of a quantized one."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def _encoded(tensor: Tensor, format: str) -> QuantizedTensor:
    """What a quantized tensor takes of numbers that are written into it. With one scale for a
    tensor, those that the format has, times a power of two, stay what they are; others have the
    scale of the largest magnitude. Always a power of two would leave a number that is written again
    and again in one place, and train worse."""
    found = QuantizedTensor.quantize(tensor, format)
    if format not in _POWERS or _is_seen_to_differ(tensor, format):
        return found
    powers = QuantizedTensor.quantize(tensor, _POWERS[format])
    # No branch: a device answers late, and a compiler not at all.
    is_exact = (_decode(powers) == tensor).all()
    parts = (powers.codes.view(torch.uint8), found.codes.view(torch.uint8))
    codes = torch.where(is_exact, *parts).view(found.codes.dtype)
    scale = torch.where(is_exact, powers.scale, found.scale)
    return QuantizedTensor(codes, scale, format, tensor.dtype)


def _is_seen_to_differ(tensor: Tensor, format: str) -> bool:
    """Whether the first numbers show that the format has not all, where reading them is cheap:
    nearly always, and a write costs no more then."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu":
        return False
    first = tensor[(0,) * (tensor.dim() - 1)][:64] if tensor.numel() else tensor
    scaled = torch.frexp(first).mantissa * 2 ** FORMATS[format].significant_bits
    return bool((scaled != scaled.round()).any())


def _have_same_parts(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether codes and scales mean the same in both. A power of two is a rule for scales that are
    made, and decodes as any other scale does."""
    return _POWERS.get(a.format, a.format) == _POWERS.get(b.format, b.format)


def _broadcasts(source: torch.Size, target: torch.Size) -> bool:
    pairs = zip(reversed(source), reversed(target), strict=False)
    return len(source) <= len(target) and all(a in (1, b) for a, b in pairs)


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


def _has_other_mode(tensor: Tensor) -> bool:
    """Whether a tensor that is made now is an inference tensor and this one is not, or the other
    way round."""
    return tensor.is_inference() != torch.is_inference_mode_enabled()


@contextmanager
def _mode_of(tensor: Tensor) -> Iterator[None]:
    """What is made within is an inference tensor if `tensor` is one."""
    if _has_other_mode(tensor):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            yield
    else:
        yield


def _run_decoded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any op on the numbers; what it writes into quantized tensors is encoded again."""
    plain: dict[int, Tensor] = {}

    def replace(tensor: QuantizedTensor) -> Tensor:
        if id(tensor) not in plain:
            plain[id(tensor)] = _decode(tensor)
        return plain[id(tensor)]

    given_args, given_kwargs = tree_map_only(QuantizedTensor, replace, (args, kwargs))
    result = func(*given_args, **given_kwargs)
    written = _written(func, args, kwargs)
    back = {id(plain[id(tensor)]): tensor for tensor in written}
    for tensor in written:
        if plain[id(tensor)].shape != tensor.shape:
            raise RuntimeError(
                f"[QuantizedTensor] {func._schema.name} must keep the shape "
                f"{tuple(tensor.shape)}, got {tuple(plain[id(tensor)].shape)}"
            )
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


# ---- what stays quantized; None where it does not. With FSDP2's way of sharding, it is enough.

# Formats whose blocks are parts of a row, and how long those are.
_ROW_BLOCKS = {
    row.name: row.block_columns for row in FORMATS.values() if row.block_rows == 1 and row.bits == 8
}


def _rows(
    tensor: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantizedTensor | None:
    """Rows of a matrix as a view of its codes."""
    if tensor.dim() != 2 or dim != 0 or step != 1 or tensor.format not in _ROW_BLOCKS:
        return None
    return tensor._with_parts(lambda part: part[start:end])


def _split_rows(
    tensor: QuantizedTensor, size: int, dim: int = 0
) -> tuple[QuantizedTensor, ...] | None:
    if tensor.dim() != 2 or dim != 0 or tensor.format not in _ROW_BLOCKS:
        return None
    parts = zip(tensor.codes.split(size), tensor.scale.split(size), strict=True)
    return tuple(QuantizedTensor(*part, tensor.format, tensor.dtype) for part in parts)


def _zero_rows(tensor: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor | None:
    same_width = len(size) == tensor.dim() == 2 and size[1] == tensor.shape[1]
    if not same_width or tensor.format not in _ROW_BLOCKS:
        return None
    return tensor._with_parts(lambda part: part.new_zeros((size[0], part.shape[1])))


def _view(tensor: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor | None:
    """Of the same shape, or flat where blocks fill their rows."""
    if tuple(size) == tuple(tensor.shape):
        return _same(tensor)
    block = _ROW_BLOCKS.get(tensor.format)
    is_flat = list(size) in ([-1], [tensor.numel()])
    if block is None or not is_flat or tensor.shape[-1] % block:
        return None
    return tensor._with_parts(lambda part: part.view(-1))


def _same(tensor: QuantizedTensor) -> QuantizedTensor:
    return tensor._with_parts(lambda part: part.view(part.shape))


def _as_strided(
    tensor: QuantizedTensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> QuantizedTensor | None:
    is_same = (tuple(size), tuple(stride)) == (tuple(tensor.shape), tensor.stride())
    return _same(tensor) if is_same and not offset else None


_VIEWS: dict[Any, Callable[..., Any]] = {
    _aten.slice.Tensor: _rows,
    _aten.split.Tensor: _split_rows,
    _aten.new_zeros.default: _zero_rows,
    _aten.view.default: _view,
    _aten.as_strided.default: _as_strided,
}


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
    codes = _viewed(codes, codes_dtype)
    found: Any = QuantizedTensor(codes, scale, format, dtype, requires_grad)
    if is_parameter:
        found = nn.Parameter(found, requires_grad)
    found._initial = initial
    return cast(QuantizedTensor, found)


torch.serialization.add_safe_globals([_rebuild])
# C++ takes parameters of this class by their parts.
_C.set_quantized_class(QuantizedTensor)
