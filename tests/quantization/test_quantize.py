"""quantize and dequantize: bytes against other encoders and against the decomposition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DTYPES, every_device, every_dtype, off_the_grid, strided
from torch import Tensor

from transformer_ops import _C

pytestmark = pytest.mark.takes(seconds=80)

o = torch.ops.transformer_ops
quantize = torch.ops.transformer_ops.quantize.default
dequantize = torch.ops.transformer_ops.dequantize.default

FP8 = ("e4m3", "e5m2", "e4m3 1x128", "e5m2 1x128", "e4m3 128x128", "e5m2 128x128")
FP8 += ("e4m3 pow2", "e5m2 pow2")
MX = ("mx e4m3", "mx e5m2")
# Each column as the formats above have a row.
COLUMNS = (
    *("e4m3 128x1", "e5m2 128x1", "mx e4m3 32x1", "mx e5m2 32x1", "nvfp4 16x1"),
    "nvfp4 4over6 16x1",
)
NVFP4 = ("nvfp4", "nvfp4 16x16", "nvfp4 4over6", "nvfp4 4over6 mse 448 16x16")
INT8 = ("int8 1x32", "int8 1x128")
FORMATS = (*FP8, *MX, *COLUMNS, *NVFP4, "nf4", *INT8)
SHAPES = ((), (1,), (300,), (0,), (3, 0), (0, 5), (2, 3, 33), (131, 130), (4, 256))
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "nvfp4": 6.0, "nf4": 1.0, "int8": 127.0}
every_format = pytest.mark.parametrize("format", FORMATS)


def largest(format: str) -> float:
    return next(value for name, value in LARGEST.items() if name in format)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes."""
    x = torch.randn(shape, dtype=torch.float64)
    return (x * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1)))).reshape(shape).to(dtype)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assert_same_bytes(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: Any) -> None:
    for name, a, b in zip(("codes", "scale"), got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (what, name)
        assert torch.equal(raw(a), raw(b)), (what, name)


# ---- the decomposition


def special_rows(dtype: torch.dtype) -> Tensor:
    """A row each: zeros, one infinity, one NaN, subnormal numbers, the largest number."""
    x = numbers(9, 260, dtype=dtype)
    x[0] = 0
    x[1, 5], x[2, 5], x[3, 5] = math.inf, -math.inf, math.nan
    x[4] = torch.finfo(dtype).tiny * torch.rand(260, dtype=torch.float64).to(dtype) / 4
    x[5] = torch.finfo(dtype).max
    x[6, 200] = -torch.finfo(dtype).max
    x[7, ::2] = -0.0
    return x


@every_format
@every_dtype
@every_device
def test_bytes_of_the_decomposition(format: str, dtype: torch.dtype, device: str) -> None:
    tensors = [numbers(*shape, dtype=dtype) for shape in SHAPES]
    tensors += [special_rows(dtype), *special_rows(dtype)]
    for x in tensors:
        x = x.to(device)
        codes, scale = quantize(x, format)
        what = (x.shape, x.flatten()[:3])
        assert_same_bytes((codes, scale), _C.decomposition("quantize", (x, format)), what)
        arguments = (codes, scale, format, name_of(dtype), x.shape)
        out, meant = dequantize(*arguments), _C.decomposition("dequantize", arguments)[0]
        assert (out.shape, out.dtype) == (x.shape, dtype)
        torch.testing.assert_close(out, meant, rtol=0, atol=0, equal_nan=True)


@every_format
def test_any_layout(format: str) -> None:
    x = numbers(6, 200, dtype=torch.bfloat16)
    want = quantize(x, format)
    for other in (strided(x), off_the_grid(x), x.t().contiguous().t()):
        assert_same_bytes(quantize(other, format), want, other.stride())
    out = dequantize(*want, format, "float32", x.shape)
    strides = [strided(part.view(torch.uint8)).view(part.dtype) for part in want[:1]]
    assert torch.equal(dequantize(*strides, want[1], format, "float32", x.shape), out)


# ---- how near


@every_format
@every_dtype
def test_how_near(format: str, dtype: torch.dtype) -> None:
    x = torch.randn(256, 512).to(dtype)
    out = dequantize(*quantize(x, format), format, name_of(dtype), None)
    error = (out.double() - x.double()).norm() / x.double().norm()
    most = {"e4m3": 0.03, "e5m2": 0.06, "nvfp4": 0.12, "nf4": 0.1, "int8": 0.009}
    assert error <= next(value for name, value in most.items() if name in format)
    # What is decoded loses nothing more, unless its scale has digits of its own.
    if ("x128" in format and "int8" not in format) or "pow2" in format:
        assert torch.equal(dequantize(*quantize(out, format), format, name_of(dtype), None), out)


@pytest.mark.parametrize("format", ["e4m3 1x128", "mx e4m3", "e5m2"])
def test_float64_is_rounded_once(format: str) -> None:
    """Next to a tie by less than float32 can say."""
    x = torch.full((128,), 1.0625, dtype=torch.float64)
    x[0] = 57344.0 if "e5m2" in format else 448.0
    x[1::2] += 2.0**-45
    x[2::2] -= 2.0**-45
    if "e5m2" in format:
        x[1:] += 0.0625
    codes, _ = quantize(x, format)
    assert (codes[1::2].float() > codes[2::2][0].float()).all()


# ---- other people's encoders


def by_ml_dtypes(x: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of float32 rows, whose width the blocks divide; formats of FP8 alone."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    element = ml_dtypes.float8_e5m2 if "e5m2" in format else ml_dtypes.float8_e4m3fn
    most = np.float32(largest(format))
    rows, h = x.shape
    tiles = {"1x128": (1, 128), "128x128": (128, 128)}
    height, width = (1, 32) if format in MX else tiles.get(format.partition(" ")[2], (rows, h))
    blocks = x.reshape(rows // height, height, h // width, width)
    amax = np.abs(blocks).max((1, 3), keepdims=True)
    if format in MX:
        exponent = np.ceil(np.log2(amax.astype(np.float64) / most)).astype(np.int64)
        scale, stored = np.exp2(-exponent.astype(np.float64)), (exponent + 127).astype(np.uint8)
    else:
        scale = most / amax
        if " " in format:
            scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))).astype(np.float32)
        stored = np.float32(1) / scale
    scaled = np.clip(blocks * scale.astype(np.float32), -most, most)
    return scaled.astype(element).view(np.uint8).reshape(rows, h), stored


@pytest.mark.parametrize("format", [*FP8, *MX])
def test_bytes_of_ml_dtypes(format: str) -> None:
    x = numbers(256, 512)
    codes, scale = quantize(x, format)
    want_codes, want_scale = by_ml_dtypes(x.numpy(), format)
    assert np.array_equal(codes.view(torch.uint8).numpy(), want_codes)
    assert np.array_equal(scale.numpy().reshape(-1), want_scale.reshape(-1))


@every_device
@pytest.mark.parametrize("format", COLUMNS)
def test_columns_are_rows_of_the_transposed_tensor(format: str, device: str) -> None:
    rows = format.rpartition(" ")[0]
    if format.startswith("e"):
        rows += " 1x128"
    for x in (numbers(260, 71), special_rows(torch.bfloat16).t().contiguous()):
        x = x.to(device)
        codes, scale = quantize(x, format)
        out = dequantize(codes, scale, format, "float32", x.shape)
        turned = dequantize(*quantize(x.t().contiguous(), rows), rows, "float32", x.t().shape)
        torch.testing.assert_close(out, turned.t(), rtol=0, atol=0, equal_nan=True)
        if format.startswith("nvfp4"):
            continue
        want = quantize(x.t().contiguous(), rows)
        assert_same_bytes((codes, scale), (want[0].t(), want[1].t()), format)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_every_code_of_ml_dtypes(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    count = 16 if "float4" in name else 256
    codes = np.arange(count, dtype=np.uint8)
    want = torch.from_numpy(codes.view(getattr(ml_dtypes, name)).astype(np.float32))
    if "float4" in name:
        packed = torch.from_numpy(codes[::2] | codes[1::2] << 4)
        one = torch.tensor([0x38, 0, 0, 0x80, 0x3F], dtype=torch.uint8)  # 1 in E4M3, 1 in float32
        got = dequantize(packed, one, "nvfp4", "float32", None)
    else:
        format = "e4m3" if "e4m3" in name else "e5m2"
        plain = torch.from_numpy(codes).view(getattr(torch, name))
        got = dequantize(plain, torch.tensor(1.0), format, "float32", None)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_every_scale_byte_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bytes_ = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(bytes_.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    ones = torch.full((256, 1), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = dequantize(ones, torch.from_numpy(bytes_).view(256, 1), "mx e4m3", "float32", None)
    torch.testing.assert_close(got.view(-1), want, rtol=0, atol=0, equal_nan=True)


def test_codes_of_ml_dtypes_in_fp4() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = numbers(64, 160)
    codes, scale = quantize(x, "nvfp4")
    blocks, tensor_scale = scale[:-4], scale[-4:].clone().view(torch.float32)
    decoded = blocks.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor_scale.item()
    scaled = x.numpy().reshape(-1, 16) * (np.float32(1) / decoded)[:, None]
    want = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(64, 160)
    assert np.array_equal(codes.numpy(), want[:, ::2] | want[:, 1::2] << 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", MX)
def test_bytes_of_torchao(format: str, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    element = torch.float8_e5m2 if "e5m2" in format else torch.float8_e4m3fn
    x = torch.cat([numbers(64, 320, dtype=dtype), torch.zeros(1, 320, dtype=dtype)])
    x[3, 7] = math.inf
    # Among NaN, signs differ.
    scale, codes = to_mx(x, element, 32, ScaleCalculationMode.RCEIL)
    assert_same_bytes(quantize(x, format), (codes, scale.view(torch.uint8)), format)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_numbers_of_bitsandbytes(name: str) -> None:
    """Its codes and scales of NF4 are ours, and decode to the same numbers."""
    functional = pytest.importorskip("bitsandbytes.functional")
    dtype = getattr(torch, name)
    x = torch.randn(96, 320).to(dtype)
    x[5, :64] = 0
    codes, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    scale = state.absmax.view(96, 5)
    got = dequantize(codes.view(96, 160), scale, "nf4", name, x.shape)
    assert torch.equal(got, functional.dequantize_4bit(codes, state).view(96, 320))
    own, own_scale = quantize(x, "nf4")
    # A block of zeros has the scale 1 here, and 0 there.
    assert torch.equal(own_scale, torch.where(scale == 0, 1.0, scale))
    # Where numbers are next to a tie, codes may differ.
    assert (own.view(-1) != codes.view(-1)).float().mean() < 1e-3


# ---- bad numbers


def decoded(x: Tensor, format: str) -> Tensor:
    """What rows become; of formats with blocks of columns, what columns do."""
    if format in COLUMNS:
        return dequantize(*quantize(x.t().contiguous(), format), format, "float32", None).t()
    return dequantize(*quantize(x, format), format, "float32", None)


@every_format
def test_what_is_not_finite(format: str) -> None:
    x = torch.ones(4, 256)
    x[1, 200], x[2, 3] = math.inf, math.nan
    out = decoded(x, format)
    # As large as the format goes, and what it is.
    assert out[1, 200] >= 6 and out[2, 3].isnan()
    # Blocks without either are as ever.
    torch.testing.assert_close(out[::3, 32:128], x[::3, 32:128], rtol=0.05, atol=0)
    # NaN that is no code is that of its block.
    blocks = {"mx": 32, "nvfp4": 16, "nf4": 64, "int8 1x32": 32, "int8 1x128": 128}
    width = next((width for name, width in blocks.items() if name in format), 1)
    assert out[2].isnan().sum() == width


@every_format
def test_zeros(format: str) -> None:
    x = torch.zeros(3, 40)
    assert torch.equal(dequantize(*quantize(x, format), format, "float32", (3, 40)), x)


# ---- what torch asks of an op


@every_format
def test_opcheck(format: str) -> None:
    # Torch's own check of mutations multiplies the arguments, which it cannot do with these.
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for shape in ((3, 40), (2, 3, 256), (300,), (0, 5), ()):
        x = torch.randn(shape, dtype=torch.bfloat16)
        # A trace takes longer than all else. Without rows, or dimensions, it is another one.
        chosen = tests if shape in ((2, 3, 256), (0, 5), ()) else tests[:-1]
        torch.library.opcheck(quantize, (x, format), test_utils=["test_schema", *chosen])
        codes, scale = quantize(x, format)
        for sizes in (None, list(shape)):
            arguments = (codes, scale, format, "bfloat16", sizes)
            torch.library.opcheck(dequantize, arguments, test_utils=chosen)


@every_format
def test_never_mutates_and_never_aliases(format: str) -> None:
    x = numbers(3, 64)
    copy = x.clone()
    codes, scale = quantize(x, format)
    copies = [raw(codes).clone(), raw(scale).clone()]
    out = dequantize(codes, scale, format, "float32", None)
    assert torch.equal(x, copy)
    assert torch.equal(raw(codes), copies[0]) and torch.equal(raw(scale), copies[1])
    storages = {t.untyped_storage().data_ptr() for t in (x, codes, scale, out)}
    assert len(storages) == 4


@every_format
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fullgraph(format: str, backend: str) -> None:
    def function(x: Tensor) -> Tensor:
        codes, scale = quantize(x, format)
        return dequantize(codes, scale, format, "float32", x.shape) * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for rows, width in ((4, 33), (7, 129), (130, 256)):
        x = numbers(rows, width)
        assert torch.equal(compiled(x), function(x))


@every_format
def test_export_with_a_dynamic_dimension(format: str) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return dequantize(*quantize(x, format), format, "float32", x.shape)

    # Torch asks of each tensor whether a size is 1: that of the scales must not change between.
    least = 129 if "128x" in format else 33 if "32x1" in format else 2
    rows = torch.export.Dim("rows", min=least)
    program = torch.export.export(
        Module(), (numbers(least + 2, 77),), dynamic_shapes={"x": {0: rows}}
    )
    x = numbers(300, 77)
    assert torch.equal(program.module()(x), Module()(x))


@every_format
def test_no_gradient_passes(format: str) -> None:
    """Where autograd would record a call, that is an error: its result would have no history."""
    x = torch.randn(4, 64, requires_grad=True)
    refused = lambda op, name: pytest.raises(  # noqa: E731
        NotImplementedError,
        match=rf"\[{op}\] {name} must not require a gradient, because none passes",
    )
    for call in (quantize, lambda x, format: o.quantize_dequantize(x, format, "float32")):
        with refused(r"quantize\w*", "input"):
            call(x, format)
        with torch.autograd.forward_ad.dual_level(), refused(r"quantize\w*", "input"):
            dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
            call(dual, format)
    with torch.no_grad():
        codes, scale = quantize(x, format)
    assert not codes.requires_grad and not scale.requires_grad
    assert_same_bytes((codes, scale), quantize(x.detach(), format), format)
    if scale.is_floating_point():
        with refused("dequantize", "scale"):
            dequantize(codes, scale.requires_grad_(), format, "float32", None)
    assert not dequantize(codes, scale.detach(), format, "float32", None).requires_grad


@every_format
def test_does_not_depend_on_threads(format: str) -> None:
    x = numbers(700, 1000)
    want = quantize(x, format)
    out = dequantize(*want, format, "bfloat16", None)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert_same_bytes(quantize(x, format), want, threads)
        assert torch.equal(dequantize(*want, format, "bfloat16", None), out)


# ---- errors


def test_errors() -> None:
    x = torch.randn(4, 64)
    codes, scale = quantize(x, "e4m3 1x128")
    calls: list[tuple[Any, tuple[Any, ...], str]] = [
        (quantize, (x, "fp8"), r"format must be one of 'e4m3', .*, got 'fp8'"),
        (quantize, (x.int(), "e4m3"), "input must be float16, .*, got Int"),
        (dequantize, (codes, scale, "int4", "float32", None), "format must be one of .*'int4'"),
        (dequantize, (codes, scale, "e4m3 1x128", "int8", None), "dtype must be .*, got 'int8'"),
        (dequantize, (codes, scale, "e5m2 1x128", "float32", None), "codes must have dtype"),
        (dequantize, (codes, scale, "mx e4m3", "float32", None), "scale must have shape"),
        (dequantize, (codes, scale[:2], "e4m3 1x128", "float32", None), "scale must have shape"),
        (dequantize, (codes, scale, "e4m3 1x128", "float32", (4, 65)), "codes must have shape"),
        (dequantize, (codes, scale, "e4m3 1x128", "float32", (-4, 64)), "shape must have no neg"),
        (dequantize, (codes, scale.double(), "e4m3 1x128", "float32", None), "scale must have dt"),
    ]
    for op, arguments, message in calls:
        with pytest.raises(RuntimeError, match=rf"^\[{op._schema.name.split('::')[1]}\] {message}"):
            op(*arguments)
        moved = [v.to("meta") if isinstance(v, Tensor) else v for v in arguments]
        with pytest.raises(RuntimeError, match=message):
            op(*moved)


def test_dtypes_of_the_parts() -> None:
    x = numbers(3, 40)
    for dtype in DTYPES:
        codes, scale = quantize(x.to(dtype), "int8 1x32")
        assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
        assert dequantize(codes, scale, "int8 1x32", name_of(dtype), None).dtype == dtype
