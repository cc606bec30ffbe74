"""docs/reference.md says what the declarations say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import transformer_ops as tops
from transformer_ops import _C

ROOT = Path(__file__).parents[2]


def make_reference() -> ModuleType:
    path = ROOT / "tools" / "make_reference.py"
    spec = importlib.util.spec_from_file_location("make_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_page_is_up_to_date() -> None:
    module = make_reference()
    committed = module.PAGE.read_text(encoding="utf-8")
    assert committed == module.reference(), "run: python tools/make_reference.py"
    stub = module.STUB.read_text(encoding="utf-8")
    assert stub == module.stub(), "run: python tools/make_reference.py"


def test_every_op_and_fusion_is_listed() -> None:
    page = make_reference().reference()
    for name in tops.ops.__all__:
        assert f"\n{name}(" in page
    # Others are of libraries that another test has loaded.
    for fusion in tops.fusions():
        assert fusion.origin != "built-in" or f"| `{fusion.name}` |" in page


def test_rows_of_known_ops() -> None:
    page = make_reference().reference()
    assert "| `ReLU` | `max(x, 0)` | - | - | `mask` h/8 |" in page
    assert "| `weight` (or None) | - | `input` hB, `rstd` 4 |" in page
    assert "| `activation_linear` | joint | 10 | (ReLU, SReLU) + BasicLinear |" in page
    assert "Dropout(p=0.5, inplace=False)\n" in page


def test_every_slot_has_a_shape_and_a_dtype() -> None:
    page = make_reference().reference()
    for row in _C.declarations():
        for slot in row["slots"] if hasattr(tops, row["kind"]) else ():
            (line,) = re.findall(rf"^\| `{row['kind']}` \| `{slot}` \|.*$", page, re.MULTILINE)
            _, _, _, shape, dtype, _ = (cell.strip() for cell in line.split("|"))
            assert shape and dtype, line
    statistic = "that of the input without the normalized dimensions | float32, or float64 in"
    assert f"| `RMSNorm` | `rstd` | {statistic}" in page
    assert "| `Dropout` | `mask` | (ceil(n / 8),) | uint8 |" in page
