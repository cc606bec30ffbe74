"""The fine-tuning example: every model learns, plain and fused alike."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.takes(seconds=20)

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune.py"


@pytest.mark.parametrize("model", ["minilm", "vit", "smollm"])
def test_finetuning(model: str, tmp_path: Path) -> None:
    small = ["--steps", "12", "--batch", "4", "--layers", "1", "--width", "64", "--quiet"]
    command = [sys.executable, str(SCRIPT), model, *small, "--out", str(tmp_path)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert re.search(r"^\d+ fused, 0 left", printed, re.MULTILINE), printed
    plain, fused = (float(x) for x in re.findall(r"loss ([\d.]+) at the end", printed))
    assert abs(plain - fused) < 0.2 and plain < 5.6
    before, after = (float(x) for x in re.findall(r"([\d.]+) MiB", printed))
    assert after < before
    assert (tmp_path / f"finetune-{model}.png").read_bytes()[:4] == b"\x89PNG"


def test_finetuning_adapters(tmp_path: Path) -> None:
    script = str(SCRIPT.with_name("finetune_lora.py"))
    command = [sys.executable, script, "--smoke", "--quiet", "--learning-rate", "1e-2"]
    run = [*command, "--out", str(tmp_path)]
    printed = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert re.search(r"2 x LlamaDecoderLayer +layer +fused", printed), printed
    first, last = (
        float(re.search(rf"([\d.]+) at the {when}", printed)[1])  # type: ignore[index]
        for when in ("start", "end")
    )
    assert last < first
    before, loaded = re.search(r"loss ([\d.]+), loaded ([\d.]+)", printed).groups()  # type: ignore[union-attr]
    assert before == loaded
    assert (tmp_path / "finetune-lora.png").read_bytes()[:4] == b"\x89PNG"
