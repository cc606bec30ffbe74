"""`fuse`: the numbers of the plain model, whatever happens to it, and nothing replaced."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import traceback
import weakref
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from fuse_models import (
    LAYERS,
    DecoderLayer,
    EncoderLayer,
    GatedMLP,
    Model,
    assert_same,
    is_fused,
    of_layers,
    pair,
    results,
    tokens,
)
from helpers import html_cells
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops

# ---- what is as before


@pytest.mark.parametrize("kind", LAYERS)
def test_a_fused_model_computes_what_the_plain_one_does(kind: str) -> None:
    plain, model, report = pair(kind)
    assert_same(plain, model)
    assert is_fused(report) == [True, True]
    before, after = report.saved_bytes(tokens())
    assert after < before


def test_nothing_is_replaced() -> None:
    model = Model()
    modules, parameters = list(model.named_modules()), list(model.named_parameters())
    keys = list(model.state_dict())
    tops.fuse(model)
    results(model)
    assert [(n, id(m)) for n, m in model.named_modules()] == [(n, id(m)) for n, m in modules]
    assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in parameters]
    assert list(model.state_dict()) == keys
    layer = model.layers[0]
    assert isinstance(layer, DecoderLayer) and type(layer.mlp) is GatedMLP
    assert model.head.weight is model.embed.weight


def test_training_gives_the_same_weights() -> None:
    plain, model, _ = pair()
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.01)
        for _ in range(3):
            results(one)
            optimizer.step()
    torch.testing.assert_close(plain.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-4)
    fresh = Model()
    fresh.load_state_dict(model.state_dict())
    assert_same(fresh, model)


@pytest.mark.parametrize("kind", LAYERS)
def test_compiled(kind: str) -> None:
    plain, model, _ = pair(kind)
    assert_same(plain, model, torch.compile(model, backend="aot_eager", fullgraph=True))


def test_a_compiled_model_that_is_fused_later() -> None:
    plain, model = Model(), Model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(plain, model, compiled)
    report = tops.fuse(compiled)
    assert_same(plain, model, compiled)
    assert is_fused(report) == [True, True]


def test_keyword_arguments_and_defaults() -> None:
    plain, model, _ = pair()
    x = torch.randn(2, 5, 16)
    for keywords in ({}, {"scale": 0.5}):
        torch.testing.assert_close(plain.layers[0](x, **keywords), model.layers[0](x, **keywords))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints(is_reentrant: bool) -> None:
    plain, model, _ = pair()

    def run(found: Tensor) -> Tensor:
        x = model.embed(found)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=is_reentrant)
        y: Tensor = model.head(x)
        return y

    assert_same(plain, model, run)


@pytest.mark.parametrize("change", ["bfloat16", "double", "frozen", "shared", "eps"])
def test_changes_of_the_model(change: str) -> None:
    plain, model, report = pair()
    results(model)
    for one in (plain, model):
        layer = one.layers[0]
        if change in ("bfloat16", "double"):
            one.to(getattr(torch, change))
        elif change == "frozen":
            layer.mlp.requires_grad_(False)
        elif change == "shared":
            one.layers[1].mlp = layer.mlp
        else:
            layer.post_attention_layernorm.variance_epsilon = 0.5
    if change in ("bfloat16", "double"):
        # The norm of the model rounds to another dtype than ours.
        outputs = [results(one)[0].double() for one in (plain, model)]
        limit = 0.02 if change == "bfloat16" else 1e-6
        assert (outputs[0] - outputs[1]).norm() < limit * outputs[0].norm()
    else:
        assert_same(plain, model)
    assert is_fused(report) == [True, True]


def test_dropout_follows_the_module() -> None:
    layer, x = EncoderLayer(p=1.0), torch.randn(3, 16)
    assert len(tops.fuse(layer).fused) == 1
    assert torch.equal(layer(x), x)
    layer.eval()
    assert not torch.equal(layer(x), x)
    layer.train()
    layer.drop.p = 0.0
    assert not torch.equal(layer(x), x)


def test_copies_and_pickles_are_fused() -> None:
    plain, model, _ = pair()
    results(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        report = tops.fuse(other)
        assert_same(plain, other)
        assert is_fused(report) == [True, True]
        with torch.no_grad():
            other.layers[0].mlp.up_proj.weight.mul_(2)
        assert not torch.equal(results(other)[0], results(model)[0])
    assert_same(plain, model)


def test_nothing_keeps_a_model_alive() -> None:
    model = Model()
    report = tops.fuse(model)
    alive = [weakref.ref(part) for part in model.modules()]
    gc.collect()
    gc.disable()
    results(model)
    assert str(report) and report.saved_bytes(tokens())
    del model, report
    assert not any(part() for part in alive)


# ---- the way back


def test_unfuse() -> None:
    plain, model, report = pair()
    results(model)
    tops.unfuse(model)
    assert type(model.layers[0]) is DecoderLayer and not report.rows
    assert vars(model.layers[0]).keys() == vars(plain.layers[0]).keys()
    assert all(map(torch.equal, results(plain), results(model)))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def derived(module: nn.Module) -> None:
    """Gives the module a class of its own, as many wrappers do."""

    class Wrapped(type(module)):  # type: ignore[misc]
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().forward(*args, **kwargs)

        @property
        def count(self) -> int:
            return super().__getattribute__("calls")

        @classmethod
        def name(cls) -> str:
            return super().__module__ + cls.__name__

    module.__class__ = Wrapped


def test_unfuse_leaves_what_others_added_to_the_class() -> None:
    plain, model, _ = pair()
    for one in (plain, model):
        derived(one.layers[0])
        for layer in one.layers:
            register_parametrization(layer.mlp.up_proj, "weight", Doubled())
    assert_same(plain, model)
    tops.unfuse(model)
    assert all(map(torch.equal, results(plain), results(model)))
    first = model.layers[0]
    assert first.count == plain.layers[0].count > 0 and first.name() == plain.layers[0].name()
    assert [kind.__qualname__ for kind in type(first).__mro__] == [
        kind.__qualname__ for kind in type(plain.layers[0]).__mro__
    ]


def test_unfuse_reaches_methods_that_somebody_stored() -> None:
    """As accelerate does: `module._old_forward = module.forward`."""
    plain, model, _ = pair()
    for layer in model.layers:
        stored = layer.forward
        layer.forward = lambda x, *args, stored=stored: stored(x, *args)
    results(model)
    tops.unfuse(model)
    assert all(map(torch.equal, results(plain), results(model)))


def test_unfused() -> None:
    plain, model, report = pair()
    with tops.unfused(model):
        assert all(map(torch.equal, results(plain), results(model)))
        with tops.unfused(model):
            pass
        assert all(map(torch.equal, results(plain), results(model)))
    assert_same(plain, model)
    assert is_fused(report) == [True, True]


# ---- arguments and reports


def test_only() -> None:
    model = Model()
    assert [row.path for row in tops.fuse(model, only="layers.1").rows] == ["layers.1"]
    assert len(of_layers(tops.fuse(model, only=["layers.*"]).rows)) == 2


def test_fusing_twice_changes_nothing() -> None:
    plain, model, _ = pair()
    kinds = [type(layer) for layer in model.layers]
    report = tops.fuse(model)
    assert [type(layer) for layer in model.layers] == kinds and kinds[0] is kinds[1]
    assert_same(plain, model)
    assert is_fused(report) == [True, True]


def test_reports() -> None:
    model = Model()
    report = tops.fuse(model, rules=["residual"])
    results(model)
    assert str(report).splitlines() == [
        "2 fused, 0 left as they are",
        "    2 x DecoderLayer  residual  fused",
    ]
    assert json.loads(json.dumps(report.as_dict()))["fused"][0]["path"] == "layers.0"
    table = html_cells(report._repr_html_())
    assert table == [
        ["modules", "class", "rule", "state"],
        ["2", "DecoderLayer", "residual", "fused"],
    ]
    assert "SwiGLU" in str(model.layers[0].fused.explain())


def test_a_report_has_lines_for_a_terminal_and_a_picture(tmp_path: Path) -> None:
    class ADecoderLayerForConditionalGeneration(DecoderLayer):
        pass

    model = Model()
    model.layers[1] = ADecoderLayerForConditionalGeneration()
    model.layers[1].mlp.register_forward_hook(lambda *unused: None)
    report = tops.fuse(model)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    for row in report.rows:
        assert row.kind in words and (row.reason or "fused").split()[-1] in words
    assert "GatedMLP: it has hooks" in words
    report.save(tmp_path / "report.svg")
    picture = ElementTree.parse(tmp_path / "report.svg").getroot()
    shown = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"GatedMLP: it has hooks", "1 x DecoderLayer", text.splitlines()[0]} <= shown
    with pytest.raises(ValueError, match=r"^\[fuse\] path must end in \.svg, got .*report.png"):
        report.save(tmp_path / "report.png")
    nothing = tops.fuse(nn.Sequential(nn.Tanh()))
    nothing.save(tmp_path / "nothing.svg")
    assert str(nothing) == nothing._repr_html_() == "nothing to fuse: no rule matches a module"
    assert str(nothing) in (tmp_path / "nothing.svg").read_text()


def test_a_traceback_shows_the_lines_of_the_model() -> None:
    _, model, _ = pair()
    with pytest.raises(TypeError) as caught:
        model.layers[0](torch.randn(2, 5, 16), scale="three")
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename.endswith("fuse_models.py")
    assert last.line == "hidden_states = residual + hidden_states * scale"
