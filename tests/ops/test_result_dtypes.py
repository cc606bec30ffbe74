"""The dtype of a result where input and parameters differ: the weight's of a product, the input's
of any other op, which is torch.nn's wherever torch.nn gives a result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import transformer_ops as tops

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
PAIRS = [(of_input, of_weight) for of_input in DTYPES for of_weight in DTYPES]
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda module: module,
    "compiled": lambda module: torch.compile(module, fullgraph=True, backend="aot_eager"),
}


class Row(NamedTuple):
    """An op, its counterpart in torch.nn, and whether the weight decides."""

    make: Callable[..., nn.Module]
    plain: Callable[..., nn.Module] | None
    is_product: bool = False


ROWS = {
    "LayerNorm": Row(lambda dtype: tops.LayerNorm(8, dtype=dtype), nn.LayerNorm),
    "RMSNorm": Row(lambda dtype: tops.RMSNorm(8, dtype=dtype), nn.RMSNorm),
    "LayerScale": Row(lambda dtype: tops.LayerScale(8, dtype=dtype), None),
    "Bias": Row(lambda dtype: tops.Bias(8, dtype=dtype), None),
    "Linear": Row(lambda dtype: tops.Linear(8, 8, dtype=dtype), lambda n: nn.Linear(n, n), True),
    "PackedLinear": Row(lambda dtype: tops.PackedLinear(8, (8, 8), dtype=dtype), None, True),
    "norm, Linear": Row(
        lambda dtype: tops.Sequential(tops.RMSNorm(8), tops.Linear(8, 8, dtype=dtype), tops.GELU()),
        None,
        True,
    ),
    "Linear, norm": Row(
        lambda dtype: tops.Sequential(tops.Linear(8, 8, dtype=dtype), tops.LayerNorm(8)),
        None,
        True,
    ),
}


def dtype_in_nn(plain: Callable[..., nn.Module], x: Tensor, dtype: torch.dtype) -> Any:
    """The dtype of the result; None if torch.nn raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return plain(8).to(dtype)(x).dtype
        except RuntimeError:
            return None


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROWS)
def test_result_and_gradients(name: str, way: str) -> None:
    row = ROWS[name]
    for of_input, of_weight in PAIRS if way == "eager" else PAIRS[1:3]:
        module = row.make(of_weight)
        x = torch.randn(3, 8, dtype=of_input, requires_grad=True)
        y = WAYS[way](module)(x)
        assert y.dtype == (of_weight if row.is_product else of_input), (of_input, of_weight)
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype == of_input
        for parameter in module.parameters():
            assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
        if row.plain is not None:
            assert dtype_in_nn(row.plain, x.detach(), of_weight) in (y.dtype, None)


@pytest.mark.parametrize("of_input", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", sorted(ROWS.keys() - {"LayerScale", "Bias"}))
def test_autocast_decides(name: str, of_input: torch.dtype) -> None:
    module = ROWS[name].make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(3, 8, dtype=of_input)).dtype == torch.bfloat16


@pytest.mark.parametrize(("of_input", "of_weight"), PAIRS)
def test_numbers(of_input: torch.dtype, of_weight: torch.dtype) -> None:
    """The tensor of the other dtype is cast, and nothing else."""
    x = torch.randn(3, 8, dtype=of_input)
    linear, norm = tops.Linear(8, 8, dtype=of_weight), tops.RMSNorm(8, dtype=of_weight)
    want = nn.functional.linear(x.to(of_weight), linear.weight, linear.bias)
    torch.testing.assert_close(linear(x), want)
    torch.nn.init.uniform_(norm.weight)
    want = nn.functional.rms_norm(x, (8,), norm.weight.to(of_input), 1e-5)
    torch.testing.assert_close(norm(x), want)
