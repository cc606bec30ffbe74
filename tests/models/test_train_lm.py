"""The main job, examples/train_lm.py, in short runs."""

from __future__ import annotations

import csv
import errno
import math
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_lm  # noqa: E402
from lm import checkpoint, data, model, options, report, training  # noqa: E402
from lm.failure import Failure  # noqa: E402
from lm.options import parse  # noqa: E402

pytestmark = pytest.mark.takes(seconds=60)


@pytest.fixture(autouse=True)
def _short_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture and a long sample take longer than a short training. A run as a user starts it, in
    a process of its own, has both."""
    monkeypatch.setattr(report, "draw_losses", lambda run, path: None)
    monkeypatch.setattr(report, "SAMPLE_BYTES", 3)


SMALL = ["--batch", "2", "--context", "32", "--layers", "2", "--width", "32"]


def train(out: Path, *arguments: str) -> list[float]:
    assert train_lm.main([*SMALL, "--out", str(out), *arguments]) == 0
    return losses(out)


def losses(out: Path) -> list[float]:
    with open(out / "losses.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def make_run(*arguments: str) -> training.Run:
    options, state = parse(list(arguments))
    return training.Run(options, state)


def steps(run: training.Run, count: int) -> list[float]:
    run.model.train()
    return [run._one_step() for _ in range(count)]


# ---- what a run leaves behind


def test_a_run_as_a_user_starts_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_lm.py", *SMALL, "--steps", "6", "--out", tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for piece in ("bits per byte", "tokens/s", "a token, parameters left out", "LayerNorm", "GELU"):
        assert piece in done.stdout
    for name in ("loss.png", "losses.csv", "checkpoint.pt"):
        assert str(tmp_path / name) in done.stdout
    assert "6/6" in done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(losses(tmp_path)) == 6
    assert not list(tmp_path.glob("*.part"))


def test_torch_backend_reports_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "--steps", "2", "--backend", "torch")
    assert "plan of one block\n  none" in capsys.readouterr().out


# ---- resuming


@pytest.mark.parametrize(
    "extra",
    [(), ("--dropout", "0.2"), ("--dtype", "bfloat16"), ("--backend", "torch", "--dropout", "0.2")],
    ids=["plain", "dropout", "bfloat16", "torch"],
)
def test_resume_gives_the_very_same_losses(tmp_path: Path, extra: tuple[str, ...]) -> None:
    whole = train(tmp_path / "whole", "--steps", "8", *extra)
    first = train(tmp_path / "parts", "--steps", "5", *extra)
    saved = str(tmp_path / "parts" / "checkpoint.pt")
    assert train_lm.main(["--resume", saved, "--steps", "8"]) == 0
    both = losses(tmp_path / "parts")
    assert first == whole[:5]
    assert both == whole
    ends = [checkpoint.load(str(tmp_path / p / "checkpoint.pt")) for p in ("whole", "parts")]
    for name, tensor in ends[0]["model"].items():
        assert torch.equal(tensor, ends[1]["model"][name]), name


def test_resume_past_the_end_only_reports(tmp_path: Path) -> None:
    before = train(tmp_path, "--steps", "3")
    assert train_lm.main(["--resume", str(tmp_path / "checkpoint.pt")]) == 0
    assert losses(tmp_path) == before


def test_ctrl_c_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(tmp_path / "whole", "--steps", "6")
    one_step = training.Run._one_step

    def interrupted(self: training.Run) -> float:
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)
        return one_step(self)

    monkeypatch.setattr(training.Run, "_one_step", interrupted)
    arguments = [*SMALL, "--steps", "6", "--out", str(tmp_path / "cut")]
    assert train_lm.main(arguments) == 130
    monkeypatch.undo()
    saved = tmp_path / "cut" / "checkpoint.pt"
    assert checkpoint.load(str(saved))["step"] == 3
    assert train_lm.main(["--resume", str(saved)]) == 0
    assert losses(tmp_path / "cut") == whole


# ---- both backends


def test_backends_start_from_the_same_weights() -> None:
    states = [make_run(*SMALL, "--backend", b).model.state_dict() for b in ("tops", "torch")]
    assert list(states[0]) == list(states[1])
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


def test_backends_agree_for_20_steps() -> None:
    size = ["--batch", "4", "--context", "64"]
    ours, plain = (steps(make_run(*size, "--backend", b), 20) for b in ("tops", "torch"))
    assert plain[-1] < plain[0] - 0.5
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) < 1e-3


@pytest.mark.parametrize("backend", ["tops", "torch"])
def test_saved_bytes_are_all_that_backward_needs(backend: str) -> None:
    row = 4 * 32
    norm, attention = row + 8, 3 * row + row + 4  # (input, mean, rstd); (q, k, v, output, sum)
    block = 2 * norm + 2 * row + attention + 2 * 4 * row  # and the inputs of up, GELU and down
    head = norm + row + 4 * model.VOCABULARY
    indices = 8 * model.RECENT + 8
    if backend == "tops":
        # What norms give to qkv, up and head, and GELU to down, is computed again.
        block, head = block - 2 * row - 4 * row, head - row
    expected = 64 * (2 * block + head + indices) + 4  # one scalar: how many targets count
    assert report.saved_bytes(make_run(*SMALL, "--backend", backend)) == expected


def test_with_dropout_tops_saves_less_for_backward() -> None:
    ours, plain = (
        report.saved_bytes(make_run(*SMALL, "--backend", b, "--dropout", "0.1"))
        for b in ("tops", "torch")
    )
    assert ours < plain


def test_compiled_training_follows_eager() -> None:
    size = ["--batch", "2", "--context", "32", "--layers", "1", "--width", "32"]
    eager, compiled = (steps(make_run(*size, *extra), 3) for extra in ([], ["--compile"]))
    assert compiled == pytest.approx(eager, abs=1e-4)


# ---- both side by side


def test_compare_gives_the_losses_of_lone_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = ["--steps", "6", "--dropout", "0.2"]
    lone = {b: train(tmp_path / b, *extra, "--backend", b) for b in ("tops", "torch")}
    capsys.readouterr()
    assert train_lm.main([*SMALL, *extra, "--compare", "--out", str(tmp_path)]) == 0
    rows = compared(tmp_path)
    for backend, losses_alone in lone.items():
        assert [row[f"loss_{backend}"] for row in rows] == losses_alone
    assert lone["tops"] != lone["torch"]
    largest = max(abs(row["loss_tops"] - row["loss_torch"]) for row in rows)
    shown = capsys.readouterr().out
    assert f"at most {largest:.2g} (each backend drew its own dropout masks)" in shown
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("saved", ["fp8", "int8"])
def test_saved_formats_train_alike_and_keep_less(saved: str, tmp_path: Path) -> None:
    size = ["--batch", "4", "--context", "64", "--layers", "2", "--width", "128"]
    exact, kept = make_run(*size), make_run(*size, "--saved", saved)
    assert report.saved_bytes(kept) < 0.8 * report.saved_bytes(exact)
    for a, b in zip(steps(kept, 20), steps(exact, 20), strict=True):
        assert a == pytest.approx(b, abs=0.02)
    train(tmp_path, "--saved", saved, "--steps", "2")
    checkpointed = make_run("--resume", str(tmp_path / "checkpoint.pt"))
    assert checkpointed.options.saved == saved


@pytest.mark.parametrize("recipe", options.RECIPES)
def test_recipes_train_alike(recipe: str, tmp_path: Path) -> None:
    assert list(training.RECIPES) == list(options.RECIPES)
    size = ["--batch", "4", "--context", "64", "--layers", "2", "--width", "128"]
    exact, quantized = make_run(*size), make_run(*size, "--recipe", recipe)
    found, want = steps(quantized, 15), steps(exact, 15)
    assert found != want
    assert found[-1] == pytest.approx(want[-1], abs=0.1 if recipe == "nvfp4" else 0.03)
    train(tmp_path, "--recipe", recipe, "--steps", "2")
    assert make_run("--resume", str(tmp_path / "checkpoint.pt")).options.recipe == recipe


def test_compare_reports_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--dtype", "bfloat16", "--dropout", "0.1"]
    steps = str(training.UNTIMED_STEPS + 3)
    arguments = [*SMALL, *extra, "--steps", steps, "--compare", "--out", str(tmp_path)]
    assert train_lm.main(arguments) == 0
    shown = {row[0]: row[1:] for row in map(cells, capsys.readouterr().out.splitlines()) if row}
    kept = [
        report.saved_bytes(make_run(*SMALL, *extra, "--backend", b)) / (2 * 32)
        for b in ("tops", "torch")
    ]
    ratio = f"{kept[0] / kept[1]:.2f}x"
    assert shown["saved bytes a token"] == [f"{k:,.0f}" for k in kept] + [ratio]
    timed = compared(tmp_path)[training.UNTIMED_STEPS :]
    speed = statistics.median(row["seconds_torch"] / row["seconds_tops"] for row in timed)
    assert shown["tokens/s"][2] == f"{speed:.2f}x"
    assert len(shown["held-out bits per byte"]) == 2


def test_ctrl_c_ends_a_comparison_with_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one_step = training.Run._one_step

    def interrupted(self: training.Run) -> float:
        if self.step == 2 and self.options.backend == "tops":
            signal.raise_signal(signal.SIGINT)
        return one_step(self)

    monkeypatch.setattr(training.Run, "_one_step", interrupted)
    assert train_lm.main([*SMALL, "--steps", "9", "--compare", "--out", str(tmp_path)]) == 130
    shown = capsys.readouterr().out
    assert "interrupted after step 3 of 9" in shown
    assert "saved bytes a token" in shown
    assert len(compared(tmp_path)) == 3


def compared(out: Path) -> list[dict[str, float]]:
    with open(out / "compare.csv", newline="") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--data", "{tmp}/none.txt"], "--data must be readable"),
        (["--data", "{tmp}/binary"], "--data must be text"),
        (["--data", "{tmp}/empty"], "--data must have at least 258 bytes for --context 128, got 0"),
        (["--data", "{tmp}/short.txt"], "--data must have at least 258 bytes"),
        (["--data", "/dev/null"], "--data must be a file or a folder"),
        (["--device", "abacus"], "--device must be one that torch can use here, got 'abacus'"),
        (["--device", "meta"], "--device must be one that torch can use here, got 'meta'"),
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--width", "x"], "--width"),
        (["--dropout", "nan"], "--dropout: must be in [0, 1), got nan"),
        (["--lr", "-1"], "--lr: must be finite and above 0"),
        (["--dtype", "int8"], "--dtype"),
        (["--surplus"], "--surplus"),
        (["--saved", "fp4"], "--saved"),
        (["--recipe", "fp8"], "--recipe"),
        (
            ["--recipe", "mxfp8", "--backend", "torch"],
            "--recipe must be none with --backend torch, got mxfp8",
        ),
        (["--saved", "fp8", "--backend", "torch"], "--saved must be exact with --backend torch"),
        (["--compare", "--backend", "torch"], "--backend: not allowed with argument --compare"),
        (["--compare", "--resume", "last.pt"], "--compare must start afresh, got --resume 'last"),
        (["--compare", "--checkpoint-every", "200"], "--checkpoint-every must be absent, got 200"),
        (["--resume", "{tmp}/none.pt"], "--resume must be readable"),
        (["--resume", "{tmp}/short.txt"], "--resume must be a checkpoint"),
        (["--out", "{tmp}/short.txt"], "--out must be a folder that can be written"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "binary").write_bytes(bytes(1000))
    (tmp_path / "empty").mkdir()
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    assert train_lm.main(["--out", str(tmp_path / "out"), *given]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("train_lm.py: ")
    assert text in captured.err


@pytest.mark.parametrize("package", ["tqdm", "matplotlib"])
def test_missing_package_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert train_lm.main(["--steps", "1"]) == 2
    assert capsys.readouterr().err == (
        f"train_lm.py: needs {package}: pip install matplotlib tqdm, the [examples] extra\n"
    )


def test_resume_needs_the_same_model_and_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--steps", "1")
    saved = str(tmp_path / "checkpoint.pt")
    other = tmp_path / "other.txt"
    other.write_text("Another text. " * 100)
    capsys.readouterr()
    assert train_lm.main(["--resume", saved, "--width", "64"]) == 2
    assert "--width must be that of the checkpoint, 32, got 64" in capsys.readouterr().err
    assert train_lm.main(["--resume", saved, "--data", str(other)]) == 2
    assert "--data must be the text that the checkpoint" in capsys.readouterr().err


class FullDisk:
    """A file on a disk without room."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, content: Any) -> int:
        self._file.write(bytes(content)[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", "--steps", "6")
    train(tmp_path / "cut", "--steps", "4")
    saved = tmp_path / "cut" / "checkpoint.pt"
    before = saved.read_bytes()
    capsys.readouterr()
    monkeypatch.setattr(checkpoint, "open", lambda *a, **k: FullDisk(open(*a, **k)), raising=False)
    assert train_lm.main(["--resume", str(saved), "--steps", "6"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == (
        f"train_lm.py: the checkpoint {str(saved)!r} could not be written: "
        "No space left on device; the last good one is still there"
    )
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert not list(saved.parent.glob("*.part"))
    assert train_lm.main(["--resume", str(saved), "--steps", "6"]) == 0
    assert losses(saved.parent) == whole


# ---- the text


def test_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    assert data.read_text(str(tmp_path)) == b"first\n\nsecond"


def test_held_out_text_is_the_last_tenth_and_is_covered_once() -> None:
    text = bytes(i % 251 for i in range(5000))
    corpus = data.Corpus(text, 16)
    assert bytes(corpus.training.tolist()) == text[:4500]
    windows = corpus.validation(4, 16)
    targets = torch.cat([t.flatten() for _, t in windows])
    assert bytes(targets.tolist()) == text[4501 : 4501 + targets.numel()]
    assert 500 - 17 < targets.numel() < 500
    with pytest.raises(Failure, match="at least 34 bytes"):
        data.Corpus(text[:33], 16)
    data.Corpus(text[:34], 16)


def test_learning_rate_does_not_depend_on_the_number_of_steps() -> None:
    rates = [training.learning_rate(step, 1.0, 500) for step in (0, 49, 50, 500, 5000)]
    assert rates == pytest.approx([0.02, 1.0, 1.0, 0.05, 0.05])


def test_generation_is_repeatable_and_slides_its_window() -> None:
    run = make_run(*SMALL)
    samples = [model.generate(run.model, b"The ", 40, 0.8, 7) for _ in range(2)]
    assert samples[0] == samples[1]
    assert len(samples[0]) == 44
    assert samples[0].startswith(b"The ")


def test_bits_per_byte_of_an_untrained_model_is_8() -> None:
    assert math.isclose(make_run(*SMALL).validate(), 8.0, abs_tol=0.1)


# ---- experts


def test_experts_agree_with_a_loop_over_them_for_50_steps() -> None:
    size = [*SMALL, "--experts", "8", "--top-k", "2"]
    runs = [make_run(*size, "--backend", backend) for backend in ("tops", "torch")]
    assert list(runs[0].model.state_dict()) == list(runs[1].model.state_dict())
    ours, plain = (steps(run, 50) for run in runs)
    assert plain[-1] < plain[0] - 0.5
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) < 1e-4


def test_more_experts_of_a_byte_than_there_are() -> None:
    with pytest.raises(Failure, match="--top-k must be at most --experts, 2, got 3"):
        parse(["--experts", "2", "--top-k", "3"])


# ---- several processes


def run_script(out: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *launcher, EXAMPLES / "train_lm.py", "--out", out, *arguments]
    # What the launcher ends by itself it must not be the limit that ends.
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_train_as_one_and_resume_each_other(tmp_path: Path) -> None:
    size = ["--batch", "4", "--context", "32", "--layers", "1", "--width", "64"]
    assert train_lm.main([*size, "--steps", "8", "--out", str(tmp_path / "one")]) == 0
    want = losses(tmp_path / "one")
    out, saved = tmp_path / "two", tmp_path / "two" / "checkpoint.pt"
    shown = run_script(out, *size, "--steps", "6", "--tensor-parallel", "2")
    for piece in ("2 processes", "gather_linear", "ReduceScatter", "on this rank", "validation"):
        assert piece in shown
    assert losses(out) == pytest.approx(want[:6], abs=1e-5)
    state = checkpoint.load(str(saved))
    assert state["model"]["blocks.0.mlp.up.weight"].shape == (256, 64)
    # One process goes on from there, and from what that leaves four do, as the page has it.
    assert train_lm.main(["--resume", str(saved), "--steps", "7"]) == 0
    page = (EXAMPLES.parent / "docs" / "distributed.md").read_text()
    (line,) = re.findall(r"^    torchrun (.*) examples/train_lm.py (.*)$", page, re.MULTILINE)
    launcher = ("-m", "torch.distributed.run", *line[0].split())
    arguments = ("--resume", str(saved), "--steps", "8", *line[1].split())
    assert "4 processes" in run_script(out, *arguments, launcher=launcher)
    assert losses(out) == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--backend", "torch"], "--backend must be tops where processes share a model, got torch"),
        (["--dropout", "0.1"], "--dropout must be 0.0 where processes share a model, got 0.1"),
        (["--experts", "4"], "--experts must be 0"),
        (["--compile"], "--compile must be absent"),
        (["--compare"], "--compare must be absent"),
        (["--width", "32"], "--tensor-parallel must divide the 1 heads of --width, got 2"),
        (["--batch", "3"], "--batch must be divisible by the 2 processes, got 3"),
        (["--tensor-parallel", "0"], "--tensor-parallel: must be at least 1, got 0"),
    ],
)
def test_what_processes_cannot_share(arguments: list[str], text: str) -> None:
    with pytest.raises(Failure, match=re.escape(text)):
        parse(["--tensor-parallel", "2", *arguments])


def test_processes_that_the_groups_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(Failure, match="--tensor-parallel must divide the 3 processes, got 2"):
        parse(["--tensor-parallel", "2", "--batch", "6"])
