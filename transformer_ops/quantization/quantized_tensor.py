"""A tensor that is stored as codes and scales, and reads as the numbers that they encode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from .. import _C
from .number_format import FORMATS, format_with

__all__ = ["QuantizedTensor"]

_aten = torch.ops.aten
# Maps formats with one float scale for a tensor to those whose scale is a power of two.
_POWERS = {
    row.name: format_with(row.element, "power of two").name
    for row in FORMATS.values()
    if row.has_one_scale and row.scale == "float32"
}
# These ops return the same numbers, so their results keep the codes.
_SAME = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.lift_fresh.default,
}


class QuantizedTensor(Tensor):
    """A tensor of codes and scales in a format of `torch.ops.transformer_ops.quantize`, which
    behaves as a tensor of `dtype` with the shape of the tensor that was quantized.

    If it is the weight of a `Linear`, `BasicLinear`, `PackedLinear` or `GroupedLinear`, it is
    decoded where the product reads it, and again in backward, so only the codes stay in memory. Its
    gradient is a plain tensor.

    Every other torch operation runs on the decoded numbers and returns plain tensors. An operation
    that writes to the tensor, as optimizers do, decodes, runs and encodes again, so steps smaller
    than half a code are lost. `detach()`, `clone()` and `to(device)` stay quantized. If blocks are
    parts of a row, then consecutive rows of a matrix, its flat view, and what FSDP2 makes of it
    also stay quantized. Any other view is a copy. `to(dtype)` returns a plain tensor.

    Args:
        codes, scale: the results of `torch.ops.transformer_ops.quantize(tensor, format)`.
        format: the name of that format.
        dtype: the dtype of the numbers.

    Raises:
        ValueError: `dtype` is not floating. Parts that do not fit the format raise a RuntimeError
            when they are first decoded.
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
        # A view shares the version counter of its tensor, and an inference tensor has none. The
        # wrapper is therefore an inference tensor if its codes are, whatever the current mode.
        make = Tensor._make_wrapper_subclass
        if _has_other_mode(codes):
            with _mode_of(codes):
                found = make(cls, shape, dtype=dtype, device=codes.device)
        else:
            found = make(cls, shape, dtype=dtype, device=codes.device)
        # This is outside of the mode, because torch does not allow gradients of inference tensors.
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
        """Rounds a floating tensor to the numbers of a format.

        Raises:
            RuntimeError: the format is unknown; the tensor is not floating.
            ValueError: the last dimension is odd, or there is none, and two codes share a byte.
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
        """The numbers as a plain tensor, rounded to the dtype of this tensor, then to `dtype`. It
        is differentiable, with the gradient of a copy."""
        found = _aten._to_copy.default(self, dtype=self.dtype)
        return cast(Tensor, found if dtype is None else found.to(dtype))

    def get_high_precision_init_val(self) -> Tensor | None:
        """The tensor before quantization, on the CPU, under
        `quantized_model_init(preserve_high_precision_init_val=True)`; else None."""
        return self._initial

    def clear_high_precision_init_val(self) -> None:
        """Frees it."""
        self._initial = None

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"QuantizedTensor(format='{self.format}', shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device='{self.device}', requires_grad={self.requires_grad})"
        )

    # ---- for torch

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The codes are saved as bytes, because pickle without torch.save does not support 8-bit
        # floating dtypes.
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
                # On other devices, autograd decomposes composite ops before they get here.
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
        """Takes the numbers of `source`, which is broadcast."""
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

    # ---- for FSDP2, which gathers codes and scales instead of numbers

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """The tensors to gather. Raises ValueError if the ranks do not divide the rows."""
        if outer_size[0] % mesh.size():
            raise ValueError(
                f"[QuantizedTensor] rows must be divisible by the {mesh.size()} ranks that share "
                f"them, got {outer_size[0]}"
            )
        # Gloo does not support 8-bit floating dtypes.
        return (self.codes.view(torch.uint8), self.scale), None

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: QuantizedTensor | None = None,
    ) -> tuple[QuantizedTensor, tuple[Tensor, ...]] | None:
        """The whole tensor, and the tensors that it consists of."""
        codes, scale = gathered[0].view(self.codes.dtype), gathered[1]
        if out is not None:
            out.codes, out.scale = codes, scale
            return None
        return QuantizedTensor(codes, scale, self.format, param_dtype), gathered

    def moved(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """The same codes, on the device and with the dtype that `function` (as in `Module._apply`)
        gives plain tensors."""
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
    # This is the only view of torch that takes the mode of its caller, not that of its tensor.
    with _mode_of(codes):
        return codes.view(dtype)


def decoded(tensor: Tensor) -> Tensor:
    """Returns a plain tensor itself, and the numbers of a quantized one."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def _encoded(tensor: Tensor, format: str) -> QuantizedTensor:
    """Encodes numbers that are written to a quantized tensor. With one scale for a tensor, numbers
    that are values of the format times a power of two stay exact; others get the scale of the
    largest magnitude. If the scale were always a power of two, small updates of a number would be
    lost, and models would train worse."""
    found = QuantizedTensor.quantize(tensor, format)
    if format not in _POWERS or _is_seen_to_differ(tensor, format):
        return found
    powers = QuantizedTensor.quantize(tensor, _POWERS[format])
    # There is no branch, because reading a result from a device takes long, and a compiler cannot.
    is_exact = (_decode(powers) == tensor).all()
    parts = (powers.codes.view(torch.uint8), found.codes.view(torch.uint8))
    codes = torch.where(is_exact, *parts).view(found.codes.dtype)
    scale = torch.where(is_exact, powers.scale, found.scale)
    return QuantizedTensor(codes, scale, format, tensor.dtype)


def _is_seen_to_differ(tensor: Tensor, format: str) -> bool:
    """Whether the first numbers show that the format cannot hold them all exactly. They are read
    only on the CPU. They nearly always show it, and then a write costs nothing more."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu":
        return False
    first = tensor[(0,) * (tensor.dim() - 1)][:64] if tensor.numel() else tensor
    scaled = torch.frexp(first).mantissa * 2 ** FORMATS[format].significant_bits
    return bool((scaled != scaled.round()).any())


def _have_same_parts(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether codes and scales have the same meaning in both. A power of two is only a rule for
    computing scales; it decodes as any other scale."""
    return _POWERS.get(a.format, a.format) == _POWERS.get(b.format, b.format)


def _broadcasts(source: torch.Size, target: torch.Size) -> bool:
    pairs = zip(reversed(source), reversed(target), strict=False)
    return len(source) <= len(target) and all(a in (1, b) for a, b in pairs)


def with_parts(parameters: Iterable[Tensor | None]) -> list[Tensor]:
    """Parameters as a plan takes them: a quantized one is followed by its codes and scale, and None
    is left out."""
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
    """Whether exactly one of this tensor and a tensor made now is an inference tensor."""
    return tensor.is_inference() != torch.is_inference_mode_enabled()


@contextmanager
def _mode_of(tensor: Tensor) -> Iterator[None]:
    """Tensors made within are inference tensors if `tensor` is one."""
    if _has_other_mode(tensor):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            yield
    else:
        yield


def _run_decoded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs any op on the numbers, and encodes what it writes to quantized tensors."""
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
    """The quantized tensors that an op writes to, by its schema."""
    found: dict[int, QuantizedTensor] = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, QuantizedTensor):
                found[id(leaf)] = leaf
    return list(found.values())


# ---- ops whose results stay quantized; they return None if not. FSDP2's sharding needs only these.

# The formats whose blocks are parts of a row, and the length of a block.
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
    """A view of the same shape, or a flat one if blocks fill their rows."""
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
# C++ reads the parts of parameters of this class.
_C.set_quantized_class(QuantizedTensor)
