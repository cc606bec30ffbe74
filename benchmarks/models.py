"""Whole models of transformers: plain, compiled, and with `tops.fuse`.

    python benchmarks/models.py              all of it, 10 minutes on 2 cores
    python benchmarks/models.py --quick      without Inductor, a minute

A step is forward, loss and backward of a model with random weights; rounds of all ways are
interleaved. Limits are the targets of the issue that asked for `fuse`.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
from suite.measure import saved_bytes
from suite.rows import Row, run, timed
from suite.timing import Call, Clock, interleave
from torch import Tensor, nn

import transformer_ops as tops

CPU = torch.device("cpu")
EAGER, INDUCTOR, FUSED, BOTH = "eager", "Inductor", "fused", "fused, compiled"


class Model(NamedTuple):
    """A model, its input, and the most that it may take: a step against eager and Inductor, saved
    bytes against eager, and a call under `no_grad` against eager."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    batch: int
    limits: dict[str, float]
    saved: float


def llama() -> nn.Module:
    """4 layers of 512."""
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=2048,
    )
    return transformers.LlamaForCausalLM(config)


def minilm() -> nn.Module:
    """6 layers of 384, with dropout."""
    config = transformers.BertConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        vocab_size=2048,
    )
    return transformers.BertModel(config)


def vit() -> nn.Module:
    """ViT-S/16, with the exact GELU."""
    config = transformers.ViTConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6
    )
    return transformers.ViTModel(config)


def tokens(batch: int, length: int) -> Tensor:
    """Random ones."""
    return torch.randint(0, 2048, (batch, length), generator=torch.Generator().manual_seed(0))


MODELS = {
    "Llama h512 f1376, 4 layers, 512 tokens": Model(
        llama,
        lambda batch: {"input_ids": tokens(batch, 512), "labels": tokens(batch, 512)},
        1,
        {EAGER: 0.82, INDUCTOR: 0.95},
        0.55,
    ),
    "MiniLM shape, 16 x 128 tokens, dropout 0.1": Model(
        minilm,
        lambda batch: {"input_ids": tokens(batch, 128)},
        16,
        {EAGER: 0.80, INDUCTOR: 0.80},
        0.60,
    ),
    "ViT-S/16, 8 images": Model(
        vit,
        lambda batch: {"pixel_values": torch.randn(batch, 3, 224, 224)},
        8,
        {EAGER: 0.92, INDUCTOR: 0.92},
        0.65,
    ),
}


def loss_of(output: Any) -> Tensor:
    """The loss of the model, or one of its hidden states."""
    loss: Tensor | None = getattr(output, "loss", None)
    return output.last_hidden_state.float().square().mean() if loss is None else loss


def step(model: nn.Module, run: Any, inputs: dict[str, Tensor]) -> Call:
    """Forward and backward."""

    def call() -> None:
        model.zero_grad(set_to_none=True)
        loss_of(run(**inputs)).backward()

    return call


def inference(run: Any, inputs: dict[str, Tensor]) -> Call:
    """Forward alone."""

    def call() -> None:
        with torch.no_grad():
            run(**inputs)

    return call


def as_dtype(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point ones in this dtype."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def model_rows(name: str, dtype: torch.dtype, quick: bool) -> Iterator[Row]:
    """The rows of one model."""
    make, inputs, batch, limits, most_saved = MODELS[name]
    torch.manual_seed(0)
    plain = make().to(dtype)
    model = copy.deepcopy(plain)
    begin = time.perf_counter()
    report = tops.fuse(model, strict=True)
    seconds = time.perf_counter() - begin
    what = f"{name}, {str(dtype).removeprefix('torch.')}"
    yield Row(f"{what}: seconds of fuse", "1 s", 1.0, seconds, f"{seconds:.2f} s", "1 s")
    given = as_dtype(inputs(batch), dtype)
    before, after = report.saved_bytes(**given)
    texts = [f"{count / 2**20:.1f} MiB" for count in (after, before)]
    yield Row(f"{what}: saved for backward", EAGER, most_saved, after / before, *texts)
    calls = {EAGER: step(plain, plain, given), FUSED: step(model, model, given)}
    is_compiled = dtype == torch.float32 and not quick
    if is_compiled:
        torch._dynamo.reset()
        compiled = torch.compile(plain)
        calls[INDUCTOR] = step(plain, compiled, given)
        calls[BOTH] = step(model, torch.compile(model), given)
        calls[INDUCTOR]()  # compiles, without the hooks that count
        theirs = saved_bytes(lambda: compiled(**given), (), plain.parameters())
        texts = [f"{count / 2**20:.1f} MiB" for count in (after, theirs)]
        yield Row(f"{what}: saved for backward", INDUCTOR, 1.0, after / theirs, *texts)
    times = interleave(calls, 3.0 if quick else 30.0, Clock(CPU))
    for other, limit in limits.items():
        if other in times:
            yield timed(f"{what}: step", other, limit, times, FUSED, other)
    if is_compiled:
        yield timed(f"{what}: step, compiled", INDUCTOR, 1.0, times, BOTH, INDUCTOR)
    for module in (plain, model):
        module.eval()
    for size in (1, 8):
        some = as_dtype(inputs(size), dtype)
        some.pop("labels", None)
        ways = {EAGER: inference(plain, some), FUSED: inference(model, some)}
        times = interleave(ways, 2.0 if quick else 10.0, Clock(CPU))
        yield timed(f"{what}: no_grad, batch {size}", EAGER, 0.92, times, FUSED, EAGER)


def rows(quick: bool) -> Iterator[Row]:
    """All rows, in the order in which they are measured."""
    for name in MODELS:
        for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
            yield from model_rows(name, dtype, quick)


if __name__ == "__main__":
    sys.exit(run("models", __doc__ or "", rows))
