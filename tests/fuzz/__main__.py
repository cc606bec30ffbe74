"""Runs the fuzzers in turn: `python -m tests.fuzz --seconds 60`; exit code 1 after a failure."""

from __future__ import annotations

import argparse
import importlib
import os
import random
import select
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from . import FUZZERS, report
from . import __name__ as package

ROOT = Path(__file__).resolve().parent.parent.parent
# A seed takes seconds at most, so one that takes this long hangs.
SEED_LIMIT = 120.0
# The limit for the imports of a child, which may be slow on a busy machine.
START_LIMIT = 600.0


class SeedFailed(Exception):
    """A seed failed; the text says how."""


class InProcess:
    """Runs the seeds of a fuzzer here."""

    def __init__(self, fuzzer: ModuleType) -> None:
        self.fuzzer = fuzzer

    def run(self, seed: int) -> int:
        try:
            return self.fuzzer.run_seed(seed)
        except Exception as error:
            raise SeedFailed(traceback.format_exc()) from error

    def close(self) -> None:
        pass


class Isolated:
    """Runs the seeds of a fuzzer in a child that is replaced when it crashes or hangs."""

    def __init__(self, name: str, limit: float) -> None:
        self.name, self.limit = name, limit
        self.folder = tempfile.TemporaryDirectory()
        self.last = Path(self.folder.name) / "last"
        self.errors = Path(self.folder.name) / "errors"
        self.child: subprocess.Popen[bytes] | None = None

    def run(self, seed: int) -> int:
        self.last.unlink(missing_ok=True)
        self.errors.write_bytes(b"")
        if self.child is None:
            self.child = self._start()
            answer = self._read_answer(START_LIMIT)
            if answer != ["ready"]:
                raise SeedFailed(self._explain(answer, START_LIMIT))
        assert self.child.stdin is not None
        self.child.stdin.write(f"{seed}\n".encode())
        self.child.stdin.flush()
        answer = self._read_answer(self.limit)
        if answer and answer[0] == "ok":
            return int(answer[1])
        raise SeedFailed(self._explain(answer, self.limit))

    def _read_answer(self, limit: float) -> list[str]:
        """The words of the answer; empty after the child has ended."""
        assert self.child is not None and self.child.stdout is not None
        ready, _, _ = select.select([self.child.stdout], [], [], limit)
        return self.child.stdout.readline().decode().split() if ready else ["hung"]

    def _start(self) -> subprocess.Popen[bytes]:
        with self.errors.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", f"{package}.child", self.name, str(self.limit)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, report.VARIABLE: str(self.last)},
            )

    def _explain(self, answer: list[str], limit: float) -> str:
        assert self.child is not None
        if answer == ["hung"]:
            how = f"the child did not answer for {limit:g} s"
            self.close_child()
        elif answer:
            how = "the child raised"
        else:
            how = f"the child ended with {self.child.wait()}"
            self.child = None
        lines = [how, self.errors.read_text(errors="replace")[-6000:]]
        if self.last.exists():
            lines.append("the last thing it was about to do:\n" + self.last.read_text())
        return "\n".join(lines)

    def close_child(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child = None

    def close(self) -> None:
        self.close_child()
        self.folder.cleanup()


@dataclass
class Count:
    seeds: int = 0
    checks: int = 0
    seconds: float = 0.0
    failed: list[int] = field(default_factory=list)


def make_runner(name: str, limit: float) -> InProcess | Isolated:
    fuzzer = importlib.import_module(f".{name}", package)
    return Isolated(name, limit) if fuzzer.ISOLATED else InProcess(fuzzer)


def run_one(name: str, runner: InProcess | Isolated, seed: int, count: Count) -> None:
    start = time.perf_counter()
    try:
        count.checks += runner.run(seed)
    except SeedFailed as error:
        count.failed.append(seed)
        print(f"FAILED {name} seed {seed}:\n{error}")
        print(
            f"repeat it: python -m tests.fuzz --only {name} --seed {seed} --seeds 1\n", flush=True
        )
    count.seeds += 1
    count.seconds += time.perf_counter() - start


def run_all(names: list[str], options: argparse.Namespace) -> dict[str, Count]:
    """Runs the fuzzers in turn as long as there is time, but each one once; one that has failed is
    left out."""
    runners = {name: make_runner(name, options.limit) for name in names}
    end = time.monotonic() + options.seconds
    counts = {name: Count() for name in names}

    def goes_on(name: str) -> bool:
        count = counts[name]
        return len(count.failed) < options.failures and count.seeds != options.seeds

    try:
        while active := [name for name in names if goes_on(name)]:
            # The fuzzer that had the least time is next: a seed of one takes as long as many of
            # another.
            name = min(active, key=lambda name: counts[name].seconds)
            seed = options.seed + counts[name].seeds
            run_one(name, runners[name], seed, counts[name])
            is_late = options.seeds is None and time.monotonic() > end
            if is_late and all(count.seeds for count in counts.values()):
                break
    finally:
        for runner in runners.values():
            runner.close()
    return counts


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of them together")
    parser.add_argument("--only", default=",".join(FUZZERS), help="names, with commas between")
    parser.add_argument("--seed", default="0", help="the first seed, or 'random'")
    parser.add_argument("--seeds", type=int, help="this many for each, whatever time they take")
    parser.add_argument("--failures", type=int, default=1, help="leave a fuzzer after so many")
    parser.add_argument("--limit", type=float, default=SEED_LIMIT, help="seconds before it hangs")
    options = parser.parse_args(arguments)
    options.seed = random.randrange(10**6) * 1000 if options.seed == "random" else int(options.seed)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    names = options.only.split(",")
    unknown = set(names) - {*FUZZERS, "planted"}
    if unknown:
        raise SystemExit(f"--only must name fuzzers of {', '.join(FUZZERS)}, got {sorted(unknown)}")
    print(f"first seed {options.seed}", flush=True)
    counts = run_all(names, options)
    for name, count in counts.items():
        print(
            f"{name:12} {count.seeds:6} seeds {count.checks:8} checks {count.seconds:6.1f} s"
            + (f"  FAILED: {count.failed}" if count.failed else "")
        )
    return int(any(count.failed for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
