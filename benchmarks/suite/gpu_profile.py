"""Which kernels a step of each block spends its time in: `python -m suite.gpu_profile --out FILE`.

For whoever tunes: a line a kernel, most time first, of ours and of eager torch.nn.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import blocks
import torch
from torch.profiler import ProfilerActivity, profile

from .cases import EAGER, OURS
from .gpu import TINY, Sizes, block_in, fresh, input_of
from .gpu_timing import synchronize
from .measure import make_calls
from .timing import Call

STEPS = 3
SHOWN = 14


class Kernel(NamedTuple):
    """A kernel's share of a step."""

    name: str
    calls: float
    microseconds: float


def kernels(step: Call, device: torch.device) -> list[Kernel]:
    """By time, most first; on another device than CUDA its operators."""
    cuda = device.type == "cuda"
    for _ in range(2):
        step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
        synchronize(device)
    rows = []
    for event in found.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0:
            rows.append(Kernel(event.key, event.count / STEPS, spent / STEPS))
    return sorted(rows, key=lambda row: -row.microseconds)


def main(arguments: list[str] | None = None) -> int:
    """Profile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that only try the code")
    parser.add_argument("--out", type=Path, help="JSON")
    options = parser.parse_args(arguments)
    device, sizes = torch.device(options.device), TINY if options.tiny else Sizes()
    tokens, h, f = sizes.block
    results: dict[str, list[Kernel]] = {}
    for block in (blocks.GELU_BLOCK, blocks.LLAMA_BLOCK):
        for way in (OURS, EAGER):
            fresh()
            x = input_of((tokens, h), device)
            module = block_in(way, block, h, f, device)
            step = make_calls(module, [x], list(module.parameters()))[1]
            rows = results[f"{block.name}, {way}"] = kernels(step, device)
            total = sum(row.microseconds for row in rows)
            print(f"\n{block.name}, {way}, T={tokens}, h={h}, f={f}: {total:.0f} us a step")
            for row in rows[:SHOWN]:
                print(f"{row.microseconds:9.1f} us {row.calls:5.1f}x  {row.name[:110]}")
    if options.out:
        content = {name: [row._asdict() for row in rows] for name, rows in results.items()}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
