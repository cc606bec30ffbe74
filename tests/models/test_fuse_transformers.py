"""`fuse` on models of transformers, from small configurations with random weights."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from fuse_models import DECODER, ENCODER, assert_same_step, fused_rules, step_of
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    quantize_,
)

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=80)

VISION = {k: v for k, v in ENCODER.items() if "_token_id" not in k and k != "vocab_size"} | {
    "image_size": 16,
    "patch_size": 8,
}
TOKENS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def causal(name: str, **options: Any) -> Callable[[], nn.Module]:
    config = "Gemma3Text" if name == "Gemma3" else name
    return lambda: getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{config}Config")(**DECODER, **options)
    )


def masked(name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"{name}ForMaskedLM")(
        getattr(transformers, f"{name}Config")(**ENCODER)
    )


def vision(name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, f"{name}Model")(
        getattr(transformers, f"{name}Config")(**VISION)
    )


def small(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**options))


GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "vocab_size": 64,
}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
OPT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 64,
    "num_attention_heads": 4,
}
OPT |= {"dropout": 0.0, "vocab_size": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 16}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 16}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
BART: dict[str, Any] = {"d_model": 32, "vocab_size": 64, "encoder_layers": 2, "decoder_layers": 2}
BART |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 16}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0}
WHISPER = {k: v for k, v in BART.items() if k != "max_position_embeddings"}
WHISPER |= {"max_target_positions": 16, "max_source_positions": 16, "num_mel_bins": 8}
XGLM: dict[str, Any] = {
    "d_model": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "attention_heads": 4,
    "vocab_size": 64,
}
XGLM |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
NO_DROPOUT = {k: v for k, v in XGLM.items() if k.endswith("dropout")}
TROCR = {k: v for k, v in BART.items() if not k.startswith("encoder")} | NO_DROPOUT
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 8}
MIXED = ["linear_attention", "full_attention"]
MODERNBERT = ENCODER | {"cls_token_id": 3, "sep_token_id": 4}

# These have two layers, and a norm behind them.
LLAMA = {"layer": 2, "norm": 1}
GEMMA = {"layer": 2, "norm of any dtype": 1}
PARALLEL = {"attention": 2, "parallel branches": 2}
PARALLEL_HALVES = {"attention": 2, "parallel branches of a norm": 2}
# With the second half alone, where attention runs as its own statements.
BERT = {"layer": 2, "feed-forward, sum and norm": 2}
# Layers with norms behind the sums. In calls with an encoder's output, their half with attention
# to it reads the residual, too.
CROSS = {"layer": 2, "sum and norm": 2}
LEFT = {name: {"residual and norm"} for name in ("TrOCR", "Mvp")}
LEFT |= {"Mpt": {"residual and norm"}, "Bloom": {"feed-forward"}}
LEFT["GptOss"] = {"residual and norm", "experts"}  # experts with biases
LEFT["FalconH1"] = {"residual", "feed-forward"}  # a factor of the gate
# model -> (how it is made, how many parts each rule fuses)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "Llama": (causal("Llama"), LLAMA),
    "Mistral": (causal("Mistral"), LLAMA),
    "Qwen2": (causal("Qwen2"), LLAMA),
    "Qwen3": (causal("Qwen3"), LLAMA),
    "Phi3": (causal("Phi3"), LLAMA),
    "Olmo2": (causal("Olmo2"), LLAMA),
    "Granite": (causal("Granite", residual_multiplier=0.5), LLAMA),
    "Gemma": (causal("Gemma", head_dim=8), GEMMA),
    "Gemma2": (causal("Gemma2", head_dim=8), {"norm of any dtype": 5, "residual": 2}),
    "Gemma3": (causal("Gemma3", head_dim=8), GEMMA),
    "Glm": (causal("Glm", head_dim=8), LLAMA),
    "Ernie4_5": (causal("Ernie4_5", head_dim=8), LLAMA),
    "Arcee": (causal("Arcee"), LLAMA),
    "GPT2": (small("GPT2LMHeadModel", "GPT2Config", **GPT2), {"layer": 2}),
    "GPT2, other scores": (
        small(
            "GPT2LMHeadModel",
            "GPT2Config",
            **GPT2,
            scale_attn_by_inverse_layer_idx=True,
            reorder_and_upcast_attn=True,
        ),
        {"layer": 2},
    ),
    "GPT2, cross attention": (
        small("GPT2LMHeadModel", "GPT2Config", **GPT2, add_cross_attention=True),
        {"layer": 2},
    ),
    "GPTNeoX": (small("GPTNeoXForCausalLM", "GPTNeoXConfig", **ENCODER), PARALLEL),
    "GPTNeoX, one after the other": (
        small("GPTNeoXForCausalLM", "GPTNeoXConfig", **ENCODER, use_parallel_residual=False),
        {"layer": 2},
    ),
    "Cohere": (causal("Cohere"), PARALLEL_HALVES | {"norm of any dtype": 3}),
    "StableLm": (causal("StableLm"), {"layer": 2}),
    "StableLm, parallel": (causal("StableLm", use_parallel_residual=True), PARALLEL_HALVES),
    "Starcoder2": (causal("Starcoder2"), {"layer": 2}),
    "Olmo": (causal("Olmo"), GEMMA),
    "SmolLM3": (causal("SmolLM3", no_rope_layers=[1, 0]), LLAMA),
    "Phi": (causal("Phi"), PARALLEL_HALVES),
    "Nemotron": (causal("Nemotron"), {"layer": 2}),
    "OPT": (small("OPTForCausalLM", "OPTConfig", **OPT), {"layer": 2}),
    "OPT, post-norm": (
        small("OPTForCausalLM", "OPTConfig", **OPT, do_layer_norm_before=False),
        {"layer": 2},
    ),
    "Helium": (causal("Helium", head_dim=8), GEMMA),
    # Norms of queries and keys behind the rotation.
    "HunYuanDenseV1": (causal("HunYuanDenseV1", head_dim=8), LLAMA),
    "Exaone4": (causal("Exaone4", head_dim=8), LLAMA),
    # Norms without weights, those of queries and keys behind the rotation.
    "NanoChat": (causal("NanoChat"), {"sum": 4}),
    # Gates of what attention gives are statements behind ops; a cache has layers of other calls.
    "Afmoe": (
        causal("Afmoe", num_dense_layers=2, head_dim=8),
        {"attention": 2, "norm": 5, "residual": 2},
    ),
    "Laguna": (
        causal("Laguna", mlp_layer_types=["dense"] * 2, head_dim=8),
        {"attention": 2, "norm": 3, "residual": 2},
    ),
    "HrmText": (causal("HrmText", head_dim=8), {"attention": 4, "sum": 4}),
    # Sinks: one more column of scores, and a factor of the result. A mask for the calls of each.
    "GptOss": (
        causal("GptOss", num_local_experts=4, head_dim=8, sliding_window=4),
        {"norm": 3, "residual": 2},
    ),
    "GraniteSWA": (causal("GraniteSWA", sliding_window=4), LLAMA),
    # A norm between attention and its product.
    "BitNet": (causal("BitNet"), LLAMA),
    # All heads share keys and values.
    "GPTBigCode": (small("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **GPT2), {"layer": 2}),
    "Whisper": (small("WhisperForCausalLM", "WhisperConfig", **WHISPER), {"layer": 2}),
    "Bart": (small("BartForConditionalGeneration", "BartConfig", **BART), {"layer": 4}),
    "Falcon": (
        small("FalconForCausalLM", "FalconConfig", **ENCODER),
        {"attention": 2, "feed-forward": 2},
    ),
    # Sines come before cosines, with a number for each pair.
    "GPTJ": (small("GPTJForCausalLM", "GPTJConfig", **GPT2, rotary_dim=4), PARALLEL_HALVES),
    # Their caches also have states of other layers; FalconH1's takes scaled keys.
    "FalconH1": (
        causal("FalconH1", key_multiplier=0.5, head_dim=8, **MAMBA),
        {"norm": 5, "parallel branches of a norm": 2},
    ),
    "MiniMax": (
        causal("MiniMax", head_dim=8, num_local_experts=4, layer_types=MIXED, block_size=4),
        {"attention": 1, "experts": 2, "norm": 6},
    ),
    # Queries, values and keys of some heads, and then of others.
    "CodeGen": (
        small("CodeGenForCausalLM", "CodeGenConfig", **GPT2, rotary_dim=4),
        PARALLEL_HALVES,
    ),
    # Scores by hand.
    "XGLM": (small("XGLMForCausalLM", "XGLMConfig", **XGLM), {"layer": 2}),
    "TrOCR": (small("TrOCRForCausalLM", "TrOCRConfig", **TROCR), CROSS),
    "Mvp": (small("MvpForCausalLM", "MvpConfig", **BART, **NO_DROPOUT), CROSS),
    # A bias of scores (ALiBi), and a mask of booleans. Its dropout has p = 0, which is no float.
    "Mpt": (small("MptForCausalLM", "MptConfig", **MPT), {"residual": 2, "sum": 2}),
    # Its attention adds the residual itself.
    "Bloom": (small("BloomForCausalLM", "BloomConfig", **BLOOM), {"attention": 2}),
    # Their attention is given away with its weights, as one tuple.
    "MegatronBert": (masked("MegatronBert"), {"attention": 2, "feed-forward": 1, "sum": 4}),
    "RemBert": (
        masked("RemBert"),
        {"attention": 2, "feed-forward": 1, "feed-forward, sum and norm": 2, "sum and norm": 2},
    ),
    "T5": (small("T5ForConditionalGeneration", "T5Config", **T5), {"norm": 8, "residual": 4}),
    "T5, gated": (
        small("T5ForConditionalGeneration", "T5Config", **T5, feed_forward_proj="gated-gelu"),
        {"norm": 8, "residual": 4},
    ),
    "Bert": (masked("Bert"), BERT | {"feed-forward": 1}),
    "Roberta": (masked("Roberta"), BERT | {"feed-forward": 1}),
    "Albert": (
        masked("Albert"),
        {"feed-forward": 1, "feed-forward in chunks": 1, "residual and norm": 1, "attention": 1},
    ),
    # Their heads are a part of the forward of the model.
    "Electra": (masked("Electra"), BERT),
    "DistilBert": (
        small("DistilBertForMaskedLM", "DistilBertConfig", **DISTILBERT),
        {"layer": 2},
    ),
    "ModernBert": (
        small("ModernBertForMaskedLM", "ModernBertConfig", **MODERNBERT),
        {"layer": 2},
    ),
    "CLIPVision": (vision("CLIPVision"), {"layer": 2}),
    "SiglipVision": (vision("SiglipVision"), {"layer": 2, "residual": 1}),
    "ViT": (vision("ViT"), {"layer": 2}),
    "Dinov2": (vision("Dinov2"), {"layer": 2}),
    "DINOv3ViT": (vision("DINOv3ViT"), {"residual": 2}),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


def inputs(model: nn.Module) -> dict[str, Tensor]:
    if "pixel_values" in model.forward.__code__.co_varnames or hasattr(model.config, "image_size"):
        return {"pixel_values": PIXELS}
    return {"input_ids": TOKENS, "labels": TOKENS}


def assert_same(
    plain: nn.Module, model: nn.Module, run: Any = None, tolerance: float = 1e-5
) -> None:
    assert_same_step(plain, model, inputs(model), tolerance, run)


@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_state_dict(name: str, tmp_path: Path) -> None:
    plain: Any = make(name)
    model: Any = copy.deepcopy(plain)
    report = tops.fuse(model, strict=True)
    assert_same(plain, model)
    assert fused_rules(report) == MODELS[name][1]
    assert {row.rule for row in report.skipped} == LEFT.get(name, set())
    before, after = report.saved_bytes(**inputs(model))
    assert after < before
    model.save_pretrained(tmp_path)
    assert model.config.architectures == [type(plain).__name__]
    again = type(plain).from_pretrained(tmp_path)
    want = plain.state_dict()
    assert again.state_dict().keys() == want.keys()
    assert all(torch.equal(tensor, want[key]) for key, tensor in again.state_dict().items())


def calls_of_hook(model: Any, path: str) -> int:
    calls: list[int] = []
    handle = model.get_submodule(path).register_forward_hook(lambda *_: calls.append(1))
    model(**inputs(model))
    handle.remove()
    return len(calls)


@pytest.mark.parametrize("name", ["Albert", "Bert", "DistilBert"])
def test_hooks_of_every_module(name: str) -> None:
    plain: Any = make(name)
    model: Any = copy.deepcopy(plain)
    tops.fuse(model)
    for path, _ in plain.named_modules():
        assert calls_of_hook(model, path) == calls_of_hook(plain, path), path


@pytest.mark.parametrize(
    "name",
    [
        *("Llama", "Gemma3", "GPT2", "GPTNeoX", "Bert", "DistilBert", "RemBert", "Bloom"),
        # They have the rules of Llama and GPT2.
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("OPT", "StableLm", "Dinov2", "CodeGen")
        ),
    ],
)
def test_compiled(name: str) -> None:
    plain, model = make(name), make(name)
    for one in (plain, model):
        if getattr(one, "loss_type", "") is None:  # transformers warns, which ends a graph
            one.loss_type = "ForCausalLM"
    tops.fuse(model)
    assert_same(plain, model, torch.compile(model, backend="aot_eager", fullgraph=True))


def test_training_with_checkpoints() -> None:
    plain: Any = make("Llama")
    model: Any = make("Llama")
    report = tops.fuse(model)
    for one in (plain, model):
        one.train()
        one.gradient_checkpointing_enable()
    assert_same(plain, model)
    assert fused_rules(report) == LLAMA


@pytest.mark.parametrize("name", ["Llama", "GPT2", "GPTNeoX", "OPT"])
def test_generation_with_a_cache(name: str) -> None:
    plain: Any = make(name)
    model: Any = make(name)
    tops.fuse(model)
    found = [
        one.generate(TOKENS[:1, :4], max_new_tokens=6, do_sample=False) for one in (plain, model)
    ]
    assert torch.equal(*found)


def lora(model: Any, targets: Any) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    ("targets", "when"),
    [
        (targets, when)
        for targets in (["q_proj", "v_proj"], ["gate_proj", "down_proj"], "all-linear")
        for when in ("before", "after")
    ],
)
def test_adapters(targets: Any, when: str) -> None:
    plain, model = lora(make("Llama"), targets), make("Llama")
    if when == "after":
        report = tops.fuse(model)
        assert_same(make("Llama"), model)
        model = lora(model, targets)
    else:
        model = lora(model, targets)
        report = tops.fuse(model)
    assert_same(plain, model)
    assert fused_rules(report) == LLAMA and not report.skipped
    assert all("lora" in name for name in step_of(model, inputs(model))[1])


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("GPT2", ["c_attn"]),
        ("GPT2", ["c_attn", "c_proj", "c_fc"]),
        ("GPTNeoX", ["query_key_value"]),
        ("OPT", ["v_proj"]),
        ("OPT, post-norm", ["k_proj"]),
        ("Cohere", ["o_proj"]),
        ("Bert", ["query", "value"]),
    ],
)
def test_adapters_of_other_models(name: str, targets: list[str]) -> None:
    """The layers are fused as without adapters."""
    fused = MODELS[name][1]
    plain, model = lora(make(name), targets), make(name)
    report = tops.fuse(model)
    assert_same(make(name), model)
    model = lora(model, targets)
    assert_same(plain, model)
    assert fused_rules(report) == fused


def train_and_merge(model: Any, targets: Any) -> tuple[list[float], list[weakref.ref[Any]]]:
    """The losses of some steps with adapters, which are merged then; and the modules of PEFT."""
    adapted = lora(model, targets)
    kinds = [(module, type(module).__module__) for module in adapted.modules()]
    replaced = [weakref.ref(module) for module, kind in kinds if kind.startswith("peft.")]
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, adapted.parameters()), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = adapted(**inputs(model)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert adapted.merge_and_unload() is model
    return losses, replaced


@pytest.mark.parametrize("way", ["a call", "unfuse"])
@pytest.mark.parametrize("targets", [["q_proj"], ["gate_proj", "down_proj"], "all-linear"])
def test_adapters_that_are_merged(targets: Any, way: str) -> None:
    """The numbers are those of the plain model, and nobody keeps what PEFT has put in between."""
    plain: Any = make("Llama")
    model: Any = make("Llama")
    report = tops.fuse(model)
    model(**inputs(model))
    (want, _), (losses, replaced) = (train_and_merge(one, targets) for one in (plain, model))
    assert losses == pytest.approx(want, rel=1e-6)
    if way == "a call":
        # Each has been trained by itself.
        assert_same(plain.requires_grad_(), model.requires_grad_(), tolerance=1e-4)
        assert fused_rules(report) == LLAMA and not report.skipped
    else:
        tops.unfuse(model)
    gc.collect()
    assert replaced and not any(one() is not None for one in replaced)
    tops.unfuse(model)
    assert [type(one) for one in model.modules()] == [type(one) for one in plain.modules()]
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    model.load_state_dict(plain.state_dict())
    assert all(
        torch.equal(one(**inputs(model)).logits, plain(**inputs(model)).logits)
        for one in (model, copy.deepcopy(model))
    )


def by_torchao(config: Any) -> Callable[[Any], Any]:
    def quantize(model: Any) -> Any:
        quantize_(model, config())
        return model

    return quantize


def by_torch(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


# name -> (what quantizes a model, what the report says of its feed-forwards)
QUANTIZERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "torchao, dynamic": (
        by_torchao(Int8DynamicActivationInt8WeightConfig),
        "Linear: its weight is a Int8Tensor that also quantizes the input",
    ),
    "torch": (by_torch, "torch.ao.nn.quantized.dynamic.modules.linear.Linear"),
}
# But for norms: what they round else goes to the next number of eight bits.
NOT_NORMS = ["residual", "sum and norm", "feed-forward, sum and norm", "feed-forward"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("when", ["before", "after", "after, with products"])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_quantizers(name: str, quantizer: str, when: str) -> None:
    """What a quantizer finds runs as in the quantized plain model. What it passes over, it says."""
    quantize, reason = QUANTIZERS[quantizer]
    plain, model = quantize(make(name)), make(name)
    # As on processors where our product is faster.
    rule = tops.register_fuse_rule(
        "all products",
        "return F.linear(H, self.weight, self.bias)",
        lambda module, _: [tops.view(module)],
    )
    rules: list[Any] = [*NOT_NORMS, *([rule] if "products" in when else [])]
    if when != "before":
        tops.fuse(model, rules=rules)
        model(**inputs(model))
    is_passed_over = quantizer == "torch" and "products" in when
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = quantize(model)
    said = [str(warning.message) for warning in caught]
    assert any("[fuse]" in text and "over each Linear" in text for text in said) == (is_passed_over)
    if is_passed_over:
        tops.unfuse(model)
        model = quantize(model)
    report = tops.fuse(model, rules=rules)
    with torch.no_grad():
        want, found = (one(input_ids=TOKENS).logits for one in (plain, model))
        float_logits = make(name)(input_ids=TOKENS).logits
    torch.testing.assert_close(found, want, rtol=0, atol=1e-6)
    assert (float_logits - want).abs().max() > 1e-4
    assert not report.fused
    assert any(reason in row.reason for row in report.skipped)


class Output(nn.Module):
    """The first output of a model for one input."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = self.model(given, return_dict=False)[0]
        return output


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "given"), [("Llama", TOKENS), ("ViT", PIXELS)])
def test_exports(name: str, given: Tensor) -> None:
    plain, model = (Output(make(name)).eval() for _ in range(2))
    assert tops.fuse(model).fused
    programs = [torch.export.export(one, (given,)).run_decompositions() for one in (plain, model)]
    targets = [[str(node.target) for node in program.graph.nodes] for program in programs]
    assert targets[0] == targets[1]
    onnx = torch.onnx.export(model, (given,), dynamo=True, verbose=False)
    (found,) = ReferenceEvaluator(onnx.model_proto).run(None, {"given": given.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), plain(given), rtol=1e-4, atol=1e-5)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        row = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": row, "labels": row}


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"bf16": True}])
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    losses = []
    for is_fused in (False, True):
        model = make("Llama")
        report = tops.fuse(model) if is_fused else None
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(is_fused)),
            use_cpu=True,
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=0,
            **options,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows())
        trainer.train()
        first = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        if report is not None:
            assert fused_rules(report) == LLAMA
            # Continues from what the second step has saved.
            model.load_state_dict(make("Llama").state_dict())
            trainer.train(resume_from_checkpoint=str(tmp_path / "True" / "checkpoint-2"))
            again = [row["loss"] for row in trainer.state.log_history if "loss" in row][-2:]
            assert again == pytest.approx(first[-2:], rel=1e-3)
        losses.append(first)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3 if "bf16" in options else 1e-5)
