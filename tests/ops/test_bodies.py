"""Bodies, shape rules and meanings are functions of what their schema says (csrc/op/body.h)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import saved_tensors
from libraries import build_library
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.op import BasicOperation

pytestmark = pytest.mark.takes(seconds=25)

CSRC = Path(__file__).parents[2] / "csrc"

WRONG = """
#include "op/op.h"

namespace transformer_ops {
namespace {

void body(const Tensor& input, float p, Tensor& output) { output.copy_(input); }

[[maybe_unused]] const bool registered = register_op(
    {.forward = {.schema = "wrong_body(Tensor input, Tensor? bias, float p) -> Tensor output",
                 .bodies = {.cpu = body}}});

}  // namespace
}  // namespace transformer_ops
"""


def test_a_body_that_differs_from_its_schema_is_an_error_at_load(tmp_path: Path) -> None:
    source = WRONG.replace("float p, Tensor& output", "double p, Tensor& output")
    library = build_library(tmp_path, "wrong_body", {"wrong_body": source})
    script = f"import torch, transformer_ops; torch.ops.load_library({str(library)!r})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode != 0
    assert (
        "[wrong_body] cpu must be void(const Tensor& input, const Tensor* bias, double p, "
        "Tensor& output) as the schema 'wrong_body(Tensor input, Tensor? bias, float p) -> "
        "Tensor output' says, got void(const Tensor&, double, Tensor&)"
    ) in run.stderr


def test_a_type_that_no_schema_has_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        build_library(tmp_path, "float_body", {"float_body": WRONG})


def test_nothing_is_read_by_number() -> None:
    """Kernel wrappers read no argument or result of a typed op by its number."""
    by_number = re.compile(
        r"\bArgs\b|\bargs\.|\bargs\[|\bresults\[\d\]|\.(flag|number|text|integer|tensor)\(\d"
    )
    files = [
        path
        for folder in ("ops", "fusions", "wrappers", "quantization")
        for path in (CSRC / folder).iterdir()
    ]
    assert len(files) > 50
    found = [
        f"{path.name}: {line}"
        for path in files
        for line in path.read_text(encoding="utf-8").splitlines()
        if by_number.search(line)
    ]
    assert found == []


# ---- what a declaration leaves out: shape rule, bodies and backward of y = x * weight * p

PLAIN = """
#include "op/op.h"

namespace transformer_ops {
namespace {

Tensor scale_columns(const Tensor& input, const Tensor* weight, double p) {
  return weight != nullptr ? input * *weight * p : input * p;
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "ScaleColumns",
                    .summary = "x * weight * p",
                    .parameters = {"weight"},
                    .attributes = {"p"},
                    .slots = {{"input"}}},
    .forward = {.schema = "scale_columns(Tensor input, Tensor? weight, float p) -> Tensor output",
                .bodies = {.decomposition = scale_columns}},
});

}  // namespace
}  // namespace transformer_ops
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The class of that op."""
    folder = tmp_path_factory.mktemp("scale_columns")
    torch.ops.load_library(str(build_library(folder, "scale_columns", {"scale_columns": PLAIN})))

    class ScaleColumns(BasicOperation, kind="ScaleColumns"):
        """`x * weight * p`; without a weight, its factor is 1."""

        def __init__(self, width: int | None, p: float) -> None:
            super().__init__()
            self.weight = None if width is None else nn.Parameter(torch.randn(width))
            self.p = p

    return ScaleColumns


def test_the_backward_op_is_derived(plain: Any) -> None:
    schema = torch.ops.transformer_ops.scale_columns_backward.default._schema
    assert str(schema) == (
        "transformer_ops::scale_columns_backward(Tensor grad_output, Tensor input, "
        "Tensor? weight, float p, bool[2] output_mask) -> (Tensor grad_input, Tensor grad_weight)"
    )


def gradients(module: Any, x: Tensor) -> list[Tensor]:
    inputs = [t for t in (x, *module.parameters()) if t.requires_grad]
    return list(torch.autograd.grad(module(x).square().sum(), inputs))


@pytest.mark.parametrize(
    ("width", "frozen"), [(8, "nothing"), (8, "weight"), (8, "input"), (None, "nothing")]
)
def test_a_derived_backward_is_right(plain: Any, width: int | None, frozen: str) -> None:
    op = plain(width, 3.0).double()
    if frozen == "weight":
        op.requires_grad_(False)
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=frozen != "input")

    def meaning(x: Tensor) -> Tensor:
        return x * (1 if op.weight is None else op.weight) * 3

    torch.testing.assert_close(op(x), meaning(x))
    inputs = [t for t in (x, *op.parameters()) if t.requires_grad]
    want = torch.autograd.grad(meaning(x).square().sum(), inputs)
    torch.testing.assert_close(gradients(op, x), list(want))
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, x), list(want))
    if x.requires_grad:
        assert torch.autograd.gradgradcheck(op, (x,))


def test_a_derived_backward_keeps_its_slots_alone(plain: Any) -> None:
    op = plain(8, 3.0)
    x = torch.randn(4, 8, requires_grad=True)
    with saved_tensors() as kept:
        op(x)
    assert op.weight is not None
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), op.weight.data_ptr()}


def test_a_derived_typed_op_is_like_any_other(plain: Any) -> None:
    typed = torch.ops.transformer_ops.scale_columns
    x, weight = (torch.randn(*size, dtype=torch.float64) for size in ((4, 8), (8,)))
    x.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: typed(x, w, 2.0), (x, weight))
    assert torch.autograd.gradgradcheck(lambda x, w: typed(x, w, 2.0), (x, weight))
    torch.library.opcheck(typed.default, (x, weight, 2.0))
    backward = torch.ops.transformer_ops.scale_columns_backward
    torch.library.opcheck(
        backward.default, (x.detach(), x.detach(), weight.detach(), 2.0, [True, True])
    )
    with pytest.raises(
        RuntimeError, match=r"\[scale_columns_backward\] grad_output must have shape"
    ):
        backward(x[:2], x, weight, 2.0, [True, True])
    with pytest.raises(RuntimeError, match=r"\[scale_columns\] input must be float16"):
        typed(torch.ones(4, 8, dtype=torch.int64), None, 2.0)


def test_it_fuses_with_nothing_and_stands_between_products(plain: Any) -> None:
    module = tops.Sequential(tops.Linear(8, 8), plain(8, 2.0), tops.Linear(8, 8)).double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    assert [step.name for step in module.plans()[0].backward][1:2] == ["ScaleColumns"]
