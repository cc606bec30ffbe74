"""`fuse` on models of timm and litgpt, with hooks and adapters."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import peft
import pytest
import timm
import torch
import transformers
from fuse_models import fused_rules, llama
from torch import Tensor, nn

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=15)


def results(model: nn.Module, input: Tensor, run: Any = None) -> list[Tensor]:
    """The output, and the gradients of all parameters that have some."""
    model.zero_grad()
    output = (model if run is None else run)(input)
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(plain: nn.Module, model: nn.Module, input: Tensor, run: Any = None) -> None:
    want, found = results(plain, input), results(model, input, run)
    assert len(found) == len(want)
    # Some gradients are zero but for rounding.
    least = 1e-5 * max(float(tensor.norm()) for tensor in want)
    for a, b in zip(want, found, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm() + least


# ---- timm

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 4, "img_size": 32}
PATCHES_OF_14 = SMALL | {"img_size": 28}
SWIN = {"depths": (1, 1), "embed_dim": 16, "num_heads": (2, 2), "img_size": 56}
# name -> (options, drop path, what is fused)
VISION: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "vit_small_patch16_224": (SMALL, {"layer": 2}),
    "deit3_small_patch16_224": (SMALL, {"layer": 2}),
    "vit_small_patch14_dinov2": (PATCHES_OF_14, {"layer": 2}),
    "vit_base_patch16_clip_224": (SMALL, {"layer": 2}),
    "vit_base_patch16_siglip_224": (SMALL, {"layer": 2, "residual": 1}),
    # One product without its biases, three of which one has no bias, and halves that rotate.
    "eva02_tiny_patch14_224": (PATCHES_OF_14, {"layer": 2}),
    "eva02_base_patch14_224": (PATCHES_OF_14, {"layer": 2}),
    "vit_small_patch16_dinov3": (SMALL, {"layer": 2}),
    "vit_small_patch16_rope_224": (SMALL, {"layer": 2}),
    # Each layer and head has its own trained tables, so that attention runs as statements.
    "vit_small_patch16_rope_mixed_224": (SMALL, {"layer": 2}),
    "beit_base_patch16_224": (SMALL, {"residual": 2}),
    "swin_tiny_patch4_window7_224": (SWIN, {"residual": 2}),
}


def vision(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    small = VISION[name][0]
    options = {"drop_path_rate": 0.0} | small | options
    model = timm.create_model(name, pretrained=False, **options)
    return model, torch.randn(2, 3, small["img_size"], small["img_size"])


@pytest.mark.parametrize("name", VISION)
def test_models_of_timm(name: str, tmp_path: Path) -> None:
    plain, pixels = vision(name)
    for parameter in plain.parameters():
        if parameter.dim() == 1:  # biases are zero
            nn.init.normal_(parameter, 0.5, 0.2)
    model = copy.deepcopy(plain)
    report = tops.fuse(model, strict=True)
    assert_same(plain, model, pixels)
    assert fused_rules(report) == VISION[name][1] and not report.skipped
    before, after = report.saved_bytes(pixels)
    assert after < before
    torch.save(model.state_dict(), tmp_path / "state")
    state, want = torch.load(tmp_path / "state"), plain.state_dict()
    assert state.keys() == want.keys() and all(torch.equal(state[key], want[key]) for key in want)


@pytest.mark.parametrize(
    "name", ["deit3_small_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224"]
)
def test_models_of_timm_compiled(name: str) -> None:
    plain, pixels = vision(name)
    model = copy.deepcopy(plain)
    tops.fuse(model, strict=True)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(plain, model, pixels, run)


ROPE = torch.randn(4, 16)
# name -> (what is done to attention before, the arguments of a call, whether attention is an op)
ROTATED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "tables": ({}, {"rope": ROPE}, True),
    "no tables": ({}, {}, True),
    "causal": ({}, {"rope": ROPE, "is_causal": True}, True),
    "a mask": ({}, {"rope": ROPE, "attn_mask": torch.randn(5, 5)}, True),
    "halves": ({"rotate_half": True}, {"rope": ROPE}, True),
    "step by step": ({"fused_attn": False, "scale": 0.1}, {"rope": ROPE}, True),
    "a scale that torch does not get": ({"scale": 0.1}, {"rope": ROPE}, False),
    "a bias that is added apart": ({"qkv_bias_separate": True}, {"rope": ROPE}, True),
    "tables of each head": ({}, {"rope": torch.randn(4, 4, 16)}, False),
    "trained tables": ({}, {"rope": ROPE.clone().requires_grad_()}, False),
}


@pytest.mark.parametrize("name", ROTATED)
def test_calls_of_a_block_that_rotates(name: str) -> None:
    attributes, arguments, is_op = ROTATED[name]
    model, _ = vision("eva02_tiny_patch14_224")
    plain: Any = model.blocks[0]  # type: ignore[index]
    nn.init.normal_(plain.attn.q_bias)
    block = copy.deepcopy(plain)
    tops.fuse(block)
    x, tables = torch.randn(2, 5, 32), arguments.get("rope", torch.zeros(0))
    found = []
    for one in (plain, block):
        for key, value in attributes.items():
            setattr(one.attn, key, value)
        y = one(x, **arguments)
        wanted = [p for p in (*one.parameters(), tables) if p.requires_grad]
        found.append((y, *torch.autograd.grad(y.square().mean(), wanted)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert ("Attention" in str(block.fused.explain())) == is_op


def test_paths_that_timm_drops() -> None:
    """Each sample keeps all of a branch, times 1 / (1 - p), or nothing of it."""
    model, _ = vision("deit3_small_patch16_224", drop_path_rate=0.5, init_values=1.0)
    block: Any = model.blocks[1]
    x = torch.randn(64, 4, 32)
    block.eval()
    block.attn.register_forward_hook(lambda module, inputs, output: output * 0)
    branch = block(x) - x
    assert fused_rules(tops.fuse(block, strict=True)) == {"residual": 1}
    block.train()
    found = block(x) - x
    p = block.drop_path2.drop_prob
    scales = (found * branch).flatten(1).sum(1) / branch.square().flatten(1).sum(1)
    is_kept = scales > 0.5
    torch.testing.assert_close(scales, is_kept / (1 - p), rtol=1e-3, atol=1e-3)
    assert p == 0.5 and 16 <= is_kept.sum() <= 48


def test_the_dropout_of_attention_in_another_mode() -> None:
    """Only the statements of timm without torch's attention call it."""
    model, _ = vision("vit_small_patch16_224", attn_drop_rate=0.5)
    block: Any = model.blocks[0]
    block.attn.fused_attn = False
    tops.fuse(block)
    x = torch.randn(2, 4, 32)
    want = block.eval()(x)
    block.attn.attn_drop.train()
    assert not torch.allclose(block(x), want)
    block.train().attn.attn_drop.eval()
    torch.testing.assert_close(block(x), want, rtol=1e-4, atol=1e-5)
    block.attn.attn_drop = nn.Tanh()
    found = block(x)
    with tops.unfused(block):
        torch.testing.assert_close(found, block(x), rtol=1e-4, atol=1e-5)


def test_layer_scale_in_place_is_left_alone() -> None:
    model, pixels = vision("deit3_small_patch16_224")
    for block in model.blocks:
        block.ls2.inplace = True
    plain = copy.deepcopy(model)
    report = tops.fuse(model)
    assert fused_rules(report) == {"feed-forward": 2, "residual": 2} and len(report.skipped) == 2
    assert_same(plain, model, pixels)


def norms_of_timm(kind: str) -> tuple[nn.Module, Tensor]:
    norm = timm.layers.get_norm_layer(kind)
    return vision("vit_small_patch16_224", norm_layer=functools.partial(norm, eps=1e-5))


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        ("layernormfp32", {"norm of any dtype": 1, "layer": 2}),
        ("rmsnorm", {"norm": 1, "layer": 2}),
        ("rmsnormfp32", {"norm of any dtype": 1, "layer": 2}),
    ],
)
def test_norms_of_timm(kind: str, rules: dict[str, int]) -> None:
    plain, pixels = norms_of_timm(kind)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.1)
    model = copy.deepcopy(plain)
    report = tops.fuse(model, strict=True)
    assert_same(plain, model, pixels)
    assert fused_rules(report) == rules and not report.skipped


class Images(nn.Module):
    """A residual connection around a norm of images."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.proj = norm, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.norm(x))
        return x


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (timm.layers.RmsNorm2d, "RmsNorm2d normalizes over dimension 1, and ops over the last one"),
        (timm.layers.RmsNorm2dFp32, "RmsNorm2dFp32 normalizes over dimension 1"),
        (timm.layers.LayerNorm2d, "the forward of LayerNorm2d is not known"),
        (timm.layers.SimpleNorm, "the forward of SimpleNorm is not known"),
    ],
)
def test_norms_that_no_op_computes(make: Any, reason: str) -> None:
    plain, x = Images(make(4)), torch.randn(2, 4, 4, 4)
    model = copy.deepcopy(plain)
    report = tops.fuse(model, rules=["residual", "norm", "norm of any dtype"])
    assert torch.equal(model(x), plain(x))
    assert len(report.rows) == 1 and reason in report.rows[0].reason


def test_fast_norms_of_timm() -> None:
    with timm.layers.set_layer_config(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm.layers.fast_norm, "_USE_FAST_NORM", True)
        plain, pixels = norms_of_timm("rmsnorm")
    model = copy.deepcopy(plain)
    report = tops.fuse(model)
    assert_same(plain, model, pixels)
    assert fused_rules(report) == {"feed-forward": 2}
    reason = "RmsNorm calls a faster function of another library"
    assert {row.reason for row in report.skipped} == {reason}


# ---- litgpt

COMMON = {
    "block_size": 16,
    "vocab_size": 64,
    "padded_vocab_size": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "intermediate_size": 64,
}
LLAMA = {"norm_class_name": "RMSNorm", "parallel_residual": False, "bias": False}
LITGPT: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama": (LLAMA | {"mlp_class_name": "LLaMAMLP"}, {"norm of any dtype": 5, "sum": 2}),
    "gemma": (
        LLAMA | {"mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh"},
        {"norm of any dtype": 5, "sum": 2},
    ),
    "pythia": ({}, {"sum": 2}),
}


@pytest.fixture(scope="module")
def litgpt() -> Any:
    """Its model alone: the package as a whole wants other releases than transformers does."""
    spec = importlib.util.find_spec("litgpt")
    assert spec is not None and spec.submodule_search_locations is not None
    stubs: dict[str, dict[str, Any]] = {
        "litgpt": {"__path__": list(spec.submodule_search_locations)},
        "litgpt.scripts": {"__path__": []},
        "litgpt.scripts.convert_hf_checkpoint": {"qkv_reassemble": None},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, attributes in stubs.items():
            module = types.ModuleType(name)
            vars(module).update(attributes)
            patch.setitem(sys.modules, name, module)
        yield importlib.import_module("litgpt.model")
        for name in [name for name in sys.modules if name.partition(".")[0] == "litgpt"]:
            patch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", LITGPT)
def test_models_of_litgpt(name: str, litgpt: Any) -> None:
    options, rules = LITGPT[name]
    torch.manual_seed(0)
    plain = litgpt.GPT(litgpt.Config(**COMMON, **options))
    model = copy.deepcopy(plain)
    report = tops.fuse(model, strict=True)
    tokens = torch.randint(0, 64, (2, 12))
    assert_same(plain, model, tokens)
    assert fused_rules(report) == rules and not report.skipped
    before, after = report.saved_bytes(tokens)
    assert after < before


# ---- hooks and adapters


def test_one_call_that_records_hidden_states() -> None:
    """Its hooks stay on the modules, and record nothing in other calls."""
    plain, model = llama(), llama()
    tops.fuse(model)
    tokens = torch.arange(12).view(2, 6)
    layer = max(model.model.layers[0].fused.regions, key=lambda one: len(one.inside))
    for options in ({}, {"output_hidden_states": True}, {}, {"output_attentions": True}, {}):
        wanted, found = plain(input_ids=tokens, **options), model(input_ids=tokens, **options)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.hidden_states, wanted.hidden_states, rtol=1e-4, atol=1e-4)
        assert layer.sequential is not None
    assert model.model.layers[0].self_attn._forward_hooks


def test_adapters_that_are_on_and_off() -> None:
    """As a reference model in each step, and then merged."""
    model = llama()
    report = tops.fuse(model)
    tokens = torch.arange(12).view(2, 6)
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    for _ in range(40):
        with adapted.disable_adapter():
            adapted(input_ids=tokens)
        adapted(input_ids=tokens)
    want = adapted.eval()(input_ids=tokens).logits
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=tokens).logits, want, rtol=1e-4, atol=1e-4)
    assert "layer" in [row.rule for row in report.fused]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
def test_a_model_that_jit_traces_before_its_first_call() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
    x, more = torch.randn(1, 3, 32, 32), torch.randn(2, 3, 32, 32)
    plain = copy.deepcopy(model)
    tops.fuse(model)
    traced = torch.jit.trace(model, x)
    assert "transformer_ops::linear_bias_activation" in str(traced.inlined_graph)
    plain(x).sum().backward()
    for run in (traced, model):
        model.zero_grad()
        run(x).sum().backward()
        torch.testing.assert_close(run(x), plain(x))
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model(more), plain(more))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
def test_the_first_jit_trace_of_a_model_is_like_the_second() -> None:
    # It makes the plans, and jit lists weights in the order in which their sizes are asked for.
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
            config = transformers.ViTConfig(
                num_hidden_layers=1, image_size=32, patch_size=8, **sizes
            )
            self.model = transformers.ViTForImageClassification(config).eval()

        def forward(self, x: Tensor) -> Any:
            return self.model(pixel_values=x).logits

    plain, x = Classifier(), torch.randn(2, 3, 32, 32)
    fused = copy.deepcopy(plain)
    tops.fuse(fused)
    traced = torch.jit.trace(fused, x)  # compares two traces
    assert "transformer_ops::linear_bias_activation" in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), plain(x))


def test_a_frozen_model_of_inference_tensors_has_a_head_that_is_trained() -> None:
    with torch.inference_mode():
        plain = llama(vocab_size=70)
    plain.requires_grad_(False)
    plain.lm_head = nn.Linear(32, 70, bias=False)
    fused = copy.deepcopy(plain)
    tops.fuse(fused)
    ids = torch.arange(12).view(2, 6)
    for model in (plain, fused):
        model(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(fused.lm_head.weight.grad, plain.lm_head.weight.grad)
