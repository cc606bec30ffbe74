"""Fine-tune a model of transformers on CPU, plain and with one line more.

python examples/finetune.py minilm      an encoder that tells topics of Python's manual apart
python examples/finetune.py vit         a ViT that tells shapes apart
python examples/finetune.py smollm      a decoder that goes on with Python's manual, byte by byte

Models have random weights and the shapes of the originals, or smaller ones (--layers, --width).
Data is made here, or is Python's own manual. Both runs start alike; curves go to
out/finetune-*.png.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import transformer_ops as tops

Batch = dict[str, Tensor]


def minilm(layers: int, width: int) -> nn.Module:
    """An encoder of MiniLM's shape with a head for 4 classes."""
    config = transformers.BertConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        vocab_size=256,
    )
    config.num_labels = 4
    return transformers.BertForSequenceClassification(config)


def vit(layers: int, width: int) -> nn.Module:
    """A ViT with patches of 8 on images of 64."""
    config = transformers.ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        image_size=64,
        patch_size=8,
    )
    config.num_labels = 4
    return transformers.ViTForImageClassification(config)


def smollm(layers: int, width: int) -> nn.Module:
    """A decoder of SmolLM's kind on bytes."""
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 192),
        vocab_size=256,
    )
    return transformers.LlamaForCausalLM(config)


def sentences(batch: int, random: torch.Generator) -> Batch:
    """Passages of 128 bytes from the four longest topics of Python's manual; which is the label."""
    texts = [topic.encode() for topic in sorted(topics.topics.values(), key=len)[-4:]]
    labels = torch.randint(0, 4, (batch,), generator=random)
    rows = [_passage(texts[label], 128, random) for label in labels.tolist()]
    return {"input_ids": torch.stack(rows), "labels": labels}


def text(batch: int, random: torch.Generator) -> Batch:
    """Passages of 128 bytes of Python's manual, to go on with."""
    manual = "\n".join(topics.topics.values()).encode()
    rows = torch.stack([_passage(manual, 128, random) for _ in range(batch)])
    return {"input_ids": rows, "labels": rows}


def _passage(whole: bytes, length: int, random: torch.Generator) -> Tensor:
    start = int(torch.randint(0, len(whole) - length, (), generator=random))
    return torch.tensor(list(whole[start : start + length]))


def shapes(batch: int, random: torch.Generator) -> Batch:
    """Noise with a square, a disc, a cross or a ring near its middle; which one is the label."""
    labels = torch.randint(0, 4, (batch,), generator=random)
    places = torch.randint(28, 37, (batch, 2, 1, 1), generator=random)
    y, x = torch.arange(64).view(1, 64, 1) - places[:, 0], torch.arange(64) - places[:, 1]
    far, near = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    distance = (x.square() + y.square()).float().sqrt()
    kinds = [far < 9, distance < 10, (near < 3) & (far < 12), (distance - 10).abs() < 2]
    drawn = torch.stack(kinds, 1)[torch.arange(batch), labels].float()
    noise = 0.1 * torch.randn(batch, 3, 64, 64, generator=random)
    return {"pixel_values": drawn[:, None] + noise, "labels": labels}


MODELS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[..., Batch], int, int]] = {
    "minilm": (minilm, sentences, 6, 384),
    "vit": (vit, shapes, 6, 384),
    "smollm": (smollm, text, 6, 576),
}


def batches(make: Callable[..., Batch], options: argparse.Namespace) -> Iterator[Batch]:
    """The same ones in each run."""
    random = torch.Generator().manual_seed(0)
    for _ in range(options.steps):
        yield make(options.batch, random)


class Run:
    """One model in training: losses, and seconds of each step."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: Batch) -> None:
        """Forward, backward and optimizer."""
        begin = time.perf_counter()
        found: Any = self.model(**batch)
        found.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.seconds.append(time.perf_counter() - begin)
        self.losses.append(found.loss.item())


def train(runs: dict[str, Run], make: Callable[..., Batch], options: argparse.Namespace) -> None:
    """Steps of all runs in turn, on the same batches: what else the machine does slows both."""
    bar = tqdm(batches(make, options), total=options.steps, disable=options.quiet)
    for batch in bar:
        for run in runs.values():
            run.step(batch)
        bar.set_postfix({name: f"{run.losses[-1]:.3f}" for name, run in runs.items()})


def means(losses: list[float], count: int = 10) -> list[float]:
    """The mean of each loss and those before it, over `count` losses."""
    return [statistics.mean(losses[max(0, i + 1 - count) : i + 1]) for i in range(len(losses))]


def draw(runs: dict[str, Run], path: Path) -> None:
    """Losses by step and by second."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for style, (name, run) in zip(("-", "--"), runs.items(), strict=True):
        elapsed = torch.tensor(run.seconds).cumsum(0).tolist()
        by_step.plot(means(run.losses), style, label=name)
        by_time.plot(elapsed, means(run.losses), style, label=name)
    by_step.set(xlabel="step", ylabel="loss, mean of 10")
    by_time.set(xlabel="seconds")
    by_step.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, help="a multiple of 64")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args()
    make, data, layers, width = MODELS[options.model]
    torch.manual_seed(0)
    plain = make(options.layers or layers, options.width or width)
    model = copy.deepcopy(plain)

    report = tops.fuse(model)  # the one line

    print(report)
    sample = data(options.batch, torch.Generator().manual_seed(1))
    before, after = (count / 2**20 for count in report.saved_bytes(**sample))
    runs = {
        name: Run(one, options.learning_rate) for name, one in (("plain", plain), ("fused", model))
    }
    train(runs, data, options)
    for name, run in runs.items():
        milliseconds, last = 1e3 * statistics.median(run.seconds), means(run.losses)[-1]
        print(f"{name}: {milliseconds:.1f} ms a step, loss {last:.3f} at the end")
    print(f"kept for backward: {before:.1f} MiB plain, {after:.1f} MiB fused")
    path = options.out / f"finetune-{options.model}.png"
    draw(runs, path)
    print(f"curves: {path}")


if __name__ == "__main__":
    main()
