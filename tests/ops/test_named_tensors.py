"""Extra tensors and parameters by name: a native op with an optional extra input, one that holds
integers, and an optional parameter, declared in a library of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import build_library
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.op import BasicOperation
from transformer_ops.plan.plan import Plan

pytestmark = pytest.mark.takes(seconds=15)

# y[r] = x[r] * probs[r] * weight[ids[r]]; without probs, or without a weight, its factor is 1.
SOURCE = """
#include <ATen/ops/embedding.h>
#include <ATen/ops/ones.h>

#include "op/op.h"

namespace transformer_ops {
namespace {

void check_ids(const Checks& check, const Tensor& ids, const Tensor& input) {
  TORCH_CHECK(ids.scalar_type() == at::kLong, "[", check.op(), "] ids must be int64, got ",
              ids.scalar_type());
  TORCH_CHECK(ids.sym_sizes() == input.sym_sizes().slice(0, input.dim() - 1), "[", check.op(),
              "] ids must have a number for each row, got shape ", ids.sym_sizes());
}

// What each row is multiplied by.
Tensor factor(const Tensor& like, const Tensor* probs, const Tensor* ids, const Tensor* weight) {
  Tensor product = at::ones({1}, like.options());
  if (probs != nullptr) product = probs->unsqueeze(-1);
  if (weight != nullptr) product = product * at::embedding(*weight, *ids);
  return product;
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor* probs,
                          const Tensor& ids, const Tensor* weight) {
  check.compute_dtype("input", input);
  check_ids(check, ids, input);
  return {like(input)};
}

Tensor forward_unfused(const Tensor& input, const Tensor* probs, const Tensor& ids,
                       const Tensor* weight) {
  return input * factor(input, probs, &ids, weight);
}

TensorSpecs backward_shape(const Tensor& grad_output, const Tensor*, const Tensor*, const Tensor*,
                           const Tensor*, std::array<bool, 3> output_mask) {
  const auto [wants_input, wants_probs, wants_weight] = output_mask;
  const TensorSpec none = absent(grad_output.scalar_type());
  TensorSpec probs = like(grad_output), weight = none;
  probs.sizes.pop_back();
  weight.sizes = {c10::SymInt(kRows), grad_output.sym_size(-1)};
  return {wants_input ? like(grad_output) : none, wants_probs ? probs : none,
          wants_weight ? weight : none};
}

void backward(const Tensor& grad_output, const Tensor* input, const Tensor* probs,
              const Tensor* ids, const Tensor* weight, std::array<bool, 3> output_mask,
              Tensor& grad_input, Tensor& grad_probs, Tensor& grad_weight) {
  const auto [wants_input, wants_probs, wants_weight] = output_mask;
  if (wants_input) grad_input.copy_(grad_output * factor(grad_output, probs, ids, weight));
  if (wants_probs) {
    grad_probs.copy_((grad_output * *input * factor(grad_output, nullptr, ids, weight)).sum(-1));
  }
  if (wants_weight) {
    const Tensor rows = grad_output * *input * factor(grad_output, probs, ids, nullptr);
    grad_weight.zero_().index_add_(0, ids->flatten(), rows.flatten(0, -2));
  }
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "ScaleRows",
                    .summary = "rows times a factor and a row of a table",
                    .parameters = {"weight"},
                    .extra_inputs = {"probs", "ids"},
                    .integers = {"ids"},
                    .slots = {{"input", {"probs", "weight"}},
                              {"probs", {"input", "weight"}},
                              {"ids", {"input", "probs", "weight"}},
                              {"weight", {"input", "probs"}}}},
    .forward = {.schema = "scale_rows(Tensor input, Tensor? probs, Tensor ids, Tensor? weight) -> "
                          "Tensor output",
                .shape = forward_shape,
                .bodies = {.decomposition = forward_unfused}},
    .backward = {.schema = "scale_rows_backward(Tensor grad_output, Tensor? input, Tensor? probs, "
                           "Tensor? ids, Tensor? weight, bool[3] output_mask) -> "
                           "(Tensor grad_input, Tensor grad_probs, Tensor grad_weight)",
                 .shape = backward_shape,
                 .bodies = {.cpu = backward}},
});

}  // namespace
}  // namespace transformer_ops
""".replace("kRows", "5")

ROWS = 5  # of the table
BOTH = list(itertools.product([True, False], repeat=2))


ScaleRows: Any  # the class, once its declaration is loaded


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("scale_rows")
    torch.ops.load_library(str(build_library(folder, "scale_rows", {"scale_rows": SOURCE})))

    class Loaded(BasicOperation, kind="ScaleRows"):
        """Rows times `probs` (or None) and the rows of `weight` (or None) that `ids` name."""

        def __init__(self, width: int, *, weight: bool = True) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(ROWS, width)) if weight else None

    global ScaleRows
    ScaleRows = Loaded


def block(weight: bool = True) -> tops.Sequential:
    op = ScaleRows(16, weight=weight)
    return tops.Sequential(tops.Linear(16, 16), op, tops.GELU(), tops.Linear(16, 8)).double()


def meaning(module: tops.Sequential, x: Tensor, probs: Tensor | None, ids: Tensor) -> Tensor:
    x = nn.functional.linear(x, module[0].weight, module[0].bias)
    if probs is not None:
        x = x * probs.unsqueeze(-1)
    if module[1].weight is not None:
        x = x * module[1].weight[ids]
    x = nn.functional.gelu(x, approximate="tanh")
    return nn.functional.linear(x, module[3].weight, module[3].bias)


def inputs(probs: bool, rows: int = 6) -> tuple[Tensor, Tensor | None, Tensor]:
    x = torch.randn(2, rows, 16, dtype=torch.float64, requires_grad=True)
    given = torch.rand(2, rows, dtype=torch.float64, requires_grad=True) if probs else None
    return x, given, torch.randint(0, ROWS, (2, rows))


def gradients(output: Tensor, module: nn.Module, tensors: Any) -> list[Tensor]:
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    wanted += [p for p in module.parameters() if p.requires_grad]
    return list(torch.autograd.grad(output.square().sum(), wanted))


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda module: module,
    "compiled": lambda module: torch.compile(module, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("probs", "weight"), BOTH)
def test_every_combination_of_absent_tensors(way: str, probs: bool, weight: bool) -> None:
    module = block(weight)
    run = WAYS[way](module)
    tensors = inputs(probs)
    torch.testing.assert_close(run(*tensors), meaning(module, *tensors))
    got = gradients(run(*tensors), module, tensors)
    want = gradients(meaning(module, *tensors), module, tensors)
    torch.testing.assert_close(got, want)


def test_none_and_a_tensor_in_turn() -> None:
    module = block()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for probs in (True, False, True):
        tensors = inputs(probs)
        want = meaning(module, *tensors)
        torch.testing.assert_close(module(*tensors), want)
        torch.testing.assert_close(compiled(*tensors), want)
    table, module[1].weight = module[1].weight, None
    for weight in (None, table):
        module[1].weight = weight
        torch.testing.assert_close(module(*tensors), meaning(module, *tensors))
        torch.testing.assert_close(compiled(*tensors), meaning(module, *tensors))


@pytest.mark.parametrize("frozen", ["input", "probs", "weight"])
def test_who_needs_no_gradient(frozen: str) -> None:
    module = tops.Sequential(ScaleRows(16)).double()
    x, probs, ids = inputs(True)
    assert probs is not None
    {"input": x, "probs": probs, "weight": module[0].weight}[frozen].requires_grad_(False)

    def plain() -> Tensor:
        return x * probs.unsqueeze(-1) * module[0].weight[ids]

    got = gradients(module(x, probs, ids), module, (x, probs, ids))
    torch.testing.assert_close(got, gradients(plain(), module, (x, probs, ids)))


@pytest.mark.parametrize(("probs", "weight"), BOTH)
def test_second_derivatives(probs: bool, weight: bool) -> None:
    module = tops.Sequential(ScaleRows(4, weight=weight), tops.GELU()).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    given = torch.rand(3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 4, 1])
    table = [module[0].weight.detach().clone().requires_grad_()] if weight else []

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        left = list(rest)
        extra = left.pop(0) if probs else None
        names = {"0.weight": left[0]} if weight else {}
        return torch.func.functional_call(module, names, (x, extra, ids))

    tensors = (x, *([given] if probs else []), *table)
    assert torch.autograd.gradcheck(run, tensors)
    assert torch.autograd.gradgradcheck(run, tensors)
    typed = torch.ops.transformer_ops.scale_rows
    extra, own = given if probs else None, table[0] if weight else None
    assert torch.autograd.gradgradcheck(lambda x: typed(x, extra, ids, own), (x,))


@pytest.mark.parametrize("probs", [True, False])
def test_export(probs: bool) -> None:
    module = block()
    tensors = inputs(probs)
    program = torch.export.export(module, tensors)
    torch.testing.assert_close(program.module()(*tensors), meaning(module, *tensors))
    lowered = program.run_decompositions()
    targets = {str(node.target) for node in lowered.graph.nodes}
    assert "transformer_ops.scale_rows.default" in targets
    torch.testing.assert_close(lowered.module()(*tensors), meaning(module, *tensors))


def test_vmap_and_forward_mode() -> None:
    module = tops.Sequential(ScaleRows(16)).double()
    x, probs, ids = inputs(True)
    assert probs is not None
    want = x * probs.unsqueeze(-1) * module[0].weight[ids]
    torch.testing.assert_close(torch.func.vmap(module)(x, probs, ids), want)
    _, tangent = torch.func.jvp(lambda p: module(x, p, ids), (probs,), (probs,))
    torch.testing.assert_close(tangent, want)


def test_the_plan_names_them() -> None:
    module = block()
    module(*inputs(True))
    text = str(module.plans()[0])
    assert "inputs e2.probs e2.ids\n" in text
    assert "gradients g0 de2.probs " in text and "de2.ids" not in text
    assert "scale_rows(x2, e2.probs, e2.ids, p2.weight)" in text
    assert Plan.parse(text) == module.plans()[0]
    module(*inputs(False))
    text = str(module.plans()[0])
    assert "inputs e2.ids\n" in text and "scale_rows(x2, none, e2.ids, p2.weight)" in text
    assert Plan.parse(text) == module.plans()[0]
    wrong = text.replace("inputs e2.ids", "inputs e2.0").replace("e2.ids", "e2.0")
    with pytest.raises(RuntimeError, match=r"must have the tensor that is named, got e2\.0"):
        Plan.parse(wrong)
    wrong = text.replace("gradients g0", "gradients g0 de2.ids")
    with pytest.raises(RuntimeError, match=r"must be of floating tensors, got de2\.ids"):
        Plan.parse(wrong)
    wrong = text.replace("inputs e2.ids\n", "")
    with pytest.raises(RuntimeError, match="must have extra inputs probs, ids, got none"):
        Plan.parse(wrong)


@pytest.mark.parametrize("way", WAYS)
def test_wrong_inputs(way: str) -> None:
    module = block()
    run = WAYS[way](module)
    x, probs, ids = inputs(True)
    with pytest.raises(Exception, match=r"must be (a tensor|tensors), got None"):
        run(x, probs, None)
    with pytest.raises(Exception, match="ids must hold integers, got float64"):
        run(x, probs, ids.double().requires_grad_())
    with pytest.raises(Exception, match="ids must have a number for each row"):
        run(x, probs, ids[:1])
    with pytest.raises(
        Exception, match=r"must be 2 for probs of op 1 .* and ids of op 1 .*, got 1"
    ):
        run(x, ids)
    torch.testing.assert_close(run(x, probs, ids), meaning(module, x, probs, ids))


def test_a_class_with_another_number_of_extra_inputs() -> None:
    class Fewer(ScaleRows):
        num_extra_inputs = 1

    with pytest.raises(ValueError, match=r"\[ScaleRows\] num_extra_inputs must be 2, got 1"):
        tops.Sequential(Fewer(16))(torch.randn(3, 16), torch.tensor([0, 1, 2]))


def test_what_a_channel_brings_has_to_fit() -> None:
    fork = tops.MakeExtraOutput().set_extra_output_channel(0, "probs", output_to_caller=False)
    scale = ScaleRows(1, weight=False).set_extra_input_channel(0, "probs")
    module = tops.Sequential(fork, tops.Linear(1, 1), scale).double()
    x = torch.randn(4, 1, dtype=torch.float64, requires_grad=True)
    ids = torch.zeros(4, dtype=torch.int64)
    # probs has a dimension too many: what does not fit is an error of the op that takes it.
    with pytest.raises(RuntimeError, match=r"output must have shape \[4, 1\], .*\(op 2 of the S"):
        module(x, ids).sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_python_fusion_over_it(way: str) -> None:
    class Forward(tops.FusedOperation):
        def fuser_forward_compute(
            self, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
        ) -> Any:
            (probs, ids), _ = basic_op_extra_inputs
            weight = self.basic_ops[0].weight
            scaled = input_ if probs is None else input_ * probs.unsqueeze(-1)
            scaled = scaled * weight[ids]
            return scaled * 2, [(), ()], (input_, probs, ids, weight)

        def fuser_forward_save_ctx(
            self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
        ) -> None:
            basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    def fuse(ops: Any, **unused: Any) -> Any:
        return [Forward(ops)] if len(ops) == 2 else ops

    module = tops.Sequential(ScaleRows(16), tops.ConstantScale(2.0)).double()
    for probs in (True, False):
        x, given, ids = inputs(probs)
        want = 2 * x * (1 if given is None else given.unsqueeze(-1)) * module[0].weight[ids]
        with tops.register_forward_fusion(fuse):
            got = WAYS[way](module)(x, given, ids)
            assert "Forward" in str(module.explain())
            found = gradients(got, module, (x, given, ids))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(found, gradients(want, module, (x, given, ids)))
