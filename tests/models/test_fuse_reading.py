"""Ways to write attention: `fuse` reads what the statements do to the numbers of a row."""

from __future__ import annotations

import copy
import importlib.util
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from fuse_models import fused_rules
from test_fuse_transformers import TOKENS, make
from transformers.models.llama import modeling_llama as llama

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=15)

FORWARD = """
def forward(
    self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, flag={flag},
    **kwargs,
):
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    {products}
    cos, sin = position_embeddings
    {rotation}
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, eager_attention_forward
    )
    {before}
    o, w = attention(
        self, q, k, v, attention_mask, dropout=self.attention_dropout if self.training else 0.0,
        scaling={scaling}, **kwargs,
    )
    {after}
    return {result}
"""
# The rotation of one tensor by the first half of each table, and something else.
ROTATIONS = """
def turned(x, cos, sin):
    n = cos.shape[-1] // 2
    cos, sin = cos[:, None, :, :n], sin[:, None, :, :n]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
def rotated(x, y, cos, sin):
    return (x * cos.unsqueeze(1)) + (y[:, :1] * sin.unsqueeze(1))
"""
PARTS = {
    "flag": "None",
    "products": "q, k, v = (self.q_proj(hidden_states), self.k_proj(hidden_states), "
    "self.v_proj(hidden_states))\n"
    "q, k, v = q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2), "
    "v.view(shape).transpose(1, 2)",
    "rotation": "q, k = apply_rotary_pos_emb(q, k, cos, sin)",
    "before": "pass",
    "scaling": "self.scaling",
    "after": "o = self.o_proj(o.reshape(*hidden_states.shape[:-1], -1))",
    "result": "o, w",
}
IN_ROWS = PARTS["products"].replace(".transpose(1, 2)", "")
# What differs from Llama's statements -> these compute attention as ops know it.
READ: dict[str, dict[str, str]] = {
    "nothing": {},
    "permuted": {"products": PARTS["products"].replace("transpose(1, 2)", "permute(0, 2, 1, 3)")},
    "rotated before the transposition": {
        "products": IN_ROWS,
        "rotation": "q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)\n"
        "q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.swapaxes(1, 2)",
    },
    "rotated in the other order": {"rotation": "k, q = apply_rotary_pos_emb(k, q, sin, cos)"},
    "rotated one by one": {"rotation": "q, k = turned(q, cos, sin), turned(k, sin=sin, cos=cos)"},
    "scaled queries": {"before": "q = q * self.scaling", "scaling": "1.0"},
    "scaled keys, divided": {"before": "k = k / 2", "scaling": "2 * self.scaling"},
    "heads joined": {
        "before": "v = torch.cat([v[:, :1], v[:, 1:]], 1)",
    },
    "a branch": {"before": "if flag is not None:\n    q = q + flag"},
    "a method": {"after": "o = self.o_proj(self.join(o))"},
}
# These do not, or nobody knows.
NOT_READ: dict[str, dict[str, str]] = {
    "heads in another order": {"before": "q = q.flip(1)"},
    "heads swapped": {"before": "q = torch.cat([q[:, 1:], q[:, :1]], 1)"},
    "numbers of a head swapped": {"before": "v = torch.cat([v[..., 4:], v[..., :4]], -1)"},
    "keys for values": {"before": "v = k"},
    "rows mixed": {"before": "q = q.reshape(q.shape[0], -1, 4, self.head_dim).transpose(1, 2)"},
    "scaled values": {"before": "v = v * 2"},
    "scaled in part": {"before": "q = torch.cat([q[..., :4] * 2, q[..., 4:]], -1)"},
    "something added": {"before": "q = q + 1"},
    "rotated by something else": {
        "rotation": "q, k = rotated(q, k, cos, sin), rotated(k, q, cos, sin)"
    },
    "rotated twice": {"rotation": PARTS["rotation"] + "\n" + PARTS["rotation"]},
    "halves swapped around the rotation": {
        "rotation": "q, k = apply_rotary_pos_emb(torch.cat([q[..., 4:], q[..., :4]], -1), "
        "torch.cat([k[..., 4:], k[..., :4]], -1), cos, sin)\n"
        "q, k = torch.cat([q[..., 4:], q[..., :4]], -1), torch.cat([k[..., 4:], k[..., :4]], -1)",
    },
    "only queries rotated": {"rotation": "q, _ = apply_rotary_pos_emb(q, k, cos, sin)"},
    "tables in part": {
        "rotation": "a, b = apply_rotary_pos_emb(q[..., :4], k[..., :4], cos[..., :4], "
        "sin[..., :4])\n"
        "q, k = torch.cat([a, q[..., 4:]], -1), torch.cat([b, k[..., 4:]], -1)",
    },
    "an argument that is given by default": {"flag": "2", "before": "if flag:\n    q = q * 2"},
    "a size decides": {"before": "if q.shape[2] > 4:\n    q = q * 2"},
    "changed in place": {"before": "q *= 2"},
    # Behind attention.
    "arguments are read": {"after": f"{PARTS['after']}\no = o * (1 + len(kwargs))"},
    "weights are read": {"after": f"{PARTS['after']}\no = o if w is None else o * 2"},
    "keys are read": {"after": f"{PARTS['after']}\no = o * k.shape[-1]"},
    "another product with queries": {"after": f"{PARTS['after']}\no = o * self.q_proj(o)"},
    "two ends": {"after": f"{PARTS['after']}\no = o * 2\nif self.training:\n    return o, w"},
    "other weights": {"after": f"{PARTS['after']}\no = o * 2", "result": "o, o"},
    "a tensor is changed in place": {"after": f"o = o + 0\no *= 2\n{PARTS['after']}"},
    "a tensor is changed by a method": {"after": f"o = o + 0\no.mul_(2)\n{PARTS['after']}"},
    "a function changes a tensor": {
        "after": f"o = torch.nn.functional.silu(o + 0, inplace=True)\n{PARTS['after']}"
    },
}
GATE = "o = o.reshape(*hidden_states.shape[:-1], -1)\no = self.o_proj(o * g.sigmoid())"
# Statements behind attention run, and ops up to there.
REST: dict[str, dict[str, str]] = {
    "halves of the result swapped": {
        "after": "o = o.reshape(*hidden_states.shape[:-1], -1)\n"
        "o = self.o_proj(torch.cat([o[..., 16:], o[..., :16]], -1))",
    },
    "a scaled result": {"after": PARTS["after"] + "\no = o * 1.5"},
    "a loop": {"after": f"{PARTS['after']}\nfor i in range(2):\n    o = o * 1.5"},
    "a gate": {"after": f"g = self.gate(hidden_states)\n{GATE}"},
    "a gate before attention": {"before": "g = self.gate(hidden_states)", "after": GATE},
    "a gate of heads": {
        "before": "g = self.gate(hidden_states).view(shape)",
        "after": "o = (o * g.sigmoid()).reshape(*hidden_states.shape[:-1], -1)\no = self.o_proj(o)",
    },
    "a gate before queries": {
        "products": f"g = self.gate(hidden_states)\n{PARTS['products']}",
        "after": GATE,
    },
}

SINKS = "s = module.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)\n"
JOINED = SINKS + "z = torch.cat([scores, s], dim=-1)\n"
LOG_SUMS = "z = torch.logsumexp(scores, dim=-1)\np = torch.softmax(scores, -1)\n"
FACTOR = LOG_SUMS + "f = (z - module.sinks.view(1, -1, 1)).sigmoid().unsqueeze(-1)"
# The softmax of an attention function, and what is done to what it gives.
READ_SINKS = {
    "a column": (JOINED + "p = torch.softmax(z, -1)[..., :-1]", "o"),
    "a column of scores less the greatest": (
        JOINED + "z = z - z.max(dim=-1, keepdim=True).values\np = z.softmax(-1)[:, :, :, :-1]",
        "o",
    ),
    "a factor": (FACTOR, "f * o"),
}
NOT_READ_SINKS = {
    "another column is dropped": (JOINED + "p = torch.softmax(z, -1)[..., 1:]", "o"),
    "two columns": (
        JOINED + "z = torch.cat([z, s], -1)\np = torch.softmax(z, -1)[..., :-2]",
        "o",
    ),
    "heads in another order": (
        JOINED.replace("sinks", "sinks.flip(0)") + "p = z.softmax(-1)[..., :-1]",
        "o",
    ),
    "the sinks of one head": (
        JOINED.replace("sinks", "sinks[:1].expand(4)") + "p = z.softmax(-1)[..., :-1]",
        "o",
    ),
    "scaled behind": (JOINED + "p = torch.softmax(2 * z, -1)[..., :-1]", "o"),
    "a factor of queries": (FACTOR, "o * f.transpose(1, 2).reshape(f.shape)"),
    "a factor without sigmoid": (FACTOR.replace(".sigmoid()", ""), "o * f"),
    "a factor twice": (FACTOR, "o * f * f"),
    "the factor of other scores": (FACTOR.replace("(scores, dim", "(scores * 2, dim"), "o * f"),
}
EAGER = """
def eager_attention_forward(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):
    groups = module.num_key_value_groups
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = query @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    {softmax}
    p = torch.nn.functional.dropout(p, p=dropout, training=module.training)
    o = p @ value
    o = {output}
    return o.transpose(1, 2).contiguous(), p
"""


def with_sinks(texts: tuple[str, str], folder: Path) -> tuple[Any, Any, tops.FuseReport]:
    plain: Any = make("Llama")
    plain.config._attn_implementation = "eager"
    softmax = textwrap.indent(texts[0], "    ").strip()
    call = {"scaling": "self.scaling, s_aux=self.sinks"}
    kind = changed(call, folder, EAGER.format(softmax=softmax, output=texts[1]))
    for layer in plain.model.layers:
        layer.self_attn.__class__ = kind
        layer.self_attn.sinks = torch.nn.Parameter(torch.randn(4))
    model = copy.deepcopy(plain)
    return plain, model, tops.fuse(model)


def changed(texts: dict[str, str], folder: Path, eager: str = "") -> type[Any]:
    """A class of attention of Llama with other statements, and an attention function."""
    parts = PARTS | texts
    filled = {k: textwrap.indent(textwrap.dedent(v), "    ").strip() for k, v in parts.items()}
    forward = textwrap.indent(FORWARD.format(**filled), "    ")
    text = (
        "import torch\nfrom transformers.models.llama.modeling_llama import *\n"
        "from transformers.models.llama.modeling_llama import (ALL_ATTENTION_FUNCTIONS, "
        "LlamaAttention, apply_rotary_pos_emb, eager_attention_forward, repeat_kv)\n"
        f"{ROTATIONS}{eager}class Changed(LlamaAttention):\n"
        f"{forward}\n"
        "    def join(self, o):\n        return o.flatten(2)\n"
    )
    (folder / "changed.py").write_text(text)
    spec = importlib.util.spec_from_file_location("changed", folder / "changed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kind: type[Any] = module.Changed
    return kind


def pair(texts: dict[str, str], folder: Path) -> tuple[Any, Any, tops.FuseReport]:
    plain: Any = make("Llama")
    kind = changed(texts, folder)
    for layer in plain.model.layers:
        layer.self_attn.__class__ = kind
        if "self.gate" in str(texts):
            layer.self_attn.gate = torch.nn.Linear(32, 32, bias=False)
    model = copy.deepcopy(plain)
    return plain, model, tops.fuse(model)


def assert_same(plain: Any, model: Any) -> None:
    found = []
    for one in (plain, model):
        one.train()(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    for want, own in zip(*found, strict=True):
        torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str, tmp_path: Path) -> None:
    plain, model, report = pair(READ[name], tmp_path)
    assert fused_rules(report)["layer"] == 2
    assert_same(plain, model)
    assert all("Attention" in str(layer.fused.explain()) for layer in model.model.layers)


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read(name: str, tmp_path: Path) -> None:
    """Statements run, and the numbers are theirs."""
    plain, model, report = pair(NOT_READ[name], tmp_path)
    assert not {"layer", "attention"} & fused_rules(report).keys()
    assert_same(plain, model)


@pytest.mark.parametrize("name", REST)
def test_statements_behind_attention(name: str, tmp_path: Path) -> None:
    plain, model, report = pair(REST[name], tmp_path)
    assert fused_rules(report)["attention"] == 2
    assert_same(plain, model)
    assert all("Attention" in str(layer.fused.explain()) for layer in model.model.layers)


@pytest.mark.parametrize("name", [*READ_SINKS, *NOT_READ_SINKS])
def test_sinks(name: str, tmp_path: Path) -> None:
    plain, model, report = with_sinks((READ_SINKS | NOT_READ_SINKS)[name], tmp_path)
    assert_same(plain, model)
    for layer in model.model.layers:
        assert ("Attention" in str(layer.fused.explain())) is (name in READ_SINKS), report
    # Another function of attention has none.
    for one in (plain, model):
        one.zero_grad()
        one.config._attn_implementation = "sdpa"
    found = []
    for one in (plain, model):
        one(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        found.append([p.grad for p in one.parameters() if p.grad is not None])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["a gate", "a gate before attention"])
def test_a_hook_behind_attention(name: str, tmp_path: Path) -> None:
    """A hook of what the statements behind ops call sees what it saw, and may change it."""
    plain, model, _ = pair(REST[name], tmp_path)
    assert_same(plain, model)
    for one in (plain, model):
        one.zero_grad()
        for layer in one.model.layers:
            layer.self_attn.gate.register_forward_hook(lambda _, __, found: found * 3)
    assert_same(plain, model)


def test_statements_behind_attention_compile(tmp_path: Path) -> None:
    plain, model, _ = pair(REST["a gate"], tmp_path)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    given = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}
    found = []
    for one, run in ((plain, plain), (model, compiled)):
        run(**given).loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_attributes_that_change(tmp_path: Path) -> None:
    """What was read of one module serves another one only if their attributes are the same."""
    plain, model, report = pair(READ["scaled queries"], tmp_path)
    for one in (plain, model):
        assert_same(one, one)
        one.zero_grad()
        one.model.layers[1].self_attn.scaling = 0.1
    assert_same(plain, model)
    texts = [str(layer.fused.explain()) for layer in model.model.layers]
    assert "0.1" in texts[1] and "0.1" not in texts[0]
    assert not report.skipped


def test_a_function_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rotation computes is looked at again, also where the statements are the same."""
    plain: Any = make("Llama")
    model = copy.deepcopy(plain)
    tops.fuse(model)
    assert_same(plain, model)
    monkeypatch.setattr(llama, "rotate_half", lambda x: -x)
    for one in (plain, model):
        one.zero_grad()
    assert_same(plain, model)
    assert "Attention" not in str(model.model.layers[0].fused.explain())
