"""Built-in fusions: the plan has each, and its numbers are those of the ops unfused."""

import pytest
import torch
from checks import check_fusion, unfused
from fusion_cases import CASES
from helpers import as_tuple, assert_equal, saved_bytes
from user_fusions import SingleSquare, gradients

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=110)

every_case = pytest.mark.parametrize("case", CASES, ids=str)


def seeded(function, *arguments):
    """The call from one state of torch's generator."""
    torch.manual_seed(3)
    return function(*arguments)


def parameter_gradients(module, inputs):
    """For inputs that need no gradient."""
    loss = sum(output.square().sum() for output in as_tuple(seeded(module, *inputs)))
    return torch.autograd.grad(loss, list(module.parameters()))


def names(plan, pass_name, ops):
    steps = plan.forward if pass_name == "forward" else plan.backward
    return [step.name for step in steps if step.ops == ops]


def near_misses(module, rule):
    return [
        (miss.ops, miss.reason) for miss in module.plans()[0].near_misses if miss.fusion == rule
    ]


def test_every_rule_has_a_case():
    # Other tests load libraries that bring rules of their own.
    built_in = {handle.name for handle in tops.fusions() if handle.origin == "built-in"}
    assert built_in == {case.rule for case in CASES}


@every_case
def test_the_plan_has_it(case):
    module = tops.Sequential(*case.make())
    module(*case.inputs(torch.randn(3, 16)))
    (plan,) = module.plans()
    for pass_name in ("forward", "backward"):
        found = names(plan, pass_name, case.covers)
        assert found == ([case.rule] if pass_name in case.pass_name else [])
    joint = [step for step in plan.forward + plan.backward if step.joint]
    assert len(joint) == (2 if case.pass_name == "forward_backward" else 0)
    with unfused():
        module(*case.inputs(torch.randn(3, 16)))
        assert all(len(step.ops) == 1 for step in module.plans()[0].forward)
    assert str(tops.Plan.parse(str(plan))) == str(plan)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_numbers(case, dtype):
    check_fusion(case, dtype, torch.device("cpu"))


@every_case
@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 0, 16), (9, 16)])
def test_shapes_and_layouts(case, shape):
    module = tops.Sequential(*case.make())
    if case.rule in ("gather_linear", "linear_scatter") and len(shape) == 1:
        shape = (1, *shape)  # there must be rows to gather
    for x in (torch.randn(shape), torch.randn(*shape, 2)[..., 0]):
        inputs = case.inputs(x)
        with unfused():
            want = gradients(module, *inputs)
        torch.testing.assert_close(gradients(module, *inputs), want, rtol=1e-4, atol=1e-5)


# The graph of an op of a rule differs from that of another by its constants alone.
FIRST_OF_RULE = {c.rule: c for c in reversed(CASES)}.values()
by_rule = pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in FIRST_OF_RULE else pytest.mark.slow) for c in CASES],
    ids=str,
)


@by_rule
def test_fullgraph(case):
    module = tops.Sequential(*case.make())
    inputs = case.inputs(torch.randn(4, 16))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        gradients(compiled, *inputs), gradients(module, *inputs), rtol=1e-4, atol=1e-5
    )
    with torch.no_grad():
        torch.testing.assert_close(seeded(compiled, *inputs), seeded(module, *inputs))


@pytest.mark.parametrize("case", FIRST_OF_RULE, ids=str)
def test_fullgraph_with_an_input_that_needs_no_gradient(case):
    module = tops.Sequential(*case.make())
    inputs = case.inputs(torch.randn(4, 16))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        parameter_gradients(compiled, inputs),
        parameter_gradients(module, inputs),
        rtol=1e-4,
        atol=1e-5,
    )


@every_case
def test_the_text_of_the_plan_gives_the_same(case):
    fuser = tops.OperationFuser(case.make())
    inputs = [t.requires_grad_() for t in case.inputs(torch.randn(4, 16))]
    every = [t for op in fuser._basic_ops for t in op._parameter_tensors()]
    parameters = [t for t in every if t is not None]
    leaves = [*inputs, *parameters]
    outputs = as_tuple(seeded(fuser, *inputs))
    given = [torch.randn_like(output) for output in outputs]
    want = torch.autograd.grad(outputs, leaves, given)
    run_plan = torch.ops.transformer_ops.run_plan
    again = seeded(run_plan, str(fuser.plan()), inputs[0], inputs[1:], parameters)
    assert_equal(again, outputs)
    assert_equal(torch.autograd.grad(again, leaves, given), want)


@every_case
@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_frozen_parameters(case, frozen):
    """The numbers are right whether it still fires or not."""
    module = tops.Sequential(*case.make())
    parameters = list(module.parameters())
    parameters[frozen % len(parameters)].requires_grad_(False)
    inputs = case.inputs(torch.randn(4, 16))
    with unfused():
        want = gradients(module, *inputs)
    torch.testing.assert_close(gradients(module, *inputs), want, rtol=1e-4, atol=1e-5)


@every_case
def test_an_input_that_needs_no_gradient(case):
    module = tops.Sequential(*case.make())
    inputs = case.inputs(torch.randn(4, 16))
    with unfused():
        want = parameter_gradients(module, inputs)
    torch.testing.assert_close(parameter_gradients(module, inputs), want, rtol=1e-4, atol=1e-5)


@every_case
def test_second_derivatives(case):
    module = tops.Sequential(*case.make()).double()
    inputs = [t.requires_grad_() for t in case.inputs(torch.rand(3, 16, dtype=torch.float64))]

    def second():
        loss = sum(output.square().sum() for output in as_tuple(seeded(module, *inputs)))
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        loss = sum(grad.square().sum() for grad in grads)
        return torch.autograd.grad(loss, [*inputs, *module.parameters()], allow_unused=True)

    with unfused():
        want = second()
    for a, b in zip(second(), want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("activation", [tops.ReLU, tops.SReLU])
def test_joint_activation_and_linear_keep_one_tensor_instead_of_two(activation):
    module = tops.Sequential(activation(), tops.Linear(64, 16), recompute="none")
    x = torch.randn(10, 64, requires_grad=True)
    one = 10 * 64 * 4
    assert saved_bytes(module, x) == one
    with unfused():
        assert saved_bytes(module, x) == one + (10 * 64 // 8 if activation is tops.ReLU else one)


class Doubled(tops.GELU):
    def op_forward(self, ctx, input_, **unused):
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


def half_frozen():
    linear = tops.Linear(16, 16)
    linear.weight.requires_grad_(False)
    return [tops.LayerNorm(16), tops.ReLU(), linear]


def frozen_bias():
    linear = tops.Linear(16, 16)
    linear.bias.requires_grad_(False)
    return [linear, tops.SiLU()]


def two_dtypes():
    linear = tops.Linear(16, 16)
    linear.bias = torch.nn.Parameter(linear.bias.detach().double())
    return [linear, tops.SiLU()]


@pytest.mark.parametrize(
    ("rule", "make", "ops", "reason"),
    [
        (
            "activation_linear",
            half_frozen,
            (1, 2),
            "the weight needs no gradient, so the Linear saves no input",
        ),
        ("activation_bias", frozen_bias, (1, 2), "the bias needs no gradient"),
        ("linear_bias_activation", two_dtypes, (0, 1, 2), "weight and bias have different dtypes"),
        (
            "linear_bias_activation",
            lambda: [tops.Linear(16, 16), tops.Dropout(0.5)],
            (0, 1, 2),
            "op 2 is Dropout where it needs GELU or ",
        ),
        (
            "linear_bias_activation",
            lambda: [tops.Linear(16, 16)],
            (0, 1),
            "the ops end where it needs GELU or ",
        ),
        (
            "linear_bias_activation",
            lambda: [tops.Linear(16, 16), Doubled()],
            (0, 1, 2),
            "op 2 is a Python op",
        ),
        (
            "linear_epilogue",
            lambda: [tops.BasicLinear(16, 16), SingleSquare()],
            (0, 1),
            "op 1 is a Python op",
        ),
        (
            "activation_linear",
            lambda: [tops.ReLU(), tops.GELU()],
            (0, 1),
            "op 1 is GELU where it needs BasicLinear",
        ),
        (
            "linear_bias_activation",
            lambda: [tops.Linear(16, 16), tops.ReLU(), tops.Linear(16, 16)],
            (0, 1, 2, 3),
            "op 2 is taken by activation_linear",
        ),
    ],
)
def test_near_misses_say_why_not(rule, make, ops, reason):
    module = tops.Sequential(*make())
    output = module(torch.randn(3, 16, requires_grad=True))
    found = [why for place, why in near_misses(module, rule) if place == ops]
    assert len(found) == 1 and found[0].startswith(reason)
    output.sum().backward()


def test_no_gradient_is_a_reason():
    module = tops.Sequential(tops.ReLU(), tops.Linear(16, 16))
    with torch.no_grad():
        module(torch.randn(3, 16))
    assert ((0, 1), "no gradient is wanted") in near_misses(module, "activation_linear")
