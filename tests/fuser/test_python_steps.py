"""How Python methods of ops are called: which definition counts, and with which keywords."""

import pytest
import torch

from transformer_ops import ops
from transformer_ops.op import BasicOperation, FusedOperation, OperationContext
from transformer_ops.runtime import method_calls

X = torch.tensor([1.0, -2.0])
SPLIT = {"requires_grad": [True], "extra_inputs": [()]}


class Scale(BasicOperation):
    """Takes the keywords of the reference, and one of its own."""

    def op_forward_compute(
        self, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, factor=1.0
    ):
        assert prev_op_grad_output_quantizer is None and next_op_input_quantizer is None
        return input_ * factor, (input_, None, ("nested",))

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, *, requires_grad, factor=1.0):
        assert requires_grad is True and tensors_to_save[2] == ("nested",)
        ctx.save_for_backward(*tensors_to_save[:2])
        ctx.factor = factor

    def op_backward(self, ctx, grad_output):
        assert ctx.saved_tensors == (X, None)
        return grad_output * ctx.factor, ()


def run_split(op, **kwargs):
    output, extra, saved = method_calls.forward_compute(op, X, kwargs=[kwargs], counts=[0], **SPLIT)
    ctx = OperationContext()
    method_calls.forward_save_ctx(op, [ctx], X, saved, kwargs=[kwargs], **SPLIT)
    return output, extra, ctx


def test_split_style():
    output, extra, ctx = run_split(Scale(), factor=3.0)
    assert torch.equal(output, 3 * X) and extra == [()]
    bound = ctx._bind(ctx.to_save)
    grads = method_calls.backward(Scale(), [bound], X, grad_extra_outputs=[()], counts=[0])
    assert torch.equal(grads[0], 3 * X) and grads[1:] == ([()], [()])
    assert ctx.saved_tensors == () and bound.requires_grad
    with pytest.raises(AttributeError):
        _ = bound.never_set


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="unknown"):
        run_split(Scale(), unknown=1)


def test_methods_get_only_what_their_signature_takes():
    class Bare(BasicOperation):
        def op_forward(self, ctx, input_):
            return -input_

    class Greedy(BasicOperation):
        def op_forward(self, ctx, input_, **kwargs):
            ctx.kwargs = kwargs
            return -input_

    ctx = OperationContext()
    for op in (Bare(), Greedy()):
        output, _ = method_calls.forward(op, [ctx], X, extra_inputs=[()], kwargs=[{}], counts=[0])
        assert torch.equal(output, -X)
    assert ctx.kwargs == {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}


def test_an_override_of_op_forward_wins_over_an_inherited_fuser_forward():
    class Parent(BasicOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_ + 1, [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            return grad_output + 1, [()], [()]

    class Child(Parent):
        def op_forward(self, ctx, input_, **unused):
            return input_ * 2

        def op_backward(self, ctx, grad_output):
            return grad_output * 2, ()

    for op, expected in ((Parent(), X + 1), (Child(), X * 2)):
        ctxs = [OperationContext()]
        output, _ = method_calls.forward(op, ctxs, X, extra_inputs=[()], kwargs=[{}], counts=[0])
        assert torch.equal(output, expected)
        grads = method_calls.backward(op, ctxs, X, grad_extra_outputs=[()], counts=[0])
        assert torch.equal(grads[0], expected)


def test_extra_tensors_need_fuser_methods():
    message = r"\[Wrong\w*\] an op with extra tensors must define fuser_{} .*, got 1 extra inputs"
    with pytest.raises(TypeError, match=message.format("forward")):

        class Wrong(BasicOperation):
            num_extra_inputs = 1

            def op_forward(self, ctx, input_, **unused):
                return input_

    class Base(BasicOperation):
        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    with pytest.raises(TypeError, match=message.format("backward")):

        class WrongLater(Base):
            num_extra_inputs = 1

            def fuser_forward(self, basic_op_ctxs, input_, **unused):
                return input_, [()]

    class Late(BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            return input_

    late = Late()
    late.num_extra_inputs = 1
    with pytest.raises(RuntimeError, match=r"\[Late\] an op with extra tensors must define fuser"):
        method_calls.forward(
            late, [OperationContext()], X, extra_inputs=[(X,)], kwargs=[{}], counts=[0]
        )


class Residual(FusedOperation):
    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, **unused):
        return input_ + basic_op_extra_inputs[1][0], [(input_,), ()], ()

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, *, requires_grad):
        for ctx, needed in zip(basic_op_ctxs, requires_grad, strict=True):
            ctx.seen = needed

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return grad_output + basic_op_grad_extra_outputs[0][0], [], iter([(), (grad_output,)])


def test_fused_operation_with_extra_tensors():
    fused = Residual([ops.MakeExtraOutput(), ops.AddExtraInput()])
    ctxs = [OperationContext(), OperationContext()]
    common = {"requires_grad": [True, False], "extra_inputs": [(), (X,)], "kwargs": [{}, {}]}
    output, extra, saved = method_calls.forward_compute(fused, X, counts=[1, 0], **common)
    assert torch.equal(output, 2 * X) and extra == [(X,), ()]
    method_calls.forward_save_ctx(fused, ctxs, X, saved, **common)
    assert [ctx.seen for ctx in ctxs] == [True, False]
    grad, parameters, extra_grads = method_calls.backward(
        fused, ctxs, X, grad_extra_outputs=[(X,), ()], counts=[0, 1]
    )
    assert torch.equal(grad, 2 * X) and parameters == [(), ()] and extra_grads == [(), (X,)]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([()], "must return 2 lists of extra outputs, one for each basic op, got 1"),
        ([(), ()], "must return 1 extra outputs for MakeExtraOutput, got 0"),
        ([], "must return 1 extra outputs for MakeExtraOutput, got 0"),
        ([(X,), (X,)], "must return 0 extra outputs for AddExtraInput, got 1"),
    ],
)
def test_wrong_number_of_extra_outputs(extra, message):
    class Wrong(FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_, extra

    fused = Wrong([ops.MakeExtraOutput(), ops.AddExtraInput()])
    ctxs = [OperationContext(), OperationContext()]
    with pytest.raises(RuntimeError, match=rf"\[Wrong\] fuser_forward {message}"):
        method_calls.forward(
            fused, ctxs, X, extra_inputs=[(), (X,)], kwargs=[{}, {}], counts=[1, 0]
        )


def test_wrong_number_of_extra_gradients():
    class Wrong(FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            return grad_output, [()], [()]

    fused = Wrong([ops.AddExtraInput()])
    with pytest.raises(RuntimeError, match="must return 1 extra gradients for AddExtraInput"):
        method_calls.backward(fused, [OperationContext()], X, grad_extra_outputs=[()], counts=[1])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dynamo_traces_the_split_pair(backend):
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(op, input_):
            output, _, saved = method_calls.forward_compute(
                op, input_, kwargs=[{"factor": 3.0}], counts=[0], **SPLIT
            )
            return output, saved[0].clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.op, input_ = inputs
            ctx.inner = OperationContext()
            method_calls.forward_save_ctx(
                ctx.op,
                [ctx.inner],
                input_,
                (output[1], None, ("nested",)),
                kwargs=[{"factor": 3.0}],
                **SPLIT,
            )
            ctx.save_for_backward(*ctx.inner.to_save)

        @staticmethod
        def backward(ctx, grad_output, _):
            bound = ctx.inner._bind(ctx.saved_tensors)
            grads = method_calls.backward(
                ctx.op, [bound], grad_output, grad_extra_outputs=[()], counts=[0]
            )
            return None, grads[0]

    class Traceable(Scale):
        def op_backward(self, ctx, grad_output):
            return grad_output * ctx.factor + 0 * ctx.saved_tensors[0], ()

    op = Traceable()
    compiled = torch.compile(lambda x: Node.apply(op, x)[0], fullgraph=True, backend=backend)
    x = X.clone().requires_grad_()
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
