"""How much of the products' time passes while a slow process group is at work.

    python benchmarks/overlap.py [--quick]

The group has two ranks, of which one is this process. Each of its collectives takes `SLOWNESS`
times as long as the products beside it, on a thread that sleeps. Serial: the ops one after another.
hidden = (serial - beside) / products, of each round; all numbers are medians over interleaved
rounds, on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future, _register_process_group

import transformer_ops as tops
from transformer_ops.ops.collective import ReduceGradient

SLOWNESS = 4.0
LEAST = 0.8  # of the time of the products
Call = Callable[[], object]


class SlowGroup(dist.ProcessGroup):
    """Rank 0 of two; the other one holds zeros. One collective at a time, `seconds` for a row."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.seconds = 0.0
        self._free = 0.0  # when the last one ends
        self._queue: SimpleQueue[tuple[float, Call, Any]] = SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def getGroupName(self) -> str:
        """What torch asks for."""
        return "slow"

    @torch.no_grad()
    def _serve(self) -> None:
        while True:
            end, move, future = self._queue.get()
            time.sleep(max(end - time.perf_counter(), 0.0))
            future.set_result(move())

    def _start(self, rows: int, move: Call) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._free = max(self._free, time.perf_counter()) + self.seconds * rows
        self._queue.put((self._free, move, future))
        return _create_work_from_future(future)

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None) -> Any:
        """The rows of this rank, and zeros."""

        def move() -> list[Tensor]:
            output.zero_()[: len(tensor)].copy_(tensor)
            return [output]

        return self._start(len(output), move)

    _allgather_base = all_gather_single  # type: ignore[assignment]  # before torch 2.15

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Any:
        return self.all_gather_single(outputs[0], inputs[0])

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
    ) -> Any:
        """The first half of the rows."""
        output, tensor = outputs[0], inputs[0]
        return self._start(len(tensor), lambda: [output.copy_(tensor[: len(output)])])

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        """What is there."""
        return self._start(len(tensors[0]), lambda: tensors)


class Case(NamedTuple):
    """A rule, its pass, the ops it covers, and the products that lie beside collectives."""

    rule: str
    backward: bool
    ops: list[tops.FusibleOperation]
    rows: int  # of the input
    width: int
    moved: int  # rows of all ranks
    products: Call


def cases(group: SlowGroup, rows: int, width: int) -> list[Case]:
    """One for each rule with a collective."""
    x, w = torch.randn(rows, width), torch.randn(width, width)

    def linear() -> tops.FusibleOperation:
        return tops.BasicLinear(width, width)

    def one() -> Tensor:
        return x @ w.t()

    def dgrad() -> Tensor:
        return x @ w

    def wgrad() -> Tensor:
        return x.t() @ x

    def both() -> tuple[Tensor, Tensor]:
        return dgrad(), wgrad()

    sizes = {"width": width, "moved": rows}
    gather = [tops.AllGather(group), linear()]
    scatter = [linear(), tops.ReduceScatter(group)]
    reduce = [ReduceGradient(group), linear()]
    return [
        Case("gather_linear", False, gather, rows // 2, products=one, **sizes),
        Case("linear_scatter", False, scatter, rows, products=one, **sizes),
        Case("gather_linear", True, gather, rows // 2, products=both, **sizes),
        Case("linear_scatter", True, scatter, rows, products=dgrad, **sizes),
        Case("reduce_gradient_linear", True, reduce, rows, products=wgrad, **sizes),
    ]


def make_call(
    case: Case, group: SlowGroup, slow: float
) -> Callable[[], tuple[float, list[Tensor]]]:
    """Seconds of the pass, and its results; all but the pass runs at full speed."""
    torch.manual_seed(0)
    x = torch.randn(case.rows, case.width, requires_grad=case.backward)
    leaves = [x, *(p for op in case.ops for p in op.parameters())]
    module = tops.Sequential(*case.ops)

    def call() -> tuple[float, list[Tensor]]:
        group.seconds = 0.0 if case.backward else slow
        start = time.perf_counter()
        with torch.set_grad_enabled(case.backward):
            results = [module(x)]
        if case.backward:
            group.seconds, given = slow, torch.ones_like(results[0])
            start = time.perf_counter()
            results = list(torch.autograd.grad(results[0], leaves, given))
        return time.perf_counter() - start, results

    return call


def timed(call: Call) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(case: Case, group: SlowGroup, rounds: int) -> tuple[list[float], float, str]:
    """Seconds of the products, serial, beside; the share; and how the results differ."""
    alone = statistics.median(timed(case.products) for _ in range(2 * rounds))
    slow = SLOWNESS * alone / case.moved
    serial, overlapped = (make_call(case, group, slow) for _ in range(2))
    handles = [handle for handle in tops.fusions() if handle.name == case.rule]
    found: list[list[float]] = [[], [], []]
    for number in range(rounds + 1):
        with contextlib.ExitStack() as stack:
            for handle in handles:
                stack.enter_context(handle.disabled())
            one, want = serial()
        other, got = overlapped()
        if number:  # the first one plans
            for times, seconds in zip(found, (timed(case.products), one, other), strict=True):
                times.append(seconds)
    same = all(map(torch.equal, got, want))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    share = statistics.median((b - c) / a for a, b, c in zip(*found, strict=True))
    medians = [statistics.median(times) for times in found]
    return medians, share, "equal bits" if same else "close"


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each rule; 1 where one hides less than `LEAST`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    quick = parser.parse_args(arguments).quick
    rows, width, rounds = (1024, 256, 3) if quick else (2048, 1024, 9)
    group = SlowGroup()
    _register_process_group(group.group_name, group)
    print(
        f"{'rule':24}{'pass':10}{'products':>10}{'serial':>10}{'beside':>10}{'hidden':>9}  results"
    )
    shares = []
    for case in cases(group, rows, width):
        seconds, share, same = measure(case, group, rounds)
        shares.append(share)
        times = "".join(f"{1e3 * value:7.1f} ms" for value in seconds)
        name = "backward" if case.backward else "forward"
        print(f"{case.rule:24}{name:10}{times}{share:9.0%}  {same}")
    return 0 if quick or min(shares) >= LEAST else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
