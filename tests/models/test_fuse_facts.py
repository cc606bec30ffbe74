"""What the code of a module does still happens: statements that no rule matches, and what the
statements read."""

from __future__ import annotations

import copy
import linecache
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fuse_models import GatedMLP, RootNorm
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.overrides import TorchFunctionMode

import transformer_ops as tops

D = 8
# What code of the modules here does besides computing its result.
NOTES: list[str] = []
count = 0


def compiled_class(body: str, name: str, path: str = "") -> Any:
    """`Layer` with this body of its `forward`, whose source can be read."""
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    source = f"def forward(self, x, y=None):\n{lines}\n"
    path = path or f"<a layer {name}>"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    names: dict[str, Any] = {}
    exec(compile(source, path, "exec"), globals(), names)
    return type("Layer", (Layer,), {"forward": names["forward"]})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mlp = RootNorm(D), GatedMLP(D, 12)
        self.count = 0

    def note(self, *given: Any) -> int:
        NOTES.append("note")
        self.count += 1
        return self.count

    def check(self, h: Tensor) -> bool:
        raise ValueError("checked")


def outcome(layer: Any, *inputs: Tensor) -> tuple[Any, ...]:
    """All that a call does: its result and gradients, or its error; notes; the generator."""
    NOTES.clear()
    torch.manual_seed(3)
    x, *others = (one.clone().requires_grad_() for one in inputs)
    layer.zero_grad()
    try:
        result = layer(x, *others)
        result.sum().backward()
    except (ValueError, RuntimeError) as error:
        return [type(error), *NOTES], []
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return list(NOTES), [result.detach(), x.grad, gradients, torch.get_rng_state()]


def assert_same(plain: Any, fused: Any, *inputs: Tensor) -> None:
    inputs = inputs or (torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1)),)
    (notes, wanted), (fused_notes, found) = outcome(plain, *inputs), outcome(fused, *inputs)
    assert notes == fused_notes
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


BETWEEN = """
h = self.norm(x)
{}
h = self.mlp(h)
x = x + h
{}
return x
"""
# Between the statements of a rule, and behind them -> what the report names.
STATEMENTS = {
    "an unused call": ("_ = self.note(h)", "", "`_ = self.note(h)` in line"),
    "a call without an argument": ("k = self.note()", "", "`k = self.note()` in line"),
    "a call that raises": ("ok = self.check(h)", "", "`ok = self.check(h)` in line"),
    "a change in place": ("z = h.mul_(2)", "", "`z = h.mul_(2)` in line"),
    "random numbers": ("z = torch.rand_like(h)", "", "`z = torch.rand_like(h)` in line"),
    "an unused branch": ("z = x if self.note() else h", "", "in line"),
    "deleted": ("", "del h", "h is read by `del h`"),
    "changed later": ("", "h += x\nx = h", "h is read by `h += x`"),
    "read later": ("", "x = x + h", "h is read by `x = x + h`"),
    "read by a lambda": ("", "x = (lambda: x + h)()", "another function sees h"),
    "read by a generator": ("", "x = sum(h for _ in range(2))", "sees h"),
    "all variables": ("", "x = x * len(locals())", "locals sees all variables"),
    "evaluated": ("", "x = eval('x + h')", "eval sees all variables"),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_statements_that_no_rule_accounts_for(name: str) -> None:
    between, behind, reason = STATEMENTS[name]
    kind = compiled_class(BETWEEN.format(between, behind), name)
    plain, fused = kind(), kind()
    report = tops.fuse(fused)
    assert_same(plain, fused)
    assert any(reason in row.reason for row in report.skipped), report
    # Without the statement, the same is fused.
    kind = compiled_class(BETWEEN.format("", ""), name)
    assert "residual" in [row.rule for row in tops.fuse(kind()).fused]


def test_a_function_that_was_there_before() -> None:
    body = "def later():\n    return h\n" + BETWEEN.format("", "x = x + later()")
    kind = compiled_class(body, "nonlocal")
    plain, fused = kind(), kind()
    report = tops.fuse(fused)
    assert_same(plain, fused)
    assert "another function sees h" in str(report)


def test_a_variable_that_was_deleted_before() -> None:
    body = "y = x\ndel y\nh = self.norm(x)\nh = self.mlp(h)\nx = y + h\nreturn x"
    kind = compiled_class(body, "deleted before")
    fused = kind()
    assert "`del y` in line 3 deletes what they read" in str(tops.fuse(fused))
    runs: list[Any] = []
    fused.mlp.register_forward_hook(lambda *unused: runs.append(1))
    with pytest.raises(UnboundLocalError, match="'y'"):
        fused(torch.randn(2, 3, D))
    assert runs
    body = "y = x\nh = self.norm(x)\nh = self.mlp(h)\nx = y + h\ndel y\nreturn x"
    assert tops.fuse(compiled_class(body, "deleted behind")()).fused


def test_a_global_variable() -> None:
    kind = compiled_class(
        "global count\ncount = self.norm(x)\nx = x + self.mlp(count)\nreturn x", "g"
    )
    plain, fused = kind(), kind()
    tops.fuse(fused)
    seen = []
    for layer in (plain, fused):
        assert_same(layer, layer)
        seen.append(count)
    torch.testing.assert_close(*seen)


def test_a_global_variable_that_is_the_result() -> None:
    body = "global total\nh = self.norm(x)\nh = self.mlp(h)\ntotal = x + h\nreturn total * 1"
    kind = compiled_class(body, "a global result")
    plain, fused = kind(), kind()
    report = tops.fuse(fused)
    for _ in range(3):
        assert_same(plain, fused)
        assert "residual" in [row.rule for row in report.fused]


class Tagged(Tensor):
    """A tensor of a class of its own."""


def test_a_function_of_torch_is_looked_up_for_tensors_of_subclasses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`silu` passes such a tensor on to what is `F.silu` then, whatever its name is here."""
    assert silu is F.silu
    unit = "silu(h.chunk(2, dim=-1)[0]) * h.chunk(2, dim=-1)[1]"
    body = f"h = self.mlp.up_proj(self.norm(x))\nh = {unit}\nx = x + self.down(h)\nreturn x"
    kind = compiled_class(body, "silu")
    plain, fused = kind(), kind()
    for layer in (plain, fused):
        torch.manual_seed(0)
        layer.down = nn.Linear(6, D)
    assert "feed-forward" in [row.rule for row in tops.fuse(fused).fused]
    x = torch.randn(2, 3, D)
    assert_same(plain, fused, x)
    monkeypatch.setattr(F, "silu", F.relu)
    assert_same(plain, fused, x)
    torch.testing.assert_close(fused(x.as_subclass(Tagged)), plain(x.as_subclass(Tagged)))
    assert not torch.allclose(fused(x.as_subclass(Tagged)), fused(x))


def test_a_source_that_was_edited() -> None:
    path = "<an edited layer>"
    plain = compiled_class(BETWEEN.format("", ""), "e", path)
    fused = plain()
    edited = linecache.cache[path]
    source = "".join(edited[2]).replace("x = x + h", "x = x + h + h")
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    assert "residual" not in [row.rule for row in tops.fuse(fused).rows]
    assert_same(plain(), fused)


# ---- shapes and kinds


SUM = "x = y + self.mlp(x)\nreturn x"


@pytest.mark.parametrize("shape", [(D,), (), (2, 1, D), (1, 2, 3, D)])
def test_a_sum_that_broadcasts(shape: tuple[int, ...]) -> None:
    kind = compiled_class(SUM, "sum")
    plain, fused = kind(), kind()
    report = tops.fuse(fused)
    assert_same(plain, fused, torch.randn(2, 3, D), torch.randn(shape))
    assert_same(plain, fused, torch.randn(2, 3, D), torch.randn(2, 3, D))
    assert "sum" in [row.rule for row in report.fused]


def narrow(layer: Any) -> None:
    layer.mlp.down_proj = nn.Linear(12, 1, bias=False)
    layer.mlp.down_proj.weight.data.fill_(0.1)


def weight_of(*shape: int) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.norm.weight = nn.Parameter(torch.linspace(0.5, 2, math.prod(shape)).view(shape))

    return change


def trained_eps(layer: Any) -> None:
    layer.norm.variance_epsilon = nn.Parameter(torch.tensor(0.1))


def short_bias(layer: Any) -> None:
    layer.mlp.up_proj.bias = nn.Parameter(torch.tensor([0.5]))


def one_bias(layer: Any) -> None:
    layer.mlp.up_proj.bias = nn.Parameter(torch.ones(12))


FORMS = [narrow, weight_of(3, D), weight_of(1), weight_of(1, D), trained_eps, short_bias, one_bias]


@pytest.mark.parametrize("when", ["before", "after a call"])
@pytest.mark.parametrize("change", FORMS)
def test_forms_have_the_shapes_that_they_were_written_for(
    change: Callable[[Any], None], when: str
) -> None:
    kind = compiled_class(BETWEEN.format("", ""), "form")
    plain, fused = kind(), kind()
    if when == "before":
        change(fused)
    tops.fuse(fused)
    if when != "before":
        assert_same(plain, fused)
        change(fused)
    change(plain)
    assert_same(plain, fused)


# ---- what statements read


class Tripled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


class Reading(Layer):
    """Statements that read all kinds of attributes."""

    factor: Any = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.act: Any = nn.SiLU()
        self.scale: Any = None
        self.config = types.SimpleNamespace(approximate="tanh")
        self.steps = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
        self.up, self.down = nn.Linear(D, 12), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.steps(self.norm(x))
        x = x + self.down(F.gelu(self.up(x), approximate=self.config.approximate)) * self.factor
        x = x + self.mlp(x) * self.factor
        return x


def put_into_dict(layer: Any) -> None:
    layer.__dict__["mlp"] = Tripled()


def grown(layer: Any) -> None:
    layer.steps.append(nn.Tanh())


def reordered(layer: Any) -> None:
    children = layer.steps._modules
    layer.steps._modules = dict(reversed(children.items()))


def shadowed(layer: Any) -> None:
    layer.factor = 0.5


def other_number(value: Any) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        layer.norm.variance_epsilon = value

    return change


def other_form(layer: Any) -> None:
    layer.config.approximate = "none"


def other_config(layer: Any) -> None:
    layer.config = types.SimpleNamespace(approximate="none")


OBJECTS = {
    "a module in __dict__": put_into_dict,
    "a Sequential that grows": grown,
    "a Sequential in another order": reordered,
    "an attribute of the class that is shadowed": shadowed,
    "a numpy number": other_number(np.float64(0.5)),
    "a numpy number of 32 bits": other_number(np.float32(0.5)),
    "an attribute of a config": other_form,
    "another config": other_config,
}


@pytest.mark.parametrize("when", ["before a call", "after a call"])
@pytest.mark.parametrize("name", OBJECTS)
def test_a_change_of_what_statements_read(name: str, when: str) -> None:
    plain, fused = Reading(), Reading()
    report = tops.fuse(fused)
    assert {"layer", "residual"} == {row.rule for row in report.rows} - {"product"}
    assert not report.skipped
    if when == "after a call":
        assert_same(plain, fused)
    for layer in (plain, fused):
        OBJECTS[name](layer)
    assert_same(plain, fused)


def test_none_that_becomes_a_number() -> None:
    plain, fused = Reading(), Reading()
    for layer in (plain, fused):
        layer.norm = nn.RMSNorm(D)  # with eps=None
    assert {"residual"} <= {row.rule for row in tops.fuse(fused).fused}
    assert_same(plain, fused)
    for layer in (plain, fused):
        layer.norm.eps = 0.5
    assert_same(plain, fused)


def swapped_gates(mlp: Any, name: str) -> Any:
    """`up_proj` in place of `gate_proj`."""
    own: Any = object.__getattribute__(mlp, "__dict__")
    return own["_modules"]["up_proj"] if name == "gate_proj" else object.__getattribute__(mlp, name)


SHARED = {
    "a number of the class": (Reading, "factor", 3.0),
    "__call__ of a class": (GatedMLP, "__call__", lambda self, x: x * 2),
    "forward of a class": (RootNorm, "forward", lambda self, x: x * 2),
    "__call__ of all modules": (nn.Module, "__call__", lambda self, *args: self.forward(*args) * 2),
    "__getattribute__ of a class": (GatedMLP, "__getattribute__", swapped_gates),
    "a method of tensors": (Tensor, "mean", lambda x, *given, **kw: torch.sum(x, *given, **kw)),
    "a property": (Reading, "factor", property(lambda self: 3.0)),
    "a function of torch": (F, "silu", lambda x, inplace=False: x),
    "a function behind a module": (F, "linear", lambda x, weight, bias=None: x @ weight.t() * 2),
    "a global": (globals(), "F", types.SimpleNamespace(gelu=lambda x, **_: x)),
    "a function of a norm": (torch, "rsqrt", lambda x: x),
}


@contextmanager
def patched(name: str) -> Iterator[None]:
    owner, key, value = SHARED[name]
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(owner, dict):
            patch.setitem(owner, key, value)
        else:
            patch.setattr(owner, key, value)
        yield


@pytest.mark.parametrize("when", ["before fuse", "before a call", "after a call"])
@pytest.mark.parametrize("name", SHARED)
def test_a_change_of_classes_and_functions(name: str, when: str) -> None:
    plain, fused = Reading(), Reading()
    if when != "before fuse":
        tops.fuse(fused)
    if when == "after a call":
        assert_same(plain, fused)
    with patched(name):
        if when == "before fuse":
            tops.fuse(fused)
        assert_same(plain, fused)
    assert_same(plain, fused)


def test_a_parametrized_weight_is_computed_once_a_call() -> None:
    runs: list[int] = []

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            runs.append(1)
            return weight * 2

    model, x = nn.Sequential(nn.RMSNorm(D)), torch.randn(2, D)
    assert tops.fuse(model).fused
    want = model(x) * 2
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    runs.clear()
    torch.testing.assert_close(model(x), want)
    assert len(runs) == 1


def test_a_method_of_a_fused_class(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, x = RootNorm(D), torch.randn(2, D)
    tops.fuse(fused)
    fused(x)
    monkeypatch.setattr(type(fused), "forward", lambda self, x: x * 2)
    torch.testing.assert_close(fused(x), x * 2)
    layer = Reading()
    layer.norm = fused
    want = layer(x)
    tops.fuse(layer)
    torch.testing.assert_close(layer(x), want)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func in (F.linear, F.silu) else found


def test_a_mode_that_sees_functions() -> None:
    plain, fused = Reading(), Reading()
    tops.fuse(fused)
    for _ in range(2):
        with Doubling():
            assert_same(plain, fused)
        assert_same(plain, fused)
    with torch.device("cpu"):  # sees functions, too, and changes none
        fused(torch.randn(2, D))
    assert fused.fused.regions[0].sequential is not None


# ---- states


def test_a_toggle_closes_nothing() -> None:
    """Two states have ops of their own; what changes all the time does not close what comes
    afterwards."""
    kind = compiled_class(BETWEEN.format("", ""), "toggle")
    plain, fused = kind(), kind()
    report = tops.fuse(fused)
    for i in range(100):
        for layer in (plain, fused):
            layer.norm.variance_epsilon = (0.1, 0.5)[i % 2]
        if i > 90:
            assert_same(plain, fused)
        fused(torch.randn(2, D))
    assert [row.rule for row in report.fused] == ["residual"]
    for i in range(300):
        fused.norm.variance_epsilon = 0.1 + i
        fused(torch.randn(2, D))
    assert "changes from call to call" in report.skipped[0].reason
    fused.mlp = GatedMLP(D, 12)
    fused(torch.randn(2, D))
    assert [row.rule for row in report.fused] == ["residual"]


def test_compiled_code_follows_a_toggle() -> None:
    """Dynamo may look at the ops before it asks whether they may run."""
    torch._dynamo.reset()
    plain, fused = Reading(), Reading()
    tops.fuse(fused)
    run = torch.compile(fused, backend="eager", fullgraph=True)
    x = torch.randn(2, 3, D)
    for i in range(8):
        for layer in (plain, fused):
            layer.norm.variance_epsilon = (0.1, 0.5)[i % 2]
        with torch._dynamo.config.patch(error_on_recompile=i > 1):
            torch.testing.assert_close(run(x), plain(x), rtol=1e-4, atol=1e-5)


def test_copies_with_another_class_are_copied() -> None:
    layer = Reading()
    tops.fuse(layer)
    layer(torch.randn(2, D))
    nn.utils.parametrize.register_parametrization(layer.up, "weight", Tripled())
    nn.utils.parametrize.register_parametrization(layer.norm, "weight", Tripled())
    twin, x = copy.deepcopy(layer), torch.randn(2, D)
    torch.testing.assert_close(twin(x), layer(x))


def test_replicas_of_data_parallel_have_ops_of_their_own() -> None:
    layer = Reading()
    tops.fuse(layer)
    x = torch.randn(4, D)
    want = layer(x)
    replica = layer._replicate_for_data_parallel()  # type: ignore[attr-defined]
    assert replica._regions() is not layer._regions()  # type: ignore[operator]
    torch.testing.assert_close(replica(x), want)


def test_a_method_that_an_instance_replaces_before_the_first_call() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-6

        def _norm(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

        def forward(self, x: Tensor) -> Tensor:
            output = self._norm(x.float())
            output = output * (1.0 + self.weight.float())
            return output.type_as(x)

    norm, x = Norm(), torch.randn(4, 8)
    assert tops.fuse(norm).fused
    norm._norm = lambda x: x * 3  # type: ignore[method-assign]
    torch.testing.assert_close(norm(x), 3 * x * (1 + norm.weight))
