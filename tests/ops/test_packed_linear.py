"""Products of one input with several weights: against one with all of them in one tensor."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from helpers import assert_equal, saved_tensors, storage_bytes
from test_partial_backward import calls
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops import recipe as recipes

typed = torch.ops.transformer_ops
WIDTH, COLUMNS = 48, (40, 24, 8)
TOLERANCE = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 6e-2},
    torch.float16: {"rtol": 3e-3, "atol": 1e-2},
}
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
every_layout = pytest.mark.parametrize("adjacent", [False, True], ids=["apart", "adjacent"])
every_bias = pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])


def pair(
    dtype: torch.dtype = torch.float32, bias: bool = True, adjacent: bool = False, **options: Any
) -> tuple[tops.PackedLinear, tops.Linear]:
    """The op, and a Linear that has its weights as one; `adjacent` ones share that memory."""
    packed = tops.PackedLinear(WIDTH, COLUMNS, bias=bias, dtype=dtype, **options)
    whole = tops.Linear(WIDTH, sum(COLUMNS), bias=bias, dtype=dtype)
    with torch.no_grad():
        for name in ("weight", "bias") if bias else ("weight",):
            parameter = getattr(whole, name)
            parameter.normal_()
            for i, part in enumerate(parameter.split(COLUMNS)):
                own = part if adjacent else part.clone()
                setattr(packed, f"{name}{i}", nn.Parameter(own))
    return packed, whole


def tensors(packed: tops.PackedLinear, name: str, suffix: str = "") -> list[Any]:
    found = (getattr(packed, f"{name}{i}") for i in range(len(COLUMNS)))
    return [getattr(tensor, suffix) if suffix else tensor for tensor in found]


def data(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """An input and a gradient of the output."""
    return [torch.randn(3, 50, n).to(dtype) for n in (WIDTH, sum(COLUMNS))]


@every_bias
@every_layout
@every_dtype
@pytest.mark.parametrize("onednn", [True, False], ids=["", "widened"])
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_as_one_weight(dtype: torch.dtype, adjacent: bool, bias: bool, onednn: bool) -> None:
    packed, whole = pair(dtype, bias, adjacent)
    x, grad = data(dtype)
    of_packed, of_whole = (x.clone().requires_grad_() for _ in "ab")
    mkldnn = torch.backends.mkldnn.flags(enabled=False)
    with contextlib.nullcontext() if onednn else mkldnn:
        y, want = packed(of_packed), whole(of_whole)
        y.backward(grad)
        want.backward(grad)
    found = [y, of_packed.grad, torch.cat(tensors(packed, "weight", "grad"))]
    expected = [want, of_whole.grad, whole.weight.grad]
    if bias:
        found.append(torch.cat(tensors(packed, "bias", "grad")))
        expected.append(whole.bias.grad)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


# Above the least work of oneDNN, which takes no columns of a larger matrix, and of a copy's rows.
@pytest.mark.parametrize("rows", [96, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_products(dtype: torch.dtype, rows: int) -> None:
    x, grad = torch.randn(rows, 512).to(dtype), torch.randn(rows, 1152).to(dtype)
    weights, sizes = [torch.randn(n, 512).to(dtype) for n in (640, 512)], [640, 512]
    whole = torch.cat(weights).double()
    y = typed.packed_linear(x, weights, [], sizes)
    dx, dw, _ = typed.packed_linear_backward(grad, x, weights, sizes, [True, True, False])
    want = [x.double() @ whole.t(), grad.double() @ whole, grad.double().t() @ x.double()]
    for a, b in zip([y, dx, torch.cat(dw)], want, strict=True):
        error, allowed = (a.double() - b).norm(), (b.to(dtype).double() - b).norm()
        assert error <= max(2 * allowed, 1e-6 * b.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adjacent_weights_are_one_product(dtype: torch.dtype) -> None:
    """It rounds once what is a sum over the weights, so that the bits are those of one weight."""
    whole, (x, grad) = torch.randn(sum(COLUMNS), WIDTH).to(dtype), data(dtype)
    none = [True, False, False]
    backward = lambda weights: typed.packed_linear_backward(grad, None, weights, COLUMNS, none)[0]  # noqa: E731
    parts = list(whole.split(COLUMNS))
    assert torch.equal(typed.packed_linear(x, parts, [], COLUMNS), typed.linear(x, whole))
    want = typed.linear_backward(grad, None, whole, [True, False])[0]
    assert torch.equal(backward(parts), want)
    # None of these may be taken for one: another order, the same one twice, gaps, other storages.
    a, b, c = (part.clone() for part in parts)
    wider = torch.randn(sum(COLUMNS), WIDTH + 8).to(dtype)[:, :WIDTH]
    for weights in ([a, b, c], [parts[0], parts[1], c], list(wider.split(COLUMNS))):
        want = typed.linear_backward(grad, None, torch.cat(weights), [True, False])[0]
        assert not torch.equal(backward(weights), want)
        torch.testing.assert_close(backward(weights), want, **TOLERANCE[dtype])
    for weights in ([parts[0]] * 2, [parts[1], parts[2], parts[1]]):
        sizes = [len(weight) for weight in weights]
        want = typed.linear(x, torch.cat(weights))
        torch.testing.assert_close(
            typed.packed_linear(x, weights, [], sizes), want, **TOLERANCE[dtype]
        )


def test_what_backward_keeps() -> None:
    """The input and handles of the weights: nothing that was concatenated."""
    packed, _ = pair()
    x, grad = data()
    with saved_tensors() as kept:
        y = packed(x.requires_grad_())
    assert storage_bytes(kept) == storage_bytes([x, *tensors(packed, "weight")])
    module = tops.Sequential(tops.RMSNorm(WIDTH), packed)
    module(x).backward(grad)
    # The norm's output is computed again.
    assert "computes x1 again" in str(module.explain())
    del y


def test_a_frozen_op_keeps_no_input() -> None:
    packed, _ = pair()
    for weight in tensors(packed, "weight"):
        weight.requires_grad_(False)
    x, grad = data()
    with saved_tensors() as kept:
        y = packed(x.requires_grad_())
    assert storage_bytes(kept) == storage_bytes(tensors(packed, "weight"))
    y.backward(grad)
    assert tensors(packed, "weight", "grad") == [None] * 3 and packed.bias1.grad is not None


def test_masks_name_the_products_that_run() -> None:
    packed, _ = pair()
    x = data()[0].requires_grad_()
    y = packed(x)
    weights, biases = tensors(packed, "weight"), tensors(packed, "bias")
    assert calls(y, [x, *packed.parameters()]) == ["packed_linear_backward[1, 1, 1]"]
    assert calls(y, [x]) == ["packed_linear_backward[1, 0, 0]"]
    assert calls(y, [weights[1]]) == ["packed_linear_backward[0, 1, 0]"]
    assert calls(y, biases) == ["packed_linear_backward[0, 0, 1]"]


def test_gradients_share_no_storage_and_are_contiguous() -> None:
    packed, _ = pair()
    x, grad = data()
    for _ in range(2):
        packed(x).backward(grad)
    found = [*tensors(packed, "weight", "grad"), *tensors(packed, "bias", "grad")]
    assert all(each.is_contiguous() for each in found)
    assert len({each.untyped_storage().data_ptr() for each in found}) == len(found)
    before = [each.clone() for each in found]
    found[0].zero_()
    assert all(map(torch.equal, found[1:], before[1:]))
    # The memory of the others stays where one of them is gone.
    third = packed.weight2.grad
    packed.zero_grad()
    del found
    torch.full((sum(COLUMNS), WIDTH), 7.0)
    packed(x).backward(grad)
    assert torch.equal(third, before[2])


@pytest.mark.parametrize("overwrite", [False, True])
@every_layout
@pytest.mark.parametrize(
    ("dtype", "main"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_main_grad(dtype: torch.dtype, main: torch.dtype, adjacent: bool, overwrite: bool) -> None:
    packed, _ = pair(dtype, accumulate_into_main_grad=True)
    plain, _ = pair(dtype)
    plain.load_state_dict(packed.state_dict())
    start = torch.randn(sum(COLUMNS), WIDTH).to(main)
    for weight, part in zip(tensors(packed, "weight"), start.split(COLUMNS), strict=True):
        weight.main_grad = part if adjacent else part.clone()
        weight.overwrite_main_grad = overwrite
    before = start.clone()
    x, grad = data(dtype)
    of_packed, of_plain = (x.clone().requires_grad_() for _ in "ab")
    packed(of_packed).backward(grad)
    plain(of_plain).backward(grad)
    assert tensors(packed, "weight", "grad") == [None] * 3
    want = torch.cat(tensors(plain, "weight", "grad")).to(main)
    torch.testing.assert_close(
        torch.cat(tensors(packed, "weight", "main_grad")),
        want if overwrite else before + want,
        **TOLERANCE[torch.bfloat16 if torch.bfloat16 in (dtype, main) else dtype],
    )
    assert torch.equal(of_packed.grad, of_plain.grad)
    assert_equal(tensors(packed, "bias", "grad"), tensors(plain, "bias", "grad"))


def test_one_parameter_as_two_weights() -> None:
    packed = tops.PackedLinear(WIDTH, (40, 40), bias=False)
    packed.weight1 = packed.weight0
    assert len(list(packed.parameters())) == 1
    x = torch.randn(7, WIDTH)
    packed(x).square().sum().backward()
    weight = packed.weight0.detach().clone().requires_grad_()
    torch.nn.functional.linear(x, torch.cat([weight, weight])).square().sum().backward()
    torch.testing.assert_close(packed.weight0.grad, weight.grad)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_one_frozen_weight(frozen: int) -> None:
    packed, whole = pair()
    tensors(packed, "weight")[frozen].requires_grad_(False)
    tensors(packed, "bias")[frozen].requires_grad_(False)
    x, grad = data()
    of_packed, of_whole = (x.clone().requires_grad_() for _ in "ab")
    packed(of_packed).backward(grad)
    whole(of_whole).backward(grad)
    torch.testing.assert_close(of_packed.grad, of_whole.grad)
    for name in ("weight", "bias"):
        wanted = getattr(whole, name).grad.split(COLUMNS)
        for i, (got, want) in enumerate(zip(tensors(packed, name, "grad"), wanted, strict=True)):
            assert (got is None) == (i == frozen)
            if got is not None:
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["MXFP8BlockScaling", "Float8BlockScaling"])
@every_bias
def test_recipes_round_each_weight_on_its_own(name: str, bias: bool) -> None:
    """As a Linear for each, except for the sum that is the gradient of the input."""
    packed, _ = pair(bias=bias)
    x, grad = data()
    singles = [tops.Linear(WIDTH, n, bias=bias) for n in COLUMNS]
    for i, single in enumerate(singles):
        single.load_state_dict({k: packed.state_dict()[f"{k}{i}"] for k in single.state_dict()})
    of_packed, of_singles = (x.clone().requires_grad_() for _ in "ab")
    with tops.autocast(recipe=getattr(recipes, name)()):
        y, each = packed(of_packed), [single(of_singles) for single in singles]
        y.backward(grad)
        # The rows of the gradient have blocks of their own, which follow all columns.
        assert torch.equal(y, torch.cat(each, -1))
    exact = [
        part @ w for part, w in zip(grad.split(COLUMNS, -1), tensors(packed, "weight"), strict=True)
    ]
    want = sum(exact[1:], exact[0])
    assert 0 < (of_packed.grad - want).norm() < 0.1 * want.norm()
    if name == "MXFP8BlockScaling":
        torch.cat(each, -1).backward(grad)
        for got, single in zip(tensors(packed, "weight", "grad"), singles, strict=True):
            assert torch.equal(got, single.weight.grad)


def test_delayed_scaling_is_refused() -> None:
    with tops.autocast(recipe=recipes.DelayedScaling()):
        module = tops.Sequential(tops.PackedLinear(32, (32, 32)), tops.SwiGLU())
    message = r"\[PackedLinear\] recipe must have no delayed scales, .* got 2 weights"
    with tops.autocast(recipe=recipes.DelayedScaling()):
        with pytest.raises(RuntimeError, match=message):
            module(torch.randn(32, 32))
    module(torch.randn(32, 32)).sum().backward()
    assert set(module.state_dict()) == {f"0.{kind}{i}" for kind in ("weight", "bias") for i in "01"}


def test_quantized_weights() -> None:
    with tops.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):
        packed = tops.PackedLinear(64, (64, 32), bias=False)
    x = torch.randn(8, 64)
    weights = [packed.weight0, packed.weight1]
    assert all(isinstance(weight, tops.QuantizedTensor) for weight in weights)
    plain = torch.cat([weight.dequantize() for weight in weights])
    torch.testing.assert_close(packed(x), x @ plain.t())
    packed(x).sum().backward()
    assert packed.weight1.grad.shape == (32, 64)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_gated_mlp_compiles_whole(backend: str) -> None:
    module = tops.Sequential(
        tops.RMSNorm(WIDTH),
        tops.PackedLinear(WIDTH, (40, 40), bias=False),
        tops.SwiGLU(),
        tops.Linear(40, WIDTH),
    )
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)
    for rows in (5, 9):
        x = torch.randn(rows, WIDTH)
        found = []
        for run in (module, compiled):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            y.square().sum().backward()
            found.append([y, leaf.grad, *(p.grad.clone() for p in module.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


def test_parameters_start_as_those_of_linears() -> None:
    torch.manual_seed(3)
    packed = tops.PackedLinear(WIDTH, COLUMNS)
    torch.manual_seed(3)
    singles = [tops.BasicLinear(WIDTH, n) for n in COLUMNS]
    for weight, single in zip(tensors(packed, "weight"), singles, strict=True):
        assert torch.equal(weight, single.weight)
    assert not any(bias.any() for bias in tensors(packed, "bias"))
    assert "in_features=48, out_features=(40, 24, 8), bias=True" in repr(packed)


@pytest.mark.parametrize(
    ("name", "shape", "error", "message"),
    [
        ("weight1", (25, 48), RuntimeError, r"weight1 must have shape \[24, 48\], got \[25, 48\]"),
        ("weight1", None, TypeError, "weight1 must be a tensor, got None"),
        ("bias2", None, RuntimeError, "bias2 must be a tensor, got None"),
        ("bias2", (7,), RuntimeError, r"bias2 must have shape \[8\], got \[7\]"),
    ],
    ids=str,
)
def test_bad_tensors(
    name: str, shape: tuple[int, ...] | None, error: type[Exception], message: str
) -> None:
    packed, _ = pair()
    setattr(packed, name, None if shape is None else nn.Parameter(torch.ones(shape)))
    with pytest.raises(error, match=message):
        packed(data()[0])


def test_parameters_are_cast_to_the_first_weight() -> None:
    packed, _ = pair()
    x = data()[0]
    want = packed(x).double()
    packed.weight1 = nn.Parameter(packed.weight1.detach().double())
    y = packed(x.double())
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), want)
    y.sum().backward()
    assert packed.weight1.grad.dtype == torch.float64
