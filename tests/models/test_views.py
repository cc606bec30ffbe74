"""Ops on the parameters of torch's own modules: equal to the modules, and never in their way."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import transformer_ops as tops

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(16, 24),
    "Linear without bias": lambda: nn.Linear(16, 24, bias=False),
    "LayerNorm": lambda: nn.LayerNorm(16, eps=1e-3),
    "RMSNorm": lambda: nn.RMSNorm(16),
    "RMSNorm with eps": lambda: nn.RMSNorm(16, eps=1e-3),
    "LayerNorm without bias": lambda: nn.LayerNorm(16, bias=False),
    "LayerNorm without weight": lambda: nn.LayerNorm(16, elementwise_affine=False),
    "RMSNorm without weight": lambda: nn.RMSNorm(16, elementwise_affine=False),
    "GELU": lambda: nn.GELU(approximate="tanh"),
    "exact GELU": nn.GELU,
    "SiLU": nn.SiLU,
    "ReLU": nn.ReLU,
    "Dropout(0)": lambda: nn.Dropout(0.0),
}


class Plain(nn.Module):
    """A block as torch has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 24)
        self.act = nn.GELU(approximate="tanh")
        self.drop = nn.Dropout(0.0)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(self.drop(self.act(self.up(self.norm(x)))))
        return found

    def viewed(self) -> tops.Sequential:
        return tops.Sequential(*map(tops.view, self.children()))


def rows(count: int = 6) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def assert_same(module: nn.Module, viewed: Any, x: Tensor | None = None) -> None:
    x = rows() if x is None else x
    outputs = [module(x), viewed(x)]
    torch.testing.assert_close(*outputs)
    wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
    grad = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0]).to(outputs[0].dtype)
    grads = [torch.autograd.grad(y, wanted, grad) for y in outputs]
    for want, found in zip(*grads, strict=True):
        limit = 0.03 if want.dtype == torch.bfloat16 else 1e-5
        assert (found - want).norm() <= limit * want.norm()


def groups(block: tops.Sequential) -> int:
    return len(block.plans())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODULES)
def test_a_view_computes_what_its_module_does(name: str, dtype: torch.dtype) -> None:
    module = MODULES[name]().to(dtype)
    viewed = tops.view(module)
    assert_same(module, viewed, rows().detach().to(dtype).requires_grad_())
    assert not list(tops.Sequential(viewed).parameters()) and not viewed.state_dict()


def test_a_block_of_views_is_one_group() -> None:
    plain = Plain()
    block = plain.viewed()
    assert_same(plain, block)
    assert groups(block) == 1 and not list(block.parameters())


# What makes the module itself run, and how it is taken back.
def hooked(module: Plain) -> Callable[[], object]:
    return module.up.register_forward_hook(lambda *_: None).remove


def with_own_forward(module: Plain) -> Callable[[], object]:
    module.up.forward = lambda x: nn.Linear.forward(module.up, x) * 2  # type: ignore[method-assign]
    return lambda: delattr(module.up, "forward")


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def of_another_class(module: Plain) -> Callable[[], object]:
    module.up.__class__ = Doubled
    return lambda: setattr(module.up, "__class__", nn.Linear)


class Marked(nn.Parameter):
    """What a quantizer makes of a weight."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.nn.functional.linear else found


def with_another_weight(module: Plain) -> Callable[[], object]:
    weight = module.up.weight
    module.up.weight = Marked(weight.detach().clone())
    return lambda: setattr(module.up, "weight", weight)


OBSTACLES = [hooked, with_own_forward, of_another_class, with_another_weight]


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("when", ["before", "after a call"])
def test_the_module_itself_runs_where_it_has_to(obstacle: Any, when: str) -> None:
    plain = Plain()
    block = plain.viewed()
    if when == "after a call":
        block(rows())
    take_back = obstacle(plain)
    assert_same(plain, block)
    assert groups(block) == 2  # before and behind the module
    take_back()
    assert_same(plain, block)
    assert groups(block) == 1


def test_a_hook_fires_once_a_call() -> None:
    plain, calls = Plain(), []
    block = plain.viewed()
    block(rows())
    plain.norm.register_forward_pre_hook(lambda *_: calls.append(1))
    block(rows())
    assert len(calls) == 1


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_compiled_blocks_see_what_happens_to_a_module(obstacle: Any) -> None:
    plain = Plain()
    block = plain.viewed()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=obstacle is not hooked)
    assert_same(plain, compiled)
    if obstacle is with_another_weight:
        return  # of a class that Dynamo cannot trace
    take_back = obstacle(plain)
    assert_same(plain, compiled)
    take_back()
    assert_same(plain, compiled)


def test_attributes_are_those_of_the_module() -> None:
    plain = Plain()
    block = plain.viewed()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for called in (block, compiled):
        for eps in (0.3, 1e-5):
            plain.norm.eps = eps
            assert_same(plain, called)
    plain.drop.p = 1.0
    assert not block(rows()).any()
    plain.eval()
    assert_same(plain, block)
    assert block.train()[3].training is False
    plain.act.approximate = "exact"
    with pytest.raises(ValueError, match=r"\[GELU\] approximate must be 'none' or 'tanh', got 'ex"):
        block(rows())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.up, "weight", nn.Parameter(torch.randn(24, 16))),
        lambda m: setattr(m.up, "bias", None),
        lambda m: setattr(m, "up", m.up.requires_grad_(False)),
        lambda m: m.double(),
        lambda m: setattr(m, "up", weight_norm(m.up)),
        lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    ],
    ids=["weight", "no bias", "frozen", "dtype", "parametrized", "loaded"],
)
def test_parameters_are_those_of_the_module(change: Callable[[Plain], Any]) -> None:
    plain = Plain()
    block = plain.viewed()
    assert_same(plain, block)
    change(plain)
    x = rows().detach().to(plain.norm.weight.dtype).requires_grad_()
    assert_same(plain, block, x)


def test_parts_of_functional_calls() -> None:
    plain = Plain()
    block = plain.viewed()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return plain(x), block(x)

    other = {f"plain.{k}": v.detach() * 2 for k, v in plain.named_parameters()}
    torch.testing.assert_close(*torch.func.functional_call(Both(), other, (rows(),)))
    assert_same(plain, block)


@pytest.mark.parametrize("recipe", [tops.recipe.MXFP8BlockScaling(), tops.recipe.DelayedScaling()])
def test_recipes(recipe: Any) -> None:
    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    own = tops.Sequential(tops.Linear(32, 32), tops.Linear(32, 32))
    own.load_state_dict(plain.state_dict())
    block = tops.Sequential(*map(tops.view, plain))
    x = torch.randn(32, 32)
    with tops.autocast(recipe=recipe):
        if isinstance(recipe, tops.recipe.DelayedScaling):
            with pytest.raises(RuntimeError, match="recipe must be one without delayed scales"):
                block(x)
        else:
            assert torch.equal(block(x), own(x))


def test_copies_and_pickles_of_a_model_with_views() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = Plain()
            self.block = self.plain.viewed()

    model = Model()
    assert_same(model.plain, model.block)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.plain.up.weight.mul_(2)
    assert_same(other.plain, other.block)
    assert_same(model.plain, model.block)


def test_nothing_keeps_a_module_alive() -> None:
    plain = Plain()
    block = plain.viewed()
    block(rows()).sum().backward()
    alive = weakref.ref(plain.up)
    del plain, block
    gc.collect()
    assert alive() is None


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: 3, TypeError, r"^\[view\] module must be an nn.Module, got int$"),
        (Other, TypeError, r"got Other$"),
        (lambda: nn.Conv2d(3, 4, 3), TypeError, r"Dropout, GELU, SiLU, ReLU, got Conv2d$"),
        (lambda: Doubled(4, 4), TypeError, r"got Doubled with a forward of its own$"),
        (lambda: nn.ReLU(inplace=True), ValueError, r"ReLU must not work in place"),
    ],
)
def test_what_is_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        tops.view(make())
