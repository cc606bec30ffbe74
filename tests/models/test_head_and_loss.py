"""The rule for the head of a language model and its loss: numbers, and what users read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from fuse_models import DECODER, ENCODER
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.models.deferred import DeferredLogits

V = 70
SIZES: dict[str, Any] = DECODER | {"intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": V}
RULES = ["head and loss"]


class OlderLlama(transformers.LlamaForCausalLM):
    """With the head of transformers before 5.18, which takes a part of a local variable."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        hidden_states = self.model(input_ids=input_ids).last_hidden_state
        is_count = isinstance(logits_to_keep, int)
        slice_indices = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits = self.lm_head(hidden_states[:, slice_indices, :])
        loss = None
        if labels is not None:
            size = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=size, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


SCALED = {
    "granite": ("Granite", {"logits_scaling": 3.0}),
    "cohere": ("Cohere", {"logit_scale": 0.3}),
}


def make(family: str, tied: bool = False) -> Any:
    torch.manual_seed(0)
    if family in SCALED:
        name, options = SCALED[family]
        options = {**SIZES, **options, "tie_word_embeddings": tied}
        kind = getattr(transformers, f"{name}ForCausalLM")
        return kind(getattr(transformers, f"{name}Config")(**options)).train()
    if "llama" in family:
        config: Any = transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
        make = OlderLlama if "older" in family else transformers.LlamaForCausalLM
        return make(config).train()
    config = transformers.Gemma2Config(
        **SIZES, head_dim=8, final_logit_softcapping=5.0, tie_word_embeddings=tied
    )
    return transformers.Gemma2ForCausalLM(config).train()


def pair(family: str = "llama", tied: bool = False) -> tuple[Any, Any]:
    plain = make(family, tied)
    fused = copy.deepcopy(plain)
    assert len(tops.fuse(fused, rules=RULES).fused) == 1
    return plain, fused


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def is_deferred(logits: Any) -> bool:
    return isinstance(logits, DeferredLogits) and vars(logits)["_promise"].is_open


def assert_same_gradients(plain: nn.Module, fused: nn.Module) -> None:
    grads = [[p.grad for p in model.parameters()] for model in (fused, plain)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


FEW = torch.where(torch.arange(9) % 4 == 1, batch()["labels"], -100)
EXTRAS: dict[str, dict[str, Any]] = {
    "mean": {},
    "few labels": {"labels": FEW},
    "items": {"num_items_in_batch": 7},
    "items as a tensor": {"num_items_in_batch": torch.tensor(11)},
    "some rows": {"logits_to_keep": 4, "shift_labels": batch()["labels"][:, -4:].contiguous()},
    "another class ignored": {"ignore_index": 3},
}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "older llama", "gemma2", *SCALED])
def test_loss_and_gradients(family: str, tied: bool, extra: dict[str, Any]) -> None:
    plain, fused = pair(family, tied)
    given = batch()
    if "ignore_index" in extra:
        given["labels"] = given["labels"].clamp_min(0)
    given |= extra
    want, got = plain(**given), fused(**given)
    torch.testing.assert_close(got.loss, want.loss)
    assert is_deferred(got.logits)
    assert got.logits.shape == want.logits.shape and got.logits.dtype == want.logits.dtype
    want.loss.backward()
    got.loss.backward()
    assert is_deferred(got.logits)
    assert_same_gradients(plain, fused)
    torch.testing.assert_close(torch.Tensor.add(got.logits, 0), want.logits)


USES: dict[str, Callable[[Any], Tensor]] = {
    "logits": lambda out: out.logits.square().mean(),
    "loss and logits": lambda out: out.loss + out.logits.logsumexp(-1).mean(),
    "a loss of shifted rows": lambda out: F.cross_entropy(
        out.logits[:, :-1].reshape(-1, V), batch()["input_ids"][:, 1:].reshape(-1)
    ),
    "a loss of all rows": lambda out: F.cross_entropy(
        out.logits.view(-1, V), batch()["input_ids"].view(-1), label_smoothing=0.1
    ),
    "class weights": lambda out: F.cross_entropy(
        out.logits.view(-1, V), batch()["input_ids"].view(-1), weight=torch.arange(V).float()
    ),
    "an autograd function": lambda out: Double.apply(out.logits).mean(),
    "in place": lambda out: out.logits.mul_(2).mean(),
    "memory formats": lambda out: (
        out.logits.contiguous(memory_format=torch.contiguous_format)
        * out.logits.clone(memory_format=torch.preserve_format)
        * out.logits.float(memory_format=torch.preserve_format)
        * torch.tanh(input=out.logits)
    ).mean(),
}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whatever_is_done_with_logits(family: str, use: Callable[[Any], Tensor]) -> None:
    plain, fused = pair(family)
    want, got = use(plain(**batch())), use(fused(**batch()))
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-4, atol=1e-6)
    want.backward()
    got.backward()
    assert_same_gradients(plain, fused)


def test_a_loss_around_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = pair()
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args, **kw: 2 * cross_entropy(*args, **kw))
    want, got = plain(**batch()).loss, fused(**batch()).loss
    torch.testing.assert_close(got, want)
    want.backward()
    got.backward()
    assert_same_gradients(plain, fused)


def test_a_loss_function_of_the_user() -> None:
    plain, fused = pair()

    def loss_function(logits: Tensor, labels: Tensor, **unused: Any) -> Tensor:
        return (logits.softmax(-1).amax(-1) * (labels != -100)).sum()

    for model in (plain, fused):
        model.loss_function = loss_function
    torch.testing.assert_close(fused(**batch()).loss, plain(**batch()).loss)


def test_where_the_statements_run() -> None:
    _, fused = pair()
    given = batch()
    fused.eval()
    assert type(fused(**given).logits) is Tensor
    fused.train()
    with torch.no_grad():
        assert type(fused(**given).logits) is Tensor
    handle = fused.lm_head.register_forward_hook(lambda *_: None)
    assert type(fused(**given).logits) is Tensor
    handle.remove()
    assert is_deferred(fused(**given).logits)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given).loss, fused(**given).loss)


def test_logits_are_not_computed_from_other_weights() -> None:
    _, fused = pair()
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.1)
    out = fused(**batch())
    out.loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"\[fuse\] logits must be read before the weight"):
        out.logits.argmax(-1)


def test_few_labels_save_no_gradient_of_the_weight() -> None:
    _, fused = pair()
    weight = fused.lm_head.weight
    counts = []
    for labels in (batch()["labels"], FEW):
        saved: list[Tensor] = []
        pack = lambda tensor, saved=saved: saved.append(tensor) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fused(**{**batch(), "labels": labels})
        counts.append(sum(one.shape == weight.shape and one is not weight for one in saved))
    assert counts == [1, 0]


def test_a_head_with_fewer_rows() -> None:
    plain, fused = pair()
    ids = batch()["input_ids"]
    for model in (plain, fused):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight[:64])
    want, got = plain(input_ids=ids), fused(input_ids=ids)
    assert got.logits.shape == want.logits.shape == (2, 9, 64)
    torch.testing.assert_close(got.logits * 1, want.logits)
    fused.lm_head.weight = nn.Parameter(torch.zeros(V, 31))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fused(input_ids=ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("trains", ["all", "bias", "head", "rest"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_dtypes_biases_and_frozen_parameters(family: str, trains: str, dtype: torch.dtype) -> None:
    plain = make(family).to(dtype)
    if trains == "bias":
        plain.lm_head.bias = nn.Parameter(torch.randn(V, dtype=dtype))
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(
            trains in ("all", "bias") or ("lm_head" in name) == (trains == "head")
        )
    fused = copy.deepcopy(plain)
    tops.fuse(fused, rules=RULES)
    found = []
    for model in (plain, fused):
        out = model(**batch())
        (
            out.loss + F.cross_entropy(out.logits.view(-1, V), batch()["input_ids"].view(-1))
        ).backward()
        wanted = [p.grad for p in model.parameters() if p.requires_grad]
        found.append([out.loss.detach(), *wanted])
    assert is_deferred(out.logits)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("items", [0, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_no_item_in_the_batch(family: str, items: int) -> None:
    plain, fused = pair(family)
    given = {**batch(), "labels": torch.full((2, 9), -100)}
    for model in (plain, fused):
        model(**given, num_items_in_batch=torch.tensor(items)).loss.backward()
    assert_same_gradients(plain, fused)
    assert not any(p.grad.any() for p in fused.parameters())


def test_backward_again() -> None:
    """A kept graph gives the same gradients; another one raises as that of torch does."""
    _, fused = pair("granite")
    parameters = list(fused.parameters())
    loss = fused(**batch()).loss / 2
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, parameters)


def test_under_autocast() -> None:
    plain, fused = pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = plain(**batch()), fused(**batch())
    assert got.logits.dtype == want.logits.dtype == torch.bfloat16
    assert got.loss.dtype == torch.float32
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-3, atol=1e-3)


# ---- heads of several layers, losses of torch's own, and a row that is added

_BERT = ENCODER | {
    "vocab_size": V, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0
}  # fmt: skip
_SMALL = {"vocab_size": V, "d_model": 32, "decoder_start_token_id": 0}
_BART = _SMALL | {
    "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
# class -> (its configuration, its head)
HEADS: dict[str, tuple[dict[str, Any], str]] = {
    "BertForMaskedLM": (_BERT, "cls.predictions"),
    "BertLMHeadModel": (_BERT | {"is_decoder": True}, "cls"),
    "RobertaForMaskedLM": (_BERT, "lm_head"),
    "DistilBertForMaskedLM": (
        {"vocab_size": V, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0,
         "attention_dropout": 0.0},
        "vocab_layer_norm",
    ),
    "T5ForConditionalGeneration": (
        _SMALL | {"d_ff": 48, "num_layers": 1, "num_heads": 4, "d_kv": 8, "dropout_rate": 0.0},
        "lm_head",
    ),
    "BartForConditionalGeneration": (_BART, "lm_head"),
    "MarianMTModel": (_BART | {"pad_token_id": 0}, "lm_head"),
    "OPTForCausalLM": (
        {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 48, "dropout": 0.0,
         "num_attention_heads": 4, "word_embed_proj_dim": 32},
        "lm_head",
    ),
    "HyperCLOVAXForCausalLM": (SIZES | {"logits_scaling": 0.3}, "lm_head"),
    "WhisperForConditionalGeneration": (
        _BART | {"max_source_positions": 8, "max_target_positions": 16, "num_mel_bins": 4,
                 "pad_token_id": 0},
        "proj_out",
    ),
}  # fmt: skip


@pytest.fixture(params=HEADS)
def heads(request: pytest.FixtureRequest) -> tuple[Any, Any, str]:
    """The plain model, the fused one, and the name of a module of its head."""
    torch.manual_seed(0)
    kind: Any = getattr(transformers, request.param)
    options, head = HEADS[request.param]
    plain = kind(kind.config_class(**options)).train()
    if hasattr(plain, "final_logits_bias"):
        plain.final_logits_bias.normal_()
    fused = copy.deepcopy(plain)
    assert len(tops.fuse(fused, rules=RULES).fused) == 1
    return plain, fused, head


def test_heads_of_other_forms(heads: tuple[Any, Any, str]) -> None:
    plain, fused, head = heads
    given = batch()
    if fused.main_input_name == "input_features":
        del given["input_ids"]
        given["input_features"] = torch.randn(2, 4, 16)
    for use in ("loss", "loss and logits", "loss"):
        if use != "loss" and hasattr(fused.config, "logits_scaling"):
            plain.config.logits_scaling = fused.config.logits_scaling = 0.7
        want, got = plain(**given), fused(**given)
        assert is_deferred(got.logits)
        torch.testing.assert_close(got.loss, want.loss)
        for out in (want, got):
            (out.loss + (out.logits.sin().mean() if use != "loss" else 0)).backward()
        assert_same_gradients(plain, fused)
    assert is_deferred(got.logits)
    if hasattr(fused, "final_logits_bias"):
        fused.final_logits_bias.zero_()
    torch.testing.assert_close(torch.Tensor.add(got.logits, 0), want.logits)
    seen: list[Tensor] = []
    fused.get_submodule(head).register_forward_hook(lambda *given: seen.append(given[2]))
    assert type(fused(**given).logits) is Tensor and len(seen) == 1
    assert type(fused.eval()(**given).logits) is Tensor


def test_a_global_activation_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.roberta import modeling_roberta

    torch.manual_seed(0)
    config: Any = transformers.RobertaConfig(**_BERT)
    plain = transformers.RobertaForMaskedLM(config).train()
    fused = copy.deepcopy(plain)
    tops.fuse(fused, rules=RULES)
    assert is_deferred(fused(**batch()).logits)
    monkeypatch.setattr(modeling_roberta.gelu, "act", F.relu)
    torch.testing.assert_close(fused(**batch()).loss, plain(**batch()).loss, rtol=0, atol=0)
    handle = modeling_roberta.gelu.register_forward_hook(lambda *given: given[2] * 2)
    torch.testing.assert_close(fused(**batch()).loss, plain(**batch()).loss, rtol=0, atol=0)
    handle.remove()
    monkeypatch.setattr(modeling_roberta, "gelu", nn.Tanh())
    torch.testing.assert_close(fused(**batch()).loss, plain(**batch()).loss, rtol=0, atol=0)
    monkeypatch.undo()
    assert is_deferred(fused(**batch()).logits)
