"""Kernels are never further from the exact formula than PyTorch's own, over the whole range.

References are computed in numpy's long double from the same numbers. Errors are counted in units
of the last place of the exact result in the tensor's dtype; a subnormal has the unit of the
smallest normal number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES
from torch import Tensor

import transformer_ops  # noqa: F401  (registers the ops)

pytestmark = pytest.mark.takes(seconds=15)

Real = np.longdouble
Array = Any
OPS = torch.ops.transformer_ops

# Mantissa bits, exponents of the smallest and the largest normal number.
FORMATS = {
    torch.float64: (52, -1022, 1023),
    torch.float32: (23, -126, 127),
    torch.bfloat16: (7, -126, 127),
    torch.float16: (10, -14, 15),
}

# How much larger than PyTorch's the largest error among some thousand numbers may be. Where both
# round once at the end, which of them is unluckier is chance.
SLACK = {torch.float64: 1.25, torch.float32: 0.5, torch.bfloat16: 0.01, torch.float16: 0.02}


def exact(tensor: Tensor) -> Array:
    return tensor.double().numpy().astype(Real)


def inputs(dtype: torch.dtype) -> Tensor:
    """All finite numbers of a 16-bit dtype, else some of each sign and exponent."""
    mantissa, low, high = FORMATS[dtype]
    if mantissa <= 10:
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        count = 400 if dtype == torch.float32 else 50
        significands = 1 + np.random.default_rng(0).random(count)
        exponents = np.arange(low - 3, high + 1)
        x = torch.from_numpy(np.ldexp(significands[:, None], exponents[None]).ravel()).to(dtype)
        x = torch.cat([x, -x, torch.tensor([0.0, -0.0], dtype=dtype)])
    return x[torch.isfinite(x)]


def errors(got: Tensor, want: Array, size: Array) -> Array:
    mantissa, low, high = FORMATS[got.dtype]
    size = np.maximum(np.abs(size), np.abs(want))
    exponent = np.maximum(np.frexp(np.where(size == 0, Real("1e-4000"), size))[1] - 1, low)
    error = np.abs(exact(got) - want) / np.ldexp(Real(1), exponent - mantissa)
    # Infinity is right from half a unit above the largest number on.
    overflow = np.abs(want) >= np.ldexp(Real(2) - np.ldexp(Real(1), -mantissa - 1), high)
    error = np.where(overflow & np.isinf(exact(got)), 0, error)
    return np.where(np.isnan(error), np.inf, error)


def assert_not_further(
    ours: Tensor, theirs: Tensor, want: Array, x: Tensor, size: Array = 0
) -> None:
    """`size` is that of the terms whose sum `want` is: where they cancel, their units count."""
    mine, other = errors(ours, want, size), errors(theirs, want, size)
    exponent = np.frexp(x.double().numpy())[1]
    buckets = np.where(exact(x) < 0, -1, 1) * (exponent // 4 + 1000)
    for bucket in np.unique(buckets):
        inside = buckets == bucket
        limit = max(other[inside].max(), 0.5) + SLACK[ours.dtype]
        worst = np.argmax(np.where(inside, mine, -1))
        assert mine[worst] <= limit, (
            f"x {x[worst].item()}: got {ours[worst].item()}, exact {want[worst]}: "
            f"{mine[worst]:.3f} units, PyTorch's worst and slack in {x[inside].min()} to "
            f"{x[inside].max()}: {limit:.3f}"
        )


def sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, Real(1)) / (1 + e)


LINEAR = 2 * np.sqrt(2 / Real("3.14159265358979323846264338327950288"))
CUBIC = LINEAR * Real("0.044715")


def gelu(x: Array) -> Array:
    return x * sigmoid(x * (LINEAR + CUBIC * x * x))


def gelu_slope(x: Array) -> Array:
    x = np.clip(x, -1000, 1000)
    u = x * (LINEAR + CUBIC * x * x)
    return sigmoid(u) * (1 + x * sigmoid(-u) * (LINEAR + 3 * CUBIC * x * x))


@functools.cache
def normal_tail(t: float) -> Real:
    """The share of the standard normal distribution that lies beyond t >= 0."""
    with mpmath.workprec(80):
        return Real(mpmath.nstr(mpmath.erfc(mpmath.mpf(t) / mpmath.sqrt(2)) / 2, 24))


def normal_share(x: Array) -> Array:
    """The share below x."""
    middle = (np.abs(x) > 1e-12) & (np.abs(x) < 45)
    tail = np.where(np.abs(x) < 1, 0.5 - np.abs(x) / np.sqrt(Real(8) * np.arctan(Real(1))), Real(0))
    tail[middle] = [normal_tail(float(t)) for t in np.abs(x[middle])]
    return np.where(x < 0, tail, 1 - tail)


def exact_gelu_slope(x: Array) -> Array:
    density = np.exp(-(np.clip(x, -1000, 1000) ** 2) / 2) / np.sqrt(Real(8) * np.arctan(Real(1)))
    return normal_share(x) + x * density


def silu_slope(x: Array) -> Array:
    x = np.clip(x, -11000, 11000)
    return sigmoid(x) * (1 + x * sigmoid(-x))


def relu_slope(x: Array) -> Array:
    return np.where(x > 0, Real(1), Real(0))


# Name: formula, its derivative, PyTorch's kernels.
Kernel = Callable[..., Tensor]
ACTIVATIONS: dict[
    str, tuple[Callable[[Array], Array], Callable[[Array], Array], Kernel, Kernel]
] = {
    "gelu": (
        gelu,
        gelu_slope,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate="tanh"),
    ),
    "exact_gelu": (
        lambda x: x * normal_share(x),
        exact_gelu_slope,
        F.gelu,
        torch.ops.aten.gelu_backward,
    ),
    "silu": (lambda x: x * sigmoid(x), silu_slope, F.silu, torch.ops.aten.silu_backward),
    "relu": (
        lambda x: x * relu_slope(x),
        relu_slope,
        F.relu,
        lambda g, x: torch.ops.aten.threshold_backward(g, x, 0),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_forward(name, dtype):
    formula, _, torch_forward, _ = ACTIVATIONS[name]
    x = inputs(dtype)
    ours = OPS.relu(x, False)[0] if name == "relu" else getattr(OPS, name)(x)
    assert_not_further(ours, torch_forward(x), formula(exact(x)), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_backward(name, dtype):
    _, slope, _, torch_backward = ACTIVATIONS[name]
    x = inputs(dtype)
    kept = OPS.relu(x, True)[1] if name == "relu" else x
    for value in (1.0, -0.7318):
        grad = torch.full_like(x, value)
        ours = getattr(OPS, f"{name}_backward")(grad, kept)
        g, size = exact(grad), np.minimum(sigmoid(exact(x)), Real(0.25))
        assert_not_further(ours, torch_backward(grad, x), g * slope(exact(x)), x, g * size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swiglu(dtype):
    gate = inputs(dtype)
    gate = gate[gate.abs() < 100]
    linear = torch.full_like(gate, 1.37)
    x, grad = torch.stack([gate, linear], 1).flatten(), torch.full_like(gate, -0.7318)
    rows = x.view(-1, 2)
    a, b, g = exact(gate), exact(linear), exact(grad)
    leaf = rows.clone().requires_grad_()
    theirs = F.silu(leaf[:, 0]) * leaf[:, 1]
    theirs.backward(grad)
    assert_not_further(OPS.swiglu(rows, 0)[:, 0], theirs.detach(), a * sigmoid(a) * b, gate)
    ours = OPS.swiglu_backward(grad[:, None], rows, 0)
    size = g * b * sigmoid(a)
    assert_not_further(ours[:, 0], leaf.grad[:, 0], g * b * silu_slope(a), gate, size)
    assert_not_further(ours[:, 1], leaf.grad[:, 1], g * a * sigmoid(a), gate)


# ---- norms: rows of numbers of different kinds ----


def rows_of(kind: str, dtype: torch.dtype) -> Tensor:
    x = torch.randn(64, 1500, dtype=torch.float64)
    if kind == "shifted":
        x = x + 50
    elif kind == "tiny":
        x = x * 1e-3
    elif kind == "large":
        x = x * 1e3
    elif kind == "outlier":
        x[:, 7] = 300.0
    return x.to(dtype)


def assert_norm_not_further(ours: Tensor, theirs: Tensor, want: Array, what: str) -> None:
    """The largest error and the mean one, against the largest number of the row."""
    mantissa = FORMATS[ours.dtype][0]
    unit = np.abs(want).max(-1, keepdims=True) * Real(2) ** -mantissa

    def measures(tensor: Tensor) -> tuple[float, float]:
        error = np.abs(exact(tensor) - want) / unit
        return float(error.max()), float(error.mean())

    # In float64 the mean itself is rounded, by plain sums: a few units either way.
    factor = 4 if ours.dtype == torch.float64 else 1.1
    for mine, other, name in zip(measures(ours), measures(theirs), ("max", "mean"), strict=True):
        limit = other * factor + 0.01
        assert mine <= limit, f"{what}: {name} error {mine:.4f}, limit {limit:.4f}"


@pytest.mark.parametrize("kind", ["normal", "shifted", "tiny", "large", "outlier"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_norms(norm, dtype, kind):
    x, eps = rows_of(kind, dtype), 1e-5
    width = x.shape[-1]
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    grad = torch.randn(x.shape).to(dtype)
    leaf = x.clone().requires_grad_()
    ex, ew, eb, eg = exact(x), exact(weight), exact(bias), exact(grad)
    if norm == "rms_norm":
        theirs = F.rms_norm(leaf, [width], weight, eps)
        y, rstd = OPS.rms_norm(x, weight, [width], eps, False)
        grad_x = OPS.rms_norm_backward(grad, x, rstd, weight, [width], eps, False, [True, True])[0]
        scale = 1 / np.sqrt((ex * ex).mean(-1, keepdims=True) + Real(eps))
        n = ex * scale
        want, weighted = n * ew, eg * ew
        want_grad = scale * (weighted - n * (weighted * n).mean(-1, keepdims=True))
    else:
        theirs = F.layer_norm(leaf, [width], weight, bias, eps)
        y, mean, rstd = OPS.layer_norm(x, weight, bias, [width], eps, False)
        grad_x = OPS.layer_norm_backward(
            grad, x, mean, rstd, weight, [width], eps, False, [True] * 3
        )[0]
        centered = ex - ex.mean(-1, keepdims=True)
        scale = 1 / np.sqrt((centered * centered).mean(-1, keepdims=True) + Real(eps))
        n = centered * scale
        want, weighted = n * ew + eb, eg * ew
        want_grad = scale * (
            weighted - weighted.mean(-1, keepdims=True) - n * (weighted * n).mean(-1, keepdims=True)
        )
    theirs.backward(grad)
    assert_norm_not_further(y, theirs.detach(), want, "forward")
    assert_norm_not_further(grad_x, leaf.grad, want_grad, "backward")
