"""<op>.rounded: ops that round their first result on the way, as a product under a recipe takes it.

What they give is, bit for bit, what `quantize_dequantize` makes of what the op gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_calls import plan_op
from torch import Tensor

import transformer_ops as tops
from transformer_ops import _C

OPS = torch.ops.transformer_ops
ROUNDED = ".rounded"
TYPED = [name for pair in _C.typed_op_pairs() for name in pair if name] + _C.plan_ops()


def rounds(name: str) -> bool:
    try:
        _C.typed_op_schema(name + ROUNDED)
    except RuntimeError:
        return False
    return True


NAMES = sorted({name for name in TYPED if rounds(name)})
# (of the result, of its columns): blocks of rows, of columns, of both; rows of a block 1, 32, 128.
FORMATS = [
    ("mx e4m3", ""),
    ("mx e4m3", "mx e4m3 32x1"),
    ("e5m2 1x128", "e5m2 128x1"),
    ("e4m3 128x128", ""),
    ("int8 1x32", "mx e5m2 32x1"),
]
FORMAT_IDS = [f"{rows}, {columns or 'none'}" for rows, columns in FORMATS]


def forward_of(name: str) -> str:
    return name.removeprefix("recompute_").removesuffix("_backward")


def op_of(name: str) -> Any:
    """An op of torch, or one that plans alone call."""
    is_of_plans = name.startswith("recompute_") or "." in name
    return plan_op(name) if is_of_plans else getattr(OPS, name).default


def schema_of(name: str) -> Any:
    return op_of(name)._schema


def attribute(name: str, type: str) -> Any:
    """A valid value of an argument that is no tensor."""
    if name.startswith("save_") or type == "List[bool]":
        return [True, True] if type == "List[bool]" else True
    known = {"eps": 1e-5, "scale": 0.7, "glu_interleave_size": 0, "zero_centered_gamma": False}
    return known.get(name, 1.5)


def arguments(
    name: str, x: Tensor, known: dict[str, Any] | None = None, dims: int = 1
) -> list[Any]:
    """The arguments of an op for the input `x`; `known` has the results of its forward by name. A
    norm is over the last `dims` dimensions."""
    numbers, normalized = torch.Generator().manual_seed(3), x.shape[x.dim() - dims :]

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=numbers).to(x.dtype)

    makers = {
        "input": lambda: x,
        "extra_input": lambda: randn(*x.shape),
        "grad_output": lambda: randn(*(known or {})["output"].shape),
        "normalized_shape": lambda: list(normalized),
        "weight": lambda: randn(*normalized),
        "bias": lambda: randn(*normalized),
        "gamma": lambda: randn(*x.shape[-1:]),
        "scales": lambda: randn(*x.shape[:-1]).float(),
    }
    values = []
    for argument in schema_of(name).arguments:
        if known is not None and argument.name in known:
            values.append(known[argument.name])
        elif argument.name in makers:
            values.append(makers[argument.name]())
        else:
            values.append(attribute(argument.name, str(argument.type)))
    return values


def call_of(name: str, x: Tensor, dims: int = 1) -> list[Any]:
    """Arguments of the op `name`: of a backward, those that follow from its forward."""
    forward = forward_of(name)
    taken = arguments(forward, x, dims=dims)
    if forward == name:
        return taken
    results = op_of(forward)(*taken)
    results = results if isinstance(results, tuple) else (results,)
    schema = schema_of(forward)
    known = {argument.name: value for argument, value in zip(schema.arguments, taken, strict=True)}
    known |= {result.name: value for result, value in zip(schema.returns, results, strict=True)}
    return arguments(name, x, known, dims)


def check(name: str, x: Tensor, formats: tuple[str, str], dims: int = 1) -> None:
    taken = call_of(name, x, dims)
    copies = [value.clone() if isinstance(value, Tensor) else value for value in taken]
    want = op_of(name)(*copies)
    first, *rest = want if isinstance(want, tuple) else (want,)
    *got, columns = op_of(name + ROUNDED)(*taken, *formats)
    dtype = str(first.dtype).removeprefix("torch.")
    rounded = [OPS.quantize_dequantize(first, format, dtype) for format in formats if format]
    for a, b in zip([got[0], columns][: len(rounded)], rounded, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    assert formats[1] or columns.numel() == 0
    for a, b in zip(got[1:], rest, strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def test_ops_that_give_rows_round_them() -> None:
    # Each op made of rows; sums over rows and what is drawn at random are not.
    for name in ("gelu", "relu", "swiglu", "rms_norm", "layer_norm", "add_rms_norm", "bias"):
        assert name in NAMES
    assert not {"linear", "dropout", "rms_norm_backward", "bias_backward"} & set(NAMES)
    assert len(NAMES) >= 50


@pytest.mark.parametrize("formats", FORMATS, ids=FORMAT_IDS)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_op_and_then_the_rounding(name: str, formats: tuple[str, str]) -> None:
    # Many bands of rows, of which the last is no whole one, nor are the last blocks.
    check(name, torch.randn(2, 301, 1056).bfloat16(), formats)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", ["silu", "swiglu_backward", "add_layer_norm", "recompute_rms_norm"]
)
def test_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    check(name, torch.randn(2, 301, 1056).to(dtype), ("mx e4m3", "mx e4m3 32x1"))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (3, 0, 64), (2, 3, 5, 64)], ids=str)
@pytest.mark.parametrize("name", ["gelu", "swiglu", "rms_norm", "srelu_backward"])
def test_few_rows_and_many_dimensions(name: str, shape: tuple[int, ...]) -> None:
    check(name, torch.randn(shape).bfloat16(), ("mx e4m3", "e4m3 128x1"))


def test_numbers_that_are_none_stay_in_their_block() -> None:
    x = torch.randn(700, 1056).bfloat16()
    x[3, 5], x[400, 900] = float("nan"), float("inf")
    for formats in FORMATS:
        check("silu", x, formats)


def test_norms_over_several_dimensions() -> None:
    for formats in FORMATS:
        check("rms_norm", torch.randn(301, 4, 256).bfloat16(), formats, dims=2)


def test_strides_and_arguments_that_are_not_to_be_written() -> None:
    x = torch.randn(1056, 700).bfloat16().t()
    before = x.clone()
    got, _ = op_of("silu.rounded")(x, "mx e4m3", "")
    assert torch.equal(got, OPS.quantize_dequantize(OPS.silu(x), "mx e4m3", "bfloat16"))
    assert torch.equal(x, before)


@pytest.mark.parametrize("format", ["e4m3", "nvfp4", "fp8", ""])
def test_a_format_must_be_of_blocks_alone(format: str) -> None:
    text = rf"\[silu.rounded\] format must be one whose scales are those of blocks, got '{format}'"
    x = torch.randn(2, 32)
    with pytest.raises(RuntimeError, match=text):
        op_of("silu.rounded")(x, format, "")
    if format:
        with pytest.raises(RuntimeError, match=text):
            op_of("silu.rounded")(x, "mx e4m3", format)


def test_shapes_without_memory() -> None:
    x = torch.empty(3, 64, device="meta", dtype=torch.bfloat16)
    output, columns = op_of("swiglu.rounded")(x, 0, "mx e4m3", "mx e4m3 32x1")
    assert output.shape == columns.shape == (3, 32) and columns.dtype == torch.bfloat16
    assert op_of("swiglu.rounded")(x, 0, "mx e4m3", "")[1].shape == (0,)


# ---- in plans


MXFP8 = tops.recipe.MXFP8BlockScaling()


def plan_text(module: tops.Sequential, x: Tensor, recipe: tops.recipe.Recipe = MXFP8) -> str:
    with tops.autocast(recipe=recipe):
        module(x)
    return str(module.plans()[0])


def block(*head: tops.FusibleOperation, **kwargs: Any) -> tops.Sequential:
    return tops.Sequential(
        *head, tops.Linear(64, 128, bias=False), tops.SwiGLU(), tops.Linear(64, 64), **kwargs
    ).bfloat16()


def test_plans_round_where_a_value_is_made() -> None:
    text = plan_text(block(tops.RMSNorm(64)), torch.randn(8, 64).bfloat16().requires_grad_())
    rounded = 'rms_norm.rounded(x0, p0.weight, [64], 1e-05, false, "mx e4m3", "")'
    assert f"x1, s0.rstd, t1.unused = {rounded}" in text
    assert "x2 = linear(x1, t1.rounded_weight)" in text
    assert "g2, t1.rounded_grad_output_columns = swiglu_backward.rounded(g3, " in text
    assert 'recompute_swiglu.rounded(g5, s2.input, 0, "mx e4m3 32x1", "")' in text


def test_what_others_see_stays_as_it_is() -> None:
    x = torch.randn(8, 64).bfloat16().requires_grad_()
    # Kept for backward; handed to the caller; read by a second op.
    kept = plan_text(block(tops.RMSNorm(64), recompute="none"), x)
    assert "x1, s0.rstd = rms_norm(x0" in kept and "quantize_dequantize(x1, " in kept
    handed_out = plan_text(block(tops.RMSNorm(64), tops.MakeExtraOutput()), x)
    assert "x1, s0.rstd = rms_norm(x0" in handed_out and "quantize_dequantize(x2, " in handed_out
    last = plan_text(tops.Sequential(tops.Linear(64, 64), tops.GELU()).bfloat16(), x)
    assert "gelu.rounded" not in last


ROUNDS_MAIN: dict[str, Callable[[], list[Any]]] = {
    "last": lambda: [tops.GELU(), tops.Quantize()],
    "first": lambda: [tops.Quantize(forward=True, backward=True), tops.GELU()],
    "between": lambda: [tops.RMSNorm(64), tops.Quantize(), tops.Linear(64, 64)],
    "gradient": lambda: [
        tops.Linear(64, 64),
        tops.Quantize(forward=False, backward=True),
        tops.GELU(),
        tops.Linear(64, 64),
    ],
    "both": lambda: [
        tops.Linear(64, 128, bias=False),
        tops.SwiGLU(),
        tops.Quantize(forward=True, backward=True),
        tops.Linear(64, 64, bias=False),
    ],
}


@pytest.mark.parametrize("recompute", ["cheap", "none"])
@pytest.mark.parametrize(
    "recipe", [tops.recipe.MXFP8BlockScaling(), tops.recipe.Float8BlockScaling()]
)
@pytest.mark.parametrize("name", ROUNDS_MAIN)
def test_an_op_that_rounds_its_main_tensor(name: str, recipe: Any, recompute: str) -> None:
    """What it gives is a boundary of the plan, and no operand of a product: the same numbers as op
    by op, where nothing is rounded in another op's pass."""
    ops = ROUNDS_MAIN[name]()
    module = tops.Sequential(*ops, recompute=recompute).bfloat16()
    x, grad = torch.randn(300, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    found = []
    for run in (module, lambda x: functools.reduce(lambda y, op: op(y), ops, x)):
        leaf = x.clone().requires_grad_()
        with tops.autocast(recipe=recipe):
            output = run(leaf)
        found.append([output, *torch.autograd.grad(output, [leaf, *module.parameters()], grad)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recompute", ["cheap", "none"])
def test_a_block_gives_the_same_numbers(recompute: str) -> None:
    """Where a value is kept, its rounding has an op of its own: the same numbers, both ways."""
    module = block(tops.LayerNorm(64), recompute="cheap")
    other = block(tops.LayerNorm(64), recompute=recompute)
    other.load_state_dict(module.state_dict())
    x, grad = torch.randn(300, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    found = []
    for each in (module, other):
        for recipe in (tops.recipe.MXFP8BlockScaling(), tops.recipe.Float8BlockScaling()):
            leaf = x.clone().requires_grad_()
            with tops.autocast(recipe=recipe):
                output = each(leaf)
            gradients = torch.autograd.grad(output, [leaf, *each.parameters()], grad)
            found.append([output, *gradients])
    for a, b in zip(found[0] + found[1], found[2] + found[3], strict=True):
        assert torch.equal(a, b)
