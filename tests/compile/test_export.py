"""torch.export with a dynamic batch, and an AOTInductor package of it."""

import subprocess
import sys

import pytest
import torch
from helpers import feed_forward, residual
from onnx.reference import ReferenceEvaluator
from torch.export import Dim, export

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=35)

tops_ops = torch.ops.transformer_ops


def block(dtype=torch.float32):
    ops = residual(*feed_forward(16, 32))
    return tops.Sequential(*ops, tops.ReLU(), tops.Linear(16, 8), tops.GELU()).to(dtype)


def exported(module, x, **kwargs):
    return export(module, (x,), dynamic_shapes=({0: Dim("batch", min=2, max=64)},), **kwargs)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_export_with_a_dynamic_batch(strict, grad):
    module = block()
    with torch.set_grad_enabled(grad):
        program = exported(module, torch.randn(4, 3, 16), strict=strict)
    for batch in (2, 7):
        x = torch.randn(batch, 3, 16)
        torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("index", [2, 3])
def test_hooks_that_come_after_an_export_fire(strict, index):
    module, x = block(), torch.randn(4, 16)
    want = module(x)
    exported(module, x, strict=strict)
    calls = []
    module[index].register_forward_hook(lambda *_: calls.append(index))
    torch.testing.assert_close(module(x), want)
    assert calls == [index]


def test_export_is_of_typed_ops_after_decomposition():
    program = exported(block(), torch.randn(4, 16)).run_decompositions()
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any(target.startswith("transformer_ops.rms_norm") for target in targets)
    assert not any("run_plan" in target for target in targets)


def test_export_to_ops_of_torch():
    module, x = block(), torch.randn(4, 16)
    table = torch.export.default_decompositions()
    table[tops_ops.run_plan.default] = tops_ops.run_plan_unfused.default
    program = exported(module, x).run_decompositions(table)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets and not any("transformer_ops" in target for target in targets)
    x = torch.randn(7, 16)
    torch.testing.assert_close(program.module()(x), module(x))


def test_ops_of_torch_have_no_word_for_a_recipe():
    module, x = tops.Sequential(tops.Linear(32, 32)).bfloat16(), torch.randn(32, 32).bfloat16()
    with tops.autocast(recipe=tops.recipe.Float8CurrentScaling()):
        program = export(module, (x,))
    table = {tops_ops.run_plan.default: tops_ops.run_plan_unfused.default}
    with pytest.raises(Exception, match="an export to ops of torch must run without a recipe"):
        program.run_decompositions(table)


def onnx_program(module, *inputs, **options):
    return torch.onnx.export(module.eval(), inputs, dynamo=True, verbose=False, **options)


def run_onnx(program, *inputs):
    evaluator = ReferenceEvaluator(program.model_proto)
    named = dict(zip(evaluator.input_names, (x.numpy() for x in inputs), strict=True))
    return [torch.from_numpy(output) for output in evaluator.run(None, named)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        block,
        lambda: tops.Sequential(tops.LayerNorm(16), tops.PackedLinear(16, (8, 8)), tops.GEGLU()),
        lambda: torch.nn.Sequential(torch.nn.Linear(16, 8), tops.Dropout(0.5), tops.Linear(8, 8)),
    ],
)
def test_onnx(make):
    module = make()
    batch = ({0: Dim("batch", min=2, max=64)},)
    program = onnx_program(module, torch.randn(4, 16), dynamic_shapes=batch)
    assert {node.domain for node in program.model_proto.graph.node} <= {"", "pkg.onnxscript"}
    x = torch.randn(7, 16)
    with torch.no_grad():
        torch.testing.assert_close(run_onnx(program, x), [module(x)], rtol=1e-4, atol=1e-5)
    # Later exports are those of typed ops again.
    nodes = export(module, (x,)).graph.nodes
    assert any("run_plan.default" in str(node.target) for node in nodes)


class Doubled(tops.BasicOperation):
    def op_forward_compute(self, input_, **_):
        return input_ * 2, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **_):
        pass

    def op_backward(self, ctx, grad_output):
        return grad_output * 2, ()


@pytest.mark.filterwarnings("ignore")
def test_onnx_of_a_python_op():
    module = tops.Sequential(tops.Linear(16, 16), Doubled())
    with pytest.raises(Exception, match="must run over native ops only, got a Python op"):
        onnx_program(module, torch.randn(4, 16))


def test_exported_program_trains():
    module = block()
    program = exported(module, torch.randn(4, 16)).module()
    x = torch.randn(5, 16)
    want = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    got = torch.autograd.grad(program(x).square().sum(), list(program.parameters()))
    torch.testing.assert_close(got, want)


def test_export_saves_and_loads(tmp_path):
    module = block()
    program = exported(module, torch.randn(4, 16))
    torch.export.save(program, tmp_path / "block.pt2")
    again = torch.export.load(tmp_path / "block.pt2").module()
    x = torch.randn(9, 16)
    torch.testing.assert_close(again(x), module(x))


def test_aot_inductor_package(tmp_path):
    module = block().eval()
    with torch.no_grad():
        program = exported(module, torch.randn(4, 16))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "block.pt2")
        )
        package = torch._inductor.aoti_load_package(path)
        for batch in (2, 13):
            x = torch.randn(batch, 16)
            torch.testing.assert_close(package(x), module(x))


def test_a_single_op():
    op = tops.LayerNorm(8)
    program = exported(op, torch.randn(4, 8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(program.module()(x), op(x))


def test_exported_program_gives_what_lies_before_it_a_gradient():
    head = tops.Sequential(tops.Linear(8, 8), tops.GELU())
    x = torch.randn(4, 8)
    program = export(head, (x,)).module()  # of an input that wants no gradient
    encoder = torch.nn.Linear(8, 8)
    program(encoder(x)).square().sum().backward()
    got = encoder.weight.grad
    encoder.weight.grad = None
    head(encoder(x)).square().sum().backward()
    torch.testing.assert_close(got, encoder.weight.grad)


def test_exported_program_trains_what_was_frozen_when_it_was_made():
    head = tops.Sequential(tops.Linear(8, 8), tops.GELU(), tops.Linear(8, 8))
    x = torch.randn(4, 8)
    head[0].weight.requires_grad_(False)
    program = export(head, (x,)).module()
    for module in (head, program):
        module.requires_grad_(True)
        module(x).square().sum().backward()
    got = dict(program.named_parameters())
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(got[name].grad, parameter.grad)


def test_vmap_of_an_exported_program():
    module = tops.Sequential(tops.Linear(8, 8), tops.GELU())
    program, batch = export(module, (torch.randn(4, 8),)).module(), torch.randn(3, 4, 8)
    torch.testing.assert_close(torch.func.vmap(program)(batch), module(batch))
    compiled = torch.compile(lambda x: torch.func.vmap(module)(x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(batch), module(batch))


def test_loading_a_program_needs_the_import(tmp_path):
    file = tmp_path / "program.pt2"
    torch.export.save(exported(block(), torch.randn(4, 16)), file)
    for imports, is_loaded in (("torch", False), ("torch, transformer_ops", True)):
        code = f"import {imports}\ntorch.export.load({str(file)!r}).module()(torch.ones(2, 16))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert (done.returncode == 0) == is_loaded, done.stderr


def test_torchscript_compiles_no_source():
    with pytest.raises((RuntimeError, ValueError)), pytest.warns(FutureWarning):
        torch.jit.script(block())
