"""check_fusion accepts what is right, names what is wrong, and leaves the registry as it was."""

import pytest
import torch
from fusion_cases import CASES
from user_fusions import Backward, ForwardSplit, JointSplit, replacing

import transformer_ops as tops
from transformer_ops.fusion.pattern import check_pattern
from transformer_ops.testing import check_fusion
from transformer_ops.testing.fusion import _not_met, _other_norms

X = torch.linspace(-1, 1, 24).reshape(4, 6)


def make_ops():
    return [tops.LayerNorm(6), tops.Linear(6, 8, bias=False), tops.SiLU()]


def fuse(fused):
    return replacing(fused, tops.BasicLinear, tops.SiLU)


@pytest.fixture(autouse=True)
def _registry_as_it_was():
    before = tops.fusions()
    yield
    assert tops.fusions() == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "fused"),
    [("forward", ForwardSplit), ("backward", Backward), ("forward_backward", JointSplit)],
)
def test_right_in_other_dtypes(kind, fused, dtype):
    def make():
        return [op.to(dtype) for op in make_ops()]

    check_fusion(fuse(fused), make, X.to(dtype), kind=kind)


def test_with_extra_inputs_and_a_registered_function():
    def make():
        return [*make_ops(), tops.AddExtraInput(), tops.MakeExtraOutput()]

    func = fuse(JointSplit)
    with tops.register_forward_backward_fusion(func) as handle:
        check_fusion(func, make, X, torch.ones(4, 8), kind="forward_backward")
        assert handle.registered


@pytest.mark.parametrize(
    ("kind", "func"),
    [
        ("forward", lambda ops, **unused: ops),
        ("backward", lambda ops, **unused: ops),
        ("forward_backward", lambda ops, **unused: ops),
        ("forward", replacing(ForwardSplit, tops.BasicLinear, tops.GELU)),
    ],
)
def test_it_must_fire(kind, func):
    direction = "backward" if kind == "backward" else "forward"
    steps = r"LayerNorm\[0\], BasicLinear\[1\], SiLU\[2\]"
    with pytest.raises(AssertionError, match=f"must fire in {direction}, got the steps {steps}"):
        check_fusion(func, make_ops, X, kind=kind)


class WrongOutput(JointSplit):
    def fuser_forward_compute(self, input_, **unused):
        output, extra, saved = super().fuser_forward_compute(input_, basic_op_extra_inputs=[])
        return output * 1.01, extra, saved


class WrongInputGradient(JointSplit):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        grads = super().fuser_backward(basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=[])
        return grads[0] * 1.01, *grads[1:]


class NoWeightGradient(JointSplit):
    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        grads = super().fuser_backward(basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=[])
        return grads[0], [(None,), ()], grads[2]


class WrongWithoutGrad(JointSplit):
    def fuser_forward_compute(self, input_, *, requires_grad, **unused):
        output, extra, saved = super().fuser_forward_compute(input_, basic_op_extra_inputs=[])
        return output if any(requires_grad) else output + 1, extra, saved


class WrongWhenCompiled(JointSplit):
    def fuser_forward_compute(self, input_, **unused):
        output, extra, saved = super().fuser_forward_compute(input_, basic_op_extra_inputs=[])
        return output + (type(input_) is not torch.Tensor), extra, saved


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        (WrongOutput, "eager: output differs from the unfused ops"),
        (WrongInputGradient, "eager: gradient of input 0 differs"),
        (NoWeightGradient, "eager: gradient of parameter 1.weight differs"),
        (WrongWithoutGrad, "eager without grad: output differs"),
        (WrongWhenCompiled, "compiled: output differs"),
    ],
)
def test_it_says_what_differs(fused, message):
    with pytest.raises(AssertionError, match=rf"\[fuse_{fused.__name__}\] {message}"):
        check_fusion(fuse(fused), make_ops, X - 0.3, kind="forward_backward")
    if fused is WrongOutput:
        check_fusion(fuse(fused), make_ops, X, kind="forward_backward", rtol=0.1, atol=0.1)


def test_errors_of_the_function_come_through():
    def raises(ops, **unused):
        raise KeyError("boom")

    with pytest.raises(RuntimeError, match=r"\[raises\] a forward fusion must not raise"):
        check_fusion(raises, make_ops, X)


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((None, make_ops, X), {}, TypeError, "func must be callable, got None"),
        ((fuse(JointSplit), make_ops(), X), {}, TypeError, "make_ops must be callable"),
        ((fuse(JointSplit), make_ops), {}, ValueError, "inputs must hold the main input"),
        ((fuse(JointSplit), make_ops, [1.0]), {}, TypeError, "inputs must be tensors"),
        ((fuse(JointSplit), make_ops, X), {"kind": "joint"}, ValueError, "kind must be one of"),
        ((fuse(JointSplit), make_ops, X), {"rtol": "1"}, TypeError, "rtol must be a number"),
        ((fuse(JointSplit), make_ops, X), {"atol": -1.0}, ValueError, "atol must be finite"),
        ((fuse(JointSplit), tops.GELU, X), {}, TypeError, "make_ops must return a list of ops"),
        ((fuse(JointSplit), list, X), {}, ValueError, "make_ops must return at least one op"),
        (
            (fuse(JointSplit), lambda: [torch.nn.GELU()], X),
            {},
            TypeError,
            "make_ops must return FusibleOperations",
        ),
    ],
)
def test_wrong_arguments(arguments, keywords, error, message):
    with pytest.raises(error, match=rf"\[check_fusion\] {message}"):
        check_fusion(*arguments, **keywords)


@pytest.mark.parametrize("name", ["linear_bias_activation", "activation_bias"])
def test_a_rule_in_cpp(name):
    (rule,) = (handle for handle in tops.fusions() if handle.name == name)

    def make():
        return [tops.Linear(6, 8), tops.GELU()]

    check_fusion(rule, make, X)
    direction = rule.pass_name
    message = rf"\[{name}\] must fire in {direction}, got the steps LayerNorm\[0\]"
    with pytest.raises(AssertionError, match=message):
        check_fusion(rule, make_ops, X)
    with rule.disabled(), pytest.raises(AssertionError, match="must fire"):
        check_fusion(rule, make, X)
    with pytest.raises(TypeError, match="pattern and guard must be left to the handle"):
        check_fusion(rule, make, X, guard=lambda ops: None)


@pytest.mark.parametrize(
    ("name", "covers", "refused"),
    [("activation_linear", "SReLU", ()), ("linear_scatter", "", ("alone: one dimension",))],
)
def test_right_rules_for_numbers_and_sizes_at_the_limits(name, covers, refused):
    """float16 overflows and underflows in SReLU; a scatter needs rows."""
    case = next(c for c in CASES if c.rule == name and c.extra == covers)
    (rule,) = (h for h in tops.fusions() if h.name == name and h.pass_name in case.pass_name)
    report = check_fusion(rule, case.make, *case.inputs(torch.randn(4, 16)))
    assert set(refused) <= report.refused.keys() and bool(refused) == bool(report.refused)
    assert ("only the fused ops refuse: " in str(report)) == bool(refused)


class Reshaped(JointSplit):
    """The output is a view of a tensor that autograd does not know."""

    def fuser_forward_compute(self, input_, **unused):
        output, extra, saved = super().fuser_forward_compute(
            input_.reshape(-1, input_.shape[-1]), basic_op_extra_inputs=[]
        )
        return output.reshape(*input_.shape[:-1], -1), extra, (input_, saved[1])


def test_an_output_that_is_a_view():
    module, pattern = tops.Sequential(*make_ops()), [tops.BasicLinear, tops.SiLU]
    with tops.register_forward_backward_fusion(Reshaped, pattern=pattern):
        output = module(X)
        assert not output._is_view()
        output.mul_(2).sum().backward()


def test_what_was_not_tried():
    pattern = [tops.BasicLinear, tops.optional(tops.Bias), (tops.SiLU, tops.ReLU)]
    report = check_fusion(JointSplit, make_ops, X, kind="forward_backward", pattern=pattern)
    missing = ["optional Bias", "ReLU", "an odd number of columns"]
    assert report.not_met == missing and f"not tried: {'; '.join(missing)}" in str(report)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recompute", ["none", "cheap", "products"])
def test_inputs_of_another_dtype(x_dtype, recompute):
    module = tops.Sequential(*make_ops(), recompute=recompute)
    x = X.to(x_dtype).requires_grad_()
    wanted = torch.autograd.grad(module(x).sum(), x)
    with tops.register_forward_fusion(ForwardSplit, pattern=[tops.BasicLinear, tops.SiLU]):
        torch.testing.assert_close(torch.autograd.grad(module(x).sum(), x), wanted)


@pytest.mark.parametrize("inputs", [X.to("meta"), X.to_sparse()])
def test_inputs_without_numbers(inputs):
    with pytest.raises(ValueError, match="inputs must be dense tensors with numbers, got "):
        check_fusion(fuse(JointSplit), make_ops, inputs)


def test_an_output_without_numbers():
    class Fake(JointSplit):
        def fuser_forward_compute(self, input_, **unused):
            output, *rest = super().fuser_forward_compute(input_, basic_op_extra_inputs=[])
            return torch._subclasses.FakeTensorMode().from_tensor(output), *rest

    pattern = [tops.BasicLinear, tops.SiLU]
    message = r"\[Fake\] fuser_forward_compute must give tensors with numbers, got FakeTensor"
    with (
        tops.register_forward_backward_fusion(Fake, pattern=pattern),
        pytest.raises(RuntimeError, match=message),
    ):
        tops.Sequential(*make_ops())(X)


@pytest.mark.parametrize(
    ("op", "missing"),
    [
        (
            tops.LayerNorm(6),
            ["LayerNorm without weight", "LayerNorm of two dimensions", "LayerNorm without bias"],
        ),
        (
            tops.RMSNorm((4, 6), elementwise_affine=False, eps=1e-5),
            ["RMSNorm with eps=None"],
        ),
        (
            tops.RMSNorm(6, eps=1e-5),
            ["RMSNorm without weight", "RMSNorm of two dimensions", "RMSNorm with eps=None"],
        ),
    ],
)
def test_forms_of_norms_that_no_op_has(op, missing):
    assert _other_norms([op, tops.SiLU()]) == missing


def test_an_optional_op_that_is_always_there():
    pattern = [tops.BasicLinear, tops.optional(tops.Bias), tops.SiLU]
    ops = [tops.Linear(6, 5), tops.SiLU()]
    entries = check_pattern(pattern)
    assert _not_met(entries, ops, [X], [slice(0, 3)]) == ["no Bias"]
