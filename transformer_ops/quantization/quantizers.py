"""Quantizers, which convert a tensor to a QuantizedTensor in one format."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..base.constructors import names_its_arguments
from .number_format import FORMATS, NumberFormat, format_with
from .quantized_tensor import QuantizedTensor, decoded

__all__ = [
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "quantizer_for",
]

_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class Quantizer:
    """`quantizer(tensor)` converts a floating tensor to a `QuantizedTensor` in `quantizer.format`,
    a format name of `torch.ops.transformer_ops.quantize`."""

    @property
    def format(self) -> str:
        raise NotImplementedError

    def __call__(self, tensor: Tensor) -> QuantizedTensor:
        return QuantizedTensor.quantize(tensor, self.format)

    def _element(self, dtype: torch.dtype) -> str:
        if dtype not in _ELEMENTS:
            raise ValueError(
                f"[{type(self).__name__}] fp8_dtype must be torch.float8_e4m3fn or "
                f"torch.float8_e5m2, got {dtype!r}"
            )
        return _ELEMENTS[dtype]

    def __post_init__(self) -> None:
        # Arguments are checked here, not at the first call.
        _ = self.format
        for field in dataclasses.fields(self):
            found = getattr(self, field.name)
            if field.type == "bool" and not isinstance(found, bool):
                raise ValueError(
                    f"[{type(self).__name__}] {field.name} must be a bool, got {found!r}"
                )


@names_its_arguments
@dataclasses.dataclass(frozen=True, eq=False)
class Float8Quantizer(Quantizer):
    """One given scale for a tensor: numbers times `scale` are rounded to `fp8_dtype`. `amax` is
    updated with the largest magnitude. Both are float32 tensors of one number."""

    scale: Tensor
    amax: Tensor
    fp8_dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scale", "amax"):
            found = getattr(self, name)
            is_number = isinstance(found, Tensor) and found.numel() == 1
            if not is_number or found.dtype != torch.float32:
                raise ValueError(
                    f"[Float8Quantizer] {name} must be a float32 tensor of one number, "
                    f"got {found!r}"
                )

    @property
    def format(self) -> str:
        return format_with(self._element(self.fp8_dtype), "float32").name

    def __call__(self, tensor: Tensor) -> QuantizedTensor:
        plain = decoded(tensor).detach().contiguous()
        scale = self.scale.detach().reshape(1)
        rounded, found = torch.ops.transformer_ops.quantize_dequantize_scaled(
            plain, scale.expand(3).contiguous(), 0, self.format, "float32"
        )
        with torch.no_grad():
            self.amax.copy_(torch.maximum(self.amax, found.reshape(self.amax.shape)))
        # These are numbers of the format with a float32 error, so none is rounded a second time.
        codes = (rounded * scale).to(self.fp8_dtype)
        return QuantizedTensor(codes, scale.reciprocal().reshape(()), self.format, tensor.dtype)


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class Float8CurrentScalingQuantizer(Quantizer):
    """One scale for a tensor, from its largest magnitude. With `force_pow_2_scales` it is rounded
    down to a power of two; numbers of `fp8_dtype` times a power of two are then exact."""

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    force_pow_2_scales: bool = False

    @property
    def format(self) -> str:
        scale = "power of two" if self.force_pow_2_scales else "float32"
        return format_with(self._element(self.fp8_dtype), scale).name


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class Float8BlockQuantizer(Quantizer):
    """A power-of-two scale for each 128 adjacent numbers of a row (`block_scaling_dim=1`) or of a
    column (`columnwise`), or for each 128 x 128 numbers (2)."""

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    block_scaling_dim: int = 1
    columnwise: bool = False

    @property
    def format(self) -> str:
        if self.block_scaling_dim not in (1, 2) or isinstance(self.block_scaling_dim, bool):
            raise ValueError(
                "[Float8BlockQuantizer] block_scaling_dim must be 1 or 2, "
                f"got {self.block_scaling_dim!r}"
            )
        line = (128, 1) if self.columnwise else (1, 128)
        block = line if self.block_scaling_dim == 1 else (128, 128)
        return format_with(self._element(self.fp8_dtype), "power of two", block).name


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class MXFP8Quantizer(Quantizer):
    """A scale, the exponent of a power of two, for each 32 adjacent numbers of a row, or of a
    column (`columnwise`)."""

    fp8_dtype: torch.dtype = torch.float8_e4m3fn
    columnwise: bool = False

    @property
    def format(self) -> str:
        block = (32, 1) if self.columnwise else (1, 32)
        return format_with(self._element(self.fp8_dtype), "e8m0", block).name


@names_its_arguments
@dataclasses.dataclass(frozen=True)
class NVFP4Quantizer(Quantizer):
    """4-bit codes with a scale for each 16 adjacent numbers of a row, or of a column
    (`columnwise`), or for each 16 x 16 numbers (`with_2d_quantization`), and one scale for the
    tensor.

    `with_rht` has the meaning of TransformerEngine: the Hadamard transform of
    `recipe.NVFP4BlockScaling` is applied only to columnwise data. With `columnwise`, each 16 rows
    are transformed before they are rounded, and the result reads as the transformed numbers. It is
    for a product that sums over the rows, with another such tensor. Without `columnwise`,
    `with_rht` changes nothing. With `stochastic_rounding` numbers are rounded up or down at random
    with torch's generator, so that their mean is right.

    With `nvfp4_use_4over6` the largest number of a block becomes 6 or 4, whichever has the smaller
    sum of absolute or squared rounding errors (`nvfp4_4over6_err_mode`, "MAE" or "MSE"), as under
    `recipe.NVFP4BlockScaling(nvfp4_4over6=)`. `nvfp4_e4m3_max`, 448 or 256, is then the largest
    scale of a block. With `stochastic_rounding` the scale is that of rounding to nearest.

    Raises ValueError for other arguments, and for `nvfp4_e4m3_max=256` without `nvfp4_use_4over6`.
    """

    with_2d_quantization: bool = False
    columnwise: bool = False
    with_rht: bool = False
    stochastic_rounding: bool = False
    nvfp4_use_4over6: bool = False
    nvfp4_e4m3_max: int = 448
    nvfp4_4over6_err_mode: str = "MAE"

    def __post_init__(self) -> None:
        mode, largest = self.nvfp4_4over6_err_mode, self.nvfp4_e4m3_max
        if mode not in ("MAE", "MSE"):
            raise ValueError(
                f"[NVFP4Quantizer] nvfp4_4over6_err_mode must be 'MAE' or 'MSE', got {mode!r}"
            )
        if largest != 448 and not (self.nvfp4_use_4over6 and largest == 256):
            raise ValueError(
                "[NVFP4Quantizer] nvfp4_e4m3_max must be 448, or 256 with nvfp4_use_4over6, "
                f"got {largest!r}"
            )
        super().__post_init__()

    @property
    def format(self) -> str:
        line = (16, 1) if self.columnwise else (1, 16)
        return format_with(
            "e2m1",
            "e4m3",
            (16, 16) if self.with_2d_quantization else line,
            four_over_six=self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else "",
            largest_scale=self.nvfp4_e4m3_max,
        ).name

    def __call__(self, tensor: Tensor) -> QuantizedTensor:
        plain = decoded(tensor).detach().contiguous()
        if self.with_rht and self.columnwise:
            plain = torch.ops.transformer_ops.hadamard_columns(plain, plain)
        found = QuantizedTensor.quantize(plain, self.format)
        codes = _codes_at_random(plain, found) if self.stochastic_rounding else found.codes
        return QuantizedTensor(codes, found.scale, self.format, tensor.dtype)


_TWO_ONES = 0x22  # a byte of two E2M1 codes whose value is 1
_SIGN = 8


def _codes_at_random(plain: Tensor, nearest: QuantizedTensor) -> Tensor:
    """NVFP4 codes for the scales of `nearest`."""
    ops, format = torch.ops.transformer_ops, nearest.format
    rounded = ops.quantize_dequantize_stochastic(plain, format, "float32")
    ones = torch.full_like(nearest.codes, _TWO_ONES)
    unit = ops.dequantize(ones, nearest.scale, format, "float32", plain.shape)
    # These are values of codes with a float32 error, so none is rounded a second time. If the scale
    # is zero or NaN, so is the value of any code.
    value = rounded.abs().div_(unit).nan_to_num_(0)
    # The values of codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6: codes advance by two, one and a
    # half for each 1.
    code = torch.minimum(torch.minimum(2 * value, 2 + value), 4 + value / 2).round_()
    pairs = (code + _SIGN * rounded.signbit()).to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def quantizer_for(format: str) -> Quantizer | None:
    """The quantizer of a format whose scales come from the tensor; None for "exact", and for
    integers."""
    row = FORMATS.get(format)
    if row is None or row.element == "int8":
        return None
    if row.element == "e2m1":
        return NVFP4Quantizer(
            row.is_square,
            row.is_columnwise,
            nvfp4_use_4over6=bool(row.four_over_six),
            nvfp4_e4m3_max=int(row.largest_scale),
            nvfp4_4over6_err_mode=row.four_over_six or "MAE",
        )
    return _fp8_quantizer(row)


def _fp8_quantizer(row: NumberFormat) -> Quantizer:
    dtype = row.dtype
    assert dtype is not None
    if row.scale == "e8m0":
        return MXFP8Quantizer(dtype, row.is_columnwise)
    if row.has_one_scale:
        return Float8CurrentScalingQuantizer(dtype, row.scale == "power of two")
    return Float8BlockQuantizer(dtype, 2 if row.is_square else 1, row.is_columnwise)
