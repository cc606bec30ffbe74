"""What the backward of a Python op returns: its number, shapes and dtypes, and where None leads."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from user_fusions import Gate, ScaleShift, SingleSquare, replacing

import transformer_ops as tops


class Returns(tops.BasicOperation):
    """x * 1 with a parameter; its backward returns what the test says."""

    def __init__(self, returned, size=6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.returned = returned

    def op_forward(self, ctx, input_, **unused):
        return input_ * 1

    def op_backward(self, ctx, grad_output):
        return self.returned(grad_output)


@pytest.fixture
def x():
    return torch.randn(4, 6)


WRONG = {
    "no parameter gradient": (lambda g: (g, ()), "backward must return 1 parameter gradients"),
    "None for the list": (lambda g: (g, None), "backward must return 1 parameter gradients"),
    "two for one": (lambda g: (g, (None, None)), "backward must return 1 parameter gradients"),
    "shape of a parameter": (
        lambda g: (g, (torch.ones(1),)),
        r"gradient of parameter 'weight' of op 1 must have shape \(6,\), got \(1,\)",
    ),
    "dtype of a parameter": (
        lambda g: (g, (torch.ones(6, dtype=torch.complex64),)),
        "gradient of parameter 'weight' of op 1 must have dtype torch.float32, got torch.complex64",
    ),
    "device of a parameter": (
        lambda g: (g, (torch.ones(6, device="meta"),)),
        "gradient of parameter 'weight' of op 1 must have device cpu, got meta",
    ),
    "no tensor": (
        lambda g: (g, (1.0,)),
        "op_backward must return .* of a parameter, got float 1.0",
    ),
    "rows for a list": (
        lambda g: (g, g),
        "op_backward must return lists of parameter gradients, got Tensor",
    ),
    "shape of the input": (
        lambda g: (g[:1], (None,)),
        r"gradient of the input must have shape \(4, 6\), got \(1, 6\)",
    ),
    "a tensor alone": (
        lambda g: g,
        r"op_backward must return \(input gradient, parameter gradients\), got Tensor",
    ),
    "three values": (lambda g: (g, (), ()), r"op_backward must return .*, got 3 values"),
}
# Each takes gradients of its own shape, or does not look.
BEFORE = {
    "Bias": lambda: tops.Bias(6),
    "Identity": lambda: tops.Sequential(tops.Bias(6), tops.Identity()),
    "ConstantScale": lambda: tops.Sequential(tops.Bias(6), tops.ConstantScale(2.0)),
    "Dropout": lambda: tops.Sequential(tops.Bias(6), tops.Dropout(0.5).eval()),
}


def after(op, *last):
    """A block with `op` as its second."""
    return tops.Sequential(tops.Bias(6), op, *last)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_name_the_op(name, x):
    returned, message = WRONG[name]
    module = after(Returns(returned), tops.GELU())
    with pytest.raises(RuntimeError, match=rf"\[Returns\] (the )?{message}"):
        module(x).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("name", BEFORE)
def test_a_wrong_input_gradient_never_reaches_the_op_before(name, x):
    modules = BEFORE[name]()
    before = list(modules) if isinstance(modules, tops.Sequential) else [modules]
    module = tops.Sequential(*before, Returns(lambda g: (g[:1], (None,))))
    with pytest.raises(RuntimeError, match=r"\[Returns\] gradient of the input must have shape"):
        module(x).sum().backward()
    assert before[0].bias.grad is None


def test_gradients_fit_as_those_of_an_autograd_function(x):
    """A sum over what was broadcast, a cast; for the input and for a parameter."""

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return returned(grad)

    for returned in (
        lambda g: (g.double(), g.double()),
        lambda g: (g.expand(3, 4, 6), g.bfloat16()),
        lambda g: (g, torch.arange(6)),
    ):
        module = after(Returns(lambda g, r=returned: (r(g)[0], (r(g)[1],))))
        y, weight = x.clone().requires_grad_(), nn.Parameter(torch.ones(6))
        Plain.apply(y, weight).cos().sum().backward()
        z = x.clone().requires_grad_()
        module(z).cos().sum().backward()
        for got, want in ((z.grad, y.grad), (module[1].weight.grad, weight.grad)):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want)


def test_a_frozen_parameter_needs_no_gradient(x):
    for returned in (lambda g: (g, ()), lambda g: (g, None), lambda g: (g, (torch.ones(2),))):
        module = after(Returns(returned))
        module[1].weight.requires_grad_(False)
        module(x).sum().backward()
        assert module[1].weight.grad is None and module[0].bias.grad.eq(4).all()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ((), "must return 1 extra gradients for Wrong, got 0"),
        ((None, None), "must return 1 extra gradients for Wrong, got 2"),
        ((torch.ones(1, 6),), r"extra input 0 of op . must have shape \(4, 6\), got \(1, 6\)"),
        ((2.0,), "must return a tensor or None as the gradient of an extra input, got float 2.0"),
    ],
)
@pytest.mark.parametrize("routed", [False, True])
def test_gradients_of_extra_inputs(routed, returned, message, x):
    class Wrong(Gate):
        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return grad_output, [()], [returned]

    op = Wrong().set_extra_output_channel(0, None, False).set_extra_output_channel(1, None, False)
    if routed:
        make = tops.MakeExtraOutput().set_extra_output_channel(0, "a", False)
        module = tops.Sequential(tops.Bias(6), make, op.set_extra_input_channel(0, "a"))
        tensors = (x,)
    else:
        module, tensors = tops.Sequential(tops.Bias(6), op), (x, x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match=rf"\[Wrong\] .*{message}"):
        module(*tensors).sum().backward()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda g: (g, [], []), r"backward must return 1 parameter gradients for op 0 \(BasicLin"),
        (lambda g: (g, [()], [(), ()]), "must return 2 lists of parameter gradients"),
        (lambda g: (g, [(g,), ()], [(), ()]), r"parameter 'weight' of op 0 must have shape \(6, 6"),
        (lambda g: (g, [(), ()]), r"fuser_backward must return \(input gradient, .*\), got 2 valu"),
        (lambda g: g, r"fuser_backward must return \(input gradient, .*\), got Tensor"),
        (lambda g: (g, g, g), "must return lists of parameter gradients, got Tensor"),
    ],
)
def test_wrong_gradients_of_a_fused_op(returned, message, x):
    class Wrong(tops.FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            return returned(grad_output)

    module = tops.Sequential(tops.Linear(6, 6, bias=False), tops.SiLU())
    with tops.register_backward_fusion(replacing(Wrong, tops.BasicLinear, tops.SiLU)):
        output = module(x)
        with pytest.raises(RuntimeError, match=rf"\[Wrong\] .*{message}"):
            output.sum().backward()


def test_a_forward_that_forgets_half_of_its_result(x):
    class NoExtra(tops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **unused):
            return input_

    class NoSaved(tops.BasicOperation):
        def op_forward_compute(self, input_, **unused):
            return input_

        def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
            pass

    with tops.register_forward_fusion(replacing(NoExtra, tops.GELU)):
        with pytest.raises(RuntimeError, match=r"\[NoExtra\] fuser_forward must return \(output"):
            tops.GELU()(x[:2])
    with pytest.raises(RuntimeError, match=r"\[NoSaved\] op_forward_compute must return \(output"):
        NoSaved()(x[:2])


# ---- outputs that no loss uses


def branches():
    """One output after the first Linear, one after everything; a Python op in each half."""
    return tops.Sequential(
        tops.Linear(6, 6),
        ScaleShift(6),
        tops.MakeExtraOutput(),
        tops.LayerNorm(6),
        tops.Linear(6, 6),
        SingleSquare(),
        tops.Linear(6, 6),
        tops.GELU(),
    )


def plain_branches(module, x):
    first, scale, _, norm, second, _, third, gelu = module
    middle = scale.reference(first(x))
    return gelu(third(second(norm(middle)) ** 2)), middle


def none_or_values(outputs, module, x, used):
    loss = sum((k + 1) * outputs[k].cos().sum() for k in used)
    tensors = [x, *module.parameters()]
    return torch.autograd.grad(loss, tensors, allow_unused=True)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_branch_that_no_loss_uses_gets_none(used, compiled, x):
    module = branches()
    call = torch.compile(module, backend="aot_eager") if compiled else module
    x.requires_grad_()
    got = none_or_values(call(x), module, x, used)
    want = none_or_values(plain_branches(module, x), module, x, used)
    assert [g is None for g in got] == [g is None for g in want]
    for a, b in zip(got, want, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_python_op_sees_zeros_beside_a_gradient_and_is_not_called_without(x):
    seen = []

    class Spy(Gate):
        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            seen.append((grad_output, *basic_op_grad_extra_outputs[0]))
            return super().fuser_backward(
                basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs
            )

    module = tops.Sequential(Spy(), tops.MakeExtraOutput(), Spy())
    x.requires_grad_()
    outputs = module(x, x, x)
    # Output, then (sum, doubled) of the first, the extra output, (sum, doubled) of the second.
    assert len(outputs) == 6
    outputs[1].sum().backward()
    ((main, of_sum, of_doubled),) = seen
    assert not main.any() and of_sum.eq(1).all() and not of_doubled.any()


def test_no_gradient_inside_a_fused_forward_step(x):
    """The forward ran AddExtraInput, MakeExtraOutput and the norm as one step: nobody knows what
    the tensors between them looked like."""
    module = tops.Sequential(
        tops.LayerNorm(6),
        tops.AddExtraInput(),
        tops.MakeExtraOutput(),
        tops.RMSNorm(6),
        ScaleShift(6),
    )
    x.requires_grad_()
    e = torch.randn(4, 6, requires_grad=True)
    outputs = module(x, e)
    names = [step.name for step in module.plans()[0].forward]
    assert "add_rms_norm" in names
    outputs[1].cos().sum().backward()
    norm, _, _, _, scale = module
    y, f = x.detach().clone().requires_grad_(), e.detach().clone().requires_grad_()
    (norm(y) + f).cos().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(e.grad, f.grad)
    assert scale.weight.grad is None


@pytest.mark.parametrize("fused", [False, True])
def test_what_an_unused_step_computes_again_for_another(fused, x):
    """The product's step computes the norm's output, which the activation's backward reads too."""
    module = tops.Sequential(
        tops.RMSNorm(6), tops.SiLU(), tops.MakeExtraOutput(), tops.Linear(6, 6), SingleSquare()
    )
    (rule,) = (h for h in tops.fusions() if h.name == "linear_residual_scale")
    with nullcontext() if fused else rule.disabled():
        x.requires_grad_()
        got = none_or_values(module(x), module, x, (1,))
    text = str(module.plans()[0])
    assert "x1 = recompute_rms_norm(g" in text and "silu_backward(g2, x1)" in text
    assert ("backward linear_residual_scale ops=[2, 3]" in text) == fused
    want = none_or_values((None, module[1](module[0](x))), module, x, (1,))
    assert [g is None for g in got] == [g is None for g in want] == [False, False, True, True]
    torch.testing.assert_close(got[:2], want[:2])
