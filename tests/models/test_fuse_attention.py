"""Attention of whole models: which calls run as ops, and which as the model's own statements."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_fuse_transformers import TOKENS, assert_same, lora, make
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_ops as tops
from transformer_ops.models import attention_reading
from transformer_ops.models.pattern import calls_in
from transformer_ops.models.rules import rules_named
from transformer_ops.models.sites import all_sites

transformers: Any = pytest.importorskip("transformers")

from transformers.cache_utils import DynamicLayer  # noqa: E402
from transformers.models.bart.modeling_bart import BartDecoderLayer  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402

pytestmark = pytest.mark.takes(seconds=60)
ALL_ATTENTION_FUNCTIONS: Any = llama.ALL_ATTENTION_FUNCTIONS
apply_rotary_pos_emb, rotate_half = llama.apply_rotary_pos_emb, llama.rotate_half
eager_attention_forward = llama.eager_attention_forward

LAYERS = 2


class Counted(TorchDispatchMode):
    """Counts softmax and torch's attention, which ops with attention do not call as such."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        self.count += "scaled_dot_product" in name or name.startswith("_softmax.")
        return func(*args, **(kwargs or {}))


def padding() -> Tensor:
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    return mask


def filled(model: Any, kind: str) -> Any:
    """A cache with the keys and values of some tokens."""
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=32)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=TOKENS[:, :3], past_key_values=cache)
    return cache


def attentions(model: Any) -> list[Any]:
    return [one for one in model.modules() if type(one).__name__.endswith("Attention")]


def mine(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    return found.transpose(1, 2) * 2, None


# name -> (what is done to both models before, the arguments of a call, whether ops run)
Row = tuple[Callable[[Any], Any], Callable[[Any], dict[str, Any]], bool]
CALLS: dict[str, Row] = {
    "no cache": (lambda m: None, lambda m: {"use_cache": False}, True),
    "a new cache": (lambda m: None, lambda m: {"use_cache": True}, True),
    "padding": (lambda m: None, lambda m: {"attention_mask": padding()}, True),
    "positions": (lambda m: None, lambda m: {"position_ids": torch.arange(3, 15)[None]}, True),
    "eager": (lambda m: m.set_attn_implementation("eager"), lambda m: {}, True),
    "eager, padding": (
        lambda m: m.set_attn_implementation("eager"),
        lambda m: {"attention_mask": padding()},
        True,
    ),
    "a filled cache": (lambda m: None, lambda m: {"past_key_values": filled(m, "dynamic")}, False),
    "a static cache": (lambda m: None, lambda m: {"past_key_values": filled(m, "static")}, False),
    "weights": (
        lambda m: m.set_attn_implementation("eager"),
        lambda m: {"output_attentions": True},
        False,
    ),
    "a hook": (
        lambda m: [
            one.register_forward_hook(lambda _, __, found: (found[0] * 3, found[1]))
            for one in attentions(m)
        ],
        lambda m: {},
        False,
    ),
    "a position bias": (
        lambda m: None,
        lambda m: {"position_bias": torch.linspace(-1, 1, 144).view(1, 1, 12, 12)},
        False,
    ),
    "another function": (lambda m: m.set_attn_implementation("mine"), lambda m: {}, False),
    "another scale": (
        lambda m: [setattr(one, "scaling", 0.1) for one in attentions(m)],
        lambda m: {},
        True,
    ),
}
# Not all models take such masks.
MASKS: dict[str, Row] = {
    "eager, a mask of booleans": (
        lambda m: m.set_attn_implementation("eager"),
        lambda m: {"attention_mask": torch.ones(12, 12).tril().bool()[None, None]},
        False,
    ),
}
# Their attention is written in other ways.
OTHERS = ["GPT2", "OPT", "StableLm", "Cohere", "GPTNeoX"]
FORMS = ["XGLM", "TrOCR", "Mvp", "GPTJ", "CodeGen", "Falcon", "FalconH1"]
FORMS += ["Mpt", "Bloom", "Afmoe", "Laguna"]
# Their own statements give other gradients in rows that padding leaves nothing to read.
PADDED = {("XGLM", "padding"), ("Mpt", "padding")}
# The layer does not hand it on.
IGNORED = ("StableLm", "a position bias")


@pytest.fixture(autouse=True)
def _with_a_function_of_ours() -> Any:
    transformers.AttentionInterface.register("mine", mine)
    yield
    del transformers.AttentionInterface._global_mapping["mine"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", [*CALLS, *MASKS])
def test_calls_of_a_decoder(name: str, when: str) -> None:
    check_calls("Llama", name, when)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("model", OTHERS)
def test_calls_of_other_decoders(model: str, name: str) -> None:
    check_calls(model, name, "before")


@pytest.mark.parametrize("name", ["no cache", "a new cache", "padding", "a filled cache"])
@pytest.mark.parametrize("model", FORMS)
def test_calls_of_attention_in_other_forms(model: str, name: str) -> None:
    runs_ops = name != "a filled cache" and (model, name) not in PADDED
    check_calls(model, name, "before", runs_ops)


def test_a_cache_with_layers_of_other_calls() -> None:
    """A module that is called several times fills another layer of the cache in each call."""
    plain: Any = make("HrmText")
    model = copy.deepcopy(plain)
    tops.fuse(model)
    with torch.no_grad(), Counted() as counted:
        found = [one(input_ids=TOKENS, use_cache=True) for one in (plain, model)]
    want, own = (one.past_key_values for one in found)
    assert len(own) == len(want) == counted.count > len(attentions(model))
    for layer, other in zip(own.layers, want.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)


def test_a_product_with_rows_in_another_order() -> None:
    """Ops read parts of its weight where the weight is now; with adapters, statements run."""
    plain, model = make("CodeGen"), make("CodeGen")
    tops.fuse(model)
    assert_same(plain, model)
    for one in (plain, model):
        for parameter in one.parameters():
            parameter.data = parameter.data.double() * 1.1
    assert_same(plain, model)
    block: Any = model.transformer.h[0]
    assert "PackedLinear" in str(block.fused.explain())
    plain, model = lora(make("CodeGen"), ["qkv_proj"]), lora(make("CodeGen"), ["qkv_proj"])
    report = tops.fuse(model)
    assert_same(plain, model)
    assert "attention" not in {row.rule for row in report.fused}


@pytest.mark.parametrize("name", ["RemBert", "MegatronBert"])
def test_weights_that_only_some_calls_want(name: str) -> None:
    plain, model = make(name), make(name)
    tops.fuse(model)
    layer, other = (
        next(m for m in one.modules() if type(m).__name__ == f"{name}Layer").attention  # type: ignore[union-attr]
        for one in (plain, model)
    )
    x = torch.randn(2, 12, 32)
    assert other(x)[1] is None
    want, weights = layer(x)
    torch.testing.assert_close(other(x, output_attentions=True), (want, weights))
    seen: list[Any] = []
    other.register_forward_hook(lambda module, args, found: seen.append(found[1]))
    other(x)
    torch.testing.assert_close(seen[0], weights)
    for asked in (False, True):
        found, right = (
            one(input_ids=TOKENS, output_attentions=asked, return_dict=False)
            for one in (model, plain)
        )
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


def test_tables_narrower_than_heads() -> None:
    """Llama's are of whole heads: an edit that makes heads wider raises, as in the statements."""
    model = make("Llama")
    tops.fuse(model)
    model(TOKENS)
    for layer in model.model.layers:
        layer.self_attn.head_dim *= 2
    with pytest.raises(RuntimeError, match="must match the size"):
        model(TOKENS)


@pytest.mark.parametrize("name", ["Mpt", "Bloom"])
def test_biases_of_scores(name: str) -> None:
    """Ops take them with the mask, except those that train, and those of another dtype."""
    argument, columns, count = ("position_bias", 16, 4) if name == "Mpt" else ("alibi", 12, 8)
    plain, model = make(name), make(name)
    tops.fuse(model)
    layers = [
        next(m for m in one.modules() if type(m).__name__ == f"{name}Block")
        for one in (plain, model)
    ]
    hidden = torch.ones(12, 12).triu(1).bool()[None, None]
    mask = hidden if name == "Mpt" else hidden * torch.finfo(torch.float32).min
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, 32, generator=generator)
    for trains, dtype in ((False, torch.float32), (True, torch.float32), (False, torch.float64)):
        bias = torch.randn(count, 1, columns, generator=generator, dtype=dtype)
        bias.requires_grad_(trains)
        if name == "Bloom" and dtype == torch.float64:
            continue  # torch's product takes one dtype
        found = []
        for layer in layers:
            given = {argument: bias, "attention_mask": mask}
            own = x.clone().requires_grad_()
            with Counted() as counted:
                output = layer(own, **given)[0]
            sources = [own, *layer.parameters(), *([bias] if trains else [])]
            grads = torch.autograd.grad(output.square().sum(), sources, allow_unused=True)
            found.append((output, grads, counted.count))
        (want, right, _), (output, grads, count_of_softmax) = found
        torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grads, right, rtol=1e-4, atol=1e-4)
        assert count_of_softmax == int(trains or dtype == torch.float64)


def test_scores_by_hand_with_dropout() -> None:
    """The mean over many draws is that of the plain model; none are dropped in eval()."""
    plain: Any = make("XGLM")
    model = copy.deepcopy(plain)
    tops.fuse(model)
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))
    first, second = (one.model.layers[0] for one in (plain, model))
    for layer in (first, second):
        layer.self_attn.dropout = 0.5
    torch.testing.assert_close(second(x), first(x))
    means = []
    for layer in (first.train(), second.train()):
        torch.manual_seed(0)
        assert not layer(x).equal(layer(x))
        means.append(torch.stack([layer(x) for _ in range(400)]).mean(0))
    assert "Attention" in str(second.fused.explain())
    torch.testing.assert_close(*means, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_norms_whose_weights_are_no_parameters(name: str) -> None:
    plain = make("Qwen3")
    for attention in attentions(plain):
        norm = getattr(attention, name)
        weight = norm.weight.detach() * 2
        del norm.weight
        norm.register_buffer("weight", weight)
    model = copy.deepcopy(plain)
    report = tops.fuse(model)
    found, want = (one(input_ids=TOKENS).logits for one in (model, plain))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert "its weight is not among its parameters" in str(report)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_that_read_nothing(implementation: str) -> None:
    """A plain softmax makes them NaN, and torch's attention zeros."""
    mask = torch.zeros(2, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf)
    mask[1, 0, 3] = -torch.inf
    plain: Any = make("Llama")
    model = copy.deepcopy(plain)
    tops.fuse(model)
    found = []
    for one in (plain, model):
        one.set_attn_implementation(implementation)
        with Counted() as counted:
            logits = one(input_ids=TOKENS, attention_mask=mask).logits
        logits.sum().backward()
        found.append((logits, [p.grad for p in one.parameters()], counted.count))
    (want, right, _), (logits, grads, count) = found
    assert count == 0 and logits[0].isfinite().all()
    assert logits[1].isfinite().all() == (implementation == "sdpa")
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(grads, right, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["Llama", "Bert"])
def test_a_function_in_place_of_torch_s_attention(
    kind: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make(kind)
    model = copy.deepcopy(plain)
    if when == "after":
        tops.fuse(model)
        assert_same(plain, model)
    own = torch.nn.functional.scaled_dot_product_attention
    twice = lambda *args, **options: own(*args, **options) * 2  # noqa: E731
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", twice)
    tops.fuse(model)
    assert_same(plain, model)


def test_context_parallel_reaches_attention() -> None:
    """torch has it for CUDA alone: on CPU, its function raises where attention calls it."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,))
    model: Any = make("Llama")
    tops.fuse(model)
    model(input_ids=TOKENS)
    buffer = torch.zeros(2, 12)
    for one in (make("Llama"), model):
        with (
            context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]),
            pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention"),
        ):
            one(input_ids=TOKENS)
    model(input_ids=TOKENS)


def test_a_mask_with_a_gradient() -> None:
    found = []
    for is_fused in (False, True):
        model: Any = make("Llama")
        if is_fused:
            tops.fuse(model)
        mask = torch.linspace(-1, 1, 144).view(1, 1, 12, 12).requires_grad_()
        model(input_ids=TOKENS, attention_mask=mask).logits.square().sum().backward()
        found.append(mask.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def test_padding_in_bfloat16_is_as_exact() -> None:
    """The lowest number of the dtype, in all of a row."""
    exact: Any = make("Llama").train()
    exact.set_attn_implementation("eager")
    plain: Any = copy.deepcopy(exact).bfloat16()
    model = copy.deepcopy(plain)
    tops.fuse(model)
    found = []
    for one in (exact, plain, model):
        with Counted() as counted:
            one(input_ids=TOKENS, attention_mask=padding(), labels=TOKENS).loss.backward()
        found.append([p.grad.float() for p in one.parameters()])
    assert counted.count == 0
    for right, before, after in zip(*found, strict=True):
        assert (after - right).norm() <= 1.5 * (before - right).norm() + 1e-4 * right.norm()


def check_calls(kind: str, name: str, when: str, runs: bool | None = None) -> None:
    change, arguments, runs_ops = {**CALLS, **MASKS}[name]
    runs_ops = (runs_ops or (kind, name) == IGNORED) if runs is None else runs
    plain: Any = make(kind).train()
    for module in plain.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model: Any = copy.deepcopy(plain)
    if when == "before":
        tops.fuse(model)
        model(input_ids=TOKENS, use_cache=False)
    for one in (plain, model):
        change(one)
    if when == "after":
        tops.fuse(model)
    found = []
    for one in (plain, model):
        given = arguments(one)
        with Counted() as counted:
            output = one(input_ids=TOKENS, labels=TOKENS, **given)
        output.loss.backward()
        grads = [p.grad.clone() for p in one.parameters() if p.grad is not None]
        found.append((output, grads, counted.count))
    (want, right, plain_count), (output, grads, count) = found
    torch.testing.assert_close(output.loss, want.loss)
    torch.testing.assert_close(output.logits, want.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads, right, rtol=1e-3, atol=1e-6)
    assert (count, plain_count) == (0 if runs_ops else LAYERS, LAYERS)
    if want.attentions is not None:
        assert all(map(torch.allclose, output.attentions, want.attentions))
    if want.past_key_values is not None:
        for own, other in zip(
            output.past_key_values.layers, want.past_key_values.layers, strict=True
        ):
            torch.testing.assert_close(own.keys, other.keys)
            torch.testing.assert_close(own.values, other.values)


def test_attention_to_another_sequence() -> None:
    """It runs as statements, and the halves of the layer as ops."""
    found = []
    for is_fused in (False, True):
        model: Any = make("GPT2, cross attention")
        model.config.use_cache = False
        if is_fused:
            tops.fuse(model)
            model(input_ids=TOKENS)
        other = torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32)
        with Counted() as counted:
            output = model(input_ids=TOKENS, labels=TOKENS, encoder_hidden_states=other)
        output.loss.backward()
        found.append((output.loss, [p.grad for p in model.parameters()], counted.count))
    (want, right, plain_count), (loss, grads, count) = found
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(grads, right, rtol=1e-3, atol=1e-6)
    assert (count, plain_count) == (LAYERS, 2 * LAYERS)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_scores_in_float32_run_as_statements(implementation: str) -> None:
    """GPT-2 has a method of its own for them, which "sdpa" does not call."""
    model: Any = make("GPT2, other scores")
    want = model(input_ids=TOKENS).logits
    model.set_attn_implementation(implementation)
    tops.fuse(model)
    with Counted() as counted:
        torch.testing.assert_close(model(input_ids=TOKENS).logits, want, rtol=1e-4, atol=1e-5)
    assert counted.count == (LAYERS if implementation == "eager" else 0)


def test_gradients_through_a_cache() -> None:
    found = []
    for is_fused in (False, True):
        model: Any = make("Llama").train()
        if is_fused:
            tops.fuse(model)
        cache = transformers.DynamicCache(config=model.config)
        model(input_ids=TOKENS[:, :5], past_key_values=cache)
        model(input_ids=TOKENS[:, 5:], labels=TOKENS[:, 5:], past_key_values=cache).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["Llama", *OTHERS])
def test_bfloat16_is_as_exact(name: str) -> None:
    """Against float64, the fused model errs no more than the plain one."""
    plain: Any = make(name)
    exact = copy.deepcopy(plain).double()
    plain = plain.bfloat16()
    model = copy.deepcopy(plain)
    tops.fuse(model)
    errors = []
    want = exact(input_ids=TOKENS).logits
    for one in (plain, model):
        errors.append(float((one(input_ids=TOKENS).logits.double() - want).norm() / want.norm()))
    assert errors[1] <= 1.1 * errors[0] < 0.1


def test_the_plan_of_a_layer() -> None:
    model: Any = make("Llama")
    tops.fuse(model)
    model(input_ids=TOKENS)
    text = str(model.model.layers[0].fused.explain())
    assert "Attention" in text and "RoPE" in text and "SwiGLU" in text


# ---- names of arguments


class LlamaAttentionBefore(llama.LlamaAttention):  # type: ignore[misc]
    """The attention of Llama as transformers had it before 5.24."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        if past_key_values is not None:
            key_states, value_states = past_key_values.update(
                key_states, value_states, self.layer_idx
            )
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            **kwargs,
        )
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        attn_output = self.o_proj(attn_output)
        return attn_output, attn_weights


@pytest.mark.parametrize("kind", [llama.LlamaAttention, LlamaAttentionBefore])
def test_the_cache_has_two_names(kind: type[Any]) -> None:
    plain = make("Llama")
    for layer in plain.model.layers:
        layer.self_attn.__class__ = kind
    model = copy.deepcopy(plain)
    report = tops.fuse(model)
    assert [row.rule for row in report.fused].count("layer") == LAYERS
    with Counted() as seen:
        found = model(input_ids=TOKENS, use_cache=False).logits
    assert seen.count == 0
    torch.testing.assert_close(found, plain(input_ids=TOKENS, use_cache=False).logits)


def test_no_part_has_two_calls_of_attention() -> None:
    sites = all_sites(BartDecoderLayer, rules_named(None))
    counts = {len(calls_in(site.found.names)) for site in sites}
    assert counts == {0, 1}


@pytest.mark.parametrize("where", [(torch, "cat"), (DynamicLayer, "update")], ids=lambda w: w[1])
def test_a_cache_that_returns_something_else(
    where: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make("Llama")
    model = copy.deepcopy(plain)
    tops.fuse(model)
    before = model(input_ids=TOKENS).logits
    given = getattr(*where)

    def larger(*args: Any, **kwargs: Any) -> Any:
        found = given(*args, **kwargs)
        return tuple(2 * one for one in found) if isinstance(found, tuple) else 2 * found

    monkeypatch.setattr(*where, larger)
    found, want = (one(input_ids=TOKENS).logits for one in (model, plain))
    assert not torch.allclose(found, before)
    torch.testing.assert_close(found, want)


def test_the_first_module_of_a_class_is_freed() -> None:
    """Its forward is read for all modules of the class."""
    attention_reading._known.cache_clear()
    model: Any = make("Llama")
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        tops.fuse(model)
        model(input_ids=TOKENS)
        del model
        assert not any(one() is not None for one in alive)
    finally:
        gc.enable()
