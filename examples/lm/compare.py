"""Both backends trained side by side: the same weights, the same batches, step by step in turn."""

from __future__ import annotations

import csv
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from .options import Options
from .report import saved_bytes
from .training import UNTIMED_STEPS, Run, interruptible, progress

OURS, PLAIN = BACKENDS = ("tops", "torch")


class Comparison:
    """A run of each backend. Each draws random numbers as if it were alone."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.runs: dict[str, Run] = {}
        self.seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
        self._random: dict[str, list[torch.Tensor]] = {}
        for backend in BACKENDS:
            own = replace(options, backend=backend)
            if backend == PLAIN:
                own = replace(own, saved="exact", recipe="none")
            self.runs[backend] = Run(own)
            self._random[backend] = self._random_state()

    @property
    def step(self) -> int:
        """Steps that both have done."""
        return len(self.seconds[PLAIN])

    def train(self) -> bool:
        """Train both to the last step. False where Ctrl-C ended it before."""
        order = list(BACKENDS)
        for run in self.runs.values():
            run.model.train()
        with interruptible() as interrupted, progress(0, self.options.steps, True) as bar:
            while self.step < self.options.steps and not interrupted():
                for backend in order:
                    self.seconds[backend].append(self._one_step(backend))
                # Neither always finds the caches that the other one left.
                order.reverse()
                bar.update()
        return self.step >= self.options.steps

    def _one_step(self, backend: str) -> float:
        self._restore_random_state(self._random[backend])
        start = time.perf_counter()
        # Reads the loss, which waits for the device.
        self.runs[backend]._one_step()
        seconds = time.perf_counter() - start
        self._random[backend] = self._random_state()
        return seconds

    # ---- what is shown

    def report(self) -> str:
        """Speed, saved bytes and losses of both; writes every step's loss and time."""
        table = Path(self.options.out) / "compare.csv"
        self.write_steps(table)
        tokens = self.options.batch * self.options.context
        kept = {backend: saved_bytes(run) / tokens for backend, run in self.runs.items()}
        bits = {backend: run.validate() for backend, run in self.runs.items()}
        timed = {b: times[UNTIMED_STEPS:] for b, times in self.seconds.items()}
        speeds = {b: tokens / statistics.median(t) if t else None for b, t in timed.items()}
        lines = [
            f"{'':<28}{OURS:>12}{PLAIN:>12}{f'{OURS} / {PLAIN}':>14}",
            line("tokens/s", speeds, ",.0f", self.speed_ratio()),
            line("saved bytes a token", kept, ",.0f", kept[OURS] / kept[PLAIN]),
            line("held-out bits per byte", bits, ".4f", None),
        ]
        if self.step:
            last = {backend: run.losses[-1] for backend, run in self.runs.items()}
            lines.append(line("loss of the last step, nats", last, ".4f", None))
        return "\n".join(
            [*lines, "", self.differences(), f"losses and times of every step: {table}"]
        )

    def speed_ratio(self) -> float | None:
        """How many times as fast ours is: the median of the ratios step by step."""
        pairs = list(zip(self.seconds[OURS], self.seconds[PLAIN], strict=True))[UNTIMED_STEPS:]
        return statistics.median(plain / ours for ours, plain in pairs) if pairs else None

    def differences(self) -> str:
        """How far the losses are apart, in words."""
        ours, plain = (self.runs[backend].losses for backend in BACKENDS)
        apart = [abs(a - b) for a, b in zip(ours, plain, strict=True)]
        if not apart:
            return "no step was done"
        why = " (each backend drew its own dropout masks)" if self.options.dropout else ""
        return (
            f"the losses differ by {statistics.fmean(apart):.2g} nats on average, "
            f"at most {max(apart):.2g}{why}"
        )

    def write_steps(self, path: Path) -> None:
        """Loss and seconds of every step and backend."""
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            names = [f"{what}_{backend}" for what in ("loss", "seconds") for backend in BACKENDS]
            writer.writerow(["step", *names])
            losses = [self.runs[backend].losses for backend in BACKENDS]
            seconds = [self.seconds[backend] for backend in BACKENDS]
            rows = zip(*losses, *seconds, strict=True)
            writer.writerows([step, *row] for step, row in enumerate(rows))

    # ---- random numbers

    def _random_state(self) -> list[torch.Tensor]:
        device = next(iter(self.runs.values())).device
        state = [torch.get_rng_state()]
        if device.type == "cuda":
            state.append(torch.cuda.get_rng_state(device))
        return state

    def _restore_random_state(self, state: list[torch.Tensor]) -> None:
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], self.runs[OURS].device)


def line(
    what: str, values: dict[str, float] | dict[str, float | None], form: str, ratio: float | None
) -> str:
    """A row of the report."""
    cells = ["-" if value is None else f"{value:{form}}" for value in values.values()]
    return (
        f"{what:<28}"
        + "".join(f"{cell:>12}" for cell in cells)
        + ("" if ratio is None else f"{ratio:>13.2f}x")
    )
