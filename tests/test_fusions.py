"""Built-in fusions: the plan has each, and its numbers are those of the ops unfused."""

import copy
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import pytest
import torch
from user_fusions import SingleSquare, gradients

import transformer_ops as tops

ACTIVATIONS = ["GELU", "QGELU", "ReLU", "SReLU", "SiLU"]


class Case(NamedTuple):
    """A fusion, ops on which it fires, and the basic ops that it covers."""

    rule: str
    pass_name: str
    make: object
    covers: tuple[int, ...]
    extra: str = ""

    def __str__(self):
        return f"{self.rule}{self.extra and '-' + self.extra}"


def before(*made):
    """A norm in front, so that the input of the fused op wants a gradient as well."""
    return [tops.LayerNorm(16), *made]


def cases():
    for name in ACTIVATIONS:
        activation = getattr(tops, name)
        block = lambda a=activation: before(tops.Linear(16, 24), a(), tops.L2Normalization())  # noqa: E731
        yield Case("linear_bias_activation", "forward", block, (1, 2, 3), name)
        yield Case("activation_bias", "backward", block, (2, 3), name)
        alone = lambda a=activation: before(tops.Bias(16), a())  # noqa: E731
        yield Case("activation_bias", "backward", alone, (1, 2), name + " without Linear")
    for name in ("ReLU", "SReLU"):
        activation = getattr(tops, name)
        block = lambda a=activation: before(a(), tops.Linear(16, 24))  # noqa: E731
        yield Case("activation_linear", "forward_backward", block, (1, 2), name)
    yield Case("linear_bias", "forward", lambda: before(tops.Linear(16, 24)), (1, 2))


CASES = list(cases())
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@contextmanager
def unfused():
    """No fusion at all."""
    with ExitStack() as stack:
        for handle in tops.fusions():
            stack.enter_context(handle.disabled())
        yield


def names(plan, pass_name, ops):
    steps = plan.forward if pass_name == "forward" else plan.backward
    return [step.name for step in steps if step.ops == ops]


def saved_bytes(module, x):
    """Bytes of the distinct tensors that a call saves, parameters left out."""
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(size for storage, size in kept.items() if storage not in own)


def near_misses(module, rule):
    return [
        (miss.ops, miss.reason) for miss in module.plans()[0].near_misses if miss.fusion == rule
    ]


def test_every_rule_has_a_case():
    assert {h.name for h in tops.fusions() if h.func is None} == {case.rule for case in CASES}


@every_case
def test_the_plan_has_it(case):
    module = tops.Sequential(*case.make())
    module(torch.randn(3, 16))
    (plan,) = module.plans()
    for pass_name in ("forward", "backward"):
        found = names(plan, pass_name, case.covers)
        assert found == ([case.rule] if pass_name in case.pass_name else [])
    joint = [step for step in plan.forward + plan.backward if step.joint]
    assert len(joint) == (2 if case.pass_name == "forward_backward" else 0)
    with unfused():
        module(torch.randn(3, 16))
        assert all(len(step.ops) == 1 for step in module.plans()[0].forward)
    assert str(tops.Plan.parse(str(plan))) == str(plan)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_numbers(case, dtype):
    """As near to float64 as the unfused ops are: it rounds no more often."""
    module = tops.Sequential(*case.make())
    module.to(dtype)
    x = torch.randn(7, 5, 16).to(dtype)
    with unfused():
        plain = gradients(module, x)
        want = gradients(copy.deepcopy(module).double(), x.double())
    for exact, other, fused in zip(want, plain, gradients(module, x), strict=True):
        assert fused.dtype == other.dtype
        error, allowed = ((t.double() - exact).norm() for t in (fused, other))
        assert error <= 1.1 * allowed + 2 * torch.finfo(dtype).eps * exact.norm()


@every_case
@pytest.mark.parametrize("shape", [(16,), (0, 16), (2, 0, 16), (9, 16)])
def test_shapes_and_layouts(case, shape):
    module = tops.Sequential(*case.make())
    for x in (torch.randn(shape), torch.randn(*shape, 2)[..., 0]):
        with unfused():
            want = gradients(module, x)
        for a, b in zip(gradients(module, x), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every_case
@pytest.mark.parametrize("grad", [True, False])
def test_fullgraph(case, grad):
    module = tops.Sequential(*case.make())
    x = torch.randn(4, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(compiled(x), module(x))
    if grad:
        for a, b in zip(gradients(compiled, x), gradients(module, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every_case
def test_the_python_walker_gives_the_same(case):
    fuser = tops.OperationFuser(case.make())
    x = torch.randn(4, 16, requires_grad=True)
    parameters = [t for op in fuser._basic_ops for t in op._parameter_tensors()]
    given = torch.randn_like(fuser(x))
    want = torch.autograd.grad(fuser(x), [x, *parameters], given)
    walker = fuser._last_walker()
    (output,) = walker.run([x, *parameters], [{} for _ in walker.basic_ops])
    assert torch.equal(output, fuser(x))
    for a, b in zip(torch.autograd.grad(output, [x, *parameters], given), want, strict=True):
        assert torch.equal(a, b)


@every_case
@pytest.mark.parametrize("frozen", [0, 1, 2, 3])
def test_frozen_parameters(case, frozen):
    """The numbers are right whether it still fires or not."""
    module = tops.Sequential(*case.make())
    parameters = list(module.parameters())
    parameters[frozen % len(parameters)].requires_grad_(False)
    x = torch.randn(4, 16)
    with unfused():
        want = gradients(module, x)
    for a, b in zip(gradients(module, x), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every_case
def test_second_derivatives(case):
    module = tops.Sequential(*case.make()).double()
    x = torch.rand(3, 16, dtype=torch.float64, requires_grad=True)

    def second():
        (grad,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(
            grad.square().sum(), [x, *module.parameters()], allow_unused=True
        )

    with unfused():
        want = second()
    for a, b in zip(second(), want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("activation", [tops.ReLU, tops.SReLU])
def test_joint_activation_and_linear_keep_one_tensor_instead_of_two(activation):
    module = tops.Sequential(activation(), tops.Linear(64, 16))
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
            "the weight needs no gradient, so the Linear keeps no input",
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
            "linear_bias",
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
