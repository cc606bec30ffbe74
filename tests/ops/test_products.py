"""Typed ops that contain a product: any strides, any sizes, and what their kernels make of them.

`pytest --emulate-cuda` runs them through the CUDA bodies as well.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_near, every_device, every_dtype, off_the_grid, tf32
from torch import Tensor

import transformer_ops as tops  # noqa: F401  (loads the typed ops)

typed = torch.ops.transformer_ops
# Rows, input and output features: of vectors, odd, and single ones.
SIZES = [(6, 16, 24), (5, 7, 9), (1, 1, 1), (3, 8, 130)]

every_size = pytest.mark.parametrize("size", SIZES, ids=str)


def as_is(tensor: Tensor) -> Tensor:
    return tensor


def by_columns(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def with_gaps(tensor: Tensor) -> Tensor:
    """Rows apart from each other."""
    return torch.cat([tensor, torch.full_like(tensor, torch.nan)], 1)[:, : tensor.shape[1]]


def every_second(tensor: Tensor) -> Tensor:
    """Elements apart from each other."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]


STORED = [as_is, by_columns, with_gaps, every_second, off_the_grid]


def made(dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def exact(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def check(got: Tensor, want: Tensor, dtype: torch.dtype, what: str = "output") -> None:
    assert got.is_contiguous()
    # Sums of up to 130 products.
    assert_near(got, want, dtype, what, factor=8)


@every_device
@every_dtype
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("which", ["input", "weight", "grad_output"])
def test_any_strides(
    which: str, stored: Callable[[Tensor], Tensor], dtype: torch.dtype, device: str
) -> None:
    for rows, k, n in SIZES:
        x, w, g = made(dtype, device, (rows, k), (n, k), (rows, n))
        xd, wd, gd = exact(x, w, g)
        x = stored(x) if which == "input" else x
        w = stored(w) if which == "weight" else w
        g = stored(g) if which == "grad_output" else g
        check(typed.linear(x, w), xd @ wd.t(), dtype)
        dx, dw = typed.linear_backward(g, x, w, [True, True])
        check(dx, gd @ wd, dtype, "grad_input")
        check(dw, gd.t() @ xd, dtype, "grad_weight")


@every_device
@every_dtype
@pytest.mark.parametrize("size", [(1100, 4096, 8), (520, 256, 3100), (63, 263, 1025)], ids=str)
def test_large_products(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    # In float32 by oneDNN on some processors; the first in bfloat16 by parts of its rows.
    rows, k, n = size
    x, w, b, start = made(dtype, device, (rows, k), (n, k), (n,), (rows, n))
    w /= k**0.5
    want = x.double() @ w.double().t()
    check(typed.linear(x, w), want, dtype)
    check(typed.linear_epilogue(x, w, b, None, 1.0), want + b, dtype)
    check(typed.linear_epilogue(x, w, None, start, 1.0), want + start, dtype)
    by_rows = w.t().contiguous()
    check(typed.linear_backward(x, None, by_rows, [True, False])[0], want, dtype)
    dx = typed.linear_residual_scale_backward(x, start, None, by_rows, 1.0, [True, False])[0]
    check(dx, want + start, dtype)


@pytest.mark.parametrize("stored", STORED)
def test_large_products_of_any_strides(stored: Callable[[Tensor], Tensor]) -> None:
    x, w, g = made(torch.float32, "cpu", (100, 600), (300, 600), (100, 300))
    w /= 600**0.5
    xd, wd, gd = exact(x, w, g)
    for a, b, c in [(stored(x), w, g), (x, stored(w), g), (x, w, stored(g))]:
        check(typed.linear(a, b), xd @ wd.t(), torch.float32)
        dx, dw = typed.linear_backward(c, a, b, [True, True])
        check(dx, gd @ wd, torch.float32, "grad_input")
        check(dw, gd.t() @ xd, torch.float32, "grad_weight")


@every_device
@every_dtype
@pytest.mark.parametrize("stored", STORED)
def test_several_weights_of_any_strides(
    stored: Callable[[Tensor], Tensor], dtype: torch.dtype, device: str
) -> None:
    for rows, k, n in SIZES:
        counts = [n, 3, n]
        x, g = made(dtype, device, (rows, k), (rows, sum(counts)))
        weights = made(dtype, device, *((count, k) for count in counts))
        xd, wd, gd = exact(x, torch.cat(weights), g)
        biases = made(dtype, device, *((count,) for count in counts))
        for a, w, c in [(stored(x), weights, g), (x, [*map(stored, weights)], stored(g))]:
            check(typed.packed_linear(a, w, [], counts), xd @ wd.t(), dtype)
            y = typed.packed_linear(a, w, biases, counts)
            check(y, xd @ wd.t() + torch.cat(biases).double(), dtype)
            dx, dw, db = typed.packed_linear_backward(c, a, w, counts, [True, True, True])
            # The sum of one product for each weight, each rounded.
            assert_near(dx, gd @ wd, dtype, "grad_input", factor=24)
            for i, part in enumerate(gd.split(counts, -1)):
                check(dw[i], part.t() @ xd, dtype, "grad_weight")
                check(db[i], part.sum(0), dtype, "grad_bias")


def test_large_products_of_slices() -> None:
    # 1024 rows of a weight with so few outputs are taken by slices of 384 columns.
    rows, n, columns = 1024, 64, 1100
    x, w, g = made(torch.float32, "cpu", (rows, columns), (n, columns), (rows, n))
    dx, dw = typed.linear_activation_backward(g, x, w, "silu", [True, True, False])[:2]
    xd = x.double().requires_grad_()
    activated = F.silu(xd)
    (want,) = torch.autograd.grad(activated, xd, g.double() @ w.double())
    check(dx, want, torch.float32, "grad_input")
    want = g.double().t() @ activated.detach()
    # Sums of so many.
    check(dw / rows**0.5, want / rows**0.5, torch.float32, "grad_weight")
    before = torch.randn_like(dw)
    total = before.clone()
    typed.linear_activation_backward_into(g, x, w, "silu", [True, True, False], total, False)
    check(total / rows**0.5, (before + want) / rows**0.5, torch.float32, "main_grad")


@every_device
@every_dtype
def test_an_expanded_gradient(dtype: torch.dtype, device: str) -> None:
    # This is the gradient of a sum.
    x, w = made(dtype, device, (6, 16), (24, 16))
    dx, dw = typed.linear_backward(x.new_ones(()).expand(6, 24), x, w, [True, True])
    check(dx, w.double().sum(0).expand(6, 16), dtype)
    check(dw, x.double().sum(0).expand(24, 16), dtype)


@every_device
@every_dtype
@every_size
@pytest.mark.parametrize("lead", [(), (2, 3), (0,), (4, 0)], ids=str)
def test_leading_dimensions(
    lead: tuple[int, ...], size: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    _, k, n = size
    x, w, b, g = made(dtype, device, (*lead, k), (n, k), (n,), (*lead, n))
    xd, wd, bd, gd = exact(x, w, b, g)
    check(typed.linear(x, w), xd @ wd.t(), dtype)
    check(typed.linear_epilogue(x, w, b, None, 1.0), xd @ wd.t() + bd, dtype)
    dx, dw = typed.linear_backward(g, x, w, [True, True])
    check(dx, gd @ wd, dtype)
    check(dw, gd.reshape(-1, n).t() @ xd.reshape(-1, k), dtype)


@every_device
@every_dtype
@every_size
def test_residuals(size: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    rows, k, n = size
    x, w, b, extra = made(dtype, device, (rows, k), (n, k), (n,), (rows, n))
    xd, wd, bd = exact(x, w, b)
    before = extra.clone()
    for given in (extra, by_columns(extra), extra[:1].expand(rows, n)):
        ed = given.double()
        check(typed.linear_epilogue(x, w, None, given, 1.0), xd @ wd.t() + ed, dtype)
        check(typed.linear_epilogue(x, w, b, given, 1.0), xd @ wd.t() + bd + ed, dtype)
        check(typed.linear_epilogue(x, w, None, given, -0.5), ed - 0.5 * xd @ wd.t(), dtype)
        scaled = -0.5 * (xd @ wd.t() + bd)
        check(typed.linear_epilogue(x, w, b, given, -0.5), ed + scaled, dtype)
    check(typed.linear_epilogue(x, w, b, None, -0.5), scaled, dtype)
    check(typed.linear_epilogue(x, w, None, None, -0.5), -0.5 * xd @ wd.t(), dtype)
    assert torch.equal(extra, before)


@every_device
@every_dtype
def test_a_product_scaled_by_zero_is_computed(dtype: torch.dtype, device: str) -> None:
    x, w, extra = made(dtype, device, (4, 8), (8, 8), (4, 8))
    check(typed.linear_epilogue(x, w, None, extra, 0.0), extra.double(), dtype)
    x[0, 0] = torch.nan
    assert typed.linear_epilogue(x, w, None, extra, 0.0)[0].isnan().all()


@every_device
@every_dtype
@every_size
@pytest.mark.parametrize("extra_dtype", [None, torch.float32, torch.float64])
def test_gradients_onto_a_residual(
    extra_dtype: torch.dtype | None, size: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    rows, k, n = size
    x, w, g, extra = made(dtype, device, (rows, k), (n, k), (rows, n), (rows, k))
    extra = extra.to(extra_dtype or dtype)
    dx, dw = typed.linear_residual_scale_backward(g, extra, x, w, 1.0, [True, True])
    assert dx.dtype == torch.promote_types(dtype, extra.dtype)
    check(dx, g.double() @ w.double() + extra.double(), dtype)
    check(dw, g.double().t() @ x.double(), dtype)
    for residual, start in [(None, 0.0), (extra, extra.double())]:
        dx, dw = typed.linear_residual_scale_backward(g, residual, x, w, -0.7, [True, True])
        check(dx, start - 0.7 * (g.double() @ w.double()), dtype)
        check(dw, -0.7 * (g.double().t() @ x.double()), dtype)


@every_device
@pytest.mark.parametrize("mask", [[True, False], [False, True], [False, False]])
def test_only_the_gradients_that_are_wanted(mask: list[bool], device: str) -> None:
    x, w, g = made(torch.float32, device, (6, 16), (24, 16), (6, 24))
    given = (x if mask[1] else None, w if mask[0] else None)
    dx, dw = typed.linear_backward(g, *given, mask)
    assert dx.shape == ((6, 16) if mask[0] else (0,))
    assert dw.shape == ((24, 16) if mask[1] else (0,))


ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
}


@every_device
@every_dtype
@every_size
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_what_backward_reads(
    name: str, size: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    rows, k, n = size
    x, w, b = made(dtype, device, (2, rows, k), (n, k), (n,))
    sums = x.double() @ w.double().t() + b.double()
    y, kept = typed.linear_bias_activation(x, w, b, name, True)
    check(y, ACTIVATIONS[name](sums), dtype)
    if name == "relu":
        bits = (kept.cpu().unsqueeze(-1) >> torch.arange(8)) & 1
        known = (sums.abs() > 0.1).flatten().cpu()
        found = bits.flatten()[: sums.numel()].bool()
        assert torch.equal(found[known], (sums > 0).flatten().cpu()[known])
    else:
        check(kept, sums, dtype, "kept")
    again, none = typed.linear_bias_activation(x, w, b, name, False)
    check(again, ACTIVATIONS[name](sums), dtype)
    assert none.numel() == 0


@every_device
@every_dtype
@every_size
@pytest.mark.parametrize("interleave", [0, 1])
def test_glu_of_a_product(
    interleave: int, size: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    rows, k, n = size
    x, w, b = made(dtype, device, (2, rows, k), (2 * n, k), (2 * n,))
    sums = x.double() @ w.double().t() + b.double()
    halves = (sums[..., ::2], sums[..., 1::2]) if interleave else sums.chunk(2, -1)
    numbers = ("swiglu", interleave, 4.0, 25.0, 7.0, 1.702, 1.0)
    for save in (True, False):
        y, kept = typed.linear_bias_glu(x, w, b, *numbers, save)
        check(y, F.silu(halves[0]) * halves[1], dtype)
        assert kept.numel() == save * sums.numel()
        if save:
            check(kept, sums, dtype, "kept")


@every_device
@every_dtype
@every_size
@pytest.mark.parametrize("name", ["relu", "srelu"])
def test_product_of_an_activation(
    name: str, size: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    rows, k, n = size
    x, w, g = made(dtype, device, (2, rows, k), (n, k), (2, rows, n))
    xd, wd, gd = exact(x, w, g)
    y, activated = typed.activation_linear(x, w, name)
    # From its rounded value on: the square root of a square would be less exact.
    a = activated.double()
    check(activated, ACTIVATIONS[name](xd), dtype, "activated")
    check(y, a @ wd.t(), dtype)
    slope = 2 * a.sqrt() if name == "srelu" else (a > 0).double()
    dx, dw = typed.activation_linear_backward(g, activated, w, name, [True, True])
    check(dx, gd @ wd * slope, dtype, "grad_input")
    check(dw, gd.reshape(-1, n).t() @ a.reshape(-1, k), dtype, "grad_weight")
    dx, dw = typed.activation_linear_backward(g, activated, w, name, [False, True])
    assert dx.numel() == 0
    check(dw, gd.reshape(-1, n).t() @ a.reshape(-1, k), dtype, "grad_weight")


@every_device
def test_relu_keeps_nan(device: str) -> None:
    x, w, b = made(torch.float32, device, (2, 8), (128, 8), (128,))
    x[0, 3] = torch.nan
    y, _ = typed.linear_bias_activation(x, w, b, "relu", False)
    assert y[0].isnan().all()
    assert not y[1].isnan().any()


@every_device
def test_factors_that_do_not_fit(device: str) -> None:
    x, w, g = made(torch.float32, device, (6, 16), (24, 16), (6, 24))
    with pytest.raises(RuntimeError):
        typed.linear_backward(g[:, :20], x, w, [True, True])
    with pytest.raises(RuntimeError):
        typed.linear_backward(g[:5], x, w, [True, True])
    with pytest.raises(RuntimeError):
        typed.linear_backward(g.bfloat16(), x, w, [True, True])


# ---- on CUDA


@pytest.mark.cuda
@pytest.mark.parametrize("allowed", [False, True])
def test_tf32_is_torchs_setting(allowed: bool) -> None:
    x, w, b = made(torch.float32, "cuda", (512, 512), (512, 512), (512,))
    xd, wd, bd = exact(x, w, b)
    with tf32(allowed):
        results = typed.linear(x, w), typed.linear_epilogue(x, w, b, None, 1.0)
    for got, want in zip(results, (xd @ wd.t(), xd @ wd.t() + bd), strict=True):
        # 10 bits of each factor, or 23.
        error = (got - want).abs().max() / want.abs().max()
        assert (1e-5 < error < 1e-2) if allowed else (error < 1e-5)


@pytest.mark.cuda
@every_dtype
def test_the_first_call_of_a_shape_may_be_captured(dtype: torch.dtype) -> None:
    x, w, b = made(dtype, "cuda", (72, 136), (264, 136), (264,))
    typed.linear(*made(dtype, "cuda", (8, 8), (8, 8)))  # cuBLASLt has started
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = typed.linear_bias_activation(x, w, b, "gelu", True)
        dx, dw = typed.linear_backward(y, x, w, [True, True])
    for scale in (1.0, -0.5):
        x.mul_(scale)
        graph.replay()
        torch.cuda.synchronize()
        want = F.gelu(x.double() @ w.double().t() + b.double(), approximate="tanh")
        check(y, want, dtype)
        check(dx, y.double() @ w.double(), dtype)
        check(dw, y.double().t() @ x.double(), dtype)


@pytest.mark.cuda
def test_side_streams_do_not_share_a_workspace() -> None:
    # k is long where m and n are short: cuBLASLt splits it, and adds up in a workspace.
    inputs = [made(torch.bfloat16, "cuda", (64, 65536), (64, 65536)) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[] for _ in inputs]
    for _ in range(10):
        for stream, (x, w), found in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(typed.linear(x, w))
    torch.cuda.synchronize()
    for (x, w), found in zip(inputs, results, strict=True):
        check(found[0] / 64, (x.double() @ w.double().t()) / 64, torch.bfloat16)
        # In the same order each time.
        assert all(torch.equal(found[0], other) for other in found)
