"""What other libraries do with ops: docs/tools.md says so."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers.trainer_pt_utils import get_parameter_names

import transformer_ops as tops


class Model(nn.Module):
    """Ops or modules of torch with the same parameters, under the same names."""

    def __init__(self, ours: bool) -> None:
        super().__init__()
        norm, linear, gelu = (
            (tops.RMSNorm, tops.Linear, tops.GELU)
            if ours
            else (nn.RMSNorm, nn.Linear, lambda: nn.GELU(approximate="tanh"))
        )
        layers = [("norm", norm(16)), ("up", linear(16, 32)), ("act", gelu())]
        layers.append(("down", linear(32, 16)))
        self.first = nn.Linear(16, 16)
        self.mlp = (tops.Sequential if ours else nn.Sequential)(OrderedDict(layers))
        self.head = linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.mlp(self.first(x)))
        return y


def pair() -> tuple[Model, Model]:
    ours, plain = Model(ours=True), Model(ours=False)
    plain.mlp[0].eps = 1e-5
    plain.load_state_dict(ours.state_dict())
    return ours, plain


X = torch.randn(3, 16)


# ---- PEFT


def lora(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, init_lora_weights=False, **options)
    config._register_custom_module({tops.Linear: peft.tuners.lora.Linear})
    return peft.get_peft_model(model, config)


def results(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    output = model(X)
    output.square().sum().backward()
    return output.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}])
@pytest.mark.parametrize("targets", [["up", "down"], ["head"], ["up", "head", "first"]])
def test_registered_adapters(targets: list[str], options: dict[str, Any], called: bool) -> None:
    models = pair()
    if called:
        models[0](X)
    before = models[0](X).detach()
    ours, plain = (lora(model, target_modules=targets, **options) for model in models)
    torch.testing.assert_close(results(ours), results(plain), rtol=1e-4, atol=1e-4)
    assert len(results(ours)[1]) >= 2 * len(targets)
    output = ours(X)
    with ours.disable_adapter():
        torch.testing.assert_close(ours(X), before)
    assert not torch.allclose(output, before)
    merged = ours.merge_and_unload()
    assert type(merged) is Model and type(merged.head) is tops.Linear
    torch.testing.assert_close(merged(X), output)


def test_adapters_in_compiled_code() -> None:
    ours, plain = (lora(model, target_modules=["up", "down"]) for model in pair())
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), plain(X))


def test_adapters_that_are_loaded(tmp_path: Path) -> None:
    base = Model(ours=True)
    model = lora(copy.deepcopy(base), target_modules=["up"])
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Target module Linear.* is not supported"):
        peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    config = peft.LoraConfig.from_pretrained(tmp_path)
    config._register_custom_module({tops.Linear: peft.tuners.lora.Linear})
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, config=config)
    torch.testing.assert_close(again(X), model(X))


CONFIGS = [
    peft.LoraConfig(target_modules=["head"]),
    peft.IA3Config(target_modules=["head"], feedforward_modules=[]),
    peft.LoHaConfig(target_modules=["head"]),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.peft_type)
def test_adapters_of_a_class_that_is_not_registered(config: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="not supported"):
        peft.get_peft_model(Model(ours=True), config)


def test_modules_to_save() -> None:
    ours, plain = (
        lora(model, target_modules=["first"], modules_to_save=["head"]) for model in pair()
    )
    torch.testing.assert_close(results(ours), results(plain))
    assert any("modules_to_save" in name for name in results(ours)[1])


def test_what_all_linear_misses() -> None:
    model = lora(Model(ours=True), target_modules="all-linear")
    found = {name for name, _ in model.named_modules() if name.endswith("lora_A.default")}
    assert found == {"base_model.model.first.lora_A.default"}


# ---- torchao and torch


def test_quantize() -> None:
    model = Model(ours=True)
    quantize_(model, Int8WeightOnlyConfig())
    kinds = [type(module.weight).__name__ for module in (model.first, model.mlp[1], model.head)]
    assert kinds == ["Int8Tensor", "Parameter", "Parameter"]
    quantize_(
        model, Int8WeightOnlyConfig(), filter_fn=lambda module, _: isinstance(module, tops.Linear)
    )
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"transformer_ops\.linear"):
        model(X)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_quantize_dynamic() -> None:
    model = Model(ours=True)
    with pytest.warns(UserWarning, match=r"\[Linear\] torch.ao.quantization passes over"):
        found = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    kinds = [type(module).__module__ for module in (found.first, found.mlp[1], found.head)]
    assert ["ao" in kind for kind in kinds] == [True, False, False]
    assert not hasattr(found.head, "qconfig") and not hasattr(model.head, "qconfig")


def test_quantize_what_is_borrowed() -> None:
    up, down = nn.Linear(16, 32), nn.Linear(32, 16)
    mlp = tops.Sequential(tops.view(up), tops.GELU(), tops.view(down))
    mlp(X)
    quantize_(nn.ModuleList([up, down]), Int8WeightOnlyConfig())
    with torch.no_grad():
        want = down(nn.functional.gelu(up(X), approximate="tanh"))
        assert type(up.weight).__name__ == "Int8Tensor"
        torch.testing.assert_close(mlp(X), want)


def test_pruning() -> None:
    ours, plain = pair()
    ours(X)
    for model in (ours, plain):
        prune.l1_unstructured(model.mlp[1], "weight", 0.5)
    assert (ours.mlp[1].weight == 0).float().mean() == 0.5
    torch.testing.assert_close(ours(X), plain(X))


# ---- weight decay


def test_weight_decay_of_norms() -> None:
    patterns = [r"bias", r"(?:^|\.)norm(?:$|\.)"]  # of those that the Trainer has
    unnamed = tops.Sequential(tops.RMSNorm(16), tops.Linear(16, 16))
    assert get_parameter_names(unnamed, [nn.LayerNorm], patterns) == ["0.weight", "1.weight"]
    kinds = [nn.LayerNorm, tops.LayerNorm, tops.RMSNorm]
    assert get_parameter_names(unnamed, kinds, patterns) == ["1.weight"]
    names = get_parameter_names(Model(ours=True), [nn.LayerNorm], patterns)
    assert names == ["first.weight", "mlp.up.weight", "mlp.down.weight", "head.weight"]
