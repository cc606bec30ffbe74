"""`report.layers(...)`: the bytes that each layer of a model saves for backward."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from fuse_models import Model
from torch import Tensor, nn

import transformer_ops as tops


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
    assert "<td>layers.0</td>" in layers._repr_html_()
    layers.save(tmp_path / "layers.svg")
    picture = ElementTree.parse(tmp_path / "layers.svg").getroot()
    assert len(list(picture)) == 2 + 4 * len(paths)
    with pytest.raises(ValueError, match=r"^\[fuse\] path of a picture must end in \.svg"):
        layers.save(tmp_path / "layers.png")
    # The model runs as before: its modules' calls are torch's own.
    assert "noting" not in repr(nn.Module.__call__)


def test_layers_are_items_of_lists_of_one_class() -> None:
    block = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))  # noqa: E731
    model = nn.Sequential(nn.Sequential(block(), block()), nn.LayerNorm(8))
    report = tops.fuse(model)
    rows = report.layers(torch.randn(4, 8, requires_grad=True)).rows
    assert [row.path for row in rows] == ["0.0", "0.1", "1"]
