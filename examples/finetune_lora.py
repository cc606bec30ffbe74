"""Fine-tune adapters (LoRA) on a base in 4 bits, on CPU.

python examples/finetune_lora.py            TinyLlama's shape: 1.1 billion weights
python examples/finetune_lora.py --smoke    the same in small, in seconds

The base has random weights, which are made and encoded layer by layer, so that it is never in
memory as a whole. The text is Python's own manual, byte by byte. The adapters are saved in PEFT's
format and loaded again; the loss curve goes to out/finetune-lora.png.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import peft
import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import transformer_ops as tops

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def make_base(sizes: dict[str, Any], format: str | None, quiet: bool) -> Any:
    """A frozen model in bfloat16 with random weights; those of its layers in a format, or as they
    are."""
    config = transformers.LlamaConfig(**sizes)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16().requires_grad_(False)
    decoder = model.model
    decoder.rotary_emb = type(decoder.rotary_emb)(config)
    rest = [decoder.embed_tokens, decoder.norm, model.lm_head]
    for module in tqdm([*rest, *decoder.layers], desc="base", disable=quiet):
        module.to_empty(device="cpu")
        for parameter in module.parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
        if format is not None and module not in rest:
            tops.quantization.quantize_(module, format)
    return model


def batch(rows: int, length: int, random: torch.Generator) -> dict[str, Tensor]:
    """Passages of Python's manual, to go on with."""
    manual = "\n".join(topics.topics.values()).encode()
    starts = torch.randint(0, len(manual) - length, (rows,), generator=random).tolist()
    ids = torch.tensor([list(manual[start : start + length]) for start in starts])
    return {"input_ids": ids, "labels": ids}


def train(model: Any, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """The loss of each step, and its seconds."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
    random = torch.Generator().manual_seed(0)
    losses, seconds = [], []
    bar = tqdm(range(options.steps), desc="steps", disable=options.quiet)
    for _ in bar:
        begin = time.perf_counter()
        loss = model(**batch(options.batch, options.length, random)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", MiB=f"{peak() >> 20:,}")
    return losses, seconds


def peak() -> int:
    """The most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def loss_of(model: Any, options: argparse.Namespace) -> float:
    """The loss of a passage that no step has seen."""
    with torch.no_grad():
        found = model(**batch(1, options.length, torch.Generator().manual_seed(1))).loss
    return float(found)


def draw(losses: list[float], path: Path) -> None:
    """The losses by step."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a small model, 12 steps of 32 bytes")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, help="bytes of a passage (512)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--format", default="nvfp4", help='of the base; "none" for bfloat16')
    parser.add_argument("--recompute", default="cheap", help="none, cheap or products")
    parser.add_argument("--plain", action="store_true", help="without fuse, to compare")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    options = parser.parse_args()
    options.steps = options.steps or (12 if options.smoke else 20)
    options.length = options.length or (32 if options.smoke else 512)
    torch.manual_seed(0)
    start, format = peak(), None if options.format == "none" else options.format
    base = make_base(SMALL if options.smoke else TINY_LLAMA, format, options.quiet)
    config = peft.LoraConfig(r=options.rank, target_modules=LINEAR)
    model: Any = peft.get_peft_model(base, config)
    if not options.plain:
        print(tops.fuse(model, recompute=options.recompute))
    held = (peak() - start) >> 20
    losses, seconds = train(model, options)
    print(f"loss {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end")
    print(f"{statistics.median(seconds):.2f} s a step")
    print(f"peak above the interpreter: {held:,} MiB to make the base, ", end="")
    print(f"{(peak() - start) >> 20:,} MiB in all")
    before = loss_of(model, options)
    folder = options.out / "finetune-lora"
    model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(model.unload(), folder)
    size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    print(f"adapters: {folder}, {size:.1f} MiB; ", end="")
    print(f"loss {before:.4f}, loaded {loss_of(loaded, options):.4f}")
    draw(losses, options.out / "finetune-lora.png")


if __name__ == "__main__":
    main()
