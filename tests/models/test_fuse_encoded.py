"""`fuse` where weights are `QuantizedTensor`s, or quantized by torchao or bitsandbytes: ops decode
them, and save only codes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers
from fuse_models import DecoderLayer, EncoderLayer, Model, assert_same, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import transformer_ops as tops
from transformer_ops.quantization.number_format import FORMATS

QuantizedTensor = tops.QuantizedTensor
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


def encode(
    model: nn.Module, format: str = "int8 1x32", trains: bool = False, names: tuple[str, ...] = ()
) -> nn.Module:
    """Encodes the weights of linear layers whose names end like these, but not of a tied head."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or "head" in path or not path.endswith(names or ""):
            continue
        module.weight = nn.Parameter(QuantizedTensor.quantize(module.weight, format), trains)
    return model


def plans(model: nn.Module) -> str:
    """The plans of all ops that have run."""
    return "\n".join(
        plan.text
        for module in model.modules()
        for region in (module.fused.regions if hasattr(module, "fused") else ())
        if region.sequential is not None and region.sequential._layout is not None
        for plan in region.sequential.plans()
    )


def reasons(report: tops.FuseReport) -> str:
    others = ("head and loss", "product")
    return "\n".join(row.reason for row in report.skipped if row.rule not in others)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, num_key_value_heads=2))


def bert() -> nn.Module:
    config = transformers.BertConfig(
        **CONFIG, hidden_dropout_prob=0, attention_probs_dropout_prob=0
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def outcome(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    y = model(input_ids=ids)[0]
    wanted = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (y.float() - wanted).square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("format", FORMATS)
def test_all_formats(format: str) -> None:
    model = encode(DecoderLayer(size=32, inner=64), format)
    fused = copy.deepcopy(model)
    report = tops.fuse(fused)
    x = torch.randn(2, 5, 32)
    for given in (x, x.clone().requires_grad_()):
        found, wanted = fused(given), model(given)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    wanted.sum().backward()
    wanted_grads = [given.grad, *(p.grad for p in model.parameters())]
    given.grad = None
    found.sum().backward()
    found_grads = [given.grad, *(p.grad for p in fused.parameters())]
    torch.testing.assert_close(found_grads, wanted_grads, rtol=1e-4, atol=1e-4)
    assert "QuantizedTensor" not in str(report)
    assert "dequantize.saved" in plans(fused) and f'"{format}"' in plans(fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("make", [llama, bert])
def test_whole_models(make: Callable[[], nn.Module], trains: bool, dtype: torch.dtype) -> None:
    model = encode(make().to(dtype), "mx e4m3", trains)
    wanted = outcome(model)
    exact = outcome(copy.deepcopy(model).double()) if dtype == torch.bfloat16 else wanted
    report = tops.fuse(model)
    found = outcome(model)
    assert len(found) == len(wanted)
    for one, other, true in zip(found, wanted, exact, strict=True):
        assert type(one) is Tensor and one.dtype == other.dtype
        error, allowed = (one.double() - true).norm(), (other.double() - true).norm()
        # The gradient of the bias of keys is 0 but for rounding.
        assert error <= 1.5 * allowed + 2e-5 * true.double().norm() + 1e-9, (error, allowed)
    assert {row.rule for row in report.fused} & {"layer", "attention"}
    assert not reasons(report)


def test_saved_bytes_are_those_of_frozen_plain_weights() -> None:
    plain, encoded = Model(), encode(Model())
    for module in plain.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_(False)
    wanted = tops.fuse(plain).saved_bytes(tokens())
    report = tops.fuse(encoded)
    before, after = report.saved_bytes(tokens())
    assert after == wanted[1]
    # The statements save the decoded weights.
    decoded = sum(4 * m.weight.numel() for m in encoded.layers.modules() if type(m) is nn.Linear)
    assert before >= wanted[0] + decoded > 0
    layers = report.layers(tokens())
    assert (layers.before, layers.after) == (before, after)


def test_a_step_holds_the_weights_as_stored() -> None:
    model = encode(Model(), "nvfp4")
    stored = sum(
        part.untyped_storage().nbytes()
        for p in model.parameters()
        for part in ((p.codes, p.scale) if isinstance(p, QuantizedTensor) else (p,))
    )
    comparison = tops.fuse(model).step(tokens(), loss=lambda y: y.square().mean())
    assert comparison.before.parameters == comparison.after.parameters == stored
    assert comparison.after.peak < comparison.before.peak


@pytest.mark.parametrize("recompute", ["none", "products"])
def test_products_are_recomputed(recompute: str) -> None:
    plain, model = encode(Model()), encode(Model())
    cheap = tops.fuse(model).saved_bytes(tokens())[1]
    report = tops.fuse(model, recompute=recompute)
    assert_same(plain, model)
    saved = report.saved_bytes(tokens())[1]
    assert saved < cheap if recompute == "products" else saved >= cheap
    # As many bytes as with plain weights.
    other = Model()
    for module in other.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.requires_grad_(False)
    assert saved == tops.fuse(other, recompute=recompute).saved_bytes(tokens())[1]


def test_weights_that_change_later() -> None:
    """Between plain and encoded, and from one format to another."""
    plain, model = Model(), Model()
    report = tops.fuse(model)
    for change in (
        lambda m: encode(m),
        lambda m: encode(m, "nvfp4"),
        lambda m: encode(m, "mx e4m3", names=("gate_proj",)),
        lambda m: setattr(m.layers[0].mlp.up_proj, "weight", nn.Parameter(torch.ones(24, 16))),
        lambda m: encode(m, "e4m3", trains=True, names=("down_proj",)),
    ):
        change(plain)
        change(model)
        assert_same(plain, model)
        assert not reasons(report), report
    assert plans(model).count("dequantize(") >= 2


MIXED: dict[str, dict[str, str]] = {
    "one of two": {"gate_proj": "int8 1x32"},
    "two formats": {"gate_proj": "int8 1x32", "up_proj": "nvfp4"},
    "one of three": {"q_proj": "mx e4m3"},
    "three formats": {"q_proj": "mx e4m3", "k_proj": "nvfp4", "v_proj": "e4m3"},
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("recompute", ["cheap", "products"])
def test_weights_of_one_product_in_several_formats(name: str, recompute: str) -> None:
    model = llama()
    for weight, format in MIXED[name].items():
        encode(model, format, names=(weight,))
    wanted = outcome(model)
    report = tops.fuse(model, recompute=recompute)
    torch.testing.assert_close(outcome(model), wanted, rtol=1e-4, atol=1e-6)
    assert not reasons(report), report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "Float8CurrentScaling"])
def test_recipes_do_not_round_encoded_weights_of_a_packed_product(
    recipe: str, dtype: torch.dtype
) -> None:
    """The weight that is plain is rounded, and the encoded one is not: as two separate products."""
    made = getattr(tops.recipe, recipe)()
    model = tops.PackedLinear(32, (64, 64), bias=False, dtype=dtype)
    decoded, plain = (tops.BasicLinear(32, 64, dtype=dtype) for _ in range(2))
    first = QuantizedTensor.quantize(model.weight0, "int8 1x32")
    model.weight0 = nn.Parameter(first, requires_grad=False)
    decoded.weight = nn.Parameter(first.dequantize())
    plain.weight = copy.deepcopy(model.weight1)

    def formats(role: Any) -> str | None:
        names = dict(zip(("input", "weight", "grad_output"), made.operands, strict=True))
        return None if role.tensor_type == "weight" else names[role.tensor_type]

    x = torch.randn(40, 32, dtype=dtype)
    found, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    with tops.autocast(recipe=made):
        y, last = model(found), plain(wanted)
    with tops.autocast(recipe=tops.recipe.CustomRecipe(formats)):
        z = torch.cat([decoded(wanted), last], -1)
    assert torch.equal(y, z)
    grad = torch.randn(40, 128, dtype=dtype)
    grad[0, 0] = grad[0, 64] = 9.0  # a scale for both is then the scale of each
    y.backward(grad)
    z.backward(grad)
    assert torch.equal(model.weight1.grad, plain.weight.grad)
    # One product sums in float32, and autograd adds two rounded ones.
    assert (found.grad - wanted.grad).norm() <= torch.finfo(dtype).eps * wanted.grad.norm()


def test_only_weights_of_products_may_be_encoded() -> None:
    plain, model = Model(), Model()
    for one in (plain, model):
        norm = one.layers[0].input_layernorm
        norm.weight = nn.Parameter(QuantizedTensor.quantize(norm.weight, "e4m3"))
    report = tops.fuse(model)
    assert_same(plain, model)
    assert "its weight is a QuantizedTensor" in reasons(report)


def test_a_transposed_weight_is_left_to_its_statements() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    torch.manual_seed(0)
    model = transformers.GPT2Model(config).eval()
    module = model.h[0].mlp.c_fc
    module.weight = nn.Parameter(QuantizedTensor.quantize(module.weight, "int8 1x32"))
    wanted = outcome(model)
    report = tops.fuse(model)
    torch.testing.assert_close(outcome(model), wanted, rtol=1e-4, atol=1e-6)
    assert "Conv1D: its weight is a QuantizedTensor" in reasons(report)


@pytest.mark.parametrize("trains", [False, True])
def test_compiled_in_one_graph(trains: bool) -> None:
    plain, model = (encode(Model(), "mx e4m3", trains) for _ in range(2))
    tops.fuse(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(plain, model, compiled)


def test_inference_copies_and_state_dicts() -> None:
    plain, model = encode(Model(), "nvfp4"), encode(Model(), "nvfp4")
    report = tops.fuse(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(model)
    other.load_state_dict(model.state_dict())
    assert_same(plain, other)
    # A plain state dict is encoded when it is loaded.
    model.load_state_dict(Model().state_dict())
    assert_same(plain, model)
    assert not reasons(report)
    tops.unfuse(model)
    assert_same(plain, model)


def test_a_view_decodes() -> None:
    linear = encode(nn.Linear(32, 16), "nvfp4")
    op = tops.Sequential(tops.view(linear), tops.GELU())
    x = torch.randn(3, 32)
    torch.testing.assert_close(op(x), nn.functional.gelu(linear(x), approximate="tanh"))
    assert "dequantize" in op.plans()[0].text


def test_a_product_alone_decodes() -> None:
    """Torch's statements would save the decoded weight."""
    linear = encode(nn.Linear(32, 16), "nvfp4")
    model = nn.Sequential(linear, nn.Flatten())
    x = torch.randn(3, 32, requires_grad=True)
    wanted = model(x)
    report = tops.fuse(model)
    torch.testing.assert_close(model(x), wanted)
    assert [row.rule for row in report.fused] == ["product"]
    before, after = report.saved_bytes(x)
    assert before - after == 4 * 32 * 16


# ---- weights that torchao stores


def by_torchao(model: nn.Module) -> nn.Module:
    quantize_(model, Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("recompute", ["cheap", "products"])
def test_weights_of_torchao(dtype: torch.dtype, when: str, recompute: str) -> None:
    model = llama().to(dtype)
    plain = by_torchao(copy.deepcopy(model))
    if when == "after":
        tops.fuse(model)
        outcome(model)
    by_torchao(model)
    report = tops.fuse(model, recompute=recompute)
    near = 1e-5 if dtype == torch.float32 else 0.03
    for found, wanted in zip(outcome(model), outcome(plain), strict=True):
        assert type(found) is Tensor and found.dtype == dtype
        assert (found - wanted).norm() <= near * wanted.norm()
    assert not reasons(report), report
    assert plans(model).count('"of its class"') > 8
    # The head runs as torchao's statement.
    ids = torch.zeros(2, 12, dtype=torch.int64)
    before, after = report.saved_bytes(input_ids=ids)
    layers = sum(p.qdata.nbytes for n, p in model.named_parameters() if hasattr(p, "qdata"))
    assert 0 < after < before and after < before - layers


def test_torchao_in_checkpoints_and_copies() -> None:
    plain, model = by_torchao(Model()), by_torchao(Model())
    report = tops.fuse(model)
    assert_same(plain, model)

    def run(x: Tensor) -> Tensor:
        found: Tensor = checkpoint(model, x, use_reentrant=False)
        return found

    assert_same(plain, model, run)
    assert_same(plain, copy.deepcopy(model))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=1e-4, atol=1e-5)
    assert not reasons(report)
    for one in (plain, model):
        for layer in one.layers:
            layer.mlp = copy.deepcopy(Model().layers[0].mlp)
    assert_same(plain, model)


def test_torchao_in_compiled_code_runs_its_statements() -> None:
    plain, model = by_torchao(Model()), by_torchao(Model())
    tops.fuse(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens()), plain(tokens()), rtol=1e-4, atol=1e-5)
    linear = by_torchao(nn.Sequential(nn.Linear(32, 16)))[0]
    op = tops.Sequential(tops.view(linear), tops.GELU())
    x = torch.randn(3, 32)
    wanted = nn.functional.gelu(linear(x), approximate="tanh")
    for function in (op, torch.compile(op, fullgraph=True, backend="aot_eager"), op):
        torch.testing.assert_close(function(x), wanted)
    assert "dequantize" in op.plans()[0].text


def test_a_weight_of_torchao_that_asks_for_a_gradient() -> None:
    model = by_torchao(Model())
    model.layers[0].mlp.up_proj.weight.requires_grad_()
    report = tops.fuse(model)
    assert "its weight is a Int8Tensor that requires a gradient" in reasons(report)
    # After the ops were made.
    op = tops.Sequential(tops.view(by_torchao(nn.Sequential(nn.Linear(4, 4)))[0]), tops.GELU())
    x = torch.randn(3, 4)
    op(x)
    op[0].basic_ops[0].owner.weight.requires_grad_()
    with pytest.raises(RuntimeError, match="must not require a gradient, got a Int8Tensor"):
        op(x)


# ---- weights of bitsandbytes in 4 bits


def by_bitsandbytes(
    model: nn.Module, dtype: torch.dtype, names: tuple[str, ...] = ("proj",), **options: Any
) -> nn.Module:
    """As transformers does with a `BitsAndBytesConfig(load_in_4bit=True)`."""
    for path, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or not path.endswith(names):
            continue
        shape = linear.in_features, linear.out_features, linear.bias is not None
        made = bitsandbytes.nn.Linear4bit(*shape, compute_dtype=dtype, **options)
        made.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data, requires_grad=False, module=made, **options
        )
        made.bias = linear.bias
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made.to("cpu"))
    return model


OPTIONS: dict[str, dict[str, Any]] = {
    "NF4": {"quant_type": "nf4", "compress_statistics": False},
    "NF4, double quantization": {"quant_type": "nf4", "compress_statistics": True},
    "FP4": {"quant_type": "fp4", "compress_statistics": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recompute", ["cheap", "products"])
def test_weights_of_bitsandbytes(dtype: torch.dtype, options: str, recompute: str) -> None:
    model = by_bitsandbytes(llama().to(dtype), dtype, **OPTIONS[options])
    wanted = outcome(model)
    report = tops.fuse(model, recompute=recompute)
    near = 1e-5 if dtype == torch.float32 else 0.03
    for found, other in zip(outcome(model), wanted, strict=True):
        assert type(found) is Tensor and found.dtype == dtype
        assert (found - other).norm() <= near * other.norm()
    assert not reasons(report), report
    assert "layer" in {row.rule for row in report.fused}
    # Codes and scales that are those of a format of ours are decoded by its kernels.
    format = "nf4" if options == "NF4" else "of its class"
    assert plans(model).count(f'"{format}"') > 8
    before, after = report.saved_bytes(input_ids=torch.zeros(2, 12, dtype=torch.int64))
    assert 0 < after < before


def test_biases_of_bitsandbytes() -> None:
    plain, model = EncoderLayer(64, 128), EncoderLayer(64, 128)
    model.load_state_dict(plain.state_dict())
    for one in (plain, model):
        by_bitsandbytes(one, torch.float32, ("fc1", "fc2"), quant_type="nf4")
    report = tops.fuse(model)
    x = torch.randn(2, 5, 64)
    for one in (plain, model):
        one(x).square().sum().backward()
    wanted = [p.grad for p in plain.parameters() if p.requires_grad]
    found = [p.grad for p in model.parameters() if p.requires_grad]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not reasons(report), report


def test_where_layers_of_bitsandbytes_run_themselves() -> None:
    # They cast their input and their output.
    model = by_bitsandbytes(llama(), torch.bfloat16, quant_type="nf4")
    wanted = outcome(model)
    tops.fuse(model)
    for found, other in zip(outcome(model), wanted, strict=True):
        assert (found - other).norm() <= 2**-8 * other.norm()  # a rounding to bfloat16
    # Their first call decides.
    model = by_bitsandbytes(llama(), None, quant_type="nf4")  # type: ignore[arg-type]
    report = tops.fuse(model)
    assert "its dtype is that of its first call" in reasons(report)
    wanted = outcome(model)
    torch.testing.assert_close(outcome(model), wanted, rtol=1e-4, atol=1e-5)
    assert not reasons(report), report
    # Weights that are packed for inference cannot be decoded.
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.weight.quant_state.packing_format_for_cpu = True
    assert "its weight is a Params4bit that is packed for inference" in str(
        tops.fuse(model).skipped
    )
    linear = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu")
    mlp = DecoderLayer(64, 64)
    mlp.mlp.gate_proj = linear  # type: ignore[union-attr]
    reason = "Linear8bitLt rounds its input to int8 as well as its weight"
    assert reason in reasons(tops.fuse(mlp))


# ---- adapters on encoded weights (QLoRA)

BASES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nvfp4": functools.partial(encode, format="nvfp4", names=("base_layer",)),
    "torchao": by_torchao,
    "bitsandbytes": lambda model: by_bitsandbytes(model, torch.float32, **OPTIONS["NF4"]),
}


@pytest.mark.parametrize("recompute", ["cheap", "products"])
@pytest.mark.parametrize("base", BASES)
def test_adapters_on_encoded_weights(base: str, recompute: str) -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    if base == "nvfp4":
        # PEFT takes it for a plain weight.
        model: Any = BASES[base](peft.get_peft_model(llama(), config))
    else:
        model = peft.get_peft_model(BASES[base](llama()), config)
    wanted = outcome(model)
    report = tops.fuse(model, recompute=recompute)
    for found, other in zip(outcome(model), wanted, strict=True):
        assert (found - other).norm() <= 2e-5 * other.norm()
    assert not reasons(report), report
    assert "layer" in {row.rule for row in report.fused}
    before, after = report.saved_bytes(input_ids=torch.zeros(2, 12, dtype=torch.int64))
    assert 0 < after < (0.5 if recompute == "products" else 0.8) * before
