"""tops.quantization.report: what formats do to the operands of products."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import pytest
import torch
from helpers import html_cells
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.quantization import Row, report
from transformer_ops.quantization.statistics import measure
from transformer_ops.reports import progress


class Model(nn.Module):
    """A product of its own, two in a Sequential, one that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = tops.BasicLinear(32, 64)
        self.mlp = tops.Sequential(tops.Linear(64, 96), tops.GELU(), tops.Linear(96, 64))
        self.unused = tops.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(torch.relu(self.embed(x)))


def rows_of(found: tops.quantization.Report, module: str) -> dict[tuple[str, str], Row]:
    return {(row.role, row.format): row for row in found.rows if row.module == module}


def test_rows() -> None:
    model, x = Model(), torch.randn(16, 32)
    found = report(model, x, recipe=recipes.Float8CurrentScaling(), formats=["int8 1x32", "e5m2"])
    assert list(dict.fromkeys(row.module for row in found.rows)) == ["embed", "mlp.0", "mlp.2"]
    first = rows_of(found, "embed")
    assert [key for key in first if key[0] == "grad_output"] == [
        ("grad_output", "e5m2"),
        ("grad_output", "int8 1x32"),
    ]
    assert first["weight", "e4m3"].is_recipe and not first["weight", "int8 1x32"].is_recipe
    want = measure([model.embed.weight.detach()], "e4m3")
    row = first["weight", "e4m3"]
    assert (row.signal_to_noise, row.underflow, row.saturated) == want
    assert first["input", "int8 1x32"].signal_to_noise > first["input", "e4m3"].signal_to_noise > 25
    assert all(p.grad is None for p in model.parameters())
    assert not model.embed._forward_pre_hooks and not model.embed._backward_pre_hooks


@pytest.mark.parametrize("format", ["e4m3", "nvfp4 16x16"])
def test_several_weights_are_one_row(format: str) -> None:
    packed = tops.PackedLinear(32, (48, 16, 16))
    with torch.no_grad():
        packed.weight0.mul_(100)
    recipe = recipes.CustomRecipe(lambda role: format if role.tensor_type == "weight" else None)
    rows = rows_of(report(tops.Sequential(packed), torch.randn(4, 32), recipe=recipe), "0")
    row, weights = rows["weight", format], [p.detach() for p in packed.parameters() if p.ndim == 2]
    # Each weight has a scale of its own: their noise adds up.
    noise = [measure([weight], format)[0] for weight in weights]
    power = [float(weight.double().square().sum()) for weight in weights]
    total = sum(p / 10 ** (ratio / 10) for p, ratio in zip(power, noise, strict=True))
    assert row.signal_to_noise == pytest.approx(10 * math.log10(sum(power) / total))


def test_weights_of_experts_are_one_row() -> None:
    op = tops.GroupedLinear(2, 32, 16)
    with torch.no_grad():
        op.weight0.mul_(100)
    found = report(tops.Sequential(op), torch.randn(6, 32), torch.tensor([4, 2]))
    want = measure([op.weight0.detach(), op.weight1.detach()], "mx e4m3")
    row = rows_of(found, "0")["weight", "mx e4m3"]
    assert (row.signal_to_noise, row.underflow, row.saturated) == want


def test_progress_counts_products(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    seen = Terminal()
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.0)
    report(Model(), torch.randn(16, 32))
    assert "formats" in seen.getvalue() and "product/s" in seen.getvalue()


class Terminal(io.StringIO):
    """A terminal, as far as `progress` asks."""

    def isatty(self) -> bool:
        return True


def test_inputs_are_those_of_the_run() -> None:
    model = tops.Sequential(tops.Linear(32, 32, bias=False))
    x = torch.zeros(4, 32)
    row = rows_of(report(model, x), "0")["input", "mx e4m3"]
    assert math.isnan(row.signal_to_noise) and row.underflow == row.saturated == 0
    row = rows_of(report(model, x + 1), "0")["input", "mx e4m3"]
    assert row.signal_to_noise == math.inf


@pytest.mark.parametrize(
    ("format", "underflow", "saturated"),
    [("e4m3", 1 / 128, 0), ("mx e4m3", 0, 0), ("int8 1x128", 2 / 128, 0), ("nvfp4", 0, 0)],
)
def test_shares(format: str, underflow: float, saturated: float) -> None:
    x = torch.ones(1, 128)
    x[0, 0], x[0, 64] = 2.0**-20, 2.0**-9
    if format == "nvfp4":
        x[0, 0] = x[0, 64] = 1
    elif format == "mx e4m3":
        x[0, 0] = 2.0**-9
    assert measure(x, format)[1:] == (underflow, saturated)


def test_what_is_above_the_largest_number_saturates() -> None:
    x = torch.ones(2, 128)
    x[0, 3] = math.inf
    assert measure(x, "e4m3 1x128")[2] == 1 / 256


def test_shows() -> None:
    found = report(Model(), torch.randn(16, 32), formats=["nvfp4"])
    head, *lines = str(found).splitlines()
    assert head.split() == ["tensor", "format", "SNR", "dB", "underflow", "saturated"]
    modules = [line for line in lines if not line.startswith(" ")]
    assert modules == ["embed", "mlp.0", "mlp.2"]
    assert len(lines) - len(modules) == len(found.rows) == 18
    assert [line.split()[0] for line in lines[1:7:2]] == ["input", "weight", "grad_output"]
    assert lines[1].split()[:4] == ["input", "mx", "e4m3", "*"]
    assert max(map(len, str(found).splitlines())) <= 80
    row = found.rows[-1]
    assert lines[-1].split()[-3] == f"{row.signal_to_noise:.1f}"
    assert [row[0] for row in html_cells(found._repr_html_())[1:]] == [r.module for r in found.rows]
    assert found.to_dicts()[0]["module"] == "embed"


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.svg"
    report(Model(), torch.randn(16, 32), formats=["nvfp4"]).save(path)
    assert "signal-to-noise" in path.read_text() or path.stat().st_size > 5000


def test_custom_recipes_and_losses() -> None:
    recipe = recipes.CustomRecipe(lambda role: "e5m2" if role.tensor_type == "input" else None)
    found = report(Model(), torch.randn(16, 32), recipe=recipe, loss=lambda y: y.sum())
    assert {(row.role, row.format) for row in found.rows} == {("input", "e5m2")}


def test_errors() -> None:
    x = torch.randn(4, 32)
    with pytest.raises(ValueError, match=r"\[report\] model must have a Linear"):
        report(nn.Linear(32, 32), x)
    with pytest.raises(RuntimeError, match="format must be one of"):
        report(Model(), x, formats=["fp8"])
    linear = tops.Linear(32, 32)
    module = tops.Sequential(linear)
    module.register_forward_hook(lambda module, args, output: (output,))
    with pytest.raises(TypeError, match=r"\[report\] loss must be given"):
        report(module, x)
    assert not linear._forward_pre_hooks
