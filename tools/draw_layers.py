"""Draws docs/layers.svg: the folders of csrc/ in layers, from the rules that
tests/packaging/test_include_rules.py holds, so that the picture cannot grow old.

    .venv/bin/python tools/draw_layers.py
"""

from __future__ import annotations

import html
import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RULES = ROOT / "tests" / "packaging" / "test_include_rules.py"
TARGET = ROOT / "docs" / "layers.svg"

WIDTH, ROW, BOX_HEIGHT, GAP, MARGIN = 900, 66, 46, 12, 12
LETTER = 7.2  # the width of one at 12 px

# What a folder holds, in a few words. A folder without words is an error.
WORDS = {
    "kernels": "slots of kernels, scalar formulas",
    "kernels/cpu": "loops, for each instruction set",
    "kernels/cuda": "CUDA kernels",
    "memory": "the pool",
    "fuser": "declarations, rules, plans",
    "op": "typed ops: registration, checks",
    "wrappers": "what calls the kernels",
    "quantization": "how operands are rounded",
    "ops": "one file an op",
    "fusions": "one file a fused op",
    "cuda": "torch's CUDA runtime",
    "executor": "programs, the interpreter",
    "runtime": "pipelines without Python",
    "python": "the module _C",
}


def rules() -> list[Any]:
    spec = importlib.util.spec_from_file_location("include_rules", RULES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return [folder for folder in module.FOLDERS if "." not in folder.name]


def levels(folders: list[Any]) -> dict[str, int]:
    """A folder lies above all that it includes from."""
    found: dict[str, int] = {}
    for folder in folders:
        below = [found[name] for name in folder.includes if name in found]
        # A single file of a folder counts as the folder.
        below += [found[Path(name).parent.as_posix()] for name in folder.includes if "." in name]
        found[folder.name] = 1 + max(below, default=-1)
    return found


def text(x: float, y: float, content: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" font-weight="{weight}">'
        f"{html.escape(content)}</text>"
    )


def draw() -> str:
    folders = rules()
    level = levels(folders)
    missing = [folder.name for folder in folders if folder.name not in WORDS]
    if missing:
        raise ValueError(f"WORDS must say what each folder of csrc/ holds, got none for {missing}")
    top = max(level.values())
    height = (top + 1) * ROW + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>The folders of csrc/: each includes from rows below its own</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number in range(top + 1):
        row = [folder for folder in folders if level[folder.name] == number]
        widths = [LETTER * max(len(f.name), len(WORDS[f.name])) + 2 * GAP for f in row]
        x = (WIDTH - sum(widths) - GAP * (len(row) - 1)) / 2
        y = height - MARGIN - (number + 1) * ROW + (ROW - BOX_HEIGHT) / 2
        for folder, width in zip(row, widths, strict=True):
            fill = "#fff3d6" if "torch" in folder.libraries else "#e3eefb"
            lines.append(
                f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="6" '
                f'fill="{fill}" stroke="#555"/>'
            )
            lines.append(text(x + width / 2, y + 19, f"{folder.name}/", "bold"))
            lines.append(text(x + width / 2, y + 36, WORDS[folder.name]))
            x += width + GAP
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
