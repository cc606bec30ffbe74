"""torch.func over native ops: through their decomposition."""

import pytest
import torch
from helpers import feed_forward, residual
from op_cases import CASES
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import transformer_ops as tops

PLAIN = [case for case in CASES if case.extra_inputs == 0 and case.name != "MakeExtraOutput"]
# vmap must be told what random ops shall do; `test_random_ops` does.
SURE = [
    case
    for case in PLAIN
    if case.name not in ("Dropout", "Dropout-all", "DropPath-0.4")
    and not case.distributed
    and not case.extras
]
# Their extra inputs belong to all rows together. Of separate weights Python makes one.
# The decomposition of a random op draws other numbers.
OTHERS = ("GroupedLinear-bias-each", "Attention-dropout")
OF_ALL_ROWS = [case for case in CASES if case.extras and case.name not in OTHERS]


def block():
    return tops.Sequential(*residual(*feed_forward(8, 8))).double()


def inputs(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("case", SURE, ids=lambda case: case.name)
def test_grad_jvp_and_vmap_of_every_op(case):
    op = case.build(torch.float64)
    x = inputs(*case.shape)
    parameters = {name: p.detach() for name, p in op.named_parameters()}

    def reference(x):
        return case.reference(x, **parameters)

    def loss(function):
        return lambda x: function(x).square().sum()

    torch.testing.assert_close(grad(loss(op))(x), grad(loss(reference))(x))
    torch.testing.assert_close(vmap(op)(x), torch.stack([op(row) for row in x]))
    got, want = jvp(op, (x,), (x + 1,)), jvp(reference, (x,), (x + 1,))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", OF_ALL_ROWS, ids=lambda case: case.name)
def test_grad_with_extra_inputs_of_all_rows(case):
    op = case.build(torch.float64)
    x, *extra = (t.detach() for t in case.inputs(torch.float64))
    parameters = {name: p.detach() for name, p in op.named_parameters()}

    def first(found):
        return found[0] if isinstance(found, tuple) else found

    got = grad(lambda x: first(op(x, *extra)).square().sum())(x)
    want = grad(lambda x: first(case.reference(x, *extra, **parameters)).square().sum())(x)
    torch.testing.assert_close(got, want)


def test_grad_of_parameters():
    module, x = block(), inputs(5, 8)
    parameters = dict(module.named_parameters())

    def loss(parameters, x):
        return functional_call(module, parameters, (x,)).square().sum()

    got = grad(loss)(parameters, x)
    want = torch.autograd.grad(module(x).square().sum(), list(parameters.values()))
    torch.testing.assert_close(list(got.values()), want)


def test_gradients_of_each_sample():
    module, x = block(), inputs(5, 8)
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(parameters, row):
        return functional_call(module, parameters, (row,)).square().sum()

    got = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i, row in enumerate(x):
        one = torch.autograd.grad(module(row).square().sum(), list(module.parameters()))
        for a, b in zip(got.values(), one, strict=True):
            torch.testing.assert_close(a[i], b)


def test_vmap_over_stacked_parameters():
    modules = [block() for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(modules)
    x = inputs(4, 8)
    got = vmap(lambda p: functional_call(modules[0], p, (x,)))(stacked)
    torch.testing.assert_close(got, torch.stack([module(x) for module in modules]))


def test_hessian_and_jacobian():
    module, x = block(), inputs(8)
    want = torch.autograd.functional.hessian(lambda x: module(x).square().sum(), x)
    torch.testing.assert_close(hessian(lambda x: module(x).square().sum())(x), want)
    want = torch.autograd.functional.jacobian(module, x)
    torch.testing.assert_close(jacrev(module)(x), want)


def test_vjp_gives_extra_outputs():
    module = tops.Sequential(tops.MakeExtraOutput(), tops.GELU(), tops.AddExtraInput())
    x, extra = inputs(3, 8), inputs(3, 8)
    outputs, pull = vjp(module, x, extra)
    got = pull(tuple(torch.ones_like(o) for o in outputs))
    x, extra = x.requires_grad_(), extra.requires_grad_()
    outputs = module(x, extra)
    want = torch.autograd.grad(outputs, [x, extra], [torch.ones_like(o) for o in outputs])
    torch.testing.assert_close(got, want)


def test_random_ops():
    op, x = tops.Dropout(0.5), torch.ones(64, 32)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(op)(x)
    rows = vmap(op, randomness="different")(x)
    assert set(rows.unique().tolist()) == {0.0, 2.0} and not torch.equal(rows[0], rows[1])
    rows = vmap(op, randomness="same")(x)
    assert torch.equal(rows[0], rows[1])


def test_functional_call_replaces_parameters():
    module, x = block(), inputs(3, 8)
    other = block()
    got = functional_call(module, dict(other.named_parameters()), (x,))
    torch.testing.assert_close(got, other(x))


def test_the_module_is_unharmed():
    module, x = block(), inputs(3, 8)
    want = module(x)
    vmap(module)(x)
    torch.testing.assert_close(module(x), want)


def norm_glu(**policies):
    return tops.Sequential(tops.RMSNorm(8), tops.SwiGLU(), **policies)


def mlp(**policies):
    return tops.Sequential(tops.LayerNorm(8), tops.Linear(8, 8), tops.GELU(), **policies)


BATCHED = {
    "lists of weights": (lambda: tops.PackedLinear(8, [4, 4]), ()),
    "groups": (lambda: tops.GroupedLinear(2, 8, 4), (torch.tensor([2, 1]),)),
    "recomputed": (norm_glu, ()),
    "recomputed products": (lambda: mlp(recompute="products"), ()),
    "decoded": (lambda: mlp(saved="int8"), ()),
}


@pytest.mark.parametrize("name", BATCHED)
def test_batches_of_gradients_in_autograd(name):
    make, extra = BATCHED[name]
    module, x = make(), torch.randn(3, 8)

    def flat(x):
        output = module(x, *extra)
        outputs = output if isinstance(output, tuple) else (output,)
        return torch.cat([tensor.flatten() for tensor in outputs])

    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(flat, x, vectorize=True), jacobian(flat, x))


def test_a_graph_of_make_fx_with_backward_runs_with_gradients():
    module, x = norm_glu(), torch.randn(3, 8, requires_grad=True)

    def gradients(x):
        return torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])

    graph = make_fx(gradients)(x)
    assert "run_call" in graph.code
    torch.testing.assert_close(graph(x), gradients(x))
    with pytest.raises(RuntimeError, match="recompute_rms_norm must not require a gradient"):
        graph(x)[0].square().sum().backward()
