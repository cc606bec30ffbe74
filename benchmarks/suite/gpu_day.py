"""What a GPU is asked once it passes its checks: `python -m suite.gpu_day PART --out FILE`.

A part is one measurement that is useful alone and takes minutes: `benchmarks/gpu_check.sh --day`
runs all of them in their order. All ways of a part take turns in one run, in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import blocks
import experts
import head_loss
import recipes
import torch
from torch import Tensor, nn

import transformer_ops as tops

from .cases import COMPILED, EAGER, OURS, OURS_COMPILED
from .gpu import DTYPE, Line, block_in, fresh, input_of, write_lines
from .gpu_models import FULL, MIB, MODELS, Size, peak_bytes, step_of, tokens_of
from .gpu_timing import host_microseconds
from .machine import caption, describe
from .measure import compiled, make_calls, saved_bytes
from .timing import Call, Clock, interleave, ratio

LIGER = "Liger"


class Sizes(NamedTuple):
    """What is measured, and for how many seconds."""

    loss: head_loss.Size = head_loss.Size(8192, 4096, 128256)
    block: tuple[int, int, int] = (8192, 4096, 14336)
    experts: experts.Size = experts.Size(8192, 64, 8, 2048, 1024)
    host: tuple[tuple[int, int, int], ...] = ((4, 64, 256), (64, 1024, 4096))
    llama: tuple[int, int, int] = (16, 4, 2048)  # layers, batch, tokens
    model: Size = FULL
    seconds: float = 6.0
    calls: int = 200


TINY = Sizes(
    head_loss.Size(16, 32, 64),
    (8, 32, 64),
    experts.Size(8, 4, 2, 16, 16),
    ((4, 16, 32),),
    (1, 1, 8),
    Size(1, 1, 8, 0.1),
    0.05,
    3,
)


def compare(
    what: str, calls: dict[str, Call], against: list[str], limit: float, device: Any, seconds: float
) -> list[Line]:
    """Times and peaks of steps; ours against the fastest of `against`."""
    for call in calls.values():
        call()
    peaks = {way: peak_bytes(call, device) for way, call in calls.items()}
    times = interleave(calls, seconds, Clock(device))
    medians = {way: statistics.median(found) for way, found in times.items()}
    best = min(against, key=lambda way: medians[way])
    lines = []
    for way in (way for way in calls if way not in (EAGER, COMPILED, LIGER)):
        beside = "ms: " + ", ".join(f"{other} {found:.3f}" for other, found in medians.items())
        share = ratio(times[way], times[best])
        lines.append(Line(f"{what}, {way}", share, f"of {best}", limit, False, beside, medians))
        beside = "MiB: " + ", ".join(f"{other} {n / MIB:.0f}" for other, n in peaks.items())
        share = peaks[way] / peaks[EAGER]
        lines.append(Line(f"{what}, {way}, peak", share, "of eager", None, False, beside, peaks))
    return lines


def loss_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """The head of a language model and its loss."""
    size = sizes.loss
    with device:
        ways = head_loss.modules(size, DTYPE)
        target = torch.randint(0, size.classes, (size.rows,))
    x = input_of((size.rows, size.width), device)
    (weight,) = ways[head_loss.OURS].parameters()
    assert isinstance(weight, nn.Parameter)
    modules: dict[str, Any] = {EAGER: ways[EAGER], COMPILED: torch.compile(ways[EAGER])}
    try:
        from liger_kernel.transformers import (  # type: ignore[import-not-found]
            LigerFusedLinearCrossEntropyLoss,
        )
    except ImportError:
        print("[gpu_day] liger_kernel is not there", flush=True)
    else:
        loss = LigerFusedLinearCrossEntropyLoss()
        modules[LIGER] = lambda x, target: loss(weight, x, target)
    modules[OURS] = ways[head_loss.OURS]
    calls = {way: head_loss.step(module, x, target, weight) for way, module in modules.items()}
    return compare(str(size), calls, [COMPILED], 0.95, device, sizes.seconds)


def recipe_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """A Llama block in 8 and 4 bits."""
    tokens, h, f = sizes.block
    x = input_of((tokens, h), device)
    calls: dict[str, Call] = {}
    saved: dict[str, float] = {}
    for way in (EAGER, COMPILED, OURS, *recipes.RECIPES):
        name = way if way in recipes.RECIPES else "none"
        module = block_in(way if name == "none" else OURS, blocks.LLAMA_BLOCK, h, f, device)
        call = compiled(module) if way == COMPILED else module
        parameters: list[Tensor] = list(module.parameters())
        calls[way] = recipes.within(name, make_calls(call, [x], parameters)[1])
        calls[way]()
        with recipes.region(name):
            saved[way] = saved_bytes(call, [x], parameters) / tokens
    what = f"Llama block, T={tokens}, h={h}, f={f}"
    against = [EAGER, COMPILED, OURS]
    lines = compare(what, calls, against, 0.65, device, sizes.seconds)
    beside = "B a token: " + ", ".join(f"{way} {found:.0f}" for way, found in saved.items())
    for way in recipes.RECIPES:
        share = saved[way] / saved[OURS]
        lines.append(Line(f"{what}, {way}, saved", share, "of ours", 0.55, False, beside, saved))
    return lines


def expert_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """Experts against a layer on torch's grouped product."""
    size = sizes.experts
    ways = {way: module.to(device) for way, module in experts.modules(size, "bf16").items()}
    x = input_of((size.tokens, size.width), device)
    ids, probs = (given.detach().to(device) for given in experts.routings(size, 1)[0])
    probs.requires_grad_()
    calls = {}
    for name, way in ((experts.GROUPED_MM, EAGER), (experts.OURS, OURS)):
        module = ways[name]
        call = partial(lambda module, x, probs: module(x, ids, probs), module)
        calls[way] = make_calls(call, [x, probs], list(module.parameters()))[1]
    return compare(f"experts {size}", calls, [EAGER], 0.80, device, sizes.seconds)


def host_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """What a compiled call of a Llama block takes on the host."""
    lines = []
    for tokens, h, f in sizes.host:
        fresh()
        x = input_of((tokens, h), device)
        times: dict[str, float] = {}
        for way in (EAGER, OURS, OURS_COMPILED):
            module = block_in(way, blocks.LLAMA_BLOCK, h, f, device)
            call = compiled(module) if way == OURS_COMPILED else module
            step = make_calls(call, [x], list(module.parameters()))[1]
            host_microseconds(step, sizes.calls, device)
            found = [host_microseconds(step, sizes.calls, device) for _ in range(9)]
            times[way] = statistics.median(found)
        beside = ", ".join(f"{way} {found:.1f} us" for way, found in times.items())
        for way in (OURS, OURS_COMPILED):
            share = times[way] / times[EAGER]
            what = f"Llama block, T={tokens}, host time, {way}"
            lines.append(Line(what, share, "of eager", 0.6, False, beside, times))
    return lines


def llama(layers: int, device: torch.device) -> nn.Module:
    """A model of the shape of Llama-3.2-1B."""
    import transformers

    is_tiny = layers < 2
    config = transformers.LlamaConfig(
        hidden_size=32 if is_tiny else 2048,
        intermediate_size=64 if is_tiny else 8192,
        num_hidden_layers=layers,
        num_attention_heads=4 if is_tiny else 32,
        num_key_value_heads=2 if is_tiny else 8,
        vocab_size=4096 if is_tiny else 128256,
        tie_word_embeddings=True,
    )
    with device:
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.to(device, DTYPE)


def whole(
    what: str, plain: nn.Module, given: Any, limit: float, device: Any, s: Sizes
) -> list[Line]:
    """A plain model, the same under Inductor, and fused."""
    fused = copy.deepcopy(plain)
    report = tops.fuse(fused, strict=True)
    before, after = report.saved_bytes(**given)
    calls: dict[str, Call] = {
        EAGER: step_of(plain, plain, given),
        COMPILED: step_of(plain, torch.compile(plain), given),
        OURS: step_of(fused, fused, given),
    }
    lines = compare(what, calls, [EAGER, COMPILED], limit, device, s.seconds)
    beside = f"MiB: {after / MIB:.0f}, eager {before / MIB:.0f}"
    return [*lines, Line(f"{what}, saved", after / before, "of eager", None, False, beside, {})]


def llama_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """A step of a model of a billion parameters."""
    layers, batch, tokens = sizes.llama
    given = tokens_of(Size(layers, batch, tokens, 0), device)
    return whole("Llama-1B shape", llama(layers, device), given, 0.85, device, sizes)


def adapter_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """The same with adapters on all linear layers."""
    import peft

    layers, batch, tokens = sizes.llama
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(layers, device), config)
    given = tokens_of(Size(layers, batch, tokens, 0), device)
    return whole("Llama-1B shape, LoRA", model, given, 0.80, device, sizes)


def model_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """SmolLM, BERT and ViT against Inductor."""
    lines = []
    for name, (make, inputs) in MODELS.items():
        fresh()
        with device:
            plain = make(sizes.model).to(device, DTYPE)
        given = inputs(sizes.model, device)
        lines += whole(name, plain, given, 0.85, device, sizes)
        for line in lines[-3:]:
            print(line, flush=True)
    return lines


PARTS: dict[str, Callable[[torch.device, Sizes], list[Line]]] = {
    "recipes": recipe_lines,
    "loss": loss_lines,
    "whole": model_lines,
    "llama": llama_lines,
    "experts": expert_lines,
    "host": host_lines,
    "adapters": adapter_lines,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure a part and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only try the code")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    about = describe(device, torch.get_num_threads(), {})
    print(f"bfloat16; {caption(about)}", flush=True)
    fresh()
    lines = PARTS[options.part](device, TINY if options.tiny else Sizes())
    for line in lines:
        print(line, flush=True)
    if options.out:
        write_lines(options.out, about, lines, [])
    return 0


if __name__ == "__main__":
    sys.exit(main())
