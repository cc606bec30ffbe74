"""An error names the op that a user wrote, and where it is, whatever kernel it failed in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import transformer_ops as tops


class Twice(tops.BasicOperation):
    """An op in Python, so that the plan of its group has Python steps."""

    def op_forward_compute(self, input_: Tensor, **unused: Any) -> tuple[Tensor, tuple[()]]:
        return 2 * input_, ()

    def op_forward_save_ctx(self, *unused: Any, **keywords: Any) -> None: ...

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor, tuple[()]]:
        return 2 * grad_output, ()


class Wide(tops.Linear):
    """A class of the user's."""


class Row(NamedTuple):
    """Modules of which one does not fit an input of 8 columns, and the error."""

    make: Callable[[], Any]
    message: str
    step: str  # that fails
    extra: tuple[int, ...] | None = None


INPUT = "[{}] input must have last dimension 6, got shape [2, 8]"
ROWS = {
    "second op": Row(
        lambda: tops.Sequential(tops.GELU(), tops.Linear(6, 4)),
        INPUT.format("Linear") + " (op 1 of the Sequential)",
        "linear_epilogue",
    ),
    "fused, behind a module of two ops": Row(
        lambda: tops.Sequential(tops.Linear(8, 8), tops.RMSNorm(8), tops.Linear(6, 4), tops.SiLU()),
        INPUT.format("Linear") + " (op 2 of the Sequential)",
        "linear_bias_activation",
    ),
    "extra input of a product": Row(
        lambda: tops.Sequential(tops.Linear(8, 4), tops.AddExtraInput()),
        "[AddExtraInput] extra_input must have shape [2, 4], got [2, 6] (op 1 of the Sequential)",
        "linear_epilogue",
        extra=(2, 6),
    ),
    "residual": Row(
        lambda: tops.Sequential(nn.Identity(), tops.Residual(tops.RMSNorm(8), tops.Linear(8, 4))),
        "[Residual] extra_input must have shape [2, 4], got [2, 8] (op 1 of the Sequential)",
        "linear_epilogue",
    ),
    "within a residual": Row(
        lambda: tops.Sequential(tops.GELU(), tops.Residual(tops.RMSNorm(8), tops.Linear(6, 8))),
        INPUT.format("Linear") + " (op 1.1 of the Sequential)",
        "linear_epilogue",
    ),
    "behind a plain module": Row(
        lambda: tops.Sequential(tops.GELU(), nn.Identity(), tops.SiLU(), tops.LayerNorm(6)),
        "[LayerNorm] input must end in dimensions [6], got shape [2, 8] (op 3 of the Sequential)",
        "LayerNorm",
    ),
    "of a pair": Row(
        lambda: tops.Sequential(tops.GELU(), tops.Linear(8, 7), tops.SwiGLU()),
        "[Linear and SwiGLU] the product must have a last dimension that is a multiple of 2, got "
        "shape [2, 7] (ops 1 and 2 of the Sequential)",
        "linear_bias_glu",
    ),
    "named": Row(
        lambda: tops.Sequential({"act": tops.GELU(), "out": Wide(6, 4)}),
        INPUT.format("Wide") + " (op out of the Sequential)",
        "linear_epilogue",
    ),
    "borrowed": Row(
        lambda: tops.Sequential(tops.GELU(), tops.view(nn.Linear(6, 4))),
        INPUT.format("Linear") + " (op 1 of the Sequential)",
        "linear_epilogue",
    ),
    "beside a Python op": Row(
        lambda: tops.Sequential(Twice(), tops.Linear(6, 4)),
        INPUT.format("Linear") + " (op 1 of the Sequential)",
        "linear_epilogue",
    ),
    "OperationFuser": Row(
        lambda: tops.OperationFuser([tops.GELU(), tops.Linear(6, 4)]),
        INPUT.format("Linear") + " (op 1 of the OperationFuser)",
        "linear_epilogue",
    ),
    "alone": Row(lambda: tops.Linear(6, 4), INPUT.format("Linear"), "linear_epilogue"),
    "of torch's own": Row(
        lambda: tops.Sequential(tops.GELU(), tops.Reshape((3, 5))),
        "[Reshape] shape '[3, 5]' is invalid for input of size 16 (op 1 of the Sequential)",
        "Reshape",
    ),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda module: module,
    "compiled": lambda module: torch.compile(module, fullgraph=True, backend="eager"),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROWS)
def test_forward(name: str, way: str, grad: bool) -> None:
    row = ROWS[name]
    module = row.make()
    x = torch.ones(2, 8, requires_grad=grad)
    extra = () if row.extra is None else (torch.ones(row.extra),)
    # Dynamo tells of the error in a text of its own, which ends with ours, and with a bracket.
    text = re.escape(row.message)
    pattern = f"^{text}$" if way == "eager" else rf"RuntimeError\(['\"]{text}['\"]\)"
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=pattern):
        WAYS[way](module)(x, *extra)
    if way == "eager" and row.step:
        groups = [module] if isinstance(module, tops.OperationFuser) else None
        if isinstance(module, tops.Sequential):
            groups = module._groups()
        if groups is not None:
            steps = [step.name for group in groups for step in group.plan().forward]
            assert row.step in steps


def test_each_of_two_equal_plans_says_its_own_place() -> None:
    """Their graphs have one text."""
    for modules, place in (((), 1), ((nn.Identity(),), 2), ((nn.Identity(), nn.Identity()), 3)):
        module = tops.Sequential(*modules, tops.GELU(), tops.Linear(6, 4))
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        with pytest.raises(RuntimeError, match=rf"\(op {place} of the Sequential\)"):
            compiled(torch.ones(2, 8))


def test_functorch() -> None:
    module = tops.Sequential(tops.GELU(), tops.Linear(6, 4))
    want = r"^\[Linear\] input must .* \(op 1 of the Sequential\)$"
    with pytest.raises(RuntimeError, match=want):
        torch.func.vmap(module)(torch.ones(2, 8))


def test_backward() -> None:
    module = tops.Sequential(tops.GELU(), tops.Linear(8, 4, accumulate_into_main_grad=True))
    weight: Any = module[1].weight
    weight.main_grad = torch.zeros(4, 8)
    y = module(torch.ones(2, 8, requires_grad=True))
    weight.main_grad = torch.zeros(4, 6)
    with pytest.raises(RuntimeError) as error:
        y.sum().backward()
    assert str(error.value).startswith("[Linear] weight.main_grad must have shape [4, 8] ")


def test_backward_of_a_collective() -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=2)
    x = torch.ones(2, 4, requires_grad=True)
    loss = tops.Sequential(tops.GELU(), tops.AllGather())(x).sum()
    torch.distributed.destroy_process_group()
    want = r"^\[AllGather\] process group .*, got none: .* \(op 1 of the Sequential\)$"
    with pytest.raises(RuntimeError, match=want):
        loss.backward()


def test_a_typed_op_by_itself_keeps_its_name() -> None:
    with pytest.raises(RuntimeError, match=r"^\[gelu\] input must be float16"):
        torch.ops.transformer_ops.gelu(torch.ones(2, 8, dtype=torch.int64))


def test_a_plan_that_is_only_text_names_its_ops() -> None:
    module = tops.Sequential(tops.GELU(), tops.Linear(8, 4))
    module(torch.ones(2, 8))
    (plan,) = module.plans()
    run_plan = torch.ops.transformer_ops.run_plan
    with pytest.raises(RuntimeError, match=r"^\[BasicLinear\] input must .* \(op 1 of the plan\)$"):
        run_plan(str(plan), torch.ones(2, 6), [], list(module.parameters()))
