"""What the CUDA bodies of products of codes ask cuBLASLt for, and what they decode instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import test_products_of_codes as every
import torch
from test_products_of_codes import (
    Formats,
    Size,
    blocks,
    codes,
    fp8,
    mx,
    nvfp4,
    products,
)

o = torch.ops.transformer_ops
pytestmark = pytest.mark.emulated


@contextmanager
def without(family: str) -> Iterator[None]:
    """Emulates a GPU that does not multiply such codes."""
    emulated = torch.ops.transformer_ops_emulated
    switch = {"fp8": emulated.set_multiplies_codes, "nvfp4": emulated.set_multiplies_nvfp4}
    of_blocks = (emulated.set_multiplies_blocks, emulated.set_multiplies_mx)
    switches = [switch[family]] if family in switch else of_blocks
    for multiplies in switches:
        multiplies(False)
    try:
        yield
    finally:
        for multiplies in switches:
            multiplies(True)


def asked(formats: Formats, size: Size) -> list[str]:
    """By forward, with and without an epilogue, and by both gradients."""
    rows, k, n = size
    x, x_scale, _ = codes(rows, k, format=formats.forward[0])
    w, w_scale, _ = codes(n, k, format=formats.forward[1])
    bias, extra = torch.randn(n).bfloat16(), torch.randn(rows, n).bfloat16()
    products()
    o.linear_scaled(x, w, x_scale, w_scale)
    o.linear_epilogue_scaled(x, w, bias, extra, 1.0, x_scale, w_scale)
    o.linear_bias_activation_scaled(x, w, bias, "gelu", True, x_scale, w_scale)
    g, g_scale, _ = codes(rows, n, format=formats.of_input[0])
    w, w_scale, _ = codes(n, k, format=formats.of_input[1], columns=True)
    o.linear_backward_scaled(g, None, w, [True, False], g_scale, w_scale)
    g, g_scale, _ = codes(rows, n, format=formats.of_weight[0], columns=True)
    x, x_scale, _ = codes(rows, k, format=formats.of_weight[1], columns=True)
    o.linear_backward_scaled(g, x, None, [False, True], g_scale, x_scale)
    buffer = torch.zeros(n, k)
    o.linear_backward_scaled_into(g, x, None, [False, True], g_scale, x_scale, buffer, False)
    return products()


def decoded(m: int, k: int, n: int) -> list[str]:
    # If a size is odd, the last pair of NVFP4 is half empty.
    even_k, even_m, even_n = (size + size % 2 for size in (k, m, n))
    return [
        f"plain {m}x{n}x{even_k} bfloat16 -> bfloat16",
        f"bias {m}x{n}x{even_k} bfloat16 -> bfloat16 beta=1",
        f"gelu_aux_bias {m}x{n}x{even_k} bfloat16 -> bfloat16",
        f"plain {m}x{k}x{even_n} bfloat16 -> bfloat16",
        f"plain {n}x{k}x{even_m} bfloat16 -> bfloat16",
        f"plain {n}x{k}x{even_m} bfloat16 -> float32 beta=1",
    ]


MULTIPLIED = [
    (
        fp8("e4m3", "e4m3"),
        (32, 48, 64),
        [
            "plain 32x64x48 e4m3 e4m3 -> bfloat16 fast",
            "bias 32x64x48 e4m3 e4m3 -> bfloat16 beta=1 fast",
            "gelu_aux_bias 32x64x48 e4m3 e4m3 -> bfloat16 fast",
            # Sums of gradients are exact.
            "plain 32x48x64 e4m3 e4m3 -> bfloat16",
            "plain 64x48x32 e4m3 e4m3 -> bfloat16",
            "plain 64x48x32 e4m3 e4m3 -> float32 beta=1",
        ],
    ),
    # Sums are of full precision forward, too: cuBLASLt has no others with scales of blocks.
    (
        blocks("e4m3", "e4m3"),
        (128, 256, 384),
        [
            "plain 128x384x256 e4m3/1x128 e4m3/128x128 -> bfloat16",
            "bias 128x384x256 e4m3/1x128 e4m3/128x128 -> bfloat16 beta=1",
            "gelu_aux_bias 128x384x256 e4m3/1x128 e4m3/128x128 -> bfloat16",
            "plain 128x256x384 e4m3/1x128 e4m3/128x128 -> bfloat16",
            "plain 384x256x128 e4m3/1x128 e4m3/1x128 -> bfloat16",
            "plain 384x256x128 e4m3/1x128 e4m3/1x128 -> float32 beta=1",
        ],
    ),
    (
        mx("e5m2", "e4m3"),
        (64, 96, 160),
        [
            "plain 64x160x96 e5m2/mx e4m3/mx -> bfloat16",
            "bias 64x160x96 e5m2/mx e4m3/mx -> bfloat16 beta=1",
            "gelu_aux_bias 64x160x96 e5m2/mx e4m3/mx -> bfloat16",
            "plain 64x96x160 e5m2/mx e4m3/mx -> bfloat16",
            "plain 160x96x64 e5m2/mx e4m3/mx -> bfloat16",
            "plain 160x96x64 e5m2/mx e4m3/mx -> float32 beta=1",
        ],
    ),
    (
        nvfp4(),
        (64, 96, 160),
        [
            "plain 64x160x96 nvfp4 nvfp4 -> bfloat16 factors",
            "bias 64x160x96 nvfp4 nvfp4 -> bfloat16 beta=1 factors",
            "gelu_aux_bias 64x160x96 nvfp4 nvfp4 -> bfloat16 factors",
            "plain 64x96x160 nvfp4 nvfp4 -> bfloat16 factors",
            "plain 160x96x64 nvfp4 nvfp4 -> bfloat16 factors",
            "plain 160x96x64 nvfp4 nvfp4 -> float32 beta=1 factors",
        ],
    ),
]


@pytest.mark.parametrize(("formats", "size", "lines"), MULTIPLIED, ids=str)
def test_codes_are_multiplied(formats: Formats, size: Size, lines: list[str]) -> None:
    assert asked(formats, size) == lines
    with without(formats.family):
        assert asked(formats, size) == decoded(*size)


def test_codes_of_two_formats_are_multiplied() -> None:
    lines = asked(fp8("e5m2", "e4m3"), (5, 48, 64))
    assert lines[3] == "plain 5x48x64 e5m2 e4m3 -> bfloat16"
    assert asked(blocks("e5m2", "e4m3"), (256, 128, 128))[3:5] == [
        "plain 256x128x128 e5m2/1x128 e4m3/128x128 -> bfloat16",
        "plain 128x128x256 e5m2/1x128 e4m3/1x128 -> bfloat16",
    ]
    assert asked(mx("e4m3", "e4m3"), (64, 96, 160))[3].startswith("plain 64x96x160 e4m3/mx e4m3/mx")


# Formats, sizes, and which of the products are decoded.
FORWARD, OF_INPUT, OF_WEIGHT, ALL = slice(3), slice(3, 4), slice(4, 6), slice(6)
OTHER_SIZES = [
    (fp8("e4m3", "e4m3"), (32, 48, 72), FORWARD),
    (fp8("e4m3", "e4m3"), (32, 40, 64), FORWARD),
    # A gradient of the weight sums over rows.
    (fp8("e4m3", "e4m3"), (24, 48, 64), OF_WEIGHT),
    (fp8("e5m2", "e5m2"), (32, 48, 64), OF_WEIGHT),
    # Sums over 200 input features, over 200 output features, over 200 rows; 130 rows.
    (blocks("e4m3", "e4m3"), (128, 200, 128), FORWARD),
    (blocks("e4m3", "e4m3"), (128, 128, 200), slice(4)),
    (blocks("e4m3", "e4m3"), (200, 128, 128), OF_WEIGHT),
    (blocks("e4m3", "e4m3"), (130, 128, 128), ALL),
    (blocks("e5m2", "e5m2"), (128, 128, 128), ALL),
    (mx("e4m3", "e4m3"), (64, 80, 160), FORWARD),
    (mx("e4m3", "e4m3"), (64, 96, 144), FORWARD),
    (mx("e4m3", "e4m3"), (48, 96, 160), FORWARD),
    # Sums over 80 input features, over 144 output features, over 33 rows; 40 output features.
    (nvfp4(), (64, 80, 160), FORWARD),
    (nvfp4(), (64, 96, 144), OF_INPUT),
    (nvfp4(), (33, 96, 160), OF_WEIGHT),
    (nvfp4(), (64, 96, 40), FORWARD),
]


@pytest.mark.parametrize(("formats", "size", "which"), OTHER_SIZES, ids=str)
def test_of_other_sizes_they_are_decoded(formats: Formats, size: Size, which: slice) -> None:
    assert asked(formats, size)[which] == decoded(*size)[which]


def test_one_size_may_forbid_one_product() -> None:
    assert "e4m3" in asked(blocks("e4m3", "e4m3"), (200, 128, 128))[0]
    assert "nvfp4" in asked(nvfp4(), (33, 96, 160))[0]


DECODED = [
    (fp8("e5m2", "e4m3"), (32, 48, 64)),
    (blocks("e4m3", "e4m3"), (256, 640, 144)),
    (mx("e4m3", "e4m3"), (256, 640, 144)),
    *((nvfp4(square), size) for square in (False, True) for size in ((64, 96, 160), (5, 17, 9))),
]


@pytest.mark.parametrize(("formats", "size"), DECODED, ids=str)
def test_decoded_products_are_right(formats: Formats, size: Size) -> None:
    with without(formats.family):
        every.test_forward(formats, size)
        every.test_backward(formats, size)


def test_odd_sizes_are_decoded() -> None:
    with without("nvfp4"):
        assert asked(nvfp4(), (33, 31, 24)) == decoded(33, 31, 24)
