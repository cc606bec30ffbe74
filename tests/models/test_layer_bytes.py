"""`report.layers(...)`: the bytes that each layer of a model saves for backward."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from fuse_models import Model
from helpers import html_cells
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.models.layer_bytes import LayerBytes, LayerRow
from transformer_ops.reports.tables import size_text


def tokens() -> Tensor:
    return torch.arange(10).reshape(2, 5)


def test_bytes_by_layer(tmp_path: Path) -> None:
    model = Model()
    report = tops.fuse(model)
    layers = report.layers(tokens())
    assert (layers.before, layers.after) == report.saved_bytes(tokens())
    paths = [row.path for row in layers.rows]
    assert {"layers.0", "layers.1"} <= set(paths)
    assert not any(path.startswith("layers.0.") for path in paths)
    first, second = (row for row in layers.rows if row.path.startswith("layers"))
    assert first.after < first.before and first[1:] == second[1:]
    text = str(layers)
    assert len(text.splitlines()) == 1 + len(paths) and "layers.1" in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert layers.as_dict()["layers"][0] == layers.rows[0]._asdict()
    assert [row[0] for row in html_cells(layers._repr_html_())[1:-1]] == [
        path or "(the model)" for path in paths
    ]
    layers.save(tmp_path / "layers.svg")
    picture = ElementTree.parse(tmp_path / "layers.svg").getroot()
    shown = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    total = f"{size_text(layers.after)} with ops"
    assert total in shown and set(paths) - {""} <= set(shown)
    bars = [float(e.get("width", "")) for e in picture if e.get("height") == "6.0"]
    sizes = [size for row in layers.rows for size in row[1:]]
    assert bars == pytest.approx([size * max(bars) / max(sizes) for size in sizes], abs=0.06)
    with pytest.raises(ValueError, match=r"^\[fuse\] path must end in \.svg"):
        layers.save(tmp_path / "layers.png")
    # The model runs as before: its modules' calls are torch's own.
    assert "noting" not in repr(nn.Module.__call__)


def test_a_layer_that_is_fused_otherwise_is_one_of_the_list() -> None:
    model = Model()
    report = tops.fuse(model, only="layers.0*")
    assert type(model.layers[0]) is not type(model.layers[1])
    paths = [row.path for row in report.layers(tokens()).rows]
    assert {"layers.0", "layers.1"} <= set(paths)
    assert not any(path.startswith("layers.0.") for path in paths)


def test_ops_may_save_more_than_the_statements() -> None:
    layers = LayerBytes([LayerRow("head", 1000, 4000), LayerRow("norm", 500, 300)])
    head, norm = str(layers).splitlines()[1:]
    assert head.count("#") == 24 and "." * 3 not in head and len(head) <= 80
    assert norm.endswith("##.")


def test_layers_are_items_of_lists_of_one_class() -> None:
    block = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))  # noqa: E731
    model = nn.Sequential(nn.Sequential(block(), block()), nn.LayerNorm(8))
    report = tops.fuse(model)
    rows = report.layers(torch.randn(4, 8, requires_grad=True)).rows
    assert [row.path for row in rows] == ["0.0", "0.1", "1"]


class Stateful(nn.Module):
    """A quantized weight, a dropout and statistics; it fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        with tops.quantized_model_init(recipe=tops.recipe.Float8CurrentScaling()):
            self.up = tops.Linear(16, 32)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.5)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        y: Tensor = self.drop(self.norm(self.up(x)))
        assert not fails, "told to"
        return y


@pytest.mark.parametrize("fails", [False, True])
def test_a_report_leaves_the_model_as_it_found_it(fails: bool) -> None:
    model, x = Stateful(), torch.randn(8, 16)
    report = tops.fuse(model)
    before = [tensor.clone() for tensor in (*model.buffers(), torch.get_rng_state())]
    if fails:
        for look in (report.saved_bytes, report.layers, report.step):
            with pytest.raises(AssertionError, match="told to"):
                look(x, fails=True)
    else:
        # The input, the output of each module but the last, two statistics, and the mask.
        assert report.saved_bytes(x)[1] == report.layers(x).after > 2 * 8 * 32 * 4
        assert report.step(x, loss=Tensor.sum).after.parameters > 0
    assert all(map(torch.equal, before, (*model.buffers(), torch.get_rng_state())))
