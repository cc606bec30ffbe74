"""What is shown when training is over."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from transformer_ops.parallel import local

from .model import generate
from .training import LN2, Run

PROMPT = b"The "
SAMPLE_BYTES = 400
SMOOTHED = 12  # steps before and after


def report(run: Run) -> str:
    """The text of the report; writes the loss curve and the losses."""
    options = run.options
    curve, table = Path(options.out) / "loss.png", Path(options.out) / "losses.csv"
    if run.ranks.is_first:
        draw_losses(run, curve)
        write_losses(run, table)
    kept = saved_bytes(run)
    tokens = options.batch * options.context
    held_out = sum(t.numel() for _, t in run.corpus.validation(options.batch, options.context))
    bits = run.validation[-1][1] if run.validation else run.validate()
    speed = run.tokens_per_second
    trained = f"{speed:,.0f} tokens/s" if speed == speed else "too few steps to time"
    plan = plan_of_block(run)
    whole = run.whole_model()
    with run.autocast():
        sample = generate(whole, PROMPT, SAMPLE_BYTES, 0.8, options.seed)
    lines = [
        f"validation         {bits:.4f} bits per byte on {held_out:,} held-out bytes",
        f"training speed     {trained} ({describe(run)})",
        f"saved for backward {kept:,} bytes a step, {kept / tokens:,.0f} a token, "
        f"parameters left out{'' if run.ranks.is_alone else '; on this rank'}",
        "",
        "plan of one block",
        indented(plan),
        "",
        "sample",
        indented(printable(sample)),
        "",
        f"loss curve         {curve}",
        f"losses             {table}",
        f"checkpoint         {run.checkpoint}",
    ]
    return "\n".join(lines)


def describe(run: Run) -> str:
    """Backend, dtype and device in words."""
    return f"backend {run.options.backend}{settings(run)}"


def settings(run: Run) -> str:
    """What a backend has in common with the other one, in words."""
    options = run.options
    compiled = ", compiled" if options.compile else ""
    threads = f", {torch.get_num_threads()} threads" if run.device.type == "cpu" else ""
    ranks = "" if run.ranks.is_alone else f", {run.ranks.count} processes"
    return f"{compiled}, {options.dtype}, {run.device}{ranks}{threads}"


def printable(text: bytes) -> str:
    """The text without what would steer a terminal."""
    characters = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in characters)


def indented(text: str) -> str:
    """The text, two columns to the right."""
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def saved_bytes(run: Run) -> int:
    """Bytes that one training step keeps for backward: distinct storages, no parameters."""
    inputs, targets = run.batches.draw()
    own = {local(p).untyped_storage().data_ptr() for p in run.model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    run.model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run.loss(inputs, targets)
    loss.backward()
    return sum(found.values())


def plan_of_block(run: Run) -> str:
    """explain() of the three Sequentials of a block, as they run in training."""
    if run.options.backend == "torch":
        return "none: torch.nn runs op by op (--backend tops has one)"
    block = run.model.blocks[0]
    inputs, targets = (run.ranks.part(t).to(run.device) for t in run.batches.draw())
    run.model.train()
    with run.autocast():
        run.model(inputs, targets)
    parts = ("attention_in", "attention_out", "mlp")
    return "\n\n".join(f"{part}\n{getattr(block, part).explain()}" for part in parts)


def write_losses(run: Run, path: Path) -> None:
    """The loss of every step, in nats a byte, with all its digits."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss"])
        writer.writerows(enumerate(run.losses))


def draw_losses(run: Run, path: Path) -> None:
    """The loss curve as a PNG."""
    bits = [loss / LN2 for loss in run.losses]
    windows = (bits[max(0, i - SMOOTHED) : i + SMOOTHED + 1] for i in range(len(bits)))
    smooth = [sum(window) / len(window) for window in windows]
    steps = range(1, len(bits) + 1)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, bits, color="#9ec5e8", linewidth=0.8, label="training, each step")
    axes.plot(steps, smooth, color="#1f5f99", linewidth=1.8, label="training, smoothed")
    if run.validation:
        where, values = zip(*run.validation, strict=True)
        label = f"held-out text, {values[-1]:.2f} at the end"
        axes.plot(where, values, "o-", color="#c8501e", markersize=5, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_title(f"Byte-level GPT: {describe(run)}", loc="left", fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
