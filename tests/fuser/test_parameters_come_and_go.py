"""Parameters whose data are there only while their module runs: offloading, ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops
from transformer_ops import recipe as recipes

RECIPES: dict[str, recipes.Recipe | None] = {
    "exact": None,
    "mxfp8": recipes.MXFP8BlockScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=2),
}
WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda block, x: block(x),
    "non-reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
}
FROZEN = {
    "nothing": (),
    "a weight": ("0.1.weight",),
    "a block": ("0.",),
    "all but one": ("0.", "1.0"),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        tops.Sequential(tops.LayerNorm(16), tops.Linear(16, 32), tops.GELU(), tops.Linear(32, 16))
        for _ in range(2)
    )
    return nn.Sequential(*blocks)


def freeze(module: nn.Module, prefixes: tuple[str, ...]) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(prefixes) if prefixes else True)


class Offloaded:
    """Empties the parameters of each module, and fills them around its forward and backward."""

    def __init__(self, module: nn.Module) -> None:
        self.data: dict[nn.Parameter, Tensor] = {}
        for part in module.modules():
            if not list(part.parameters(recurse=False)):
                continue
            part.register_forward_pre_hook(lambda module, _: self.fill(module))
            part.register_forward_hook(lambda module, *_: self.empty(module))
            part.register_full_backward_pre_hook(lambda module, _: self.fill(module))
            part.register_full_backward_hook(lambda module, *_: self.empty(module))
            self.empty(part)

    def fill(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = self.data[parameter]

    def empty(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.numel():
                self.data[parameter] = parameter.data
            parameter.data = torch.empty(0)


def gradients(module: nn.Module, way: str, recipe: recipes.Recipe | None) -> list[Tensor]:
    found: list[Any] = []
    for step in range(2):
        module.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        y = x
        with tops.autocast(recipe is not None, recipe):
            for block in module.children():
                y = WAYS[way](block, y)
        y.square().sum().backward()
        found += [y.detach(), x.grad, *(p.grad for p in module.parameters())]
    return [tensor.clone() for tensor in found if tensor is not None]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RECIPES)
def test_numbers_are_those_of_parameters_that_stay(name: str, way: str, frozen: str) -> None:
    plain, offloaded = model(), model()
    for module in (plain, offloaded):
        freeze(module, FROZEN[frozen])
    kept = Offloaded(offloaded)
    want = gradients(plain, way, RECIPES[name])
    found = gradients(offloaded, way, RECIPES[name])
    assert len(found) == len(want) > 4
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert all(parameter.numel() == 0 for parameter in kept.data)
