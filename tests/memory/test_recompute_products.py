"""`recompute="products"`: backward also computes outputs of matrix products again."""

import copy

import pytest
import torch
from helpers import assert_equal, explained, saved_bytes
from test_recompute import PIPELINES, llama, mlp, one_call, recomputed
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from user_fusions import gradients

import transformer_ops as tops

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
ANGLES = torch.randn(6, HEAD_DIM // 2, generator=torch.Generator().manual_seed(0))
TABLES = ANGLES.cos(), ANGLES.sin()


def attention(h):
    kv = KV_HEADS * HEAD_DIM
    return [
        tops.RMSNorm(h),
        tops.PackedLinear(h, (h, kv, kv), bias=False),
        tops.QKNorm(HEADS, KV_HEADS, head_dim=HEAD_DIM),
        tops.RoPE(HEAD_DIM, HEADS + KV_HEADS),
        tops.Attention(HEADS, KV_HEADS, head_dim=HEAD_DIM, causal=True),
        tops.Linear(h, h, bias=False),
    ]


def decoder_layer(h=32, f=48):
    packed = tops.PackedLinear(h, (f, f), bias=False)
    feed_forward = [tops.RMSNorm(h), packed, tops.SwiGLU(), tops.Linear(f, h, bias=False)]
    return [tops.Residual(*attention(h)), tops.Residual(*feed_forward)]


# By name: the ops, their extra inputs, and the products that backward computes again.
CASES = {
    "llama": (lambda: llama(32, 24), (), ["recompute_linear"]),
    "mlp": (lambda: mlp(32, 24), (), ["recompute_linear_bias"]),
    "three": (
        lambda: [*mlp(32, 24), tops.GELU(), tops.Linear(32, 8)],
        (),
        ["recompute_linear_bias", "recompute_linear_bias"],
    ),
    "squared relu": (
        lambda: [tops.Linear(32, 16), tops.SReLU(), tops.Linear(16, 8)],
        (),
        ["recompute_linear_epilogue"],
    ),
    "packed with bias": (
        lambda: [tops.PackedLinear(32, (24, 24)), tops.SwiGLU(), tops.Linear(24, 8)],
        (),
        ["recompute_packed_linear"],
    ),
    "decoder layer": (
        decoder_layer,
        TABLES,
        ["recompute_packed_linear", "recompute_packed_linear"],
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


def make(name, dtype=torch.float32, recompute="products"):
    torch.manual_seed(0)
    ops, extra, _ = CASES[name]
    return tops.Sequential(*ops(), recompute=recompute).to(dtype), [t.to(dtype) for t in extra]


class Given(nn.Module):
    """A module with its extra inputs, which have no gradient."""

    def __init__(self, module, extra):
        super().__init__()
        self.module, self.extra = module, extra

    def forward(self, x):
        return self.module(x, *self.extra)


def results(module, x, extra=()):
    """Output and gradients of a call."""
    return gradients(Given(module, extra), x)


def pair(name, dtype=torch.float32):
    """The same ops with each policy, and their extra inputs."""
    module, extra = make(name, dtype)
    cheap = copy.deepcopy(module)
    cheap.recompute = "cheap"
    return module, cheap, extra


def products(module):
    return [name for name in recomputed(module.plans()[0]) if "linear" in name]


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_gradients_are_those_of_what_is_saved(name, dtype):
    module, cheap, extra = pair(name, dtype)
    x = torch.randn(2, 6, 32).to(dtype)
    assert_equal(results(module, x, extra), results(cheap, x, extra))
    assert products(module) == CASES[name][2]
    assert products(cheap) == []


BIASED = {
    "gelu": lambda: mlp(32, 24),
    "silu": lambda: mlp(32, 24, tops.SiLU),
    "relu": lambda: mlp(32, 24, tops.ReLU),
    "glu": lambda: [tops.RMSNorm(32), tops.Linear(32, 48), tops.SwiGLU(), tops.Linear(24, 8)],
    "norm": lambda: [tops.LayerNorm(32), tops.Linear(32, 24), tops.RMSNorm(24)],
    "scale": lambda: [
        *(tops.LayerNorm(32), tops.Linear(32, 24)),
        *(tops.ConstantScale(0.3), tops.GELU()),
    ],
    "scale without bias": lambda: [
        *(tops.LayerNorm(32), tops.Linear(32, 24, bias=False)),
        *(tops.ConstantScale(0.3), tops.Linear(24, 8)),
    ],
    "packed": lambda: [tops.RMSNorm(32), tops.PackedLinear(32, (24, 24)), tops.SwiGLU()],
}


@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_call_recomputes_a_product_with_its_bias(name, dtype, autocast):
    """It is rounded as in forward, so the gradients are the same to the bit."""
    module = tops.Sequential(*BIASED[name](), recompute="products").to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape).to(dtype) * 0.1)
    cheap = copy.deepcopy(module)
    cheap.recompute = "cheap"
    x = torch.randn(7, 32).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, want = gradients(module, x), gradients(cheap, x)
        calls = recomputed(module.plans()[0])
    assert_equal(found, want)
    assert sum("linear" in call for call in calls) == 1
    assert "recompute_bias" not in calls and "recompute_constant_scale" not in calls


@every_case
def test_fullgraph(name):
    module, _, extra = pair(name)
    x = torch.randn(2, 6, 32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled, x, extra), results(module, x, extra))


@pytest.mark.parametrize("name", ["mlp", "packed with bias"])
def test_second_derivatives(name):
    module, extra = make(name, torch.float64)
    x = torch.randn(2, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(module, (x, *extra))


# ---- saved bytes


@pytest.mark.parametrize("compiled", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block", "statistics"), [("llama", 4), ("mlp", 8)])
def test_a_block_saves_its_input(block, statistics, dtype, compiled):
    module, _ = make(block, dtype)
    x = torch.randn(7, 32).to(dtype).requires_grad_()
    run = one_call(module, x, compiled)
    assert saved_bytes(module, x, call=run) == 7 * (32 * dtype.itemsize + statistics)


def test_a_decoder_layer_saves_three_tensors():
    """Its input, the result of attention and the second residual; q, k, v, gate and up are not."""
    module, extra = make("decoder layer")
    x = torch.randn(2, 6, 32, requires_grad=True)
    tables = sum(t.nbytes for t in extra)
    statistics = 2 + HEADS  # of two norms, and of each head
    seeds = saved_bytes(module, x, *extra) - tables - 12 * 4 * (3 * 32 + statistics)
    assert 0 <= seeds <= 16


def test_recomputed_products_are_counted():
    counts = {}
    for recompute in ("cheap", "products"):
        module, _ = make("llama", recompute=recompute)
        x = torch.randn(5, 32, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        counts[recompute] = counter.get_total_flops()
    assert counts["products"] - counts["cheap"] == 2 * 5 * 32 * 48


# ---- what backward needs for it


def test_frozen_weights_after_a_norm():
    module, cheap, _ = pair("llama")
    x = torch.randn(6, 32)
    for each in (module, cheap):
        each.requires_grad_(False)
    torch.testing.assert_close(gradients(module, x), gradients(cheap, x))
    assert products(module) == ["recompute_linear"]


def test_an_input_that_nothing_saves_is_not_saved_for_it():
    module = tops.Sequential(
        tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32), recompute="products"
    )
    module.requires_grad_(False)
    assert saved_bytes(module, torch.randn(6, 32, requires_grad=True)) == 6 * 64 * 4
    assert products(module) == []


def test_under_autocast():
    module, cheap, _ = pair("llama")
    x = torch.randn(6, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found, want = gradients(module, x), gradients(cheap, x)
        assert products(module) == ["recompute_linear"]
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_weights_of_different_dtypes():
    packed = tops.PackedLinear(32, (24, 24), bias=False)
    module = tops.Sequential(packed, tops.SwiGLU(), recompute="products")
    packed.weight1.data = packed.weight1.data.double()
    cheap = copy.deepcopy(module)
    cheap.recompute = "cheap"
    x = torch.randn(6, 32)
    assert_equal(gradients(module, x), gradients(cheap, x))
    assert products(module) == ["recompute_packed_linear"]


def test_products_of_a_recipe_are_saved():
    """Forward rounds their operands, and backward does not have them."""
    module, cheap, _ = pair("llama")
    x = torch.randn(32, 32)
    with tops.autocast(recipe=tops.recipe.MXFP8BlockScaling()):
        found, want = gradients(module, x), gradients(cheap, x)
        assert products(module) == []
        assert recomputed(module.plans()[0]) == recomputed(cheap.plans()[0])
    assert_equal(found, want)


def test_saved_in_8_bits():
    """What backward computes again starts from decoded tensors."""
    module, _, extra = pair("decoder layer")
    coded = copy.deepcopy(module)
    coded.saved = "int8"
    x = torch.randn(2, 6, 32, requires_grad=True)
    assert saved_bytes(coded, x, *extra) < saved_bytes(module, x, *extra)
    for a, b in zip(results(coded, x, extra), results(module, x, extra), strict=True):
        assert (a - b).norm() <= 0.05 * b.norm()
    assert products(coded) == CASES["decoder layer"][2]


@pytest.mark.parametrize("name", [*(name for name in PIPELINES if name != "joint")])
def test_every_pipeline(name):
    module = tops.Sequential(*PIPELINES[name]())
    other = copy.deepcopy(module)
    other.recompute = "products"
    x = torch.randn(7, 3, 16)
    torch.testing.assert_close(gradients(other, x), gradients(module, x))
    x.requires_grad_()
    assert saved_bytes(other, x) <= saved_bytes(module, x)


def test_explain_tells():
    module, _ = make("llama")
    module(torch.randn(4, 32, requires_grad=True))
    text = explained(module)
    assert "computes x1, x2 again from 0.input, 0.rstd" in text
    assert "132 bytes a row saved for backward" in text
