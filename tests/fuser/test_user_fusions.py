"""Users' fused ops in Python, in every pass and style, against the same ops unfused."""

import gc
import sys

import pytest
import torch
from helpers import saved_bytes, saved_tensors
from torch._dynamo.testing import CompileCounterWithBackend
from user_fusions import (
    AddNorm,
    Backward,
    ForwardSingle,
    ForwardSplit,
    JointSingle,
    JointSplit,
    assert_same,
    gradients,
    replacing,
)

import transformer_ops as tops
from transformer_ops.testing import check_fusion

pytestmark = pytest.mark.takes(seconds=15)

REGISTER = {
    "forward": tops.register_forward_fusion,
    "backward": tops.register_backward_fusion,
    "forward_backward": tops.register_forward_backward_fusion,
}
FUSIONS = [
    ("forward", ForwardSplit),
    ("forward", ForwardSingle),
    ("backward", Backward),
    ("forward_backward", JointSplit),
    ("forward_backward", JointSingle),
]


def make_ops():
    return [
        tops.LayerNorm(6),
        tops.Linear(6, 8, bias=False),
        tops.SiLU(),
        tops.Linear(8, 6),
        tops.GELU(),
    ]


def fuse(fused):
    return replacing(fused, tops.BasicLinear, tops.SiLU)


@pytest.fixture
def x():
    return torch.randn(2, 3, 6)


@pytest.mark.parametrize(("kind", "fused"), FUSIONS)
def test_numbers_and_plan(kind, fused, x):
    """Habit 6: the plan has it, and the numbers are the unfused ones."""
    module = tops.Sequential(*make_ops())
    want = gradients(module, x)
    with REGISTER[kind](fuse(fused)):
        assert_same(gradients(module, x), want)
        (plan,) = module.plans()
        forward = [step.fused_op for step in plan.forward if step.ops == (1, 2)]
        backward = [step.fused_op for step in plan.backward if step.ops == (1, 2)]
        assert [isinstance(op, fused) for op in forward] == [True] * ("forward" in kind)
        assert [isinstance(op, fused) for op in backward] == [True] * ("backward" in kind)
        if kind == "forward_backward":
            assert forward[0] is backward[0]
        assert tops.Plan.parse(str(plan)) == plan
        with torch.no_grad():
            torch.testing.assert_close(module(x), want[0])
    assert_same(gradients(module, x), want)
    assert not module.plans()[0].has_python_steps


@pytest.mark.parametrize(("kind", "fused"), FUSIONS)
def test_check_fusion_accepts(kind, fused, x):
    """Every subset of tensors frozen, each `recompute`, several backwards, autocast, and more."""
    check_fusion(fuse(fused), make_ops, x, kind=kind)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("kind", "fused"), [row for row in FUSIONS if "Single" not in row[1].__name__]
)
def test_fullgraph_with_the_split_pair(kind, fused, backend, x):
    module = tops.Sequential(*make_ops())
    want = gradients(module, x)
    with REGISTER[kind](fuse(fused)):
        compiled = torch.compile(module, fullgraph=True, backend=backend)
        assert_same(gradients(compiled, x), want)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), want[0])
            # The trace reads the parameters when it is called, it has no copy of their values.
            module[1].weight.mul_(2)
        assert_same(gradients(compiled, x), gradients(module, x))


@pytest.mark.parametrize(("kind", "fused"), [row for row in FUSIONS if "Single" in row[1].__name__])
def test_single_methods_break_the_graph_and_are_right(kind, fused, x):
    module = tops.Sequential(*make_ops())
    want = gradients(module, x)
    with REGISTER[kind](fuse(fused)):
        compiled = torch.compile(lambda t: module(t * 2) + 1, backend="aot_eager")
        torch.testing.assert_close(compiled(x / 2), want[0] + 1)
        assert_same(gradients(torch.compile(module, backend="aot_eager"), x), want)


def test_a_graph_with_a_break_serves_equal_modules():
    """The modules that it was made for are gone."""

    def call(module, t):
        return module(t)

    compiled, x = torch.compile(call, backend="aot_eager"), torch.randn(3, 6)
    with tops.register_forward_backward_fusion(fuse(JointSingle)):
        for frozen in (False, True, False):
            module = tops.Sequential(*make_ops()[1:3])
            module[0].weight.requires_grad_(not frozen)
            for t in (x, x.clone().requires_grad_()):
                torch.testing.assert_close(compiled(module, t), module(t))
            del module
            gc.collect()


def test_dynamic_batch(x):
    module = tops.Sequential(*make_ops())
    batches = [torch.randn(n, 3, 6) for n in (2, 3, 5, 7)]
    want = [gradients(module, batch) for batch in batches]
    with tops.register_forward_backward_fusion(fuse(JointSplit)):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(module, fullgraph=True, backend=counter)
        for batch, numbers in zip(batches, want, strict=True):
            assert_same(gradients(compiled, batch), numbers)
    assert counter.frame_count <= 2


def test_exactly_one_recompilation_for_each_change(x):
    module = tops.Sequential(*make_ops())
    want = gradients(module, x)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for _ in range(2):
        assert_same(gradients(compiled, x), want)
    assert counter.frame_count == 1
    with tops.register_forward_fusion(replacing(Plus, tops.SiLU)):
        assert torch.equal(compiled(x), module(x)) and not torch.allclose(module(x), want[0])
        compiled(x)
        assert counter.frame_count == 2
    for _ in range(2):
        assert_same(gradients(compiled, x), want)
    assert counter.frame_count == 3


class Plus(tops.FusedOperation):
    """SiLU(x) + 1, so that a stale plan shows."""

    def fuser_forward_compute(self, input_, **unused):
        return torch.nn.functional.silu(input_) + 1, [()], (input_,)

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)


@pytest.mark.parametrize("forward", [ForwardSplit, ForwardSingle])
def test_a_python_forward_and_a_python_backward_of_two_users(forward, x):
    module = tops.Sequential(*make_ops())
    want = gradients(module, x)
    with (
        tops.register_forward_fusion(fuse(forward)),
        tops.register_backward_fusion(fuse(Backward)),
    ):
        assert_same(gradients(module, x), want)
        (plan,) = module.plans()
        assert type(plan.forward[1].fused_op) is forward
        assert type(plan.backward[1].fused_op) is Backward


def test_saved_tensors_go_through_autograd(x):
    module = tops.Sequential(*make_ops())
    with tops.register_forward_backward_fusion(fuse(JointSplit)):
        with saved_tensors() as packed:
            module(x.requires_grad_())
        storages = [t.untyped_storage()._cdata for t in packed]
        assert len(storages) == len(set(storages))
        output = module(x)
        with torch.no_grad():
            module[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_joint_op_may_save_less(x):
    module = tops.Sequential(*make_ops()[:3], recompute="none")
    before = saved_bytes(module, x)
    with tops.register_forward_backward_fusion(fuse(JointSplit)):
        assert before - saved_bytes(module, x) == 2 * 3 * 8 * 4  # the SiLU's input


@pytest.mark.parametrize(("kind", "fused"), FUSIONS)
def test_create_graph_is_one_clear_error(kind, fused, x):
    module = tops.Sequential(*make_ops())
    x.requires_grad_()
    with REGISTER[kind](fuse(fused)):
        y = module(x)
        with pytest.raises(
            RuntimeError, match=f"create_graph=True must have native ops.*{fused.__name__}"
        ):
            torch.autograd.grad(y.sum(), x, create_graph=True)
        # Also where autograd could prune the node's error away: another path to the input.
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad((module(x) + x * x).sum(), x, create_graph=True)
        module(x).sum().backward()


@pytest.mark.parametrize(("kind", "fused"), FUSIONS)
def test_torch_func_is_one_clear_error(kind, fused, x):
    module = tops.Sequential(*make_ops())
    message = r"\[Sequential\] torch.func transforms must run over native ops only, got the Python "
    with REGISTER[kind](fuse(fused)):
        with pytest.raises(RuntimeError, match=message + f"steps {fused.__name__}"):
            torch.func.grad(lambda t: module(t).sum())(x)
        if kind != "backward":
            with pytest.raises(RuntimeError, match=message):
                torch.func.vmap(module)(x)


def test_a_channel_inside_a_fused_op(x):
    def ops():
        return [
            tops.MakeExtraOutput().set_extra_output_channel(0, "residual", False),
            tops.AddExtraInput().set_extra_input_channel(0, "residual"),
            tops.Linear(6, 4),
        ]

    check_fusion(
        replacing(AddNorm, tops.MakeExtraOutput, tops.AddExtraInput),
        ops,
        x,
        kind="forward_backward",
    )


def test_a_hidden_output_that_somebody_reads_must_be_made(x):
    module = tops.Sequential(
        tops.MakeExtraOutput().set_extra_output_channel(0, "residual", False),
        tops.AddExtraInput().set_extra_input_channel(0, "residual"),
        tops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )
    with tops.register_forward_backward_fusion(
        replacing(AddNorm, tops.MakeExtraOutput, tops.AddExtraInput)
    ):
        with pytest.raises(RuntimeError, match="extra output 0 of op 0 must be a tensor"):
            module(x)


def test_several_fused_ops_share_a_channel_with_native_ones(x):
    class Residual(tops.FusedOperation):
        """Linear + AddExtraInput whose extra input comes from outside."""

        def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, **unused):
            weight = self.basic_ops[0].weight
            self.seen = basic_op_extra_inputs[1][0].requires_grad
            return input_ @ weight.T + basic_op_extra_inputs[1][0], [(), ()], (input_, weight)

        def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
            basic_op_ctxs[0].save_for_backward(*tensors_to_save)

        def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
            x, weight = basic_op_ctxs[0].saved_tensors
            grad = grad_output.to(weight.dtype)  # the sum may have that of the extra input
            grad_weight = grad.reshape(-1, 6).T @ x.reshape(-1, 6)
            return grad @ weight, [(grad_weight,), ()], [(), (grad_output,)]

    def ops():
        return [
            tops.LayerNorm(6),
            tops.MakeExtraOutput().set_extra_output_channel(0, "residual", True),
            tops.Linear(6, 6, bias=False),
            tops.AddExtraInput().set_extra_input_channel(0, "residual"),
            tops.GELU(),
            tops.Linear(6, 6, bias=False),
            tops.AddExtraInput().set_extra_input_channel(0, "residual"),
            tops.AddExtraInput().set_extra_input_channel(0, "residual"),
        ]

    fusion = replacing(Residual, tops.BasicLinear, tops.AddExtraInput)
    for kind in ("forward", "forward_backward"):
        check_fusion(fusion, ops, x, kind=kind)
    module = tops.Sequential(*ops())
    with tops.register_forward_fusion(fusion):
        module(x)  # no gradient of the input, but the norm's parameters want one
        assert [s.fused_op.seen for s in module.plans()[0].forward if s.fused_op] == [True, True]
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        module(x)
        assert [s.fused_op.seen for s in module.plans()[0].forward if s.fused_op] == [False, False]


def test_a_weight_of_another_dtype(x):
    module = tops.Sequential(*make_ops())
    module[1].to(torch.float64)
    want = gradients(module, x)
    with tops.register_backward_fusion(fuse(Backward)):
        assert_same(gradients(module, x), want)


@pytest.mark.parametrize(("kind", "fused"), FUSIONS)
def test_accumulate_into_main_grad(kind, fused, x):
    module = tops.Sequential(
        tops.Linear(6, 8, bias=False, accumulate_into_main_grad=True), tops.SiLU()
    )
    weight = module[0].weight

    def run(call):
        weight.main_grad = torch.ones_like(weight)
        call(x).square().sum().backward()
        assert weight.grad is None
        return weight.main_grad

    want = run(module)
    with REGISTER[kind](fuse(fused)):
        torch.testing.assert_close(run(module), want)
        torch.testing.assert_close(run(torch.compile(module, backend="aot_eager")), want)


# ---- what a step returns is checked when it returns


class NormSiLU(tops.FusedOperation):
    """LayerNorm and SiLU; `spoil` changes what it saves or returns."""

    spoil = staticmethod(lambda output, slots: (output, slots))

    def fuser_forward_compute(self, input_, **unused):
        norm = self.basic_ops[0]
        mean, rstd = input_.mean(-1), (input_.var(-1, unbiased=False) + norm.eps).rsqrt()
        hidden = (input_ - mean[..., None]) * rstd[..., None] * norm.weight + norm.bias
        output, slots = self.spoil(torch.nn.functional.silu(hidden), [input_, mean, rstd, hidden])
        return output, [(), ()], slots

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        basic_op_ctxs[0].save_for_backward(*tensors_to_save[:3])
        basic_op_ctxs[1].save_for_backward(tensors_to_save[3])


SPOILED = {
    "kept dimension": (
        lambda y, s: (y, [s[0], s[1], s[2][..., None], s[3]]),
        r"save slot 'rstd' of op 0 \(LayerNorm\) with shape \(4,\) and dtype torch.float32, "
        r"got shape \(4, 1\) and dtype torch.float32",
    ),
    "float64": (
        lambda y, s: (y, [s[0], s[1].double(), *s[2:]]),
        r"save slot 'mean' of op 0 .* dtype torch.float32, got shape .* torch.float64",
    ),
    "swapped": (
        lambda y, s: (y, [s[1], s[0], *s[2:]]),
        r"save slot 'input' of op 0 .* with shape \(4, 8\) .*, got shape \(4,\)",
    ),
    "output's shape": (
        lambda y, s: (y[:, :4], s),
        r"return an output with shape \(4, 8\) and dtype torch.float32, got shape \(4, 4\)",
    ),
    "output's dtype": (
        lambda y, s: (y.double(), s),
        r"return an output with shape .* dtype torch.float32, got .* dtype torch.float64",
    ),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("name", SPOILED)
def test_wrong_results_name_the_fusion(name, is_compiled):
    spoil, message = SPOILED[name]

    class Spoiled(NormSiLU):
        pass

    Spoiled.spoil = staticmethod(spoil)
    module = tops.Sequential(tops.LayerNorm(8), tops.SiLU(), tops.Linear(8, 8), recompute="none")
    called = torch.compile(module, backend="aot_eager", fullgraph=True) if is_compiled else module
    x = torch.randn(4, 8, requires_grad=True)
    pattern = [tops.LayerNorm, tops.SiLU]
    method = r"\[Spoiled\] fuser_forward_(compute|save_ctx) must "
    with (
        tops.register_forward_fusion(Spoiled, pattern=pattern),
        pytest.raises(RuntimeError, match=method + message),
    ):
        called(x)
    with tops.register_forward_fusion(NormSiLU, pattern=pattern):
        module(x).sum().backward()


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8), (0, 8)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_python_step_computes_in_the_dtype_of_autocast(shape, has_norm, is_compiled):
    seen = []

    class Recomputed(tops.FusedOperation):
        def fuser_forward_compute(self, input_, **unused):
            weight = self.basic_ops[0].weight
            seen.append((input_.dtype, weight.dtype))
            return torch.nn.functional.silu(input_ @ weight.T), [(), ()], (input_, weight)

        def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
            basic_op_ctxs[0].save_for_backward(*tensors_to_save)

        def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
            x, weight = basic_op_ctxs[0].saved_tensors
            own = self.basic_ops[0].weight * 1
            assert weight.requires_grad and self.basic_ops[0].weight.requires_grad
            seen.append((x.dtype, weight.dtype, own.dtype, basic_op_ctxs[0].dtype))
            hidden = x @ weight.T
            s = torch.sigmoid(hidden)
            grad = grad_output * s * (1 + hidden * (1 - s))
            return grad @ weight, [(grad.flatten(0, -2).T @ x.flatten(0, -2),), ()], [(), ()]

    norms = [tops.LayerNorm(8)] if has_norm else []
    module = tops.Sequential(*norms, tops.Linear(8, 8, bias=False), tops.SiLU())
    called = torch.compile(module, backend="aot_eager", fullgraph=True) if is_compiled else module
    x = torch.randn(shape, requires_grad=True)

    def results():
        with torch.autocast("cpu", torch.bfloat16):
            output = called(x)
        return output, *torch.autograd.grad(output.sum(), [x, *module.parameters()])

    unfused = results()
    pattern = [tops.BasicLinear, tops.SiLU]
    with tops.register_forward_backward_fusion(Recomputed, pattern=pattern):
        fused = results()
    assert {dtype for dtypes in seen for dtype in dtypes} == {torch.bfloat16} and len(seen) > 1
    assert [t.dtype for t in fused] == [t.dtype for t in unfused]
    torch.testing.assert_close(fused, unfused, rtol=0.05, atol=0.05)


class FloatSiLU(tops.FusedOperation):
    """Under autocast the result of SiLU is float32."""

    shape = staticmethod(lambda output: output)

    def fuser_forward_compute(self, input_, **unused):
        product = input_ @ self.basic_ops[0].weight.T
        output = torch.nn.functional.silu(product.float())
        return self.shape(output), [(), ()], [input_, product]

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        basic_op_ctxs[0].save_for_backward(tensors_to_save[0], self.basic_ops[0].weight)
        basic_op_ctxs[1].save_for_backward(tensors_to_save[1])


@pytest.mark.parametrize("shape", [(4, 8), (2, 3, 8)])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_float32_result_is_rounded_under_autocast(shape, dynamic):
    pattern = [tops.BasicLinear, tops.SiLU]
    x = torch.randn(shape)
    module = tops.Sequential(tops.LayerNorm(8), tops.Linear(8, 8, bias=False), tops.SiLU())

    def run(called, x):
        with torch.autocast("cpu", torch.bfloat16):
            return called(x)

    counter = CompileCounterWithBackend("aot_eager")
    with tops.register_forward_fusion(FloatSiLU, pattern=pattern):
        called = torch.compile(module, backend=counter, fullgraph=True, dynamic=dynamic)
        found = run(called, x)
        assert found.dtype == run(module, x).dtype == torch.bfloat16
        if dynamic:
            assert run(called, torch.cat([x, x])).dtype == torch.bfloat16
            assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("shape", "got"),
    [
        (lambda y: y[..., None], "got shape .* and dtype torch.float32"),
        (lambda y: y.double(), "got shape .* and dtype torch.float64"),
    ],
)
def test_a_wrong_result_under_symbolic_sizes(shape, got):
    class Wrong(FloatSiLU):
        pass

    Wrong.shape = staticmethod(shape)
    module = tops.Sequential(tops.Linear(8, 8, bias=False), tops.SiLU())
    called = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    message = r"return an output with 2 dimensions and dtype torch.bfloat16, " + got
    with (
        tops.register_forward_fusion(Wrong, pattern=[tops.BasicLinear, tops.SiLU]),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(Exception, match=message),
    ):
        called(torch.randn(4, 8, requires_grad=True))


@pytest.mark.parametrize(
    ("saved", "got"),
    [((), "nothing saved"), ((None,), "1 tensors, 1 of them None"), ((1, 2), "2 tensors")],
)
def test_slots_that_are_not_saved(saved, got, x):
    class Unsaved(ForwardSplit):
        def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
            super().fuser_forward_save_ctx(basic_op_ctxs, input_, tensors_to_save, **unused)
            context = basic_op_ctxs[1]
            context.to_save = tuple(t and context.to_save[0] for t in saved)

    module = tops.Sequential(*make_ops(), recompute="none")
    message = rf"must save the slots \(input\) of op 2 \(SiLU\) in its context, got {got}$"
    with (
        tops.register_forward_fusion(Unsaved, pattern=[tops.BasicLinear, tops.SiLU]),
        pytest.raises(RuntimeError, match=message),
    ):
        module(x)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error has no notes")
def test_a_backward_that_unpacks_what_was_not_saved(x):
    class Unsaved(JointSplit):
        def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
            basic_op_ctxs[1].note = "from forward"

    module = tops.Sequential(*make_ops())
    with tops.register_forward_backward_fusion(Unsaved, pattern=[tops.BasicLinear, tops.SiLU]):
        output = module(x).sum()
        with pytest.raises(ValueError, match="not enough values") as raised:
            output.backward()
    assert raised.value.__notes__ == [
        "[Unsaved] raised in the backward of ops [1, 2], whose contexts have 0, 0 saved tensors"
    ]
