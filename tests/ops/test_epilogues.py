"""What the CUDA bodies ask cuBLASLt for, on emulated kernels (`pytest --emulate-cuda`)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_near, every_dtype, tf32
from torch import Tensor

import transformer_ops as tops

pytestmark = pytest.mark.emulated

typed = torch.ops.transformer_ops
HALF = (torch.bfloat16, torch.float16)
every_half = pytest.mark.parametrize("dtype", HALF, ids=str)


def products() -> list[str]:
    """Those since the last call."""
    return torch.ops.transformer_ops_emulated.products()


def made(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    products()
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def linear_activation(
    dtype: torch.dtype, name: str, bias: bool, width: int = 24
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Results, what they should be, and the products without their dtypes."""
    g, x, w = made(dtype, (6, 16), (6, width), (16, width))
    results = list(typed.linear_activation_backward(g, x, w, name, [True, True, bias]))[: 2 + bias]
    found = [line.rpartition(f" {name_of(dtype)} -> {name_of(dtype)}")[0] for line in products()]
    exact = x.double().requires_grad_()
    y = F.gelu(exact, approximate="tanh") if name == "gelu" else F.silu(exact)
    (grad_x,) = torch.autograd.grad(y, exact, g.double() @ w.double())
    want = [grad_x, g.double().t() @ y.detach(), grad_x.sum(0)]
    return results, want[: len(results)], found


@every_half
@pytest.mark.parametrize("name", ["gelu", "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_of_an_activation_takes_a_pass(
    dtype: torch.dtype, name: str, bias: bool
) -> None:
    """cuBLASLt's epilogue rounds the product before it multiplies by the derivative."""
    results, want, found = linear_activation(dtype, name, bias)
    assert found == ["plain 16x24x6", "plain 6x24x16"]
    for got, right in zip(results, want, strict=True):
        assert_near(got, right, dtype, "result", factor=8)


@every_half
def test_several_weights_have_a_product_each_unless_they_are_adjacent(dtype: torch.dtype) -> None:
    x, g, whole = made(dtype, (6, 16), (6, 32), (32, 16))
    bias, counts = torch.randn(32, dtype=dtype), [24, 8]
    parts, biases = list(whole.split(counts)), list(bias.split(counts))
    kinds = lambda: [line.split()[:2] for line in products()]  # noqa: E731
    for weights, sizes in (
        (parts, ["6x32x16"]),
        ([p.clone() for p in parts], ["6x24x16", "6x8x16"]),
    ):
        y = typed.packed_linear(x, weights, biases, counts)
        assert kinds() == [["bias", size] for size in sizes]
        assert_near(y, x.double() @ whole.double().t() + bias.double(), dtype, "output", factor=8)
        typed.packed_linear_backward(g, None, weights, counts, [True, False, False])
        assert len(kinds()) == len(sizes)
        typed.packed_linear_backward(g, x, [], counts, [False, True, True])
        assert kinds() == [["plain", "24x16x6"], ["plain", "8x16x6"]]


def test_a_gelu_block_has_one_product_for_each() -> None:
    """What forward's epilogue leaves is what backward's reads."""
    module = tops.Sequential(tops.LayerNorm(16), tops.Linear(16, 64), tops.GELU())
    module = (module + tops.Sequential(tops.Linear(64, 16), tops.LayerNorm(16))).bfloat16()
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    products()
    y = module(x)
    assert [line.split()[0] for line in products()] == ["gelu_aux_bias", "bias"]
    y.square().sum().backward()
    # linear_activation, the first product's gradients.
    assert [line.split()[0] for line in products()] == ["plain", "plain", "plain", "plain"]


@every_dtype
def test_the_bias_gradient_comes_out_of_the_weight_gradient(dtype: torch.dtype) -> None:
    g, x, w = made(dtype, (2, 3, 24), (2, 3, 16), (24, 16))
    results = typed.bias_linear_backward(g, x, w, [True] * 3)
    both = f"{name_of(dtype)} -> {name_of(dtype)}"
    if dtype == torch.float64:
        assert products() == []
    else:
        assert products() == [f"bgradb 24x16x6 {both}", f"plain 6x16x24 {both}"]
    gd, xd, wd = (t.double() for t in (g, x, w))
    want = gd @ wd, gd.flatten(0, 1).t() @ xd.flatten(0, 1), gd.sum((0, 1))
    for got, right in zip(results, want, strict=True):
        assert_near(got, right, dtype, "result", factor=8)


def test_tf32_does_not_round_the_bias_gradient() -> None:
    g, x, w = made(torch.float32, (6, 24), (6, 16), (24, 16))
    with tf32(True):
        results = typed.bias_linear_backward(g, x, w, [True] * 3)
    assert [line.split()[0] for line in products()] == ["plain", "plain"]
    torch.testing.assert_close(results[2], g.sum(0))


@pytest.mark.parametrize("name", ["linear_activation", "bias_linear"])
def test_each_gradient_has_its_own_products(name: str) -> None:
    """The bias of `linear_activation` sums the gradient of the input."""
    op = getattr(typed, f"{name}_backward")
    g, x, w = made(torch.float32, (6, 16), (6, 24), (16, 24))
    more = ["silu"] if name == "linear_activation" else []
    whole = op(g, x, w, *more, [True] * 3)
    assert len(products()) == 2
    for k, count in enumerate((1, 1, len(more))):
        found = op(g, x, w, *more, [i == k for i in range(3)])
        torch.testing.assert_close(found[k], whole[k])
        assert len(products()) == count
