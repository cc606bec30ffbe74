"""torch.compile(fullgraph=True) of every op and of blocks: eager numbers, few graphs."""

import pytest
import torch
from fusion_cases import CASES as FUSIONS
from helpers import as_tuple, differentiable, feed_forward, leaf, residual, twin
from op_cases import CASES, NAMES, run_seeded
from torch._dynamo.testing import CompileCounterWithBackend

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=70)


def compiled(module, backend="aot_eager"):
    """The compiled module and the counter of its graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(module, fullgraph=True, backend=counter), counter


def results(module, inputs, parameters):
    """Outputs and all gradients."""
    copied = twin if differentiable(inputs) else leaf
    inputs = [copied(tensor) for tensor in inputs]
    every = as_tuple(run_seeded(module, *inputs))
    outputs, inputs = differentiable(every), differentiable(inputs)
    grads = [torch.linspace(-1, 1, o.numel()).to(o).view(o.shape) for o in outputs]
    found = torch.autograd.grad(outputs, [*inputs, *parameters], grads)
    return [*every, *found]


def assert_same(module, fast, inputs, **tolerances):
    parameters = list(module.parameters())
    want = results(module, inputs, parameters)
    torch.testing.assert_close(results(fast, inputs, parameters), want, **tolerances)


def block(dtype=torch.float32):
    return tops.Sequential(*residual(*feed_forward(16, 32), tops.Dropout(0.1))).to(dtype)


# One row for each built-in fusion; a test in test_fusions.py says that none is missing.
FUSED = {case.rule: case for case in FUSIONS}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_op_with_a_dynamic_batch(case):
    op = case.build()
    fast, counter = compiled(op)
    for batch in (4, 6, 11):
        assert_same(op, fast, case.inputs(shape=(batch, *case.row)))
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize("name", FUSED)
def test_built_in_fusion(name):
    case = FUSED[name]
    module = tops.Sequential(*case.make())
    fast, counter = compiled(module)
    for batch in (4, 6, 11):
        assert_same(module, fast, case.inputs(torch.randn(batch, 16)))
    assert counter.frame_count <= 2
    module(*case.inputs(torch.randn(4, 16, requires_grad=True)))
    (plan,) = module.plans()
    assert name in [step.name for step in plan.forward + plan.backward]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_block(backend, dtype):
    module = block(dtype)
    fast, _ = compiled(module, backend)
    assert_same(module, fast, [torch.randn(3, 5, 16, dtype=dtype)])
    with torch.no_grad():
        x = torch.randn(3, 5, 16, dtype=dtype)
        torch.testing.assert_close(run_seeded(fast, x), run_seeded(module, x))


def test_block_under_inductor():
    module = block()
    fast, counter = compiled(module, "inductor")
    for batch in (4, 6, 11):
        assert_same(module, fast, [torch.randn(batch, 16)])
    assert counter.frame_count <= 2


def test_sizes_marked_dynamic_give_one_graph():
    module = block()
    fast, counter = compiled(module)
    for batch in (4, 6, 11):
        x = torch.randn(batch, 16)
        torch._dynamo.mark_dynamic(x, 0)
        run_seeded(fast, x)
    assert counter.frame_count == 1


def test_train_and_eval_do_not_recompile_again_and_again():
    module = block()
    fast, counter = compiled(module)
    x = torch.randn(4, 16)
    for _ in range(4):
        for mode in (True, False):
            module.train(mode)
            torch.testing.assert_close(run_seeded(fast, x), run_seeded(module, x))
    assert counter.frame_count == 2


def test_grad_and_no_grad_do_not_recompile_again_and_again():
    module = block()
    fast, counter = compiled(module)
    for _ in range(3):
        fast(torch.randn(4, 16))
        with torch.no_grad():
            fast(torch.randn(4, 16))
    assert counter.frame_count == 2


def test_extra_tensors():
    module = tops.Sequential(
        tops.AddExtraInput(), tops.MakeExtraOutput(), tops.GELU(), tops.AddExtraInput()
    )
    fast, _ = compiled(module)
    assert_same(module, fast, [torch.randn(3, 8) for _ in range(3)])


def test_a_plain_module_between_groups():
    module = tops.Sequential(tops.Linear(8, 8), torch.nn.Tanh(), tops.LayerNorm(8))
    fast, _ = compiled(module)
    assert_same(module, fast, [torch.randn(3, 8)])


def test_replaced_parameters_are_seen():
    module = tops.Sequential(tops.Linear(4, 4), tops.GELU())
    fast, _ = compiled(module)
    fast(torch.randn(2, 4))
    with torch.no_grad():
        module[0].weight.mul_(2)
    assert_same(module, fast, [torch.randn(2, 4)])
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}, assign=True)
    assert_same(module, fast, [torch.randn(2, 4)])


def test_an_edited_sequential_is_traced_again():
    module = tops.Sequential(tops.Linear(4, 4))
    fast, _ = compiled(module)
    x = torch.randn(2, 4)
    fast(x)
    module.append(tops.ReLU())
    torch.testing.assert_close(fast(x), module(x))
    module[1] = tops.SiLU()
    torch.testing.assert_close(fast(x), module(x))
    module.pop()
    torch.testing.assert_close(fast(x), module(x))


def test_autocast_inside_and_outside():
    module = block()
    fast, _ = compiled(module)
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run_seeded(fast, x), run_seeded(module, x))

    def inside(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    fast, _ = compiled(inside)
    torch.testing.assert_close(run_seeded(fast, x), run_seeded(inside, x))


def test_double_backward_is_right_or_an_error():
    module = tops.Sequential(tops.Linear(4, 4), tops.GELU())
    fast, _ = compiled(module)
    x = torch.randn(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(fast(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()


def test_standalone_functions_and_two_modules():
    first, second = tops.Linear(4, 4), tops.Sequential(tops.GELU(), tops.RMSNorm(4))

    def function(x):
        return second(first(x) * 2) + x.square()

    fast, _ = compiled(function)
    x = torch.randn(3, 4)
    torch.testing.assert_close(fast(x), function(x))


def test_shared_class_does_not_mix_modules():
    """Two modules of one class behind one compiled code object keep their own plans."""

    class Net(torch.nn.Module):
        def __init__(self, activation):
            super().__init__()
            self.body = tops.Sequential(tops.Linear(4, 4), activation)

        def forward(self, x):
            return self.body(x)

    x = torch.randn(3, 4)
    for net in (Net(tops.GELU()), Net(tops.ReLU()), Net(tops.SiLU())):
        fast, _ = compiled(net)
        torch.testing.assert_close(fast(x), net(x))
