"""Peak memory of a stack of blocks in training, above its parameters.

Run as a process of its own for each way, which prints bytes. What counts is the memory that the
kernel has given to the process: the high-water mark of its resident set (VmHWM), reset just before
the steps by writing 5 to /proc/self/clear_refs. So idle blocks of an allocator or a pool, rounding
up to pages, and huge pages all count, for every way alike, and nobody has to report anything. What
a first step leaves behind for good (compiled code, packed weights, threads) does not count: one
step runs before, then every idle buffer goes back to the kernel and the mark is set. bench.py has
malloc map every tensor on pages of its own, so that holes in the heap count for nobody.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import transformer_ops as tops

from .cases import COMPILED_WAYS, DTYPES, STACK, make_inputs, make_module
from .measure import compiled

STEPS = 3


def peak_bytes(name: str, dtype: str, size: tuple[int, ...], way: str, device: str) -> int:
    """The most bytes above parameters, input and output gradient in a few steps of SGD."""
    where = torch.device(device)
    module = nn.Sequential(*(make_module(name, way, size, DTYPES[dtype]) for _ in range(STACK)))
    module = module.to(where)
    (x,) = make_inputs(name, size, DTYPES[dtype], where)
    call = compiled(module) if way in COMPILED_WAYS else module
    return training_peak(call, module, x)


def training_peak(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> int:
    """The same of any module that is there, called by `call`."""
    grad = torch.ones_like(x)
    # Without foreach it updates in place and needs no memory of its own.
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        call(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        x.grad = None

    step()
    before = mark(x.device)
    for _ in range(STEPS):
        step()
    return high_water(x.device) - before


def mark(device: torch.device) -> int:
    """Give idle memory back, reset the high-water mark; the bytes in use."""
    gc.collect()
    # The pool of transformer_ops, in builds that have one.
    memory = getattr(tops, "memory", None)
    if memory is not None:
        memory.trim()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def high_water(device: torch.device) -> int:
    """The most bytes in use since `mark`."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found, f"no {field} in /proc/self/status"
    return 1024 * int(found[1])


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    print(
        peak_bytes(
            given["name"], given["dtype"], tuple(given["size"]), given["way"], given["device"]
        )
    )
