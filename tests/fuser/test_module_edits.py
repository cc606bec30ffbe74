"""Modules that change after their first call: what an op is counts when it is called."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import transformer_ops as tops

F = torch.nn.functional


def gelu(x):
    return F.gelu(x, approximate="tanh")


def compiled(module):
    torch._dynamo.reset()
    return torch.compile(module, backend="eager")


RUNS = {"eager": lambda module: module, "compiled": compiled}
run_both = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


class LoRA(tops.Linear):
    """A Linear with a low-rank update."""

    def __init__(self, width):
        super().__init__(width, width)
        self.down = nn.Parameter(torch.randn(2, width))
        self.up = nn.Parameter(torch.randn(width, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


# ---- forward


@run_both
@pytest.mark.parametrize("make", [tops.Sequential, lambda *ops: tops.OperationFuser(ops)])
def test_a_subclass_with_a_forward_of_its_own_is_called(run, make):
    x, lora = torch.randn(4, 8), LoRA(8)
    module = run(make(tops.ReLU(), lora, tops.GELU()))
    y = module(x)
    y.sum().backward()
    h = x.relu()
    want = gelu(F.linear(h, lora.weight, lora.bias) + h @ lora.down.T @ lora.up.T)
    torch.testing.assert_close(y, want)
    assert all(p.grad is not None and p.grad.any() for p in lora.parameters())


@run_both
@pytest.mark.parametrize("alone", [True, False])
def test_a_forward_set_on_an_op_is_called_until_it_is_deleted(run, alone):
    x, op = torch.randn(4, 8), tops.GELU()
    module = run(op if alone else tops.Sequential(tops.ReLU(), op))
    inner = x if alone else x.relu()
    torch.testing.assert_close(module(x), gelu(inner))
    op.forward = lambda a: a * 100
    torch.testing.assert_close(module(x), inner * 100)
    op.forward = lambda a: a * 10
    torch.testing.assert_close(module(x), inner * 10)
    del op.forward
    torch.testing.assert_close(module(x), gelu(inner))


@run_both
@pytest.mark.parametrize("count", [1, 2])
def test_an_operation_fuser_calls_a_forward_that_was_set(run, count):
    x, ops = torch.randn(4, 8), [tops.GELU() for _ in range(count)]
    fuser = tops.OperationFuser(ops)
    call = run(lambda a: fuser(a))
    want = gelu(gelu(x)) if count == 2 else gelu(x)
    torch.testing.assert_close(call(x), want)
    ops[-1].forward = lambda a: a * 100
    torch.testing.assert_close(call(x), (gelu(x) if count == 2 else x) * 100)
    del ops[-1].forward
    torch.testing.assert_close(call(x), want)


def test_hooks_of_the_only_op_of_an_operation_fuser_fire():
    x, op, seen = torch.randn(4, 8), tops.GELU(), []
    fuser = tops.OperationFuser([op])
    fuser(x)
    op.register_forward_hook(lambda *unused: seen.append(1))
    torch.testing.assert_close(fuser(x), gelu(x))
    assert seen == [1]


def test_a_patch_that_keeps_the_old_forward():
    """As accelerate patches a module, and takes its patch back."""
    x = torch.randn(4, 8)
    module = tops.Sequential(tops.Linear(8, 8), tops.GELU())
    want, op, seen = module(x), module[0], []
    old = op.forward

    def patched(*args, **kwargs):
        seen.append(len(args))
        return old(*args, **kwargs)

    op.forward = patched
    torch.testing.assert_close(module(x), want)
    assert seen == [1] and len(module.plans()) == 2
    op.forward = old
    torch.testing.assert_close(module(x), want)
    assert seen == [1] and len(module.plans()) == 1
    twin = copy.deepcopy(module)
    torch.testing.assert_close(twin(x), want)
    assert len(twin.plans()) == 1


def test_a_forward_of_its_own_needs_no_op_methods():
    class Double(tops.BasicOperation):
        def forward(self, x):
            return 2 * x

    x = torch.randn(4, 8, requires_grad=True)
    module = tops.Sequential(Double(), tops.GELU())
    torch.testing.assert_close(module(x), gelu(2 * x))
    module(x).sum().backward()
    assert x.grad is not None


def test_a_forward_with_extra_tensors():
    class Twice(tops.MakeExtraOutput):
        def forward(self, x):
            y, extra = super().forward(x)
            return y, 2 * extra

    x = torch.randn(4, 8)
    module = tops.Sequential(Twice(), tops.GELU())
    torch.testing.assert_close(module(x), (gelu(x), 2 * x))
    module[0].forward = lambda a: a
    with pytest.raises(RuntimeError, match=r"\[Twice\] forward must return 2 tensors, got 1"):
        module(x)


def test_explain_says_who_overrides_forward():
    x = torch.randn(4, 8)
    module = tops.Sequential(LoRA(8), tops.GELU())
    module(x)
    note = "LoRA overrides forward, which keeps it in a group of its own"
    assert [group.note for group in module.explain().groups] == [note, ""]
    module[0].forward = lambda a: a
    module(x)
    assert len(module.plans()) == 1
    line = "module 0: LoRA, whose forward is overridden"
    explanation = module.explain()
    assert line in str(explanation) and line in explanation.svg()
    assert line in explanation._repr_html_()


def test_a_part_of_a_linear_takes_no_forward():
    linear = tops.Linear(8, 8)
    with pytest.raises(AttributeError, match=r"\[Bias\] forward must be set on the Linear"):
        linear.basic_ops[1].forward = lambda a: a


# ---- parameters

GIVE_A_BIAS = {
    "assigned": lambda linear, bias: setattr(linear, "bias", bias),
    "registered": lambda linear, bias: linear.register_parameter("bias", bias),
}


@run_both
@pytest.mark.parametrize("give", GIVE_A_BIAS.values(), ids=GIVE_A_BIAS)
@pytest.mark.parametrize("alone", [True, False])
def test_a_bias_may_come_and_go(run, give, alone):
    x, linear = torch.randn(4, 8), tops.Linear(8, 8, bias=False)
    after = (lambda y: y) if alone else gelu
    module = run(linear if alone else tops.Sequential(linear, tops.GELU()))
    for bias in (None, nn.Parameter(torch.full((8,), 10.0)), None, nn.Parameter(torch.ones(8))):
        give(linear, bias)
        y = module(x)
        torch.testing.assert_close(y, after(F.linear(x, linear.weight, bias)))
        y.sum().backward()
        assert bias is None or bias.grad is not None


def test_a_bias_of_an_operation_fuser_may_come_and_go():
    x, linear = torch.randn(4, 8), tops.Linear(8, 8, bias=False)
    fuser = tops.OperationFuser([linear, tops.GELU()])
    for bias in (None, nn.Parameter(torch.ones(8)), None):
        linear.bias = bias
        torch.testing.assert_close(fuser(x), gelu(F.linear(x, linear.weight, bias)))


@run_both
@pytest.mark.parametrize("alone", [True, False])
def test_a_deleted_parameter_is_missed_by_name(run, alone):
    x, linear = torch.randn(4, 8), tops.Linear(8, 8)
    module = run(linear if alone else tops.Sequential(linear, tops.GELU()))
    module(x)
    bias = linear.bias
    del linear.bias
    with pytest.raises((AttributeError, torch._dynamo.exc.Unsupported), match="'bias'"):
        module(x)
    linear.bias = bias
    linear.weight = None
    with pytest.raises(TypeError, match=r"\[Linear\] weight must be a tensor, got None"):
        module(x)


def test_a_norm_may_lose_its_parameters():
    x, norm, plain = torch.randn(4, 8), tops.LayerNorm(8), nn.LayerNorm(8)
    fast = torch.compile(norm, fullgraph=True, backend="aot_eager")
    for name in ("bias", "weight"):
        for module in (norm, plain):
            setattr(module, name, None)
        torch.testing.assert_close(norm(x), plain(x))
        torch.testing.assert_close(fast(x), plain(x))
    centered = tops.RMSNorm(8, zero_centered_gamma=True)
    centered.weight = None
    with pytest.raises(RuntimeError, match="zero_centered_gamma must be false without a weight"):
        centered(x)


class Shift(tops.BasicOperation):
    """Adds the sum of its parameters."""

    def op_forward(self, ctx, input_):
        return input_ + sum(p.detach() for p in self.parameters())

    def op_backward(self, ctx, grad_output):
        return grad_output, [grad_output.sum() for _ in self.parameters()]


def test_a_python_op_may_gain_and_lose_parameters():
    x, shift = torch.randn(4, 8), Shift()
    module = tops.Sequential(tops.Bias(8), shift, tops.Dropout(0.5).eval())
    torch.testing.assert_close(module(x), x)
    shift.a = nn.Parameter(torch.ones(()))
    shift.inner = nn.Module()
    shift.inner.b = nn.Parameter(torch.ones(()))
    y = module(x)
    torch.testing.assert_close(y, x + 2)
    y.sum().backward()
    assert shift.a.grad == shift.inner.b.grad == 32
    del shift.inner.b
    torch.testing.assert_close(module(x), x + 1)


def test_a_replaced_dict_of_parameters_is_seen():
    x, linear = torch.randn(4, 8), tops.Linear(8, 8)
    module = tops.Sequential(linear, tops.GELU())
    module(x), linear(x)
    linear._parameters = {"weight": nn.Parameter(torch.zeros(8, 8)), "bias": linear.bias}
    torch.testing.assert_close(linear(x), linear.bias.expand(4, 8))
    torch.testing.assert_close(module(x), gelu(linear.bias).expand(4, 8))


def test_a_functional_bias_for_a_linear_without_one_raises():
    for module in (
        tops.Sequential(tops.Linear(8, 8, bias=False), tops.GELU()),
        tops.Sequential(tops.Linear(8, 8, bias=False), Shift()),
    ):
        x = torch.randn(4, 8)
        module(x)
        with pytest.raises(RuntimeError, match=r"\[Linear\] bias must be assigned to the module"):
            torch.func.functional_call(module, {"0.bias": torch.ones(8)}, (x,))
        module(x)


# ---- hooks and copies


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_hooks_in_a_new_dict_fire(alone, kind):
    x, op, seen = torch.randn(4, 8), tops.GELU(), []
    module = op if alone else tops.Sequential(tops.ReLU(), op)
    want = module(x)
    setattr(op, f"_{kind}_hooks", OrderedDict())
    getattr(op, f"register_{kind}_hook")(lambda *unused: seen.append(1))
    torch.testing.assert_close(module(x), want)
    assert seen == [1]


def test_a_hook_after_compilation_is_seen_where_dynamo_guards_on_hooks():
    x, seen = torch.randn(4, 8), []
    module = tops.Sequential(tops.ReLU(), tops.GELU())
    want = module(x)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        call = compiled(module)
        torch.testing.assert_close(call(x), want)
        module[1].register_forward_hook(lambda m, args, out: seen.append(1) or 2 * out)
        torch.testing.assert_close(call(x), 2 * want)
    assert seen


@pytest.mark.parametrize("nested", [True, False])
def test_a_data_parallel_replica_computes_with_its_own_weights(nested):
    x, linear = torch.randn(4, 8), tops.Linear(8, 8)
    module = tops.Sequential(linear) if nested else linear
    want = module(x)
    linear(x)
    replica = linear._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(8, 8), torch.ones(8)
    if nested:
        replica, inner = module._replicate_for_data_parallel(), replica
        replica._modules["0"] = inner
    torch.testing.assert_close(replica(x), torch.ones(4, 8))
    torch.testing.assert_close(compiled(replica)(x), torch.ones(4, 8))
    torch.testing.assert_close(module(x), want)


def test_a_replica_leaves_the_plans_of_the_original():
    x = torch.randn(4, 8)
    module = tops.Sequential(tops.Linear(8, 8, bias=False), tops.GELU())
    module(x)
    layout = module._layout
    module._replicate_for_data_parallel()
    module[0]._replicate_for_data_parallel()
    assert module._layout is layout


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_groups_of_its_own(copied):
    x, op = torch.randn(4, 8), tops.ConstantScale(2.0)
    op(x)
    twin = copied(op)
    twin.scale = 3.0
    twin.forward = lambda a: a
    torch.testing.assert_close(op(x), 2 * x)
    del twin.forward
    torch.testing.assert_close(twin(x), 3 * x)


def test_channels_of_a_lone_op_need_a_producer():
    op = tops.AddExtraInput().set_extra_input_channel(0, "skip")
    with pytest.raises(ValueError, match="channel 'skip' must have a producer"):
        tops.OperationFuser([op])
    torch.testing.assert_close(op(torch.ones(2), torch.ones(2)), torch.full((2,), 2.0))
