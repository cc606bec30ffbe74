"""`RMSNorm(eps=None)`: the machine epsilon of the dtype that it computes in, as in `nn.RMSNorm`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from user_fusions import ScaleShift

import transformer_ops as tops
from transformer_ops import _C
from transformer_ops.recipe import MXFP8BlockScaling

pytestmark = pytest.mark.takes(seconds=20)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EPS = {dtype: torch.finfo(torch.float32).eps for dtype in DTYPES}
EPS[torch.float64] = torch.finfo(torch.float64).eps

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def small(dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers whose squares are about as large as epsilon."""
    return (torch.randn(*shape, dtype=torch.float64) * EPS[dtype] ** 0.5).to(dtype)


def results(module: Callable[..., Any], leaves: list[Tensor], x: Tensor, *extra: Tensor) -> Any:
    """Outputs, and gradients of inputs and leaves."""
    given = [tensor.clone().requires_grad_() for tensor in (x, *extra)]
    outputs = module(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum(output.float().mul(1 + k).square().sum() for k, output in enumerate(outputs))
    assert isinstance(loss, Tensor)
    return [*(o.detach() for o in outputs), *torch.autograd.grad(loss, [*given, *leaves])]


# ---- against torch


@every_dtype
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_it_is_that_of_torch(backend: str | None, dtype: torch.dtype) -> None:
    op, plain = tops.RMSNorm(64, eps=None, dtype=dtype), nn.RMSNorm(64, dtype=dtype)
    x = small(dtype, 5, 64)
    call: Any = op if backend is None else torch.compile(op, backend=backend, fullgraph=True)
    found, want = results(call, [op.weight], x), results(plain, [plain.weight], x)
    fixed = tops.RMSNorm(64, dtype=dtype)(x)
    # Gradients of the input are as large as 1 / sqrt(eps).
    tight = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 3e-2)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tight, atol=tight * b.abs().max().item())
    # The default would not be.
    assert (fixed - want[0]).norm() > 0.5 * want[0].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_under_torch_autocast(dtype: torch.dtype) -> None:
    op, plain = tops.RMSNorm(64, eps=None, dtype=dtype), nn.RMSNorm(64, dtype=dtype)
    x = small(dtype, 5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found, want = op(x), plain(x)
    torch.testing.assert_close(found.to(want.dtype), want, rtol=1e-2, atol=1e-2)


def test_behind_a_python_op_whose_dtype_no_plan_knows() -> None:
    for dtype in DTYPES:
        scale = ScaleShift(64).to(dtype)
        norm, plain = tops.RMSNorm(64, eps=None, dtype=dtype), nn.RMSNorm(64, dtype=dtype)
        x = small(dtype, 5, 64)
        found = tops.Sequential(scale, norm)(x)
        torch.testing.assert_close(found, plain(scale(x)), rtol=2e-2, atol=2e-2)


# ---- in fusions: the number itself gives the same bits


class Row(NamedTuple):
    """A fused step that has the norm in it, and how often it is there forward and backward."""

    rule: str
    make: Callable[[float | None], list[tops.FusibleOperation]]
    extra_inputs: int = 0
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def norm(eps: float | None) -> tops.RMSNorm:
    return tops.RMSNorm(32, eps=eps)


def with_residual(eps: float | None) -> list[tops.FusibleOperation]:
    fork = tops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    join = tops.AddExtraInput().set_extra_input_channel(0, "x")
    return [tops.SiLU(), fork, norm(eps), tops.SiLU(), join]


def mxfp8() -> AbstractContextManager[Any]:
    return tops.autocast(recipe=MXFP8BlockScaling())


ROWS = [
    Row("RMSNorm", lambda eps: [norm(eps), tops.SiLU()]),
    Row("add_rms_norm", lambda eps: [tops.AddExtraInput(), norm(eps)], extra_inputs=1),
    Row(
        "add_rms_norm",
        lambda eps: [tops.AddExtraInput(), tops.MakeExtraOutput(), norm(eps)],
        extra_inputs=1,
    ),
    Row("rms_norm_residual", with_residual),
    Row("RMSNorm", lambda eps: [norm(eps), tops.Linear(32, 32)], around=mxfp8),
    Row(
        "add_rms_norm",
        lambda eps: [tops.AddExtraInput(), norm(eps), tops.Linear(32, 32)],
        extra_inputs=1,
        around=mxfp8,
    ),
]


def test_every_fusion_with_the_norm_has_a_row() -> None:
    rules = {row["name"] for row in _C.rules() if any("RMSNorm" in p for p in row["pattern"])}
    assert rules and rules == {row.rule for row in ROWS} - {"RMSNorm"}


@every_dtype
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("row", range(len(ROWS)))
def test_a_fusion_computes_with_it(row: int, compiled: bool, dtype: torch.dtype) -> None:
    rule, make, extra_inputs, around = ROWS[row]
    module = tops.Sequential(*make(None)).to(dtype)
    number = tops.Sequential(*make(EPS[dtype])).to(dtype)
    number.load_state_dict(module.state_dict())
    tensors = [small(dtype, 6, 32) for _ in range(1 + extra_inputs)]
    found = []
    for made in (module, number):
        call: Any = torch.compile(made, backend="aot_eager", fullgraph=True) if compiled else made
        with around():
            found.append(results(call, list(made.parameters()), *tensors))
        with around():
            results(made, [], *tensors)
        (plan,) = made.plans()
        assert rule in [step.name for step in (*plan.forward, *plan.backward)]
        assert str(tops.Plan.parse(str(plan))) == str(plan)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


# ---- as an attribute


def test_a_plan_serves_both_dtypes() -> None:
    module = tops.Sequential(tops.RMSNorm(8, eps=None))
    module(torch.randn(2, 8))
    text = str(module.plans()[0])
    assert "none" in text and "eps" not in text
    for dtype in (torch.float32, torch.float64):
        weight, x = torch.ones(8, dtype=dtype), small(dtype, 2, 8)
        outputs = torch.ops.transformer_ops.run_plan(text, x, [], [weight])
        torch.testing.assert_close(outputs[0], nn.RMSNorm(8, dtype=dtype)(x))


def test_it_is_set_and_copied_as_others_are() -> None:
    module, x = tops.Sequential(tops.RMSNorm(8)), small(torch.float32, 2, 8)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for eps in (1e-5, None, 0.5, None):
        module[0].eps = eps
        want = nn.functional.rms_norm(x, (8,), eps=eps)
        for call in (module, compiled, copy.deepcopy(module)):
            torch.testing.assert_close(call(x), want)
    assert "eps=None" in repr(module[0])


def test_second_derivatives() -> None:
    op = tops.RMSNorm(8, eps=None, dtype=torch.float64)
    x = small(torch.float64, 2, 8).requires_grad_()
    first = []
    for call in (op, nn.RMSNorm(8, dtype=torch.float64)):
        (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        first.append(torch.autograd.grad(grad.square().sum(), x)[0])
    torch.testing.assert_close(
        first[0], first[1], rtol=1e-8, atol=1e-8 * first[1].abs().max().item()
    )
