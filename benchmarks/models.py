"""Whole models of transformers and timm: plain, compiled, and with `tops.fuse`.

    python benchmarks/models.py              all of it, 15 minutes on 2 cores
    python benchmarks/models.py --quick      one of them, without Inductor

A step is forward, loss and backward of a model with random weights; rounds of all ways are
interleaved. Limits are the targets of the issue that asked for `fuse`. A model that recomputes
products (`fuse(model, recompute="products")`) has those of bytes, and may take as long as eager.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import timm
import torch
import transformers
from suite.cases import PRODUCTS
from suite.measure import saved_bytes
from suite.results import SECOND
from suite.rows import Row, run, timed
from suite.timing import Call, Clock, interleave
from torch import Tensor, nn

import transformer_ops as tops

CPU = torch.device("cpu")
# adapters.py takes two others.
QUICK = ("Llama h512 f1376, 4 layers, 512 tokens",)
EAGER, INDUCTOR, FUSED, BOTH = "eager", "Inductor", "fused", "fused, compiled"


class Model(NamedTuple):
    """A model, its input, and the most that it may take: the time of a step against eager and
    Inductor, and saved bytes and the peak of a step against eager, in float32 and in bfloat16."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    batch: int
    time: tuple[float, float]
    inductor: float | None  # None: not measured, since it takes minutes to compile
    saved: float
    peak: float
    adapt: Callable[[nn.Module], nn.Module] = lambda model: model  # of the model in its dtype
    base: str | None = None  # the format of the fused model's base; the plain one's is as it is


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


def smollm() -> nn.Module:
    """The shape of SmolLM-135M: 30 layers of 576, with 9 heads and 3 of keys and values."""
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


def timm_vit() -> nn.Module:
    """timm's ViT-S/16."""
    return timm.create_model("vit_small_patch16_224", num_classes=1000)


def tokens(batch: int, length: int) -> Tensor:
    """Random ones."""
    return torch.randint(0, 2048, (batch, length), generator=torch.Generator().manual_seed(0))


MODELS = {
    "Llama h512 f1376, 4 layers, 512 tokens": Model(
        llama,
        lambda batch: {"input_ids": tokens(batch, 512), "labels": tokens(batch, 512)},
        1,
        time=(0.82, 0.82),
        inductor=0.95,
        saved=0.55,
        peak=0.70,
    ),
    "SmolLM-135M shape, 512 tokens": Model(
        smollm,
        lambda batch: {"input_ids": tokens(batch, 512), "labels": tokens(batch, 512)},
        1,
        time=(0.85, 0.80),
        inductor=None,
        saved=0.45,
        peak=0.60,
    ),
    "MiniLM shape, 16 x 128 tokens, dropout 0.1": Model(
        minilm,
        lambda batch: {"input_ids": tokens(batch, 128)},
        16,
        time=(0.78, 0.75),
        inductor=0.80,
        saved=0.50,
        peak=0.65,
    ),
    "ViT-S/16, 8 images": Model(
        vit,
        lambda batch: {"pixel_values": images(batch)},
        8,
        time=(0.90, 0.85),
        inductor=0.92,
        saved=0.55,
        peak=0.70,
    ),
    "timm's ViT-S/16, 8 images": Model(
        timm_vit,
        lambda batch: {"x": images(batch)},
        8,
        time=(0.90, 0.85),
        inductor=None,
        saved=0.55,
        peak=0.70,
    ),
}


def images(batch: int) -> Tensor:
    """Random ones."""
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))


def loss_of(output: Any) -> Tensor:
    """The loss of the model, or one of what it gives."""
    loss: Tensor | None = getattr(output, "loss", None)
    found: Tensor = getattr(output, "last_hidden_state", output)
    return found.float().square().mean() if loss is None else loss


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


def in_bytes(what: str, against: str, limit: float, ours: int, theirs: int) -> Row:
    """A row of exact bytes."""
    texts = [f"{count / 2**20:.1f} MiB" for count in (ours, theirs)]
    return Row(what, against, limit, ours / theirs, *texts)


def model_rows(
    name: str,
    case: Model,
    dtype: torch.dtype,
    quick: bool,
    seconds: float = 30.0,
    sizes: tuple[int, ...] = (1, 8),
) -> Iterator[Row]:
    """The rows of one model, whose steps are timed for so long; `sizes`: batches of inference."""
    inputs, is_half = case.inputs, dtype == torch.bfloat16
    torch.manual_seed(0)
    plain = case.adapt(case.make().to(dtype))
    model, recomputed = copy.deepcopy(plain), copy.deepcopy(plain)
    if case.base is not None:
        for one in (model, recomputed):
            tops.quantization.quantize_(one, case.base, only="*.base_layer")
    begin = time.perf_counter()
    report = tops.fuse(model, strict=True)
    took = time.perf_counter() - begin
    reports = {
        "": report,
        f", {PRODUCTS}": tops.fuse(recomputed, strict=True, recompute="products"),
    }
    what = f"{name}, {str(dtype).removeprefix('torch.')}"
    yield Row(f"{what}: seconds of fuse", SECOND, 1.0, took, f"{took:.2f} s", SECOND)
    given = as_dtype(inputs(case.batch), dtype)
    plain_saved = saved_bytes(lambda: plain(**given), (), plain.parameters())
    plain_step = tops.memory.step_bytes(plain, loss=loss_of, **given)
    saved = {}
    for policy, each in reports.items():
        saved[policy] = each.saved_bytes(**given)[1]
        label = f"{what}{policy}: saved for backward"
        yield in_bytes(label, EAGER, case.saved, saved[policy], plain_saved)
        # Parameters are there before and after, and no part of what a step takes.
        steps = each.step(loss=loss_of, **given).after, plain_step
        peaks = [one.peak - one.parameters for one in steps]
        yield in_bytes(f"{what}{policy}: peak of a step", EAGER, case.peak, *peaks)
    modules = {EAGER: plain, FUSED: model, PRODUCTS: recomputed}
    calls = {way: step(module, module, given) for way, module in modules.items()}
    is_compiled = not is_half and not quick and case.inductor is not None
    if is_compiled:
        torch._dynamo.reset()
        compiled = torch.compile(plain)
        calls[INDUCTOR] = step(plain, compiled, given)
        calls[BOTH] = step(model, torch.compile(model), given)
        calls[INDUCTOR]()  # compiles, without the hooks that count
        theirs = saved_bytes(lambda: compiled(**given), (), plain.parameters())
        yield in_bytes(f"{what}: saved for backward", INDUCTOR, 1.0, saved[""], theirs)
    times = interleave(calls, 3.0 if quick else seconds, Clock(CPU))
    yield timed(f"{what}: step", EAGER, case.time[is_half], times, FUSED, EAGER)
    yield timed(f"{what}, {PRODUCTS}: step", EAGER, 1.0, times, PRODUCTS, EAGER)
    if is_compiled and case.inductor is not None:
        yield timed(f"{what}: step", INDUCTOR, case.inductor, times, FUSED, INDUCTOR)
        yield timed(f"{what}: step, compiled", INDUCTOR, 1.0, times, BOTH, INDUCTOR)
    for module in (plain, model):
        module.eval()
    for size in sizes if case.inductor is not None else ():
        some = as_dtype(inputs(size), dtype)
        some.pop("labels", None)
        ways = {EAGER: inference(plain, some), FUSED: inference(model, some)}
        times = interleave(ways, 2.0 if quick else 10.0, Clock(CPU))
        yield timed(f"{what}: no_grad, batch {size}", EAGER, 0.92, times, FUSED, EAGER)


def rows(quick: bool) -> Iterator[Row]:
    """All rows, in the order in which they are measured."""
    for name in QUICK if quick else MODELS:
        for dtype in (torch.float32,) if quick else (torch.float32, torch.bfloat16):
            yield from model_rows(name, MODELS[name], dtype, quick)


if __name__ == "__main__":
    sys.exit(run("models", __doc__ or "", rows))
