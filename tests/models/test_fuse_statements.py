"""Where the statements of a fused model have to run: hooks, adapters, decorators, exports."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_models import (
    DecoderLayer,
    EncoderLayer,
    GatedMLP,
    Model,
    RootNorm,
    assert_same,
    is_fused,
    of_layers,
    pair,
    results,
    tokens,
)
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=25)


X = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))


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


def test_hooks_for_all_modules() -> None:
    _, model, report = pair()
    results(model)
    seen: list[str] = []
    handle = register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    results(model)
    assert is_fused(report) == [False, False]
    handle.remove()
    assert seen.count("SiLU") == 2 and is_fused(report) == [True, True]


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


def test_a_forward_around_a_fused_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that wraps the forward of each subclass does not wrap it for ours."""

    class Base(nn.Module):
        def __init_subclass__(cls) -> None:
            cls.forward = twice(cls.forward)  # type: ignore[method-assign]

    class Layer(Base):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)

        def ff_chunk(self, x: Tensor) -> Tensor:
            x = self.up(x)
            x = self.act(x)
            return self.down(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.ff_chunk(x).sort().values

    layer, x = Layer(), torch.randn(2, 4)
    want = layer(x)
    assert "feed-forward in chunks" in str(tops.fuse(layer))
    torch.testing.assert_close(layer(x), want)
    monkeypatch.setattr(Layer, "forward", lambda self, x: x + 1)
    assert torch.equal(layer(x), x + 1)


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


def test_hooks_that_come_and_go() -> None:
    plain, model, report = pair()
    for _ in range(40):
        handle = model.layers[0].mlp.register_forward_hook(lambda *_: None)
        results(model)
        assert is_fused(report) == [False, True]
        handle.remove()
        assert_same(plain, model)
        assert is_fused(report) == [True, True]
        for _ in range(3):
            results(model)


def test_fx_traces_the_statements() -> None:
    layer = EncoderLayer()
    traced = torch.fx.symbolic_trace(layer)
    tops.fuse(layer)
    assert str(torch.fx.symbolic_trace(layer).graph) == str(traced.graph)


@pytest.mark.parametrize(("make", "x"), [(EncoderLayer, X), (Model, tokens())])
def test_exports_have_the_statements(make: Any, x: Tensor) -> None:
    plain, fused = make().eval(), make().eval()
    fused.load_state_dict(plain.state_dict())
    assert is_fused(tops.fuse(fused))
    programs = [torch.export.export(module, (x,)) for module in (plain, fused)]
    torch.testing.assert_close(programs[1].module()(x), plain(x))
    graphs = [program.run_decompositions().graph for program in programs]
    targets = [[str(node.target) for node in graph.nodes] for graph in graphs]
    assert targets[0] == targets[1] and "transformer_ops" not in str(programs[1].graph)


def test_parameters_on_two_devices() -> None:
    model = Model()
    model.layers[0].mlp.down_proj.to("meta")
    report = tops.fuse(model)
    assert report.skipped[0].reason == "its parameters are on cpu, meta"
