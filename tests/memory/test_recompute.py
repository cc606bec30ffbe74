"""Recompute: what backward computes again is not kept, and changes no number."""

import copy
import pickle

import pytest
import torch
from helpers import explained, residual, saved_bytes
from user_fusions import gradients

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=20)


def llama(h, f):
    up, down = tops.Linear(h, 2 * f, bias=False), tops.Linear(f, h, bias=False)
    return [tops.RMSNorm(h), up, tops.SwiGLU(), down]


def mlp(h, f, activation=tops.GELU):
    return [tops.LayerNorm(h), tops.Linear(h, f), activation(), tops.Linear(f, h)]


PIPELINES = {
    "llama": lambda: llama(16, 24),
    "mlp": lambda: mlp(16, 24),
    "llama block": lambda: residual(*llama(16, 24)),
    "norms": lambda: [tops.L2Normalization(), tops.Linear(16, 8), tops.RMSNorm(8), tops.GELU()],
    "norm and activation": lambda: [tops.LayerNorm(16), tops.SiLU(), tops.Linear(16, 8)],
    "chain": lambda: [
        *(tops.Linear(16, 32), tops.SwiGLU(), tops.Bias(16), tops.ConstantScale(0.5)),
        *(tops.Identity(), tops.Reshape((-1, 4, 4)), tops.Reshape((-1, 16)), tops.Linear(16, 8)),
    ],
    "relu": lambda: [tops.RMSNorm(16), tops.ReLU(), tops.Bias(16), tops.Linear(16, 8)],
    "joint": lambda: [tops.RMSNorm(16), tops.SReLU(), tops.Linear(16, 8)],
    "without a producer": lambda: [tops.Bias(16), tops.Linear(16, 8), tops.Linear(8, 8)],
}
GLUS = ["GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU", "SiTUGLU", "ClampedSwiGLU"]
for name in GLUS:
    PIPELINES[name] = lambda name=name: [
        *(tops.Linear(16, 32), getattr(tops, name)(), tops.Linear(16, 8))
    ]
for name in ("QGELU", "SReLU", "GELU", "SiLU"):
    # Reshape keeps it out of the Linear's own step in backward, as Identity would not.
    PIPELINES[name] = lambda name=name: [
        *(tops.Linear(16, 16), getattr(tops, name)(), tops.Reshape((-1, 16)), tops.Linear(16, 8))
    ]

every_pipeline = pytest.mark.parametrize("name", PIPELINES)


def pair(make, dtype=torch.float32):
    """The same ops that compute again, and that keep all."""
    module = tops.Sequential(*make()).to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4)
    kept = copy.deepcopy(module)
    kept.recompute = "none"
    return module, kept


def recomputed(plan):
    return [
        call.target
        for step in plan.backward
        for call in step.instructions
        if call.target.startswith("recompute_")
    ]


# ---- the numbers


@every_pipeline
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_gradients_are_those_of_what_is_kept(name, dtype):
    module, kept = pair(PIPELINES[name], dtype)
    x = torch.randn(7, 3, 16).to(dtype)
    for a, b in zip(gradients(module, x), gradients(kept, x), strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps * b.abs().max().item())
    assert saved_bytes(module, x.requires_grad_()) <= saved_bytes(kept, x)
    assert not recomputed(kept.plans()[0])


@every_pipeline
@pytest.mark.parametrize("shape", [(16,), (0, 16), (5, 16)])
def test_shapes(name, shape):
    if name == "chain" and shape != (5, 16):
        shape = (1, 16)
    module, kept = pair(PIPELINES[name])
    for x in (torch.randn(shape), torch.randn(*shape, 2)[..., 0]):
        torch.testing.assert_close(gradients(module, x), gradients(kept, x))


@every_pipeline
def test_fullgraph(name):
    module, _ = pair(PIPELINES[name])
    x = torch.randn(4, 16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, x), gradients(module, x))


@every_pipeline
def test_second_derivatives(name):
    module, _ = pair(PIPELINES[name], torch.float64)
    x = (0.2 + torch.rand(2, 16, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradgradcheck(module, (x,))


@every_pipeline
def test_functional_transforms(name):
    module, _ = pair(PIPELINES[name], torch.float64)
    x = torch.randn(3, 16, dtype=torch.float64)
    parameters = dict(module.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    found, found_x = torch.func.grad(loss, argnums=(0, 1))(parameters, x)
    x.requires_grad_()
    want_x, *want = torch.autograd.grad(module(x).square().sum(), [x, *parameters.values()])
    torch.testing.assert_close(found_x, want_x)
    torch.testing.assert_close(list(found.values()), want)


def test_a_second_backward_gives_the_same():
    module, _ = pair(PIPELINES["llama"])
    x = torch.randn(4, 16, requires_grad=True)
    y = module(x).sum()
    first = torch.autograd.grad(y, [x, *module.parameters()], retain_graph=True)
    second = torch.autograd.grad(y, [x, *module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_dropout_is_drawn_once():
    """The mask of the first forward is the mask of what is computed again."""
    make = lambda: [tops.Linear(16, 32), tops.GELU(), tops.Dropout(0.5), tops.Linear(32, 16)]  # noqa: E731
    module, kept = pair(make, torch.float64)
    x = torch.randn(9, 16, dtype=torch.float64)
    found = []
    for each in (module, kept):
        torch.manual_seed(3)
        found.append(gradients(each, x))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert recomputed(module.plans()[0]) == ["recompute_gelu", "recompute_dropout"]
    module.eval()
    module(x.requires_grad_())
    (plan,) = module.plans()
    assert recomputed(plan) == []
    assert ("linear_activation", (1, 2, 3, 4)) in [(step.name, step.ops) for step in plan.backward]


# ---- dtypes


def test_under_autocast():
    module, kept = pair(PIPELINES["mlp"])
    x = torch.randn(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found, want = gradients(module, x), gradients(kept, x)
        assert recomputed(module.plans()[0]) == ["recompute_layer_norm"]
    for a, b in zip(found, want, strict=True):
        # What was kept may come from a sum before it was rounded, the other comes from what was
        # rounded: as on CUDA, where GELU is a part of the product.
        torch.testing.assert_close(a, b, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cast_between_producer_and_reader(compiled):
    """A float32 norm before a bfloat16 Linear: rounded again as in forward."""
    make = lambda: [tops.LayerNorm(16), tops.Linear(16, 8, dtype=torch.bfloat16)]  # noqa: E731
    module = tops.Sequential(*make())
    kept = copy.deepcopy(module)
    kept.recompute = "none"
    x = torch.randn(6, 16)
    want = gradients(kept, x)
    run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    for a, b in zip(gradients(run, x), want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)
    assert "recompute_cast" in recomputed(module.plans()[0])


# ---- saved bytes


def one_call(module, x, compiled):
    if compiled:
        module = torch.compile(module, fullgraph=True, backend=compiled)
        module(x)  # what it traces does not count
    return module


@pytest.mark.parametrize("compiled", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("tokens", "h", "f"), [(8, 16, 24), (7, 33, 51), (1, 5, 3), (64, 256, 1024)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", ["llama", "gelu"])
def test_saved_bytes(block, dtype, tokens, h, f, compiled):
    make, width, statistics = {
        "llama": (llama, h + 2 * f, 4),
        "gelu": (mlp, h + f, 8),
    }[block]
    module = tops.Sequential(*make(h, f)).to(dtype)
    x = torch.randn(tokens, h).to(dtype).requires_grad_()
    run = one_call(module, x, compiled)
    assert saved_bytes(module, x, call=run) == tokens * (width * dtype.itemsize + statistics)


@pytest.mark.parametrize("compiled", [None, "aot_eager"])
@pytest.mark.parametrize(("tokens", "h", "f"), [(8, 16, 24), (7, 33, 51)])
def test_dropout_adds_at_most_one_bit(tokens, h, f, compiled):
    module = tops.Sequential(*residual(*mlp(h, f), tops.Dropout(0.1)))
    x = torch.randn(tokens, h, requires_grad=True)
    run = one_call(module, x, compiled)
    assert saved_bytes(module, x, call=run) == tokens * ((h + f) * 4 + 8) + (tokens * h + 7) // 8


@pytest.mark.parametrize("compiled", [None, "aot_eager"])
def test_relu_keeps_one_bit(compiled):
    module = tops.Sequential(tops.LayerNorm(33), tops.ReLU(), tops.Bias(33), tops.Linear(33, 5))
    x = torch.randn(7, 33, requires_grad=True)
    run = one_call(module, x, compiled)
    assert saved_bytes(module, x, call=run) == 7 * (33 * 4 + 8) + (7 * 33 + 7) // 8


def test_nothing_is_kept_twice_in_a_stack():
    """Six layers keep six times what one layer keeps: the residual stream and the wide tensors."""
    layers = [op for _ in range(6) for op in mlp(16, 24)]
    module = tops.Sequential(*layers)
    x = torch.randn(8, 16, requires_grad=True)
    assert saved_bytes(module, x) == 6 * 8 * ((16 + 24) * 4 + 8)


# ---- Python steps


class KeepLinear(tops.FusedOperation):
    """Backward of BasicLinear in Python, from its slots."""

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, weight = basic_op_ctxs[0].saved_tensors
        flat = grad_output.flatten(0, -2)
        return grad_output @ weight, [[flat.T @ x.flatten(0, -2)]], [()]


def take_linears(ops, **unused):
    return [KeepLinear([op]) if isinstance(op, tops.BasicLinear) else op for op in ops]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["llama", "mlp", "chain", "norm and activation"])
def test_a_python_backward_reads_what_is_computed_again(name, compiled):
    module, kept = pair(PIPELINES[name])
    x = torch.randn(6, 16)
    want = gradients(kept, x)
    with tops.register_backward_fusion(take_linears):
        run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        found = gradients(run, x)
        if not compiled:
            native = saved_bytes(module, x.requires_grad_())
            assert any(step.fused_op is not None for step in module.plans()[0].backward)
            assert recomputed(module.plans()[0])
    torch.testing.assert_close(found, want)
    if not compiled:
        assert native == saved_bytes(module, x)


class GeluForward(tops.FusedOperation):
    """Forward of GELU in Python, which fills the slot of the native op."""

    def fuser_forward_compute(self, input_, *, basic_op_extra_inputs, **unused):
        y = torch.nn.functional.gelu(input_, approximate="tanh")
        return y, [()], (input_,)

    def fuser_forward_save_ctx(self, basic_op_ctxs, input_, tensors_to_save, **unused):
        basic_op_ctxs[0].save_for_backward(*tensors_to_save)


def take_gelu(ops, **unused):
    return [GeluForward([op]) if isinstance(op, tops.GELU) else op for op in ops]


def test_a_python_forward_feeds_what_is_computed_again():
    module, kept = pair(PIPELINES["GELU"])
    x = torch.randn(6, 16)
    want = gradients(kept, x)
    with tops.register_forward_fusion(take_gelu):
        found = gradients(module, x)
        assert "GeluForward" in [step.name for step in module.plans()[0].forward]
        assert recomputed(module.plans()[0]) == ["recompute_gelu"]
    torch.testing.assert_close(found, want)


# ---- the switch


def test_the_policy_can_be_changed():
    module = tops.Sequential(*mlp(16, 24), recompute="none")
    x = torch.randn(4, 16, requires_grad=True)
    assert module.recompute == "none" and saved_bytes(module, x) == 4 * ((32 + 48) * 4 + 8)
    module.recompute = "cheap"
    assert saved_bytes(module, x) == 4 * ((16 + 24) * 4 + 8)


def test_a_compiled_module_notices_the_change():
    module = tops.Sequential(*mlp(16, 24))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16, requires_grad=True)
    compiled(x)
    cheap = saved_bytes(module, x, call=compiled)
    module.recompute = "none"
    compiled(x)
    assert saved_bytes(module, x, call=compiled) == cheap + 4 * (16 + 24) * 4


@pytest.mark.parametrize("derive", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_the_policy(derive):
    module = tops.Sequential(*mlp(16, 24), recompute="none")
    assert derive(module).recompute == "none"


def test_what_is_made_of_it_keeps_the_policy():
    module = tops.Sequential(*mlp(16, 24), recompute="none")
    assert module[1:].recompute == "none"
    assert (module + tops.Sequential(tops.Identity())).recompute == "none"


@pytest.mark.parametrize("value", ["all", "", None, True, 1])
def test_bad_policies(value):
    message = r'recompute must be "none", "cheap" or "products", got '
    with pytest.raises(ValueError, match=r"\[Sequential\] " + message):
        tops.Sequential(tops.Identity(), recompute=value)
    with pytest.raises(ValueError, match=r"\[OperationFuser\] " + message):
        tops.OperationFuser([tops.Identity()], recompute=value)
    module = tops.Sequential(tops.Identity())
    with pytest.raises(ValueError, match=message):
        module.recompute = value
    assert module.recompute == "cheap"


def test_explain_tells():
    module = tops.Sequential(*mlp(16, 24))
    module(torch.randn(4, 16, requires_grad=True))
    text = explained(module)
    assert "computes x1 again from 0.input, 0.mean" in text
    assert "168 bytes a row saved for backward" in text
