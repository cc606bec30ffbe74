"""`fuse` matches what statements compute, however they are written, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuse_models import RootNorm, fused_rules
from timm.layers import DropPath
from torch import Tensor, nn

import transformer_ops as tops


class Form(nn.Module):
    """What the forms below call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.after = nn.LayerNorm(16), nn.LayerNorm(16)
        self.up, self.gate, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.both = nn.Linear(16, 48)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.0)
        self.p = 0.0
        self.gamma = nn.Parameter(torch.rand(16))
        self.no_gamma = None
        self.factor = 0.5
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
        self.is_first = True


class OneLine(Form):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class InSteps(Form):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        a = self.norm(x)
        b = self.up(a)
        c = self.act(b)
        d = self.down(c)
        x = d + shortcut
        return x


class WithFunctions(Form):
    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)), approximate="tanh")
        y = F.dropout(y, p=self.p, training=self.training)
        y = nn.functional.dropout(self.down(y), self.p, training=self.training)
        return x + y


class Gated(Form):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.down(self.up(y) * F.silu(self.gate(y)))
        return x


class GatedInOne(Form):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.both(x).chunk(2, dim=-1)
        y = F.relu(first) * second
        return x + self.down(y)


class Scaled(Form):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        if self.gamma is not None:
            y = self.gamma * y
        if self.no_gamma is not None:
            y = self.no_gamma * y
        x = x + self.drop(y) * self.factor
        return x


class InABranch(Form):
    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            y = self.norm(x)
            x = x + self.mlp(y)
        else:
            x = self.mlp(x)
        return x


class NormOfTheSum(Form):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return self.after(y + x)


class SumWithAnother(Form):
    def forward(self, x: Tensor) -> Tensor:
        other = x.cumsum(-1)
        y = self.mlp(self.norm(x))
        return other + self.drop(y)


class Parallel(Form):
    def forward(self, x: Tensor) -> Tensor:
        other = x.cumsum(-1)
        y = self.mlp(self.norm(x))
        x = y + other + x
        return x


class ReadLater(Form):
    """A value in between is read once more, so what gives it stays outside."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = x + self.down(self.act(self.up(y)))
        return z * y


class AroundABranch(Form):
    """The branch between the sums runs for some calls."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x + self.mlp(self.norm(x))
        if other is not None:
            other = self.norm(other)
            x = x + other
        x = x + self.down(self.act(self.up(self.after(x))))
        return x


class IntoABranch(Form):
    """The second sum is in a branch that an attribute decides."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        if self.is_first:
            x = x + y
            y = self.down(self.act(self.up(self.after(x))))
            x = x + y
        else:
            z = self.down(self.act(self.up(self.norm(x))))
            x = x + y + z
        return x


class AroundATestOfItsOwn(Form):
    """Nobody knows before the first sum which branch runs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        y = self.no_gamma if self.is_first else x
        if y is not None:
            y = y.cumsum(-1)
            x = x + y
        x = x + self.down(self.act(self.up(self.after(x))))
        return x


FUSED: dict[type[Form], dict[str, int]] = {
    OneLine: {"residual": 1},
    InSteps: {"residual": 1},
    WithFunctions: {"residual": 1},
    Gated: {"residual": 1},
    GatedInOne: {"residual": 1},
    Scaled: {"residual": 1},
    InABranch: {"residual": 1},
    NormOfTheSum: {"residual and norm": 1},
    SumWithAnother: {"sum": 1},
    Parallel: {"parallel branches": 1},
    ReadLater: {"sum": 1},
    AroundABranch: {"layer": 1},
    IntoABranch: {"layer": 1},
    AroundATestOfItsOwn: {"residual": 2},
}


class CalledTwice(Form):
    """Dropout draws anew at each call, so that no gate is the same as its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(self.drop(x))) * self.up(self.drop(x)))


class AnotherFunction(Form):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sin(self.up(self.norm(x))))


class Difference(Form):
    def forward(self, x: Tensor) -> Tensor:
        return x - self.down(self.up(x))


class InALoop(Form):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y = self.norm(x)
            x = x + self.down(self.act(self.up(y)))
        return x


LEFT = (CalledTwice, AnotherFunction, Difference, InALoop)


def results(module: nn.Module, run: Any = None) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters that have some."""
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    module.zero_grad()
    y = (module if run is None else run)(x)
    y.square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", FUSED)
def test_forms(kind: type[Form], is_compiled: bool) -> None:
    plain = kind()
    module = copy.deepcopy(plain)
    report = tops.fuse(module, strict=True)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if is_compiled else None
    torch.testing.assert_close(results(module, run), results(plain), rtol=1e-4, atol=1e-5)
    assert fused_rules(report) == FUSED[kind]


@pytest.mark.parametrize("kind", LEFT)
def test_other_forms(kind: type[Form]) -> None:
    plain = kind()
    module = copy.deepcopy(plain)
    report = tops.fuse(module)
    torch.testing.assert_close(results(module), results(plain), rtol=1e-4, atol=1e-5)
    assert not [row for row in report.fused if row.kind == kind.__name__]


def test_dropout_of_a_function_follows_the_module() -> None:
    module, x = WithFunctions(), torch.randn(3, 16)
    tops.fuse(module, strict=True)
    module.p = 1.0
    assert torch.equal(module(x), x)
    module.eval()
    assert not torch.equal(module(x), x)


class NormByMethod(RootNorm):
    """Meta's RMSNorm of Llama."""

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


@pytest.mark.parametrize("kind", [RootNorm, NormByMethod])
def test_a_norm_keeps_its_dtype(kind: type[RootNorm]) -> None:
    """Its weights promote what they multiply."""
    plain, x = kind(16), torch.randn(3, 16)
    nn.init.normal_(plain.weight)
    norm = copy.deepcopy(plain)
    assert fused_rules(tops.fuse(norm)) == {"norm": 1}
    torch.testing.assert_close(norm(x), plain(x))
    found, want = norm(x.bfloat16()), plain(x.bfloat16())
    assert found.dtype == want.dtype == torch.float32 and torch.equal(found, want)


class KeywordsAndNumbers(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.normalized_shape = shape

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        y = x.to(dtype=torch.float32)
        y = F.layer_norm(y, weight=None, bias=None, eps=0.5, normalized_shape=self.normalized_shape)
        return y.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_with_keywords_and_numbers(dtype: torch.dtype) -> None:
    plain, x = KeywordsAndNumbers((16,)), torch.randn(3, 16).to(dtype)
    norm = copy.deepcopy(plain)
    report = tops.fuse(norm, strict=True)
    assert fused_rules(report) == {"norm of any dtype": 1}
    x.requires_grad_()
    found, want = norm(x), plain(x)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, want)]
    torch.testing.assert_close(*gradients, rtol=3 * tolerance, atol=3 * tolerance)
    norm.normalized_shape = (3, 16)
    torch.testing.assert_close(norm(x), KeywordsAndNumbers((3, 16))(x), rtol=1e-2, atol=1e-2)
    assert fused_rules(report) == {"norm of any dtype": 1}


@pytest.mark.parametrize("has_weight", [True, False])
def test_the_norm_of_torch(has_weight: bool) -> None:
    """Its function takes several times as long as the op."""
    plain, x = nn.RMSNorm(16, elementwise_affine=has_weight), torch.randn(3, 16)
    norm = copy.deepcopy(plain)
    assert fused_rules(tops.fuse(norm)) == {"norm": 1}
    torch.testing.assert_close(norm(x), plain(x))
    before, after = norm(x.bfloat16()), plain(x.bfloat16())
    assert before.dtype == after.dtype
    torch.testing.assert_close(before, after, rtol=1e-2, atol=1e-2)


def test_numbers_that_are_integers() -> None:
    plain = OneLine()
    plain.norm.eps = 1
    plain.down = nn.Sequential(nn.Linear(24, 16), nn.Dropout(0))
    module = copy.deepcopy(plain)
    assert fused_rules(tops.fuse(module)) == {"residual": 1}
    torch.testing.assert_close(results(module), results(plain), rtol=1e-4, atol=1e-5)
    norm, fused = (nn.RMSNorm(16, eps=1) for _ in range(2))
    tops.fuse(fused, strict=True)
    torch.testing.assert_close(results(fused), results(norm), rtol=1e-4, atol=1e-5)


class OnRows(Form):
    """The steps see rows, whatever the shape of the input."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        rows = (rows + self.drop(self.down(self.act(self.up(self.norm(rows)))))).view(x.shape)
        return rows


def test_steps_of_rows() -> None:
    """A norm of several rows, or a path that is dropped for a sample, sees others in a tensor."""
    module = OnRows()
    assert fused_rules(tops.fuse(module)) == {"residual": 1}
    torch.testing.assert_close(module(torch.ones(2, 3, 16)), OnRows()(torch.ones(2, 3, 16)))
    for name, part in (("norm", nn.LayerNorm((3, 16))), ("drop", DropPath(0.9))):
        module = OnRows()
        setattr(module, name, part)
        report = tops.fuse(module)
        assert fused_rules(report) == {}
        assert "of rows is not what ops" in report.skipped[0].reason


@pytest.mark.parametrize("steps", [(0, 1, 0, 1), (0, 0), (2, 0, 1, 1), (3, 1, 3)])
def test_steps_of_a_sequential_that_are_one_module(steps: tuple[int, ...]) -> None:
    nested = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    modules = (nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nested)
    plain = OneLine()
    plain.down = nn.Sequential(nn.Linear(24, 16), *(modules[step] for step in steps))
    module = copy.deepcopy(plain)
    assert fused_rules(tops.fuse(module)) == ({"residual": 1} if 3 not in steps else {})
    torch.testing.assert_close(results(module), results(plain), rtol=1e-4, atol=1e-5)


def test_a_step_of_a_sequential_that_is_none_fails_as_before() -> None:
    plain = OneLine()
    plain.down = nn.Sequential(nn.Linear(24, 16), None)  # type: ignore[call-overload]
    tops.fuse(plain)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        plain(torch.randn(3, 16))


class Branches(Form):
    """Only one of the sums runs: attributes decide which one."""

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        if self.no_gamma is not None and x.ndim == 3:
            x = x + self.mlp(self.norm(x)) * self.no_gamma
            return x
        if not self.is_first:
            x = x + self.mlp(self.norm(x))
            return x
        x = x + self.down(self.act(self.up(x)))
        return x


class UndecidedBranches(Form):
    """Both of these may run: by an argument, by a tensor, in training or in eval."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3 or self.is_first is None:
            x = x + self.mlp(self.norm(x))
        if self.training:
            x = x + self.down(self.act(self.up(x)))
        if self.gamma is not None and self.gamma.sum() > 0:
            x = x + self.down(self.act(self.gate(x)))
        return x


def test_branches_that_do_not_run() -> None:
    plain = Branches()
    module = copy.deepcopy(plain)
    report = tops.fuse(module, rules=["residual"])
    assert "GELU" not in str(report) and fused_rules(report) == {"residual": 1}
    for name, value in (("is_first", False), ("no_gamma", 0.5), ("no_gamma", None)):
        for one in (plain, module):
            setattr(one, name, value)
        torch.testing.assert_close(results(module), results(plain), rtol=1e-4, atol=1e-5)
        assert len(report.rows) == (2 if value == 0.5 else 1)
        assert "ReLU" in str(module.fused.explain())


@pytest.mark.parametrize("is_compiled", [False, True])
def test_branches_within_what_ops_compute(is_compiled: bool) -> None:
    """The ops run where the branch is the one that they stand for."""
    found = []
    for is_fused in (False, True):
        around, into = AroundABranch(), IntoABranch()
        if is_fused:
            tops.fuse(around, strict=True)
            tops.fuse(into, strict=True)
            around, into = (copy.deepcopy(one) for one in (around, into))
        calls: list[Any] = [around, lambda x, m=around: m(x, x.cos())]
        calls += [into, lambda x, m=into: m(x)]
        for i, call in enumerate(calls):
            into.is_first = i < 3
            run = torch.compile(call, backend="aot_eager") if is_compiled else call
            found.append(results(around if i < 2 else into, run))
    torch.testing.assert_close(found[4:], found[:4], rtol=1e-4, atol=1e-5)
    assert not torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[2][0], found[3][0])


def test_what_a_branch_that_does_not_run_calls_is_fused_on_its_own() -> None:
    class Layer(Form):
        def forward(self, x: Tensor) -> Tensor:
            if self.is_first:
                return self.root(x)  # type: ignore[no-any-return]
            return x + self.mlp(self.root(x))  # type: ignore[no-any-return]

    layer = Layer()
    layer.root = RootNorm(16)
    assert fused_rules(tops.fuse(layer)) == {"norm": 1}
    layer = Layer()
    layer.root, layer.is_first = RootNorm(16), False
    assert fused_rules(tops.fuse(layer)) == {"residual": 1}


def test_branches_that_may_run() -> None:
    module = UndecidedBranches()
    assert fused_rules(tops.fuse(module)) == {"residual": 3}
    module.eval()
    assert fused_rules(tops.fuse(module)) == {"residual": 3}


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        return y


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_rule_with_a_condition(is_compiled: bool) -> None:
    rule = tops.register_fuse_rule(
        "three rows",
        "return torch.sin(H)",
        lambda *_: [tops.ConstantScale(7.0)],  # another function, so that it shows
        when=lambda module, x: x.shape[0] == 3,
    )
    torch._dynamo.reset()
    module, x = Sine(), torch.randn(4, 2)
    tops.fuse(module, rules=[rule])
    run = torch.compile(module, backend="aot_eager", dynamic=False) if is_compiled else module
    for _ in range(2):
        torch.testing.assert_close(run(x), torch.sin(x))
        torch.testing.assert_close(run(x[:3]), 7 * x[:3])
