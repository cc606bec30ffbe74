"""The state of delayed scaling: there before the first call, no buffer, and new with parameters."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.quantization import make_scales, reset_scales

DELAYED = recipes.DelayedScaling(amax_history_len=3)
NAMES = {"fp8_scale", "fp8_amax", "fp8_grad_amax", "fp8_amax_history", "fp8_largest"}


def model(**options: Any) -> tops.Sequential:
    torch.manual_seed(0)
    return tops.Sequential(
        tops.Linear(16, 32, **options),
        tops.GELU(),
        tops.Quantize(),
        tops.BasicLinear(32, 16, **options),
    )


def step(module: nn.Module, k: int) -> list[Tensor]:
    torch.manual_seed(k)
    x = (1.0 + k) * torch.randn(8, 16)
    with tops.autocast(recipe=DELAYED):
        y = module(x.requires_grad_())
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def used() -> tops.Sequential:
    module = model()
    for k in range(3):
        step(module, k)
    return module


def state(module: nn.Module) -> dict[str, Tensor]:
    found = module.state_dict().items()
    return {name: tensor.clone() for name, tensor in found if "fp8_" in name}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys() and len(one) == 15
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def is_new(module: nn.Module) -> bool:
    first = {"scale": 1.0, "amax": -1.0, "grad_amax": -1.0, "amax_history": 0.0}
    return all(
        bool((tensor == first[name.split("fp8_")[1]]).all())
        for name, tensor in state(module).items()
        if not name.endswith("largest")
    )


# ---- before the first call


def by_function() -> tops.Sequential:
    module = model()
    make_scales(module, DELAYED)
    return module


def within_autocast() -> tops.Sequential:
    with tops.autocast(recipe=DELAYED):
        return model()


BEFORE = [by_function, within_autocast]


@pytest.mark.parametrize("make", BEFORE)
def test_scales_are_there_before_the_first_call(make: Callable[[], tops.Sequential]) -> None:
    module = make()
    expected = {f"{place}.{name}" for place in (0, 2, 3) for name in NAMES}
    assert state(module).keys() == expected and is_new(module)
    step(module, 0)
    step(module, 1)
    assert not is_new(module)


@pytest.mark.parametrize("make", BEFORE)
def test_a_distributed_checkpoint_keeps_them(
    make: Callable[[], tops.Sequential], tmp_path: Path
) -> None:
    old = used()
    saved = state(old)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(get_model_state_dict(old), checkpoint_id=tmp_path)
        new = make()  # which may enter a region
        found = get_model_state_dict(new)
        dcp.load(found, checkpoint_id=tmp_path)
        set_model_state_dict(new, found)
    assert_same(state(new), saved)
    for a, b in zip(step(new, 3), step(old, 3), strict=True):
        assert torch.equal(a, b)


def test_a_call_after_loading_without_scales_warns(tmp_path: Path) -> None:
    old = used()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(get_model_state_dict(old), checkpoint_id=tmp_path)
        new = model()
        found = get_model_state_dict(new)
        dcp.load(found, checkpoint_id=tmp_path)
        set_model_state_dict(new, found)
    with pytest.warns(UserWarning, match=r"\[Linear\] scales of delayed scaling begin at 1"):
        step(new, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(new, 3)
        # What was asked for begins at 1 in silence.
        fresh = model()
        fresh.load_state_dict(nn.Sequential.state_dict(model()))
        make_scales(fresh, DELAYED)
        step(fresh, 3)


def test_a_recipe_may_be_another_one_until_scales_are_used() -> None:
    module, other = by_function(), recipes.DelayedScaling(amax_history_len=7)
    make_scales(module, other)
    assert len(module[0].fp8_amax_history) == 7
    make_scales(module, DELAYED)
    step(module, 0)
    before = state(module)
    with pytest.raises(RuntimeError, match=r"\[Linear\] scales must be for the recipe"):
        make_scales(nn.ModuleList([model(), module]), other)
    assert_same(state(module), before)
    with pytest.raises(TypeError, match=r"\[make_scales\] recipe must be a DelayedScaling"):
        make_scales(module, recipes.MXFP8BlockScaling())  # type: ignore[arg-type]


# ---- no buffers


def test_they_are_no_buffers() -> None:
    module = used()
    assert not list(module.buffers()) and not list(module[0].buffers())
    # As torch.distributed.checkpoint asks, module by module.
    assert {name for name, _ in module[0].named_buffers(recurse=False)} == NAMES
    names = {name for name, _ in module[0].named_buffers("a", recurse=False)}
    assert names == {f"a.{name}" for name in NAMES}


def test_averages_leave_them_alone() -> None:
    module = used()
    average = torch.optim.swa_utils.AveragedModel(module, use_buffers=True)
    step(module, 3)
    before = state(average.module)
    average.update_parameters(module)
    average.update_parameters(module)
    assert_same(state(average.module), before)


# ---- with new parameters


def pickled(module: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(module))
    return found


def loaded(module: nn.Module, *, assign: bool, make: Callable[[], nn.Module]) -> nn.Module:
    fresh = make()
    fresh.load_state_dict(module.state_dict(), assign=assign)
    return fresh


def on_meta() -> nn.Module:
    module = model(device="meta")
    make_scales(module, DELAYED)
    assert module[0].fp8_scale.is_meta
    return module


KEEPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda module: module.to("cpu"),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "half": lambda module: module.half(),
    "share_memory": lambda module: module.share_memory(),
    "cloned": lambda module: module._apply(torch.clone),
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "load_state_dict": lambda module: loaded(module, assign=False, make=model),
    "assign": lambda module: loaded(module, assign=True, make=model),
    "assign to meta": lambda module: loaded(module, assign=True, make=on_meta),
}


@pytest.mark.parametrize("way", KEEPS)
def test_what_keeps_them(way: str) -> None:
    module = used()
    before = state(module)
    found = KEEPS[way](module)
    assert_same(state(found), before)
    assert all(tensor.dtype == torch.float32 for tensor in state(found).values())


def reset(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    # A Quantize has no parameters that could be new.
    reset_scales(module[2])
    make_scales(module, DELAYED)
    return module


RENEWS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "through meta": lambda module: module.to("meta").to_empty(device="cpu"),
    "reset_parameters": reset,
    "reset_scales": lambda module: (reset_scales(module), make_scales(module, DELAYED), module)[2],
}


@pytest.mark.parametrize("way", RENEWS)
def test_what_renews_them(way: str) -> None:
    module = RENEWS[way](used())
    assert is_new(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.01)
    step(module, 0)
    step(module, 1)
    assert not is_new(module)


def test_a_model_from_meta_has_scales_on_its_device() -> None:
    module = on_meta().to_empty(device="cpu")
    assert is_new(module) and not module[0].fp8_scale.is_meta
    plain = on_meta()
    plain.load_state_dict(model().state_dict(), assign=True)  # without scales
    step(plain, 0)
    assert not plain[0].fp8_scale.is_meta
