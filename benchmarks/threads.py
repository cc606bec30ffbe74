"""Each op on fewer and on more threads than there are cores, and how loops divide up to 128 cores.

    python benchmarks/threads.py [--quick] [--check] [--out FILE.json] [--record]

The first table is computed, by the functions with which the library divides its loops. Then each op
runs forward and backward with `torch.set_num_threads(k)`, all k interleaved: on more threads than
cores an op takes longer, but not many times as long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from suite import tables
from suite.rows import Row, run, timed
from suite.timing import Clock
from torch import nn

import transformer_ops as tops

ROWS, WIDTH = 2048, 1024
BASE = 2
# The most that so many threads may take of the time of BASE, on two cores.
LIMITS = {1: 2.2, 4: 1.3, 8: 1.4, 16: 1.6}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "gelu": lambda: tops.GELU(),
    "swiglu": lambda: tops.SwiGLU(),
    "dropout": lambda: tops.Dropout(0.1),
    "layer_norm": lambda: tops.LayerNorm(WIDTH),
    "rms_norm": lambda: tops.RMSNorm(WIDTH),
    "linear": lambda: tops.Linear(WIDTH, 256),
}


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of forward and backward by the number of threads, a number a round.

    OpenMP starts and ends threads when their number changes, so a call comes before those that are
    timed."""
    module = tops.Sequential(MODULES[name]())
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    grad, wanted = torch.randn_like(module(x)), [x, *module.parameters()]
    before, clock, order = torch.get_num_threads(), Clock(torch.device("cpu")), [BASE, *LIMITS]
    times: dict[str, list[float]] = {str(threads): [] for threads in order}

    def call() -> None:
        torch.autograd.grad(module(x), wanted, grad)

    for _ in range(rounds):
        for threads in order:
            torch.set_num_threads(threads)
            call()
            times[str(threads)].append(1e3 * clock.seconds(call, 5))
        order = [*order[1:], order[0]]
    torch.set_num_threads(before)
    return times


def rows(quick: bool) -> Iterator[Row]:
    """The table of cores, printed; then a row for each op and number of threads."""
    print(tables.cores().text(), end="\n\n")
    for name in MODULES:
        times = measure(name, 5 if quick else 25)
        for threads, limit in LIMITS.items():
            what = f"{name} {ROWS}x{WIDTH}, {threads} thread{'s' * (threads > 1)}"
            yield timed(what, f"{BASE} threads", limit, times, str(threads), str(BASE))


if __name__ == "__main__":
    sys.exit(run("threads", __doc__ or "", rows))
