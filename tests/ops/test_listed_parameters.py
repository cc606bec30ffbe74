"""Parameters that are lists of tensors: native ops with one list for which the count is an
attribute, one more that may be missing, and an integer extra input, in a library of their own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import build_library
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops
from transformer_ops.op import BasicOperation
from transformer_ops.plan.plan import Plan

pytestmark = pytest.mark.takes(seconds=35)

# y[r] = x[r] * weight[ids[r]] + shift[ids[r]]; without shifts, nothing is added.
SOURCE = """
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include "op/op.h"

namespace transformer_ops {
namespace {

void check_list(const Checks& check, const char* name, const Tensors& list, const Tensor& input) {
  for (const Tensor& tensor : list) {
    check.spec(name, tensor, {{input.sym_size(-1)}, input.scalar_type()});
  }
}

TensorSpecs forward_shape(const Checks& check, const Tensor& input, const Tensor& ids,
                          const Tensors& weight, const Tensors& shift, int64_t count) {
  check.compute_dtype("input", input);
  TORCH_CHECK(std::ssize(weight) == count, "[", check.op(), "] weight must have ", count,
              " tensors, got ", weight.size());
  check_list(check, "weight", weight, input);
  check_list(check, "shift", shift, input);
  return {like(input)};
}

Tensor forward(const Tensor& input, const Tensor& ids, const Tensors& weight,
               const Tensors& shift, int64_t) {
  const Tensor scaled = input * at::stack(weight).index({ids});
  return shift.empty() ? scaled : scaled + at::stack(shift).index({ids});
}

TensorSpecs backward_shape(const Tensor& grad_output, const Tensor*, const Tensor&,
                           const Tensors&, const Tensors&, int64_t count,
                           std::array<bool, 3> output_mask) {
  const auto [wants_input, wants_weight, wants_shift] = output_mask;
  const TensorSpec row{{grad_output.sym_size(-1)}, grad_output.scalar_type()};
  const std::vector<TensorSpec> rows(count, row);
  return {wants_input ? like(grad_output) : absent(grad_output.scalar_type()),
          list_of(wants_weight ? rows : std::vector<TensorSpec>()),
          list_of(wants_shift ? rows : std::vector<TensorSpec>())};
}

void backward(const Tensor& grad_output, const Tensor* input, const Tensor& ids,
              const Tensors& weight, const Tensors&, int64_t count,
              std::array<bool, 3> output_mask, Tensor& grad_input, Tensors& grad_weight,
              Tensors& grad_shift) {
  const auto [wants_input, wants_weight, wants_shift] = output_mask;
  if (wants_input) grad_input.copy_(grad_output * at::stack(weight).index({ids}));
  for (int64_t k = 0; k < count; ++k) {
    const Tensor is_own = (ids == k).unsqueeze(-1);
    const Tensor rows = at::where(is_own, grad_output, at::zeros_like(grad_output));
    if (wants_weight) grad_weight[k].copy_((rows * *input).flatten(0, -2).sum(0));
    if (wants_shift) grad_shift[k].copy_(rows.flatten(0, -2).sum(0));
  }
}

OpDeclaration declaration_of(const char* kind) {
  return {.kind = kind,
          .summary = "rows times a weight and plus a shift of their own",
          .parameters = {"weight", "shift"},
          .lists = {{"weight", "count"}, {"shift", "count", "", /*optional=*/true}},
          .attributes = {"count"},
          .extra_inputs = {"ids"},
          .integers = {"ids"}};
}

OpDeclaration with_slots() {
  OpDeclaration row = declaration_of("ChooseRows");
  row.slots = {{"input", {"weight"}}, {"ids"}, {"weight", {"input"}}};
  return row;
}

OpDeclaration derived() {
  OpDeclaration row = declaration_of("DerivedRows");
  row.slots = {{"input"}, {"ids"}};
  return row;
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = with_slots(),
    .forward = {.schema = "choose_rows(Tensor input, Tensor ids, Tensor[] weight, "
                          "Tensor[] shift, int count) -> Tensor output",
                .shape = forward_shape,
                .bodies = {.decomposition = forward}},
    .backward = {.schema = "choose_rows_backward(Tensor grad_output, Tensor? input, Tensor ids, "
                           "Tensor[] weight, Tensor[] shift, int count, bool[3] output_mask) -> "
                           "(Tensor grad_input, Tensor[] grad_weight, Tensor[] grad_shift)",
                 .shape = backward_shape,
                 .bodies = {.cpu = backward}},
});

// The same with the backward that follows from its meaning.
[[maybe_unused]] const bool also_registered = register_op({
    .declaration = derived(),
    .forward = {.schema = "derived_rows(Tensor input, Tensor ids, Tensor[] weight, "
                          "Tensor[] shift, int count) -> Tensor output",
                .shape = forward_shape,
                .bodies = {.decomposition = forward}},
});

}  // namespace
}  // namespace transformer_ops
"""

COUNT = 3
OPS = {"ChooseRows": "choose_rows", "DerivedRows": "derived_rows"}
KINDS = tuple(OPS)
classes: dict[str, Any] = {}


class Listed:
    """The parameters `weight0`, ... and, unless they are None, `shift0`, ..."""

    count: int

    def __init__(self, width: int, *, count: int = COUNT, shift: bool = True) -> None:
        super().__init__()
        self.count = count
        for k in range(count):
            setattr(self, f"weight{k}", nn.Parameter(torch.randn(width)))
        for k in range(count):
            setattr(self, f"shift{k}", nn.Parameter(torch.randn(width)) if shift else None)


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("choose_rows")
    torch.ops.load_library(str(build_library(folder, "choose_rows", {"choose_rows": SOURCE})))

    class ChooseRows(Listed, BasicOperation, kind="ChooseRows"):
        pass

    class DerivedRows(Listed, BasicOperation, kind="DerivedRows"):
        pass

    classes.update(ChooseRows=ChooseRows, DerivedRows=DerivedRows)


def block(kind: str = "ChooseRows", **options: Any) -> tops.Sequential:
    op = classes[kind](16, **options)
    return tops.Sequential(tops.Linear(16, 16), op, tops.GELU(), tops.Linear(16, 8)).double()


def tensors_of(op: Any, name: str) -> list[Tensor]:
    found = [getattr(op, f"{name}{k}") for k in range(op.count)]
    return [] if found[0] is None else found


def rows(op: Any, x: Tensor, ids: Tensor) -> Tensor:
    y = x * torch.stack(tensors_of(op, "weight"))[ids]
    shifts = tensors_of(op, "shift")
    return y + torch.stack(shifts)[ids] if shifts else y


def meaning(module: tops.Sequential, x: Tensor, ids: Tensor) -> Tensor:
    x = nn.functional.linear(x, module[0].weight, module[0].bias)
    x = nn.functional.gelu(rows(module[1], x, ids), approximate="tanh")
    return nn.functional.linear(x, module[3].weight, module[3].bias)


def inputs(count: int = COUNT, size: int = 6) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, size, 16, dtype=torch.float64, requires_grad=True)
    return x, torch.randint(0, count, (2, size))


def gradients(output: Tensor, module: nn.Module, x: Tensor) -> list[Tensor]:
    wanted = [t for t in (x, *module.parameters()) if t.requires_grad]
    return list(torch.autograd.grad(output.square().sum(), wanted))


WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda module: module,
    "aot_eager": lambda module: torch.compile(module, fullgraph=True, backend="aot_eager"),
    "inductor": lambda module: torch.compile(module, fullgraph=True),
    "checkpoint": lambda module: lambda *tensors: checkpoint(module, *tensors, use_reentrant=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_values_and_gradients(way: str, kind: str, shift: bool, count: int) -> None:
    module = block(kind, count=count, shift=shift)
    run = WAYS[way](module)
    for size in (6, 4):
        x, ids = inputs(count, size)
        output = run(x, ids)
        torch.testing.assert_close(output, meaning(module, x, ids))
        got = gradients(output, module, x)
        torch.testing.assert_close(got, gradients(meaning(module, x, ids), module, x))


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", ["input", "weight1", "weights", "shifts"])
def test_who_needs_no_gradient(way: str, kind: str, frozen: str) -> None:
    module = tops.Sequential(classes[kind](16)).double()
    x, ids = inputs()
    if frozen == "input":
        x = x.detach()
    for name, parameter in module[0].named_parameters():
        if name == frozen or name[:-1] == frozen[:-1] != "weight" or frozen[:-1] == name[:-1]:
            parameter.requires_grad_(False)
    got = gradients(WAYS[way](module)(x, ids), module, x)
    torch.testing.assert_close(got, gradients(rows(module[0], x, ids), module, x))


def test_a_gradient_is_a_tensor_of_its_own() -> None:
    module = tops.Sequential(classes["ChooseRows"](16)).double()
    module(*inputs()).sum().backward()
    found = [p.grad for p in module.parameters()]
    assert len({grad.untyped_storage().data_ptr() for grad in found if grad is not None}) == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [True, False])
def test_second_derivatives(kind: str, shift: bool) -> None:
    module = tops.Sequential(classes[kind](4, shift=shift), tops.GELU()).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 2, 0])

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        names = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(module, names, (x, ids))

    given = (x, *module.parameters())
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("kind", KINDS)
def test_the_typed_op_by_itself(kind: str) -> None:
    typed = getattr(torch.ops.transformer_ops, OPS[kind])
    op = classes[kind](4).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 2, 0])
    parameters = list(op.parameters())

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return typed(x, ids, list(parameters[:COUNT]), list(parameters[COUNT:]), COUNT)

    assert torch.autograd.gradcheck(run, (x, *parameters))
    assert torch.autograd.gradgradcheck(run, (x, *parameters))
    torch.library.opcheck(typed, (x, ids, parameters[:COUNT], parameters[COUNT:], COUNT))
    torch.library.opcheck(typed, (x, ids, parameters[:COUNT], [], COUNT))
    bad = [*parameters[:2], torch.randn(5, dtype=torch.float64)]
    with pytest.raises(RuntimeError, match=r"weight must have shape \[4\], got \[5\]"):
        typed(x, ids, bad, [], COUNT)
    with pytest.raises(
        RuntimeError, match="tensors must be on one device, got cpu and meta for weight"
    ):
        typed(x, ids, [*parameters[:2], parameters[2].to("meta")], [], COUNT)
    with pytest.raises(RuntimeError, match=r"\[\w+_rows\] weight must have 3 tensors, got 2"):
        typed(x, ids, parameters[:2], [], COUNT)
    strided = torch.randn(4, 2, dtype=torch.float64)[:, 0]
    torch.testing.assert_close(
        typed(x, ids, [*parameters[:2], strided], [], COUNT),
        typed(x, ids, [*parameters[:2], strided.clone()], [], COUNT),
    )


def test_a_list_that_the_first_backward_did_not_need() -> None:
    """Without its weights the meaning of the op is another one, or none."""
    backward = torch.ops.transformer_ops.choose_rows_backward
    op = classes["ChooseRows"](4).double()
    x, g = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in "xg")
    ids, wanted = torch.tensor([0, 2, 0]), [False, False, True]
    weights, shifts = tensors_of(op, "weight"), tensors_of(op, "shift")
    _, _, grads = backward(g, x, ids, weights, shifts, COUNT, wanted)
    (found,) = torch.autograd.grad(sum(grads).sum(), g)
    assert torch.equal(found, torch.ones_like(g))
    _, _, grads = backward(g, x, ids, [], shifts, COUNT, wanted)
    with pytest.raises(
        RuntimeError, match=r"\[choose_rows_backward\] double backward must have 'weight', got none"
    ):
        torch.autograd.grad(sum(grads).sum(), g)
    # One that may be missing is missing.
    _, grads, _ = backward(g, x, ids, weights, [], COUNT, [False, True, False])
    (found,) = torch.autograd.grad(sum(grads).sum(), g)
    torch.testing.assert_close(found, x)


@pytest.mark.parametrize("shift", [True, False])
def test_export(shift: bool) -> None:
    module = block(shift=shift)
    tensors = inputs()
    program = torch.export.export(module, tensors)
    torch.testing.assert_close(program.module()(*tensors), meaning(module, *tensors))
    lowered = program.run_decompositions()
    targets = {str(node.target) for node in lowered.graph.nodes}
    assert "transformer_ops.choose_rows.default" in targets
    assert not any("stack" in target or "cat" in target for target in targets)
    torch.testing.assert_close(lowered.module()(*tensors), meaning(module, *tensors))


def test_vmap_and_forward_mode() -> None:
    module = tops.Sequential(classes["ChooseRows"](16)).double()
    x, ids = inputs()
    want = rows(module[0], x, ids)
    torch.testing.assert_close(torch.func.vmap(module)(x, ids), want)
    _, tangent = torch.func.jvp(lambda x: module(x, ids), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.stack(tensors_of(module[0], "weight"))[ids])


def test_a_tensor_of_another_dtype() -> None:
    module = tops.Sequential(classes["ChooseRows"](16))
    x, ids = inputs()
    module[0].weight1.data = module[0].weight1.data.double()
    x = x.float().detach()
    with pytest.raises(RuntimeError, match="weight must have dtype Float, got Double"):
        module(x, ids)


def test_the_plan_names_them() -> None:
    module = block()
    module(*inputs())
    text = str(module.plans()[0])
    assert "p2.weight0..2 p2.shift0..2 " in text
    assert "choose_rows(x2, e2.ids, [p2.weight0..2], [p2.shift0..2], 3)" in text
    assert "[dp2.weight0..2], [dp2.shift0..2] = choose_rows_backward(" in text
    assert Plan.parse(text) == module.plans()[0]
    assert "weight" not in str(module.explain()).split("saves")[1]
    wrong = text.replace("[p2.weight0..2]", "[p2.weight0..1]")
    with pytest.raises(
        RuntimeError,
        match=r"op 2 \(ChooseRows\) must have a list of all 3 tensors of 'weight' in step "
        r"'ChooseRows', got \[p2.weight0..1\]",
    ):
        Plan.parse(wrong)
    for other in ("p2.weight0", "[]"):
        wrong = text.replace("[p2.weight0..2]", other)
        with pytest.raises(
            RuntimeError, match=r"call must fit the op's schema .*Tensor\[\] weight"
        ):
            Plan.parse(wrong)


def test_another_number_of_tensors() -> None:
    module = block()
    x, ids = inputs()
    module(x, ids)
    module[1].count = 2
    ids = ids.clamp(max=1)
    torch.testing.assert_close(module(x, ids), meaning(module, x, ids))
    module[1].count = 4
    with pytest.raises(AttributeError, match="weight3"):
        module(x, ids)
    module[1].weight3, module[1].shift3 = (nn.Parameter(torch.randn(16).double()) for _ in "ab")
    ids[0] = 3
    torch.testing.assert_close(module(x, ids), meaning(module, x, ids))
    module[1].count = 0
    with pytest.raises(
        RuntimeError, match=r"\[ChooseRows\] count must be a number of tensors, 1 to"
    ):
        module(x, ids)


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_missing_tensors(way: str) -> None:
    module = block()
    run = WAYS[way](module)
    x, ids = inputs()
    kept, module[1].shift1 = module[1].shift1, None
    with pytest.raises(Exception, match=r"\[ChooseRows\] shift1 must be a tensor, got None"):
        run(x, ids)
    module[1].shift1, module[1].weight1 = kept, None
    with pytest.raises(Exception, match=r"\[ChooseRows\] weight1 must be a tensor, got None"):
        run(x, ids)


def test_copies_and_state_dicts() -> None:
    module = block()
    x, ids = inputs()
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[1].weight1.fill_(2)
    assert not torch.equal(module(x, ids), other(x, ids))
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(x, ids), other(x, ids))


def test_a_python_fusion_over_it() -> None:
    class Forward(tops.FusedOperation):
        def fuser_forward_compute(
            self, input_: Tensor, *, basic_op_extra_inputs: Any, **unused: Any
        ) -> Any:
            (ids,), _ = basic_op_extra_inputs
            op = self.basic_ops[0]
            weights = tensors_of(op, "weight")
            return 2 * rows(op, input_, ids), [(), ()], (input_, ids, *weights)

        def fuser_forward_save_ctx(
            self, basic_op_ctxs: Any, input_: Tensor, tensors_to_save: Any, **unused: Any
        ) -> None:
            basic_op_ctxs[0].save_for_backward(*tensors_to_save)

    class Backward(tops.FusedOperation):
        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **unused: Any) -> Any:
            input_, ids, *weights = basic_op_ctxs[0].saved_tensors
            assert len(weights) == COUNT
            grad = 2 * grad_output
            own = [torch.where((ids == k).unsqueeze(-1), grad, 0) for k in range(COUNT)]
            of_weights = [(g * input_).flatten(0, -2).sum(0) for g in own]
            of_shifts = [g.flatten(0, -2).sum(0) for g in own]
            grads = [[*of_weights, *of_shifts], []]
            return grad * torch.stack(weights)[ids], grads, [(None,), ()]

    def fuse(kind: Any) -> Any:
        return lambda ops, **unused: [kind(ops)] if len(ops) == 2 else ops

    module = tops.Sequential(classes["ChooseRows"](16), tops.ConstantScale(2.0)).double()
    x, ids = inputs()
    of_forward = (tops.register_forward_fusion, Forward)
    of_backward = (tops.register_backward_fusion, Backward)
    for fusions in ([of_forward], [of_backward], [of_forward, of_backward]):
        with contextlib.ExitStack() as scope:
            for register, kind in fusions:
                scope.enter_context(register(fuse(kind)))
            got = module(x, ids)
            found = gradients(got, module, x)
        want = 2 * rows(module[0], x, ids)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(found, gradients(want, module, x))
