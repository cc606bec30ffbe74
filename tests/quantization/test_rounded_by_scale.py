"""<op>.rounded_by: ops that round their first result by a scale that is known before it, as
delayed scaling has it, and note the largest magnitude.

What they give is, bit for bit, what `quantize_values_scaled` makes of what the op gives.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from plan_calls import plan_op
from test_rounded_results import NAMES, ROUNDS_MAIN, block, call_of, op_of, plan_text, schema_of
from torch import Tensor

import transformer_ops as tops
from transformer_ops import _C

OPS = torch.ops.transformer_ops
DELAYED = tops.recipe.DelayedScaling(amax_history_len=4)


def scales() -> Tensor:
    return torch.tensor([3.0, 0.07, 900.0])


def clones(values: list[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def check(
    name: str, x: Tensor, place: int, format: str, with_amax: bool = True, dims: int = 1
) -> None:
    """Checks the kernels and the decompositions."""
    taken, added = call_of(name, x, dims), (scales(), place, format, with_amax)
    rounded = f"{name}.rounded_by"
    for want, got in (
        (op_of(name)(*clones(taken)), op_of(rounded)(*clones(taken), *added)),
        (_C.decomposition(name, (*taken,)), _C.decomposition(rounded, (*taken, *added))),
    ):
        first, *rest = (result.detach() for result in tensors(want))
        dtype = str(first.dtype).removeprefix("torch.")
        values, decodes, amax = plan_op("quantize_values_scaled")(
            first, scales(), place, format, dtype
        )
        results = len(schema_of(name).returns)
        assert len(got) == results + 2
        for a, b in zip(got, [values, *rest], strict=False):
            assert equal(a, b)
        assert equal(got[results], decodes)
        assert equal(got[-1], amax if with_amax else torch.empty(0))


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> int:
    """Many bands of them, of which the last is no whole one; few where each number is emulated."""
    return 301 if request.config.getoption("--emulate-cuda") is None else 19


@pytest.mark.parametrize(("place", "format"), [(0, "e4m3"), (2, "e5m2")])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_op_and_then_the_rounding(name: str, place: int, format: str, rows: int) -> None:
    check(name, torch.randn(2, rows, 1056).bfloat16(), place, format)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["silu", "swiglu_backward", "add_layer_norm"])
def test_in_every_dtype(name: str, dtype: torch.dtype, rows: int) -> None:
    for place in range(3):
        check(name, torch.randn(2, rows, 1056).to(dtype), place, "e4m3")


@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (3, 0, 64), (2, 3, 5, 64)], ids=str)
@pytest.mark.parametrize("name", ["gelu", "swiglu", "rms_norm", "srelu_backward"])
@pytest.mark.parametrize("with_amax", [True, False])
def test_few_rows_and_many_dimensions(name: str, shape: tuple[int, ...], with_amax: bool) -> None:
    check(name, torch.randn(shape).bfloat16(), 1, "e5m2", with_amax)


@pytest.mark.parametrize("row", [0, 350, 699])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_numbers_that_are_none_reach_the_magnitude_from_any_row(row: int, value: float) -> None:
    x = torch.randn(700, 1056).bfloat16()
    x[row, 5] = value
    check("constant_scale", x, 0, "e4m3")
    amax = op_of("constant_scale.rounded_by")(x, 0.5, scales(), 0, "e4m3", True)[-1]
    assert not amax.isfinite()


@pytest.mark.parametrize("row", [0, 350, 699])
def test_the_largest_magnitude_may_be_in_any_row(row: int) -> None:
    x = torch.randn(700, 1056)
    x[row, -1] = -50.0
    y, decodes, amax = op_of("constant_scale.rounded_by")(x, 0.5, scales(), 0, "e4m3", True)
    assert amax.item() == 25.0 and y.abs().max() == 72.0  # of 75, in steps of 8
    assert decodes.item() == pytest.approx(1 / 3)


def test_strides_and_arguments_that_are_not_to_be_written() -> None:
    x = torch.randn(1056, 700).bfloat16().t()
    before, scale = x.clone(), scales()
    got, _, amax = op_of("silu.rounded_by")(x, scale, 0, "e4m3", True)
    want, _, largest = plan_op("quantize_values_scaled")(OPS.silu(x), scale, 0, "e4m3", "bfloat16")
    assert equal(got, want) and equal(amax, largest)
    assert torch.equal(x, before) and torch.equal(scale, scales())


def test_norms_over_several_dimensions() -> None:
    check("rms_norm", torch.randn(301, 4, 256).bfloat16(), 0, "e4m3", dims=2)


BAD = {
    "[3]": ((torch.ones(2), 0, "e4m3"), "fp8_scale must have shape [3], got [2]"),
    "float": ((torch.ones(3).double(), 0, "e4m3"), "fp8_scale must have dtype Float, got Double"),
    "place": ((torch.ones(3), 3, "e4m3"), "fp8_position must be 0, 1 or 2, got 3"),
    "no place": ((torch.ones(3), -1, "e4m3"), "fp8_position must be 0, 1 or 2, got -1"),
    "blocks": (
        (torch.ones(3), 0, "mx e4m3"),
        "format must have one scale for a tensor, got 'mx e4m3'",
    ),
    "none": ((torch.ones(3), 0, ""), "format must have one scale for a tensor, got ''"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_scale_must_be(name: str) -> None:
    added, text = BAD[name]
    with pytest.raises(RuntimeError, match=re.escape(f"[silu.rounded_by] {text}")):
        op_of("silu.rounded_by")(torch.randn(2, 32), *added, True)


def test_shapes_without_memory() -> None:
    x = torch.empty(3, 64, device="meta", dtype=torch.bfloat16)
    scale = torch.empty(3, device="meta")
    y, decodes, amax = op_of("swiglu.rounded_by")(x, 0, scale, 0, "e4m3", True)
    assert y.shape == (3, 32) and decodes.shape == amax.shape == ()
    assert y.dtype == torch.bfloat16 and decodes.dtype == amax.dtype == torch.float32
    assert op_of("swiglu.rounded_by")(x, 0, scale, 0, "e4m3", False)[2].shape == (0,)


# ---- in plans


def test_plans_round_where_a_value_is_made() -> None:
    text = plan_text(
        block(tops.RMSNorm(64)), torch.randn(8, 64).bfloat16().requires_grad_(), DELAYED
    )
    for line in (
        "x1, s0.rstd, t1.rounded_input_scale, st1.fp8_amax = rms_norm.rounded_by("
        'x0, p0.weight, [64], 1e-05, false, st1.fp8_scale, 0, "e4m3", true)',
        "x2 = linear_scaled(x1, t1.rounded_weight, t1.rounded_input_scale, "
        "t1.rounded_weight_scale)",
        "g2, t1.rounded_grad_output_scale, st1.fp8_grad_amax = swiglu_backward.rounded_by("
        'g3, s2.input, 0, st1.fp8_scale, 2, "e5m2", true)',
        # Forward has noted its magnitude.
        "x3, t3.rounded_input_scale, t3.unused = recompute_swiglu.rounded_by("
        'g5, s2.input, 0, st3.fp8_scale, 0, "e4m3", false)',
    ):
        assert f"  {line}\n" in text, text
    assert str(tops.Plan.parse(text)) == text


def test_what_others_see_stays_as_it_is() -> None:
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    kept = plan_text(block(tops.RMSNorm(64), recompute="none"), x, DELAYED)
    assert "x1, s0.rstd = rms_norm(x0" in kept and "quantize_values_scaled(x1, " in kept
    handed_out = plan_text(block(tops.RMSNorm(64), tops.MakeExtraOutput()), x, DELAYED)
    assert "x1, s0.rstd = rms_norm(x0" in handed_out and "quantize_values_scaled(x2" in handed_out
    # A product in float32 takes numbers, not values of codes.
    y = x.detach().float().requires_grad_()
    wide = plan_text(block(tops.RMSNorm(64)).float(), y, DELAYED)
    assert "x1, s0.rstd = rms_norm(x0" in wide and "quantize_dequantize_scaled(x1, " in wide


def states_of(module: torch.nn.Module) -> dict[str, Tensor]:
    states = module.state_dict().items()
    return {name: value.clone() for name, value in states if ".fp8_" in name}


def train(run: Any, module: tops.Sequential, steps: int = 4) -> list[Tensor]:
    """Outputs and gradients of a few steps, whose scales follow from those before."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        x, grad = torch.randn(2, 300, 64).bfloat16()
        x.requires_grad_()
        with tops.autocast(recipe=DELAYED):
            y = run(x)
        found += [y, *torch.autograd.grad(y, [x, *module.parameters()], grad)]
    return found


@pytest.mark.parametrize("name", ROUNDS_MAIN)
@pytest.mark.parametrize("recompute", ["cheap", "none"])
def test_as_op_by_op(name: str, recompute: str) -> None:
    """Where nothing is rounded in another op's pass: the same numbers, and the same scales."""
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        ops = ROUNDS_MAIN[name]()
        module = tops.Sequential(*ops, recompute=recompute).bfloat16()
        run = module if fused else functools.partial(functools.reduce, lambda y, op: op(y), ops)
        results = train(run, module)
        found.append([*results, *states_of(module).values()])
    for a, b in zip(*found, strict=True):
        assert equal(a, b)


@pytest.mark.parametrize("make", [tops.RMSNorm, tops.LayerNorm])
def test_a_block_gives_the_same_numbers(make: Any) -> None:
    """Where a value is kept, its rounding has a call of its own: the same numbers and scales."""
    found = []
    for recompute in ("cheap", "none"):
        torch.manual_seed(0)
        module = block(make(64), recompute=recompute)
        found.append([*train(module, module), *states_of(module).values()])
    for a, b in zip(*found, strict=True):
        assert equal(a, b)
