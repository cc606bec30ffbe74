"""`quantize_`: encodes the weights of a whole model in place."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from fuse_models import GatedMLP, Model, tokens
from helpers import html_cells
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import transformer_ops as tops
from transformer_ops.quantization import QuantizedTensor, QuantizedWeights, quantize_
from transformer_ops.quantization.number_format import FORMATS


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(GatedMLP(64, 96, bias=True), nn.LayerNorm(64), GatedMLP(64, 96))


@pytest.mark.parametrize("format", FORMATS)
def test_weights_become_codes(format: str) -> None:
    model, plain = layers(), layers()
    names = list(model.state_dict())
    found = quantize_(model, format)
    assert list(model.state_dict()) == names
    for (path, module), other in zip(model.named_modules(), plain.modules(), strict=True):
        if not isinstance(module, nn.Linear):
            continue
        weight: Any = module.weight
        assert isinstance(weight, QuantizedTensor) and weight.format == format, path
        assert isinstance(weight, nn.Parameter) and not weight.requires_grad
        wanted = QuantizedTensor.quantize(other.weight, format).dequantize()
        assert torch.equal(weight.dequantize(), wanted)
        if module.bias is not None:
            assert module.bias.requires_grad and torch.equal(module.bias, other.bias)
    assert [row.module for row in found.rows] == [
        path for path, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    x = torch.randn(3, 64)
    torch.testing.assert_close(model(x), plain(x), rtol=0.3, atol=0.3)
    assert not torch.equal(model(x), plain(x))


def test_what_it_says() -> None:
    model = layers()
    plain: Any = copy.deepcopy(model)
    found = quantize_(model, "nvfp4")
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert found.before == 6 * 64 * 96 * 4
    assert found.after == sum(w.codes.nbytes + w.scale.nbytes for w in weights)
    # The errors are those of the report of formats.
    for row in found.rows:
        codes = QuantizedTensor.quantize(plain.get_submodule(row.module).weight, "nvfp4")
        weight = plain.get_submodule(row.module).weight
        noise = (codes.dequantize() - weight).double().square().sum()
        ratio = 10 * torch.log10(weight.double().square().sum() / noise)
        assert row.signal_to_noise == pytest.approx(ratio.item(), abs=1e-3)
    head, columns, *lines = str(found).splitlines()
    assert head == "6 weights as nvfp4: 144.0 KiB -> 20.3 KiB"
    assert columns.split() == ["weights", "SNR", "dB", "underflow", "saturated"]
    assert [line.split("  ")[1] for line in lines] == [
        "2 x *.gate_proj",
        "2 x *.up_proj",
        "2 x *.down_proj",
    ]
    worst = min(row.signal_to_noise for row in found.rows if "gate" in row.module)
    assert f"{worst:.1f}" in lines[0]
    assert len(html_cells(found._repr_html_())) == 4
    assert found.to_dicts()[0]["format"] == "nvfp4"


@pytest.mark.parametrize("only", ["0.*", ["0.gate_proj", "0.up_proj", "0.down_proj"]])
def test_selected_layers(only: Any) -> None:
    model: Any = layers()
    found = quantize_(model, "int8 1x32", only=only)
    assert len(found.rows) == 3
    assert isinstance(model[0].up_proj.weight, QuantizedTensor)
    assert type(model[2].up_proj.weight) is nn.Parameter and model[2].up_proj.weight.requires_grad


def test_products_of_this_package() -> None:
    model = nn.Sequential(
        tops.Sequential(tops.RMSNorm(32), tops.Linear(32, 64), tops.GELU()),
        tops.PackedLinear(64, (32, 16)),
        tops.BasicLinear(48, 32),
    )
    plain = copy.deepcopy(model)
    found = quantize_(model, "mx e4m3")
    assert [row.module for row in found.rows] == ["0.1", "1", "1", "2"]
    assert [row.role for row in found.rows] == ["weight", "weight0", "weight1", "weight"]
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, QuantizedTensor) == ("weight" in name and "0.0" not in name)
    x = torch.randn(5, 32, requires_grad=True)
    y = model(x)
    torch.testing.assert_close(y, plain(x), rtol=0.2, atol=0.2)
    y.sum().backward()
    assert x.grad is not None


def test_tied_weights() -> None:
    model = Model()
    found = quantize_(model, "int8 1x32")
    assert model.head.weight is model.embed.weight and type(model.head.weight) is nn.Parameter
    assert found.left == (("head", "it is also embed.weight"),)
    assert "head stays as it is: it is also embed.weight" in str(found)
    assert len(found.rows) == 2 * 4
    # Layers that share a weight share its codes.
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    second.weight = first.weight
    pair = nn.Sequential(first, second)
    assert len(quantize_(pair, "e4m3").rows) == 1
    assert second.weight is first.weight and isinstance(first.weight, QuantizedTensor)
    # All of them, or none.
    other = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    other[1].weight = other[0].weight
    assert quantize_(other, "e4m3", only="1").left == (("1", "it is also 0.weight"),)


def test_one_weight_at_a_time() -> None:
    """The plain weight is free before the next one is encoded."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    old = [weakref.ref(layer.weight) for layer in model]
    living: list[int] = []
    quantize = QuantizedTensor.quantize

    def counted(tensor: Tensor, format: str) -> QuantizedTensor:
        living.append(sum(weight() is not None for weight in old))
        return quantize(tensor, format)

    gc.disable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedTensor, "quantize", counted)
        quantize_(model, "e4m3")
    assert living == [4, 3, 2, 1] and not any(weight() for weight in old)


def test_again_and_in_another_format() -> None:
    model: Any = layers()
    quantize_(model, "int8 1x32")
    codes = model[0].up_proj.weight.codes.clone()
    found = quantize_(model, "int8 1x32")
    assert torch.equal(model[0].up_proj.weight.codes, codes)
    assert found.before == found.after
    assert quantize_(model, "nvfp4").after < found.after
    assert model[0].up_proj.weight.format == "nvfp4"


def test_before_and_after_fuse() -> None:
    plain, before, after = Model(), Model(), Model()
    for model in (plain, before):
        quantize_(model, "nvfp4")
    reports = [tops.fuse(before), tops.fuse(after)]
    quantize_(after, "nvfp4")
    wanted = plain(tokens())
    for model, report in zip((before, after), reports, strict=True):
        torch.testing.assert_close(model(tokens()), wanted, rtol=1e-4, atol=1e-5)
        assert "QuantizedTensor" not in str(report)


def test_in_inference_mode() -> None:
    model = layers()
    with torch.inference_mode():
        quantize_(model, "mx e4m3")
    x = torch.randn(3, 64, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None


EVEN = r"weight of Linear must have an even number of columns for format 'nvfp4', got 5"
NUMBERS = "weight of Linear must have numbers, got a tensor on the meta device"
PARAMETER = "weight of ParametrizedLinear must be a parameter, got one with a parametrization"
# name -> (the arguments, the error)
BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "no module": (([1], "nvfp4"), "model must be an nn.Module, got list"),
    "format": ((layers(), "nvfp5"), "format must be one of .*'nvfp5'; the nearest is 'nvfp4'"),
    "no format": ((layers(), None), "format must be one of .*, got None"),
    "no layer": ((nn.LayerNorm(4), "e4m3"), "model must have a linear layer, got LayerNorm"),
    "only": ((layers(), "e4m3", "3.*"), r"only must name a linear layer, got '3.\*'"),
    "odd": ((nn.Linear(5, 4), "nvfp4"), EVEN),
    "meta": ((nn.Linear(4, 4, device="meta"), "e4m3"), NUMBERS),
    "parametrized": ((parametrizations.weight_norm(nn.Linear(4, 4)), "e4m3"), PARAMETER),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=rf"^\[quantize_\] {message}"):
        quantize_(*arguments)


def test_nothing_changes_after_an_error() -> None:
    class Special(Tensor):
        pass

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.ones(4, 4).as_subclass(Special))
    with pytest.raises(TypeError, match=r"^\[quantize_\] weight of 1 must be a plain .*got a Spec"):
        quantize_(model, "e4m3")
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(quantize_(model, "e4m3", only="0"), QuantizedWeights)
