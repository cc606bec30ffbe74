"""Users' basic ops in Python: both families and styles, parameters, extra tensors, compile."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from user_fusions import (
    Gate,
    ScaleShift,
    SingleSquare,
    assert_same,
    gradients,
    output_gradients,
    replacing,
)

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=15)


class Reference(nn.Module):
    """The same numbers by plain autograd."""

    def __init__(self, sequential, function):
        super().__init__()
        self.inner, self.function = sequential, function

    def forward(self, *tensors):
        return self.function(self.inner, *tensors)


@pytest.fixture
def x():
    return torch.randn(2, 3, 6)


def block():
    return tops.Sequential(tops.LayerNorm(6), ScaleShift(6), tops.Linear(6, 6), tops.GELU())


def block_reference(module, x):
    norm, scale, linear, gelu = module
    return gelu(linear(scale.reference(norm(x))))


def test_split_style_in_a_block(x):
    module = block()
    assert_same(gradients(module, x), gradients(Reference(module, block_reference), x))
    with torch.no_grad():
        torch.testing.assert_close(module(x), block_reference(module, x))
    (plan,) = module.plans()
    assert [step.name for step in plan.forward][:2] == ["LayerNorm", "ScaleShift"]
    assert all(step.fused_op is None for step in plan.forward)


def test_alone_and_by_a_fuser(x):
    op = ScaleShift(6)
    want = gradients(Reference(op, lambda op, x: op.reference(x)), x)
    assert_same(gradients(op, x), want)
    torch.testing.assert_close(tops.OperationFuser([op])(x), want[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_fullgraph(backend, x):
    module = block()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    want = gradients(Reference(module, block_reference), x)
    assert_same(gradients(compiled, x), want)
    # Parameters, buffers, tensors and plain state are those of each call.
    with torch.no_grad():
        module[1].weight.mul_(3)
        module[1].mask.copy_(1 - module[1].mask)
    assert_same(gradients(compiled, x), gradients(Reference(module, block_reference), x))
    module[1].gain = torch.full((), -2.0)
    assert_same(gradients(compiled, x), gradients(Reference(module, block_reference), x))
    module[1].weight = nn.Parameter(torch.rand(6))
    assert_same(gradients(compiled, x), gradients(Reference(module, block_reference), x))
    module[1].sign = -1.0
    assert_same(gradients(compiled, x), gradients(Reference(module, block_reference), x))


def test_export(x):
    module = block()
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    other = torch.randn(5, 3, 6)
    torch.testing.assert_close(program.module()(other), module(other))


def test_a_lone_op_compiles(x):
    op = ScaleShift(6)
    want = gradients(Reference(op, lambda op, x: op.reference(x)), x)
    assert_same(gradients(torch.compile(op, backend="aot_eager"), x), want)


def test_single_style_breaks_the_graph(x):
    module = tops.Sequential(tops.Linear(6, 6), SingleSquare(), tops.Linear(6, 2))
    want = gradients(Reference(module, lambda m, x: m[2](m[0](x) ** 2)), x)
    assert_same(gradients(module, x), want)
    assert_same(gradients(torch.compile(module, backend="aot_eager"), x), want)
    with pytest.raises(Exception, match=r"\[SingleSquare\] forward must be the split pair"):
        torch.compile(module, fullgraph=True, backend="aot_eager")(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_op_kwargs(compiled, x):
    op = ScaleShift(6)
    module = tops.Sequential(tops.LayerNorm(6), op)
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    want = gradients(Reference(module, lambda m, x: m[1].reference(m[0](x), 2.5)), x)
    if not compiled:
        assert_same(gradients(call, x, op_kwargs={op: {"factor": 2.5}}), want)
    assert_same(gradients(call, x, op_kwargs={1: {"factor": 2.5}}), want)
    factor = torch.tensor(2.5)
    assert_same(gradients(call, x, op_kwargs={1: {"factor": factor}}), want)
    with pytest.raises(Exception, match=r"\[LayerNorm\] a native op takes no keyword arguments"):
        call(x, op_kwargs={0: {"factor": 1}})
    if not compiled:
        torch.testing.assert_close(op(x, factor=2.5), op.reference(x, 2.5))


def gate_reference(module, x, gate):
    first, _, last = module
    hidden = first(x)
    return last(hidden * gate), hidden + 1, gate * 2


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_extra_inputs_and_outputs(backend, x):
    module = tops.Sequential(tops.Linear(6, 6), Gate(), tops.GELU())
    call = torch.compile(module, fullgraph=True, backend=backend) if backend else module
    gate = torch.randn(2, 3, 6)
    assert_same(gradients(call, x, gate), gradients(Reference(module, gate_reference), x, gate))
    with pytest.raises(ValueError, match=r"must be 1 for extra input 0 of op 1 \(Gate\), got 0"):
        module(x)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_channels_to_and_from_python_ops(backend, x):
    gate = Gate().set_extra_input_channel(0, "a").set_extra_output_channel(0, "b", False)
    gate.set_extra_output_channel(1, None, output_to_caller=False)
    module = tops.Sequential(
        tops.Linear(6, 6),
        tops.MakeExtraOutput().set_extra_output_channel(0, "a", False),
        tops.GELU(),
        gate,
        tops.AddExtraInput().set_extra_input_channel(0, "b"),
    )

    def reference(module, x):
        hidden = module[0](x)
        active = nn.functional.gelu(hidden, approximate="tanh")
        return active * hidden + active + 1

    call = torch.compile(module, fullgraph=True, backend=backend) if backend else module
    assert_same(gradients(call, x), gradients(Reference(module, reference), x))
    assert gate.seen == (True, [True])
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    torch.testing.assert_close(call(x), reference(module, x))
    assert gate.seen == (False, [False])


def test_a_hidden_output_that_nobody_reads_may_be_none(x):
    class Quiet(Gate):
        num_extra_outputs = 1

        def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, **unused):
            ((gate,),) = basic_op_extra_inputs
            return input_ * gate, [(None,)], (input_, gate)

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            x, gate = basic_op_ctxs[0].saved_tensors
            assert basic_op_grad_extra_outputs == [(None,)]
            return grad_output * gate, [()], [(grad_output * x,)]

    hidden = Quiet().set_extra_output_channel(0, None, output_to_caller=False)
    module = tops.Sequential(hidden, tops.GELU())
    gate = torch.randn(2, 3, 6)
    want = gradients(Reference(module, lambda m, x, gate: m[1](x * gate)), x, gate)
    assert_same(gradients(module, x, gate), want)
    with pytest.raises(RuntimeError, match=r"\[Quiet\] extra output 0 of op 0 must be a tensor"):
        tops.Sequential(Quiet(), tops.GELU())(x, gate)


def test_a_subclass_of_a_native_op(x):
    class Doubled(tops.SiLU):
        def op_forward_compute(self, input_, **unused):
            return 2 * nn.functional.silu(input_), ()

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
            ctx.save_for_backward(input_)

        def op_backward(self, ctx, grad_output):
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return 2 * grad_output * s * (1 + x * (1 - s)), ()

    module = tops.Sequential(tops.Linear(6, 6), Doubled())
    want = gradients(Reference(module, lambda m, x: 2 * nn.functional.silu(m[0](x))), x)
    assert_same(gradients(module, x), want)
    # No native rule takes a Python op for the native one.
    assert [step.name for step in module.plans()[0].forward] == ["linear_epilogue", "Doubled"]
    assert_same(gradients(torch.compile(module, fullgraph=True, backend="aot_eager"), x), want)


def test_half_an_op_runs_only_where_a_fusion_covers_the_rest(x):
    class ForwardOnly(tops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_)
            return input_.sin()

    class Rest(tops.FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            (x,) = basic_op_ctxs[0].saved_tensors
            return grad_output * x.cos(), [()], [()]

    module = tops.Sequential(tops.Linear(6, 6), ForwardOnly())
    with torch.no_grad():
        want = module[0](x).sin()
        torch.testing.assert_close(module(x), want)
    with pytest.raises(RuntimeError, match=r"\[ForwardOnly\] a Python op must define its backward"):
        module(x)
    with tops.register_backward_fusion(replacing(Rest, ForwardOnly)):
        want = gradients(Reference(module, lambda m, x: m[0](x).sin()), x)
        assert_same(gradients(module, x), want)


def test_hooks_keep_a_python_op_in_a_group_of_its_own(x):
    module = block()
    want = gradients(module, x)
    seen = []
    handle = module[1].register_forward_hook(lambda op, inputs, output: seen.append(output.shape))
    assert_same(gradients(module, x), want)
    assert seen == [x.shape] and len(module.plans()) == 3
    assert_same(gradients(torch.compile(module, backend="aot_eager"), x), want)
    handle.remove()
    assert_same(gradients(module, x), want)
    assert len(module.plans()) == 1


def test_other_dtypes_between_python_and_native_ops(x):
    module = tops.Sequential(
        tops.Linear(6, 6), ScaleShift(6), tops.Linear(6, 6, dtype=torch.float64), tops.GELU()
    )

    def reference(module, x):
        hidden = module[1].reference(module[0](x)).double()
        return nn.functional.gelu(module[2](hidden), approximate="tanh")

    want = gradients(Reference(module, reference), x)
    got = gradients(module, x)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    assert_same(got, want)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside, x):
    module = block()

    def call(x):
        if not inside:
            return module(x)
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        want = call(x)
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    assert want.dtype == compiled.dtype == torch.bfloat16
    torch.testing.assert_close(compiled, want)
    torch.testing.assert_close(want.float(), module(x), rtol=0.05, atol=0.05)


def test_backward_in_a_region_of_autocast_computes_as_forward_did(x):
    module, x = block(), x.detach().requires_grad_()
    want = torch.autograd.grad(module(x).sum(), [x, *module.parameters()])
    loss = module(x).sum()
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(loss, [x, *module.parameters()])
    assert_same(got, want)


def test_the_context_says_what_is_needed(x):
    class Spy(tops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            self.seen = (ctx.requires_grad, ctx.dtype)
            return input_ * 1

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    spy = Spy()
    tops.Sequential(tops.Linear(6, 6), spy)(x)
    assert spy.seen == (True, torch.float32)
    tops.Sequential(spy, tops.Linear(6, 6))(x)
    assert spy.seen == (False, torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        spy(x)
    assert spy.seen == (False, torch.bfloat16)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "op_forward must return tensors, got None"),
        (3.0, "op_forward must return tensors, got float 3.0"),
    ],
)
def test_wrong_forward(returned, message, x):
    class Wrong(tops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            return returned

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    with pytest.raises(RuntimeError, match=rf"\[Wrong\] {message}"):
        Wrong()(x)


@pytest.mark.parametrize("number", [3, "text", (torch.ones(2),)])
def test_what_is_no_tensor_is_not_saved(number, x):
    class Single(tops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            ctx.save_for_backward(input_, number)
            return input_ * 2

        def op_backward(self, ctx, grad_output):
            return grad_output * 2, ()

    class Pair(tops.BasicOperation):
        op_backward = Single.op_backward

        def op_forward_compute(self, input_, **unused):
            return input_ * 2, (input_, number)

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
            ctx.save_for_backward(*tensors_to_save)

    got = {3: "int 3", "text": "str 'text'"}.get(number, "tuple")
    for op, method in ((Single(), "op_forward"), (Pair(), "op_forward_save_ctx")):
        message = rf"\[{type(op).__name__}\] {method} must save tensors or None, got {got}"
        with pytest.raises(RuntimeError, match=message):
            tops.Sequential(tops.Linear(6, 6), op)(x)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((3.0, (None, None)), "op_backward must return .* gradient of the input, got float 3.0"),
        ((None, (None,)), r"backward must return 2 parameter gradients for op 1 \(Wrong\), got 1"),
    ],
)
def test_wrong_backward(returned, message, x):
    class Wrong(ScaleShift):
        def op_backward(self, ctx, grad_output):
            return returned

    module = tops.Sequential(tops.GELU(), Wrong(6))
    with pytest.raises(RuntimeError, match=rf"\[Wrong\] {message}"):
        module(x).sum().backward()


def test_none_is_no_gradient_as_in_autograd(x):
    class Stop(ScaleShift):
        def op_backward(self, ctx, grad_output):
            return None, (None, grad_output.sum((0, 1)))

    class PlainStop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            return x * weight + bias

        @staticmethod
        def backward(ctx, grad):
            return None, None, grad.sum((0, 1))

    module = tops.Sequential(tops.Linear(6, 6), Stop(6), tops.GELU())
    plain = nn.Linear(6, 6), nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))
    y = x.clone().requires_grad_()
    nn.functional.gelu(PlainStop.apply(plain[0](y), *plain[1:])).sum().backward()
    module(x.requires_grad_()).sum().backward()
    want = [y, plain[0].weight, plain[0].bias, *plain[1:]]
    got = [x, *module.parameters()]
    assert [t.grad is None for t in got] == [t.grad is None for t in want]
    assert [t.grad is None for t in got] == [True, True, True, True, False]


def test_copies_and_pickles_of_a_block_with_a_user_op(x):
    module = block()
    want = gradients(module, x)
    assert_same(gradients(copy.deepcopy(module), x), want)


def test_checkpointing(x):
    module = block()
    want = gradients(module, x)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    assert_same(gradients(Checkpointed(), x), want)


def test_create_graph_is_one_clear_error(x):
    module = block()
    with pytest.raises(RuntimeError, match=r"create_graph=True must have native ops.*ScaleShift"):
        torch.autograd.grad(module(x.requires_grad_()).sum(), x, create_graph=True)


def test_compiled_autograd(x):
    module = block()
    want = gradients(module, x)
    x.requires_grad_()
    output = module(x)
    (given,) = output_gradients(output)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        output.backward(given)
    torch.testing.assert_close(x.grad, want[1])


def test_a_counter_in_a_method_does_not_recompile_at_each_call(x):
    class Counting(ScaleShift):
        calls = 0

        def op_forward_compute(self, input_, **unused):
            self.calls = self.calls + 1
            return super().op_forward_compute(
                input_, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None
            )

    op = Counting(6)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tops.Sequential(op), fullgraph=True, backend=counter)
    for _ in range(6):
        torch.testing.assert_close(compiled(x), op.reference(x))
    assert counter.frame_count <= 2


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take no notes")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_error_of_a_method_says_which_step_it_comes_from(direction):
    class Broken(tops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            if direction == "forward":
                raise KeyError("mine")
            return input_ + 1

        def op_backward(self, ctx, grad_output):
            raise KeyError("mine")

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(KeyError, match="mine") as raised:
        tops.Sequential(tops.GELU(), Broken())(x).sum().backward()
    kept = ", whose contexts have 0 saved tensors" if direction == "backward" else ""
    assert raised.value.__notes__ == [f"[Broken] raised in the {direction} of ops [1]{kept}"]


def test_a_hook_that_is_registered_while_its_group_waits_is_an_error():
    op = ScaleShift(6)

    class Registers(torch.nn.Module):
        def forward(self, x):
            op.register_forward_hook(lambda module, inputs, output: None)
            return x

    module = tops.Sequential(tops.GELU(), Registers(), op)
    with pytest.raises(RuntimeError, match="hooks must be registered before the call"):
        module(torch.randn(3, 6))
    module[1] = torch.nn.Identity()
    assert module(torch.randn(3, 6)).shape == (3, 6)
