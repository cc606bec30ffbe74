"""What the CUDA backend should reach on an H200, as a table: `python -m suite.gpu --out FILE`.

Norms and elementwise ops are timed alone on the GPU, each call with a cold L2 cache, forward and
backward apart, and against a copy measured in the same run; blocks, calls and graphs against eager
torch.nn and torch.compile. A target that is missed is a line that says NO; an error is an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import blocks
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import transformer_ops as tops

from .cases import COMPILED, COMPILED_WAYS, EAGER, OURS, OURS_COMPILED
from .gpu_timing import GpuTimer, captured, host_microseconds, passes, synchronize
from .machine import caption, describe
from .measure import compiled, make_calls, saved_bytes
from .timing import Call, Clock, interleave, ratio

DTYPE = torch.bfloat16
BYTES = 2
FORWARD, BACKWARD = "forward", "backward"


class Sizes(NamedTuple):
    """What is measured, [T, h] or [T, h, f], and how often."""

    norms: tuple[tuple[int, int], ...] = ((8192, 4096), (16384, 4096))
    elementwise: tuple[int, int] = (8192, 14336)
    block: tuple[int, int, int] = (8192, 4096, 14336)
    host: tuple[int, int, int] = (4, 64, 256)  # the GPU waits for the host
    graph: tuple[int, int, int] = (64, 1024, 4096)
    samples: int = 30
    calls: int = 200


TINY = Sizes(((8, 32),), (8, 32), (8, 32, 64), (4, 16, 32), (4, 16, 32), samples=3, calls=5)

# ---- the targets

# Microseconds by rows of 4096 on an H200, which copies 4.3 TB/s: what cudnn-frontend's benchmark
# gives for RMSNorm (2026-02).
NORM_SPEED = 4.3
NORM_LIMITS = {FORWARD: {8192: 35.0, 16384: 72.0}, BACKWARD: {8192: 58.0, 16384: 106.0}}
COPY_SHARES = {FORWARD: 0.85, BACKWARD: 0.80}
BLOCK_SPEEDUP, GRAPH_SPEEDUP = 1.08, 2.0
HOST_RATIOS = {FORWARD: 0.6, "forward+backward": 0.7}
# Bytes a token, as on CPU: tests/memory/test_recompute.py.
SAVED: dict[str, Callable[[int, int], float]] = {
    "GELU block": lambda h, f: BYTES * (h + f) + 8 + h / 8,
    "Llama block": lambda h, f: BYTES * (h + 2 * f) + 4,
}


class Line(NamedTuple):
    """A row of the table; `at_least` says on which side of the limit it should be."""

    what: str
    value: float
    unit: str
    limit: float | None
    at_least: bool
    beside: str
    details: dict[str, Any]

    @property
    def ok(self) -> bool | None:
        """None without a limit."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        side = "at least" if self.at_least else "at most"
        target = "no target" if self.limit is None else f"{side} {self.limit:g} {self.unit}"
        said = {True: "ok", False: "NO", None: "-"}[self.ok]
        value = f"{self.value:.4g} {self.unit}"
        return f"{self.what:<46} {value:<14} {target:<22} {said:<3} {self.beside}"


# ---- what is called


def input_of(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A leaf of random numbers."""
    return torch.randn(shape, dtype=DTYPE, device=device).requires_grad_()


def norms(h: int, device: torch.device) -> dict[str, nn.Module]:
    """RMSNorm in each way."""
    found = {way: nn.RMSNorm(h, eps=1e-5) for way in (EAGER, COMPILED)} | {OURS: tops.RMSNorm(h)}
    return {way: module.to(device, DTYPE) for way, module in found.items()}


def block_in(way: str, block: blocks.Block, h: int, f: int, device: torch.device) -> nn.Module:
    """A block in one way."""
    torch.manual_seed(0)
    make = block.ours if way in (OURS, OURS_COMPILED) else block.eager
    with device:
        return make(h, f).to(device, DTYPE)


def by_pass(modules: dict[str, nn.Module], x: Tensor) -> dict[str, dict[str, Call]]:
    """Forward and backward calls, by pass and way."""
    calls: dict[str, dict[str, Call]] = {FORWARD: {}, BACKWARD: {}}
    # A compiled backward may be called again on the same graph.
    with torch._functorch.config.patch(donated_buffer=False):
        for way, module in modules.items():
            call = compiled(module) if way in COMPILED_WAYS else module
            for name, found in passes(call, x, list(module.parameters())).items():
                found()
                calls[name][way] = found
    return calls


def fresh() -> None:
    """A start that does not depend on what ran before."""
    torch._dynamo.reset()
    torch.manual_seed(0)


# ---- the rows


def norm_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """RMSNorm against published times."""
    timer, lines = GpuTimer(device, sizes.samples), []
    for rows, h in sizes.norms:
        fresh()
        source = input_of((rows, h), device).detach()
        target = torch.empty_like(source)
        for name, calls in by_pass(norms(h, device), input_of((rows, h), device)).items():
            times = timer.microseconds({**calls, "copy": partial(target.copy_, source)})
            speed = 2 * rows * h * BYTES / times["copy"] / 1e6
            beside = f"eager {times[EAGER]:.1f}, compiled {times[COMPILED]:.1f}, "
            beside += f"the copy {speed:.2f} TB/s"
            limit = NORM_LIMITS[name].get(rows)
            # On a GPU with slower memory it takes longer by as much.
            limit = None if limit is None else limit * max(1.0, NORM_SPEED / speed)
            what = f"RMSNorm {name}, {rows}x{h}"
            lines.append(Line(what, times[OURS], "us", limit, False, beside, times))
    return lines


def elementwise_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """SwiGLU and GELU, in bytes a second, against a copy."""
    timer, lines = GpuTimer(device, sizes.samples), []
    rows, f = sizes.elementwise
    source = input_of((rows, f), device).detach()
    target = torch.empty_like(source)
    # Reads and writes of [T, f].
    cases: list[tuple[str, nn.Module, int, dict[str, int]]] = [
        ("GELU", tops.GELU(), f, {FORWARD: 2, BACKWARD: 3}),
        ("SwiGLU", tops.SwiGLU(), 2 * f, {FORWARD: 3, BACKWARD: 5}),
    ]
    for label, module, width, moves in cases:
        fresh()
        for name, calls in by_pass({OURS: module}, input_of((rows, width), device)).items():
            times = timer.microseconds({**calls, "copy": lambda: target.copy_(source)})
            share = moves[name] / times[OURS] / (2 / times["copy"])
            speed = 2 * rows * f * BYTES / times["copy"] / 1e6
            beside = f"{times[OURS]:.1f} us, the copy {speed:.2f} TB/s"
            what = f"{label} {name}, {rows}x{f}"
            limit = 100 * COPY_SHARES[name]
            lines.append(Line(what, 100 * share, "% of copy", limit, True, beside, times))
    return lines


def block_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """Forward and backward of whole blocks, and what they save."""
    lines = []
    tokens, h, f = sizes.block
    for block in (blocks.GELU_BLOCK, blocks.LLAMA_BLOCK):
        fresh()
        x = input_of((tokens, h), device)
        calls, saved = {}, {}
        for way in (EAGER, COMPILED, OURS, OURS_COMPILED):
            module = block_in(way, block, h, f, device)
            call = compiled(module) if way in COMPILED_WAYS else module
            parameters: list[Tensor] = list(module.parameters())
            calls[way] = make_calls(call, [x], parameters)[1]
            calls[way]()
            saved[way] = saved_bytes(call, [x], parameters) / tokens
        times = interleave(calls, 3.0, Clock(device))
        medians = {way: statistics.median(found) for way, found in times.items()}
        best = min((EAGER, COMPILED), key=lambda way: medians[way])
        what = f"{block.name}, T={tokens}, h={h}, f={f}"
        beside = "ms: " + ", ".join(f"{way} {found:.3f}" for way, found in medians.items())
        for way in (OURS, OURS_COMPILED):
            limit = BLOCK_SPEEDUP if way == OURS else None
            speedup = ratio(times[best], times[way])
            label = what + ("" if way == OURS else ", compiled")
            lines.append(Line(label, speedup, "x faster", limit, True, beside, medians))
        beside = f"eager {saved[EAGER]:.0f}, compiled {saved[COMPILED]:.0f}"
        limit = SAVED[block.name](h, f)
        lines.append(Line(f"{what}, saved", saved[OURS], "B a token", limit, False, beside, saved))
    return lines


def epilogue_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """Is a GELU in the product's epilogue faster than in a pass of its own?"""
    fresh()
    typed = torch.ops.transformer_ops
    tokens, h, f = sizes.block
    x, w, b = (input_of(size, device).detach() for size in ((tokens, h), (f, h), (f,)))
    times = GpuTimer(device, sizes.samples).microseconds(
        {
            "epilogue": lambda: typed.linear_bias_activation(x, w, b, "gelu", True),
            "apart": lambda: typed.gelu(typed.linear_epilogue(x, w, b, None, 1.0)),
            "torch": lambda: nn.functional.gelu(nn.functional.linear(x, w, b), approximate="tanh"),
        }
    )
    beside = ", ".join(f"{way} {spent:.0f} us" for way, spent in times.items())
    what = f"Linear + bias + GELU in one, T={tokens}"
    return [Line(what, times["apart"] / times["epilogue"], "x faster", None, True, beside, times)]


def host_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """What a call of a Llama block takes on the host."""
    fresh()
    tokens, h, f = sizes.host
    x = input_of((tokens, h), device)
    calls: dict[str, dict[str, Call]] = {name: {} for name in HOST_RATIOS}
    for way in (EAGER, OURS):
        module = block_in(way, blocks.LLAMA_BLOCK, h, f, device)
        found = make_calls(module, [x], list(module.parameters()))
        for name, call in zip(HOST_RATIOS, found, strict=True):
            calls[name][way] = call
    lines = []
    for name, limit in HOST_RATIOS.items():
        for call in calls[name].values():
            host_microseconds(call, sizes.calls, device)
        times: dict[str, list[float]] = {way: [] for way in calls[name]}
        for _ in range(sizes.samples):
            for way, call in calls[name].items():
                times[way].append(host_microseconds(call, sizes.calls, device))
        medians = {way: statistics.median(found) for way, found in times.items()}
        share = ratio(times[OURS], times[EAGER])
        beside = f"{medians[OURS]:.1f} us, eager {medians[EAGER]:.1f}"
        what = f"Llama block, host time, {name}"
        lines.append(Line(what, share, "of eager", limit, False, beside, medians))
    return lines


def graph_lines(device: torch.device, sizes: Sizes) -> list[Line]:
    """A training step of a small block, replayed from a CUDA graph."""
    lines = []
    tokens, h, f = sizes.graph
    for block in (blocks.GELU_BLOCK, blocks.LLAMA_BLOCK):
        fresh()
        module = block_in(OURS, block, h, f, device)
        x = input_of((tokens, h), device)
        step = make_calls(module, [x], list(module.parameters()))[1]
        times = interleave({"step": step, "graph": captured(step, device)}, 0.5, Clock(device))
        medians = {way: 1e3 * statistics.median(found) for way, found in times.items()}
        beside = f"{medians['step']:.0f} us to {medians['graph']:.0f} us"
        what = f"{block.name}, CUDA graph, T={tokens}, h={h}"
        speedup = ratio(times["step"], times["graph"])
        lines.append(Line(what, speedup, "x faster", GRAPH_SPEEDUP, True, beside, medians))
    return lines


# ---- all of it

PARTS = (norm_lines, elementwise_lines, epilogue_lines, block_lines, host_lines, graph_lines)


def compile_all(device: torch.device, sizes: Sizes) -> None:
    """Fill Inductor's cache with what the table will compile."""
    for rows, h in sizes.norms:
        fresh()
        by_pass({COMPILED: norms(h, device)[COMPILED]}, input_of((rows, h), device))
    tokens, h, f = sizes.block
    for block in (blocks.GELU_BLOCK, blocks.LLAMA_BLOCK):
        fresh()
        x = input_of((tokens, h), device)
        for way in COMPILED_WAYS:
            module = block_in(way, block, h, f, device)
            make_calls(compiled(module), [x], list(module.parameters()))[1]()
    synchronize(device)


def table(device: torch.device, sizes: Sizes) -> Iterator[tuple[list[Line], list[str]]]:
    """After each part the rows so far, and the errors of parts that failed: the others go on."""
    lines: list[Line] = []
    errors: list[str] = []
    for part in PARTS:
        try:
            found = part(device, sizes)
        except Exception as error:
            traceback.print_exc()
            errors.append(f"{part.__name__}: {type(error).__name__}: {error}")
        else:
            lines += found
            for line in found:
                print(line, flush=True)
        yield lines, errors


def write_lines(path: Path, about: dict[str, Any], lines: list[Line], errors: list[str]) -> None:
    """The table as JSON."""
    rows = [{**line._asdict(), "ok": line.ok} for line in lines]
    content = json.dumps({"about": about, "lines": rows, "errors": errors}, indent=1)
    path.write_text(content + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only try the code")
    parser.add_argument("--compile-only", action="store_true", help="fill Inductor's cache")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    device, sizes = torch.device(options.device), TINY if options.tiny else Sizes()
    # Inductor keeps the configurations that it found fastest; those of --compile-only were found
    # while others had the GPU too, and would slow what ours is compared to.
    inductor_config.autotune_local_cache = False
    if options.compile_only:
        compile_all(device, sizes)
        return 0
    about = describe(device, torch.get_num_threads(), {})
    print(f"bfloat16; {caption(about)}", flush=True)
    errors: list[str] = []
    for lines, errors in table(device, sizes):
        # Each time: whoever starts this may not let it come to its end.
        if options.out:
            write_lines(options.out, about, lines, errors)
    for error in errors:
        print(f"[gpu] {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
