"""`fuse`: the numbers of the plain model, whatever happens to its modules, and nothing replaced."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
import pickle
import re
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_models import LAYERS, DecoderLayer, EncoderLayer, GatedMLP, Model, RootNorm
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=40)


def tokens() -> Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(1))


def results(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The output, and the gradients of all parameters that have some."""
    model.zero_grad()
    y = (model if run is None else run)(tokens())
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def pair(kind: str = "decoder") -> tuple[Model, Model, tops.FuseReport]:
    plain, model = Model(kind), Model(kind)
    report = tops.fuse(model)
    return plain, model, report


def assert_same(plain: nn.Module, model: nn.Module, run: Any = None) -> None:
    torch.testing.assert_close(results(plain), results(model, run), rtol=1e-4, atol=1e-4)


def of_layers(rows: list[Any]) -> list[Any]:
    return sorted(row for row in rows if row.kind in {kind.__name__ for kind in LAYERS.values()})


def is_fused(report: tops.FuseReport) -> list[bool]:
    return [not row.reason for row in of_layers(report.rows)]


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
    torch._dynamo.reset()
    plain, model, _ = pair(kind)
    assert_same(plain, model, torch.compile(model, backend="aot_eager", fullgraph=True))


def test_a_compiled_model_that_is_fused_later() -> None:
    torch._dynamo.reset()
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
    results(model)
    alive = weakref.ref(model.layers[0])
    del model, report
    gc.collect()
    assert alive() is None


# ---- where the statements themselves have to run


class Adapter(nn.Module):
    """What an adapter puts in the place of a Linear."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) * self.scale
        return found


class Marked(nn.Parameter):
    """A weight of a class of its own."""


def hook_on(path: str) -> Callable[[Model], None]:
    return lambda m: m.get_submodule(path).register_forward_hook(lambda *a: a[-1] * 2) and None


def pre_hook_on(path: str) -> Callable[[Model], None]:
    return lambda m: (
        m.get_submodule(path).register_forward_pre_hook(lambda _, a: (a[0] * 2,)) and None
    )


def backward_hook_on(path: str) -> Callable[[Model], None]:
    return lambda m: (
        m.get_submodule(path).register_full_backward_hook(lambda _, g, __: (g[0] * 2,)) and None
    )


def own_forward(path: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        module = model.get_submodule(path)
        forward = module.forward
        module.forward = lambda x: forward(x) * 2  # type: ignore[method-assign]

    return change


def adapter(model: Model) -> None:
    mlp = model.layers[0].mlp
    mlp.up_proj = Adapter(mlp.up_proj)


def another_activation(model: Model) -> None:
    model.layers[0].mlp.act_fn = nn.Softplus()


def marked_weight(model: Model) -> None:
    down = model.layers[0].mlp.down_proj
    down.weight = Marked(down.weight.detach())


def another_class(model: Model) -> None:
    class Twice(GatedMLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    model.layers[0].mlp.__class__ = Twice


OBSTACLES: dict[str, tuple[Callable[[Model], None], str]] = {
    "hook on a leaf": (hook_on("layers.0.mlp.up_proj"), "hooks"),
    "hook on the norm": (hook_on("layers.0.post_attention_layernorm"), "hooks"),
    "hook on the activation": (hook_on("layers.0.mlp.act_fn"), "hooks"),
    "hook on the parent": (hook_on("layers.0.mlp"), "hooks"),
    "pre-hook": (pre_hook_on("layers.0.mlp"), "hooks"),
    "backward hook": (backward_hook_on("layers.0.mlp.down_proj"), "hooks"),
    "forward of a leaf": (own_forward("layers.0.mlp.gate_proj"), "forward of its own"),
    "forward of the parent": (own_forward("layers.0.mlp"), "forward of its own"),
    "forward of the activation": (own_forward("layers.0.mlp.act_fn"), "forward of its own"),
    "adapter": (adapter, "Adapter"),
    "activation": (another_activation, "Softplus"),
    "weight": (marked_weight, "Marked"),
    "class": (another_class, "Twice"),
}


WHEN = ("before", "after fuse", "after a call", "compiled")
# Dynamo does not trace these in the plain model.
NOT_COMPILED = ("weight", "backward hook")


@pytest.mark.parametrize(
    ("name", "when"),
    [
        (name, when)
        for name in OBSTACLES
        for when in WHEN
        if when != "compiled" or name not in NOT_COMPILED
    ],
)
def test_the_statements_run_where_they_have_to(name: str, when: str) -> None:
    change, reason = OBSTACLES[name]
    plain, model = Model(), Model()
    run = None
    if when == "compiled":
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager")
    if when == "before":
        change(model)
    report = tops.fuse(model)
    if when in ("after a call", "compiled"):
        results(model, run)
    if when != "before":
        change(model)
    change(plain)
    assert_same(plain, model, run)
    if (name, when) == ("hook on the norm", "before"):
        assert [row.rule for row in of_layers(report.fused)] == ["sum", "residual"]
        return
    assert is_fused(report) == [False, True]
    assert reason in of_layers(report.skipped)[0].reason and reason in str(report)


def test_a_hook_that_is_removed() -> None:
    plain, model, report = pair()
    handle = model.layers[0].mlp.register_forward_hook(lambda *_: None)
    results(model)
    assert is_fused(report) == [False, True]
    handle.remove()
    assert_same(plain, model)
    assert is_fused(report) == [True, True]


def test_hooks_for_all_modules() -> None:
    _, model, report = pair()
    results(model)
    seen: list[str] = []
    handle = register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    results(model)
    assert is_fused(report) == [False, False]
    handle.remove()
    assert seen.count("SiLU") == 2 and is_fused(report) == [True, True]


def test_export_has_the_statements() -> None:
    plain, model, _ = pair()
    program = torch.export.export(model, (tokens(),))
    assert "transformer_ops" not in str(program.graph)
    torch.testing.assert_close(program.module()(tokens()), plain(tokens()))


def test_attributes_that_change_at_each_call() -> None:
    plain, model, report = pair()
    for i in range(40):
        for one in (plain, model):
            one.layers[0].mlp.count = i  # type: ignore[assignment]
        assert_same(plain, model)
    assert is_fused(report) == [False, True]
    assert "changes from call to call: count of mlp has changed" in report.skipped[0].reason


def twice(function: Any) -> Any:
    @functools.wraps(function)
    def twice_of(*args: Any, times: float = 2.0, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * times

    return twice_of


def counted(function: Any) -> Any:
    calls = 0

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*args, **kwargs) * calls

    return counting


def by_default(function: Any) -> Any:
    @functools.wraps(function)
    def with_default(*args: Any, inner: Any = function) -> Any:
        return inner(*args) * 2

    return with_default


def looks_for_itself(function: Any) -> Any:
    @functools.wraps(function)
    def outermost(self: Any, *args: Any) -> Any:
        is_outermost = type(self).forward is outermost
        return function(self, *args) * (2 if is_outermost else 1)

    return outermost


# What is wrapped around a forward -> the row of the report.
WRAPPERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "a decorator": ((twice,), ""),
    "no_grad": ((torch.no_grad(),), ""),
    "two decorators": ((torch.no_grad(), twice), ""),
    "a variable of its own": ((counted,), ""),
    "the function as a default": (
        (by_default,),
        "its forward is wrapped in with_default, which can hold no other function",
    ),
    "a look at itself": (
        (looks_for_itself,),
        "its forward is wrapped in outermost, which can hold no other function",
    ),
}


def wrapped(decorators: Any, base: type[nn.Module] = EncoderLayer) -> type[nn.Module]:
    forward: Any = base.forward
    for decorator in reversed(decorators):
        forward = decorator(forward)
    return type("Wrapped", (base,), {"forward": forward})


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_forward_that_is_wrapped(name: str) -> None:
    decorators, reason = WRAPPERS[name]
    layer, x = wrapped(decorators)(), torch.randn(2, 16)
    plain = wrapped(decorators)()
    plain.load_state_dict(layer.state_dict())
    report = tops.fuse(layer)
    for _ in range(2):
        found, want = layer(x), plain(x)
        torch.testing.assert_close(found, want)
        assert found.requires_grad == want.requires_grad
    assert inspect.signature(layer.forward) == inspect.signature(plain.forward)
    (row,) = [row for row in report.rows if row.kind == "Wrapped" and row.rule == "residual"]
    assert bool(row.reason) == bool(reason) and reason in row.reason
    if not reason:
        assert "MakeExtraOutput" in str(layer.fused.explain())


def test_a_forward_that_is_wrapped_by_itself_and_by_its_base() -> None:
    """As transformers wraps what checkpoints around the forward of each subclass."""

    class Base(EncoderLayer):
        def __init_subclass__(cls) -> None:
            cls.forward = looks_for_itself(cls.forward)  # type: ignore[method-assign]

    class Layer(Base):
        forward = twice(EncoderLayer.forward)

    layer, x = Layer(), torch.randn(2, 16)
    want = layer(x)
    assert len([row for row in tops.fuse(layer).fused if row.rule == "residual"]) == 1
    torch.testing.assert_close(layer(x), want)
    assert "MakeExtraOutput" in str(layer.fused.explain())


def test_a_forward_that_is_wrapped_and_then_patched() -> None:
    kind: Any = wrapped((twice,))
    layer, x = kind(), torch.randn(2, 16)
    tops.fuse(layer)
    kind.forward = lambda self, x: x + 1
    assert torch.equal(layer(x), x + 1)


class Private(EncoderLayer):
    __twice = 2

    def forward(self, x: Tensor) -> Tensor:
        residual = x * self.__twice
        x = residual
        residual = x
        x = self.norm(x)
        x = self.mlp(x)
        x = residual + x
        return x


def test_a_function_that_cannot_be_written_anew() -> None:
    layer, x = Private(), torch.randn(2, 16)
    want = layer(x)
    report = tops.fuse(layer)
    torch.testing.assert_close(layer(x), want)
    assert not [row for row in report.rows if row.kind == "Private"]


def test_a_class_keeps_its_name() -> None:
    """Checkpoints, wrap policies and registries go by the names of classes."""
    plain, model, _ = pair()
    kinds = [type(one.layers[0]) for one in (plain, model)]
    assert kinds[0] is not kinds[1] and str(kinds[0]) == str(kinds[1])
    assert model.layers[0]._get_name() == "DecoderLayer"
    assert repr(model.layers[0]).startswith("FusedDecoderLayer(")


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("kind", [GatedMLP, RootNorm, nn.SiLU, DecoderLayer])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_class_that_is_patched(
    when: str, kind: type[nn.Module], is_wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries that replace the forwards of classes do."""
    plain, model = Model(), Model()
    forward = kind.forward

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * 2

    def patch() -> None:
        replacement = functools.wraps(forward)(patched) if is_wrapped else patched
        monkeypatch.setattr(kind, "forward", replacement)

    if when == "before":
        patch()
    report = tops.fuse(model)
    results(model)
    if when == "after":
        patch()
    assert_same(plain, model)
    fused = [row.rule for row in of_layers(report.fused)]
    # A patch that calls what it replaces calls the ops.
    rules: dict[Any, list[str]] = {RootNorm: ["sum", "sum"]}
    if is_wrapped:
        rules[DecoderLayer] = ["residual", "residual"]
    assert fused == (rules.get(kind, []) if when == "before" else [])


def test_a_refusal_is_found_out_once() -> None:
    model, made = DoublingInPlace(), []

    def make(*_: Any) -> Any:
        made.append(1)
        raise tops.FuseSkip("no")

    rule = tops.register_fuse_rule("refusing", STATEMENTS, make)
    try:
        report = tops.fuse(model, rules=[rule])
        model(torch.randn(2, 16))
        before = len(made)
        for _ in range(5):
            model(torch.randn(2, 16))
        assert len(made) == before and report.skipped[0].reason == "no"
    finally:
        rule.remove()


def test_hooks_that_come_and_go() -> None:
    plain, model, report = pair()
    for _ in range(40):
        handle = model.layers[0].mlp.register_forward_hook(lambda *_: None)
        results(model)
        handle.remove()
        for _ in range(4):
            results(model)
    assert is_fused(report) == [True, True]
    assert_same(plain, model)


def test_fx_traces_the_statements() -> None:
    layer = EncoderLayer()
    traced = torch.fx.symbolic_trace(layer)
    tops.fuse(layer)
    assert str(torch.fx.symbolic_trace(layer).graph) == str(traced.graph)


def test_exports_have_the_statements() -> None:
    plain, layer = EncoderLayer().eval(), EncoderLayer().eval()
    layer.load_state_dict(plain.state_dict())
    report = tops.fuse(layer)
    assert is_fused(report)
    x = torch.randn(2, 4, 16)
    programs = [torch.export.export(module, (x,)).run_decompositions() for module in (plain, layer)]
    targets = [[str(node.target) for node in program.graph.nodes] for program in programs]
    assert targets[0] == targets[1]


def test_parameters_on_two_devices() -> None:
    model = Model()
    model.layers[0].mlp.down_proj.to("meta")
    report = tops.fuse(model)
    assert report.skipped[0].reason == "its parameters are on cpu, meta"


# ---- the way back


def test_unfuse() -> None:
    plain, model, report = pair()
    results(model)
    tops.unfuse(model)
    assert type(model.layers[0]) is DecoderLayer and not report.rows
    assert vars(model.layers[0]).keys() == vars(plain.layers[0]).keys()
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
        "    2 x DecoderLayer                 residual                 fused",
    ]
    assert json.loads(json.dumps(report.as_dict()))["fused"][0]["path"] == "layers.0"
    assert "<td>DecoderLayer</td>" in report._repr_html_()
    assert "SwiGLU" in str(model.layers[0].fused.explain())


def test_a_traceback_shows_the_lines_of_the_model() -> None:
    _, model, _ = pair()
    with pytest.raises(TypeError) as caught:
        model.layers[0](torch.randn(2, 5, 16), scale="three")
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename.endswith("fuse_models.py")
    assert last.line == "hidden_states = residual + hidden_states * scale"


# ---- rules


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y * 2
        return y


class Tripling(Doubling):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y * 3
        return y


STATEMENTS = """
H = self.any_norm(H)
H = H * 2
"""


class DoublingInPlace(Doubling):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x * 2
        return x


@pytest.fixture
def rule() -> Any:
    def make(module: Any, names: dict[str, str]) -> list[nn.Module]:
        return [tops.view(getattr(module, names["norm"])), tops.ConstantScale(2.0)]

    found = tops.register_fuse_rule("doubling", STATEMENTS, make)
    yield found
    found.remove()


def test_a_rule_of_the_users(rule: tops.FuseRule) -> None:
    layer, x = DoublingInPlace(), torch.randn(3, 16)
    want = layer(x)
    report = tops.fuse(layer, rules=["doubling"])
    torch.testing.assert_close(layer(x), want)
    assert [row.rule for row in report.fused] == ["doubling"]
    # Other names of local variables than the pattern has, and another function.
    assert len(tops.fuse(Doubling()).fused) == 1
    assert not tops.fuse(Tripling()).rows


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(3, "gave int in place of ops"), ([], "gave list in place of ops"), ([4], "gave list")],
)
def test_a_rule_that_answers_nonsense(answer: Any, reason: str) -> None:
    rule = tops.register_fuse_rule("nonsense", STATEMENTS, lambda *_: answer)
    try:
        layer, x = DoublingInPlace(), torch.randn(3, 16)
        want = layer(x)
        report = tops.fuse(layer, rules=[rule])
        assert torch.equal(layer(x), want) and reason in report.skipped[0].reason
    finally:
        rule.remove()


def test_a_rule_that_raises() -> None:
    def make(*_: Any) -> Any:
        raise AttributeError("no such thing")

    rule = tops.register_fuse_rule("raises", STATEMENTS, make)
    try:
        layer, x = DoublingInPlace(), torch.randn(3, 16)
        want = layer(x)
        report = tops.fuse(layer, rules=["raises"])
        assert torch.equal(layer(x), want)
        reason = report.skipped[0].reason
        assert reason == "the rule raises raised AttributeError: no such thing"
    finally:
        rule.remove()


def test_a_wrong_rule_is_seen() -> None:
    rule = tops.register_fuse_rule("wrong", STATEMENTS, lambda m, n: [tops.view(m.norm)])
    try:
        layer, x = DoublingInPlace(), torch.randn(3, 16)
        want = layer(x)
        tops.fuse(layer, rules=["wrong"])
        with pytest.raises(AssertionError):
            torch.testing.assert_close(layer(x), want)
    finally:
        rule.remove()


def test_a_source_that_cannot_be_read() -> None:
    names: dict[str, Any] = {"nn": nn, "RootNorm": RootNorm, "GatedMLP": GatedMLP}
    exec(
        "class Layer(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.mlp = RootNorm(16), GatedMLP(16, 24)\n"
        "    def forward(self, x):\n"
        "        r = x\n        x = self.norm(x)\n        x = self.mlp(x)\n        x = r + x\n"
        "        return x\n",
        names,
    )
    layer = names["Layer"]()
    assert "Layer" not in {row.kind for row in tops.fuse(layer).rows}
    assert layer(torch.randn(2, 16)).shape == (2, 16)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: tops.fuse(3), TypeError, "[fuse] model must be an nn.Module, got int"),
        (lambda: tops.fuse(Model(), rules=["llama"]), ValueError, "[fuse] rules must be some of"),
        (lambda: tops.fuse(nn.Softplus(), strict=True), ValueError, "got nothing to fuse"),
        (
            lambda: tops.register_fuse_rule("new", "H = (", lambda *_: []),
            ValueError,
            "[fuse] statements must be Python",
        ),
        (
            lambda: tops.register_fuse_rule("new", "R = X", lambda *_: []),
            ValueError,
            "[fuse] statements must read an H and compute one value, which the last one assigns or "
            "returns, got 'R = X'",
        ),
        (
            lambda: tops.register_fuse_rule("residual", "R = H", lambda *_: []),
            ValueError,
            "[fuse] name must be new, got 'residual'",
        ),
    ],
)
def test_errors(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()
