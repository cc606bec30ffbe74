"""The example of docs/adding-an-op.md compiles, loads as an extension, and behaves like an op."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from libraries import build_library
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_ops as tops
from transformer_ops.fusion import registry

pytestmark = pytest.mark.takes(seconds=80)

ROOT = Path(__file__).parents[2]


def block(language: str) -> str:
    """The code block of the op without a kernel: tests/quantization/test_recipe.py adds that."""
    page = (ROOT / "docs" / "adding-an-op.md").read_text(encoding="utf-8")
    found = re.findall(rf"```{language}\n(.*?)```", page.split("## A CUDA kernel")[0], re.DOTALL)
    assert len(found) == 1
    return found[0]


# The same op with bodies and a backward of its own, which reads the slot that KEPT names.
WITH_BODIES = """
#include <ATen/ops/tanh.h>

#include "op/op.h"

namespace transformer_ops {
namespace {

Tensor forward(const Tensor& input, double cap) {
  const Tensor x = to_accumulate(input);
  return (cap * at::tanh(x / cap)).to(input.scalar_type());
}

TensorSpecs backward_shape(const Checks& check, const Tensor& grad_output, const Tensor& kept,
                           double) {
  check.compute_dtype("KEPT", kept);
  check.spec("grad_output", grad_output, like(kept));
  return {like(kept)};
}

Tensor backward(const Tensor& grad_output, const Tensor& KEPT, double cap) {
  const Tensor slope = SLOPE;
  return (to_accumulate(grad_output) * (1 - slope * slope)).to(KEPT.scalar_type());
}

[[maybe_unused]] const bool registered = register_op({
    .declaration = {.kind = "KIND",
                    .summary = "cap * tanh(x / cap)",
                    .attributes = {"cap"},
                    .slots = {{"KEPT"}},
                    .dtype = DTypeRule::Autocast},
    .forward = {.schema = "NAME(Tensor input, float cap) -> Tensor output",
                .bodies = {.cpu = forward, .decomposition = forward}},
    .backward = {.schema = "NAME_backward(Tensor grad_output, Tensor KEPT, float cap) -> "
                           "Tensor grad_input",
                 .shape = backward_shape,
                 .bodies = {.cpu = backward}},
});

}  // namespace
}  // namespace transformer_ops
"""


def with_bodies(kind: str, name: str, kept: str) -> str:
    slope = {
        "input": "at::tanh(to_accumulate(input) / cap)",
        "output": "to_accumulate(output) / cap",
    }
    text = WITH_BODIES.replace("KIND", kind).replace("NAME", name)
    return text.replace("KEPT", kept).replace("SLOPE", slope[kept])


# Declarations that lack more than bodies.
LACKING = """
#include "op/op.h"

namespace transformer_ops {
namespace {

TensorSpecs with_mask(const Tensor& input) { return {like(input), bit_mask(input)}; }
Tensor identity(const Tensor& input) { return input; }

[[maybe_unused]] const bool registered =
    register_op({.forward = {.schema = "meaningless_softcap(Tensor input) -> Tensor output"}}) &&
    register_op({.forward = {.schema = "shapeless_softcap(Tensor input) -> "
                                       "(Tensor output, Tensor mask)",
                             .bodies = {.cpu = [](const Tensor&, Tensor&, Tensor&) {}}}}) &&
    register_op({.forward = {.schema = "half_softcap(Tensor input) -> (Tensor output, Tensor mask)",
                             .shape = with_mask,
                             .bodies = {.decomposition = identity}}});

}  // namespace
}  // namespace transformer_ops
"""


RULE = """
#include <ATen/ops/tanh.h>
#include "op/op.h"

namespace transformer_ops {
namespace {

Tensor scaled(const Tensor& input, double cap, double scale) {
  return scale * cap * at::tanh(input / cap);
}

[[maybe_unused]] const bool registered = register_fused_op({
    .rule = {.name = "NAME",
             .pass = Pass::Forward,
             .benefit = BENEFIT,
             .pattern = {{"Softcap"}, {"ConstantScale"}}},
    .forward = {.schema = "NAME(Tensor input, float cap, float scale) -> Tensor output",
                .bodies = {.cpu = scaled, .decomposition = scaled}},
});

}  // namespace
}  // namespace transformer_ops
"""


def rule_library(folder: Path, name: str, benefit: int) -> Path:
    source = RULE.replace("NAME", name).replace("BENEFIT", str(benefit))
    return build_library(folder, name, {name: source})


@pytest.fixture(scope="module")
def softcap(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The class of the example, after its declaration was compiled and loaded."""
    texts = {
        "softcap": block("cpp"),
        "output_softcap": with_bodies("OutputSoftcap", "output_softcap", "output"),
        "body_softcap": with_bodies("BodySoftcap", "body_softcap", "input"),
        "lacking": LACKING,
    }
    # build_library would hide that it is missing.
    assert '#include "op/op.h"' in texts["softcap"]
    torch.ops.load_library(str(build_library(tmp_path_factory.mktemp("softcap"), "softcap", texts)))
    names: dict[str, Any] = {}
    exec(block("py"), names)
    return names["Softcap"]


def test_it_is_an_op_like_any_other(softcap: Any) -> None:
    module = tops.Sequential(tops.Linear(8, 8), softcap(2.0)).double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    expected = 2 * torch.tanh(torch.nn.functional.linear(x, module[0].weight, module[0].bias) / 2)
    torch.testing.assert_close(module(x), expected)
    assert torch.autograd.gradcheck(module, (x,))
    assert torch.autograd.gradgradcheck(module, (x,))
    assert [step.name for step in module.plans()[0].forward] == ["linear_epilogue", "Softcap"]
    assert "2.input 64" in str(module.explain())


def test_it_compiles(softcap: Any) -> None:
    module = tops.Sequential(softcap(2.0))
    x = torch.randn(3, 8, requires_grad=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))


def test_its_errors_are_clear(softcap: Any) -> None:
    with pytest.raises(ValueError, match=r"\[Softcap\] cap must"):
        softcap(float("nan"))
    with pytest.raises(RuntimeError, match=r"\[Softcap\] input must be float16.*\(op 0 of the"):
        tops.Sequential(softcap(2.0))(torch.ones(3, dtype=torch.int64))


def test_second_derivatives_need_the_input_or_a_replay(softcap: Any) -> None:
    class OutputSoftcap(softcap, kind="OutputSoftcap"):  # type: ignore[call-arg]
        """Another declaration."""

    module = tops.Sequential(OutputSoftcap(2.0)).double()
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    with pytest.raises(NotImplementedError, match=r"\[OutputSoftcap\] double backward must have"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


def test_the_typed_op_of_a_late_library_has_gradients(softcap: Any) -> None:
    softcap_op = torch.ops.transformer_ops.softcap
    linear = torch.nn.Linear(8, 8).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        softcap_op(linear(x), 2.0).sum().backward()
    got = linear.weight.grad
    linear.weight.grad = None
    (2 * torch.tanh(linear(x) / 2)).sum().backward()
    torch.testing.assert_close(got, linear.weight.grad)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: softcap_op(x, 2.0), (x,))
    assert torch.autograd.gradgradcheck(lambda x: softcap_op(x, 2.0), (x,))
    torch.library.opcheck(softcap_op.default, (x, 2.0))
    torch.library.opcheck(torch.ops.transformer_ops.softcap_backward.default, (x, x, 2.0))


@pytest.mark.parametrize("name", ["softcap_on_meta", "softcap_first_compiled"])
def test_the_first_gradient_of_a_late_typed_op_may_be_anywhere(name: str, tmp_path: Path) -> None:
    text = block("cpp").replace('"softcap', f'"{name}').replace('"Softcap"', f'"{name}"')
    torch.ops.load_library(str(build_library(tmp_path, name, {name: text})))
    op = getattr(torch.ops.transformer_ops, name)
    if name.endswith("meta"):
        x = torch.randn(3, device="meta", requires_grad=True)
        (grad,) = torch.autograd.grad(op(x, 2.0).sum(), x)
        assert grad.is_meta
    else:
        x = torch.randn(3, requires_grad=True)
        compiled = torch.compile(lambda x: op(x, 2.0), fullgraph=True, backend="aot_eager")
        (grad,) = torch.autograd.grad(compiled(x).sum(), x)
        torch.testing.assert_close(grad, 1 - torch.tanh(x / 2) ** 2)


def test_a_late_op_beside_python_steps(softcap: Any) -> None:
    """The slots of a kind that came after the import."""

    class Backward(tops.FusedOperation):
        def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **unused: Any) -> Any:
            (x,) = basic_op_ctxs[0].saved_tensors
            return grad_output * 3 * (1 - torch.tanh(x / 2) ** 2), [(), ()], [(), ()]

    def fuse(ops: Any, **unused: Any) -> Any:
        return [Backward(ops)] if len(ops) == 2 else ops

    module = tops.Sequential(softcap(2.0), tops.ConstantScale(3.0))
    x = torch.randn(3, 8, requires_grad=True)
    with tops.register_backward_fusion(fuse):
        (grad,) = torch.autograd.grad(module(x).sum(), x)
        assert "Backward" in str(module.explain())
    (want,) = torch.autograd.grad((6 * torch.tanh(x / 2)).sum(), x)
    torch.testing.assert_close(grad, want)


def load_without_the_gil(path: Path) -> None:
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    assert dlopen(str(path).encode(), os.RTLD_NOW)


def load_in_a_thread(path: Path) -> None:
    thread = threading.Thread(target=torch.ops.load_library, args=(str(path),))
    thread.start()
    thread.join()


LOADERS = {
    "late_softcap_scale": lambda path: torch.ops.load_library(str(path)),
    "softcap_scale_of_a_thread": load_in_a_thread,
    "softcap_scale_without_gil": load_without_the_gil,
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_rule_that_comes_after_torch_compile(softcap: Any, name: str, tmp_path: Path) -> None:
    library = rule_library(tmp_path, name, benefit=100 + list(LOADERS).index(name))
    module = tops.Sequential(softcap(2.0), tops.ConstantScale(3.0))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    x = torch.randn(3, 8)
    want = compiled(x)
    assert counter.frame_count == 1
    LOADERS[name](library)
    assert registry.VERSION == registry._C.registry_version()
    for _ in range(3):
        torch.testing.assert_close(compiled(x), want)
    # Stale once, and planned with the new rule.
    assert counter.frame_count == 2
    assert [step.name for step in module.plans()[0].forward] == [name]
    (handle,) = (handle for handle in tops.fusions() if handle.name == name)
    assert handle.origin == f"lib{name}.so"
    assert module.explain().groups[0].forward[0].made_by == f"{name} (from lib{name}.so)"
    with handle.disabled():
        torch.testing.assert_close(module(x), want)
        assert name not in [step.name for step in module.plans()[0].forward]


@pytest.mark.parametrize("grad", [True, False])
def test_without_a_body_the_decomposition_runs(softcap: Any, grad: bool) -> None:
    class BodySoftcap(softcap, kind="BodySoftcap"):  # type: ignore[call-arg]
        """Another declaration."""

    x = torch.randn(3, 8).requires_grad_(grad)
    plain, want = softcap(2.0), BodySoftcap(2.0)
    torch.testing.assert_close(plain(x), want(x))
    typed = torch.ops.transformer_ops.softcap(x.detach().t(), 2.0)
    torch.testing.assert_close(typed, want(x.detach().t()))
    assert typed.is_contiguous() and not typed.requires_grad
    if grad:
        found = [torch.autograd.grad(op(x).sum(), x)[0] for op in (plain, want)]
        torch.testing.assert_close(*found)
        assert not found[0].requires_grad
        for op in (plain, want):
            assert torch.autograd.gradgradcheck(op, (torch.randn(3).double().requires_grad_(),))
    for op in (plain, want):
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), want(x))


@pytest.mark.parametrize(
    ("name", "lack"),
    [
        ("meaningless", "a body for cpu or .bodies.decomposition, got neither"),
        ("shapeless", ".shape, got none"),
        ("half", "a body for cpu, got a decomposition that leaves out mask"),
    ],
)
def test_what_a_declaration_lacks(softcap: Any, name: str, lack: str) -> None:
    op = getattr(torch.ops.transformer_ops, f"{name}_softcap")
    with pytest.raises(RuntimeError) as caught:
        op(torch.randn(3))
    assert str(caught.value).startswith(f"[{name}_softcap] declaration must have {lack}")
