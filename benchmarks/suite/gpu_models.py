"""Whole models of transformers on a GPU, plain and with `tops.fuse`: `python -m suite.gpu_models`.

A step is forward, loss and backward in bfloat16. Each model also answers whether the fused one is
right: its loss and its gradients beside those of the plain model, both against float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import transformer_ops as tops

from .cases import COMPILED, EAGER
from .gpu import Line, fresh, write_lines
from .machine import caption, describe
from .timing import Call, Clock, interleave, ratio

DTYPE = torch.bfloat16
FUSED = "fused"
MIB = 2**20


class Size(NamedTuple):
    """What a model is called with, and how long it is measured."""

    layers: int
    batch: int
    tokens: int
    seconds: float


FULL, TINY = Size(12, 8, 1024, 4.0), Size(1, 1, 8, 0.1)


def smollm(size: Size) -> nn.Module:
    """SmolLM-135M's layers, head and vocabulary."""
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=size.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def bert(size: Size) -> nn.Module:
    """BERT-base, with dropout."""
    config = transformers.BertConfig(num_hidden_layers=size.layers, vocab_size=4096)
    return transformers.BertModel(config)


def vit(size: Size) -> nn.Module:
    """ViT-B/16, with the exact GELU."""
    return transformers.ViTModel(transformers.ViTConfig(num_hidden_layers=size.layers))


def tokens_of(size: Size, device: torch.device) -> dict[str, Tensor]:
    """Random tokens, which are their own labels."""
    ids = torch.randint(0, 4096, (size.batch, size.tokens), device=device)
    return {"input_ids": ids, "labels": ids}


def sentences(size: Size, device: torch.device) -> dict[str, Tensor]:
    """More and shorter rows."""
    shape = (8 * size.batch, max(size.tokens // 8, 4))
    return {"input_ids": torch.randint(0, 4096, shape, device=device)}


def images(size: Size, device: torch.device) -> dict[str, Tensor]:
    """Random images."""
    return {"pixel_values": torch.randn(4 * size.batch, 3, 224, 224, device=device, dtype=DTYPE)}


Make = Callable[[Size], nn.Module]
Inputs = Callable[[Size, torch.device], dict[str, Tensor]]
MODELS: dict[str, tuple[Make, Inputs]] = {
    "SmolLM layers": (smollm, tokens_of),
    "BERT-base": (bert, sentences),
    "ViT-B/16": (vit, images),
}


def loss_of(output: Any) -> Tensor:
    """The loss of the model, or one of its hidden states."""
    loss: Tensor | None = getattr(output, "loss", None)
    return output.last_hidden_state.float().square().mean() if loss is None else loss


def step_of(model: nn.Module, run: Any, given: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Forward and backward; answers the loss."""

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = loss_of(run(**given))
        loss.backward()
        return loss.detach()

    return step


def peak_bytes(step: Call, device: torch.device) -> int:
    """The most that is allocated in a step beyond what was there before."""
    if device.type != "cuda":
        return 1
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def error_of(model: nn.Module, exact: nn.Module) -> float:
    """The norm of the difference of all gradients, in the norm of the exact ones."""
    pairs = [
        (p.grad.float(), q.grad)
        for p, q in zip(model.parameters(), exact.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    ]
    wrong = sum(float((ours - theirs).square().sum()) for ours, theirs in pairs)
    whole = sum(float(theirs.square().sum()) for _, theirs in pairs)
    return float((wrong / whole) ** 0.5)


def accuracy_line(name: str, models: dict[str, nn.Module], given: dict[str, Tensor]) -> Line:
    """Gradients without dropout, against those of the model in float32."""
    exact = copy.deepcopy(models[EAGER]).float().eval()
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in given.items()}
    step_of(exact, exact, inputs)()
    errors, losses = {}, {}
    for way, model in models.items():
        model.eval()
        losses[way] = float(step_of(model, model, given)())
        errors[way] = error_of(model, exact)
        model.train()
    beside = f"errors {errors[FUSED]:.2e}, {errors[EAGER]:.2e}; losses {losses[FUSED]:.4f}, "
    beside += f"{losses[EAGER]:.4f}"
    share = errors[FUSED] / errors[EAGER]
    return Line(f"{name}, error of gradients", share, "of eager", 1.2, False, beside, errors)


def model_lines(name: str, device: torch.device, size: Size, inductor: bool) -> list[Line]:
    """The rows of a model."""
    fresh()
    make, inputs = MODELS[name]
    with device:
        plain = make(size).to(device, DTYPE)
    given = inputs(size, device)
    fused = copy.deepcopy(plain)
    report = tops.fuse(fused, strict=True)
    models = {EAGER: plain, FUSED: fused}
    lines = [accuracy_line(name, models, given)]
    before, after = report.saved_bytes(**given)
    beside = f"MiB: {after / MIB:.0f}, eager {before / MIB:.0f}"
    lines.append(Line(f"{name}, saved", after / before, "of eager", None, False, beside, {}))
    calls: dict[str, Call] = {way: step_of(model, model, given) for way, model in models.items()}
    if inductor:
        calls[COMPILED] = step_of(plain, torch.compile(plain), given)
        calls[COMPILED]()
    peaks = {way: peak_bytes(call, device) for way, call in calls.items()}
    beside = "MiB: " + ", ".join(f"{way} {found / MIB:.0f}" for way, found in peaks.items())
    share = peaks[FUSED] / peaks[EAGER]
    lines.append(Line(f"{name}, peak of a step", share, "of eager", None, False, beside, {}))
    times = interleave(calls, size.seconds, Clock(device))
    medians = {way: statistics.median(found) for way, found in times.items()}
    beside = "ms: " + ", ".join(f"{way} {found:.2f}" for way, found in medians.items())
    share = ratio(times[FUSED], times[EAGER])
    lines.append(Line(f"{name}, step", share, "of eager", None, False, beside, medians))
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 where a model failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only try the code")
    parser.add_argument("--inductor", action="store_true", help="the plain model compiled, too")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    device, size = torch.device(options.device), TINY if options.tiny else FULL
    about = describe(device, torch.get_num_threads(), {})
    print(f"bfloat16; {caption(about)}", flush=True)
    lines: list[Line] = []
    errors: list[str] = []
    for name in MODELS:
        try:
            found = model_lines(name, device, size, options.inductor)
        except Exception as error:
            traceback.print_exc()
            errors.append(f"{name}: {type(error).__name__}: {error}")
            continue
        lines += found
        for line in found:
            print(line, flush=True)
        if options.out:
            write_lines(options.out, about, lines, errors)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
