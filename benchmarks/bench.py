"""Time, saved bytes and peak memory of ops and blocks, against eager torch.nn and torch.compile.

    python benchmarks/bench.py                      all of it, over half an hour on 2 quiet cores
    python benchmarks/bench.py --quick --check      what CI runs, about five minutes
    python benchmarks/bench.py --only rms_norm/bf16 --ways eager,ours
    python benchmarks/bench.py --record             also writes benchmarks/recorded.json and docs/

All ways of a case are timed in turn, round after round, in one process; a ratio is the median of
the rounds' ratios. Each setting of the allocator has a process of its own, and so has each stack
whose peak memory is measured. Cases are named as in rms_norm/fp32/8192x2048/default,
peak/Llama block/bf16/1024x768x2048/ours, avx2, experts, head_loss, layer, quantized, startup,
threads and models (programs of those names) and calls (call_cost.py); --list shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from suite import cases, check, pages, plots, tables
from suite.machine import ROOT, caption, describe
from suite.results import Results
from suite.rows import WORSE

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"
CALLS = "calls"
LIMITED = (
    "adapters",
    "avx2",
    "experts",
    "head_loss",
    "layer",
    "quantized",
    "startup",
    "threads",
    "models",
)  # of rows.py
PEAK = "peak"
TUNABLES = {
    # glibc keeps what it has got from the kernel, and gets it in large pieces.
    cases.WARM: "glibc.malloc.mmap_threshold=4294967296:"
    "glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=1073741824",
    # Every tensor has pages of its own, given back at once. What counts is then what is alive, to
    # 1 %; with holes in the heap, which differ from process to process, to 10 %.
    PEAK: "glibc.malloc.mmap_threshold=65536",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="few cases, no Inductor, no peak memory")
    add("--check", action="store_true",
        help=f"exit 1 where a ratio is over {check.WORSE} times the recorded one "
        f"(times on another processor: {check.WORSE_ELSEWHERE:g})")  # fmt: skip
    add("--recorded", type=Path, default=RECORDED, help="what --check compares to")
    add("--only", action="append", default=[], metavar="PATTERN",
        help="cases whose name contains it; * and ? as in a shell; may be repeated")  # fmt: skip
    add("--ways", default=",".join(cases.WAYS), help="default: %(default)s")
    add("--threads", type=int, default=2, help="default: 2")
    add("--device", default="auto", help="auto: CUDA where there is one, else cpu")
    add("--seconds", type=float, default=1.0, help="factor on the time that each case is given")
    add("--out", type=Path, default=ROOT / "out" / "bench", help="folder for JSON and plots")
    add("--record", action="store_true", help="write the results into the checkout")
    add("--show", type=Path, metavar="JSON", help="measure nothing, show an earlier run")
    add("--list", action="store_true", help="name the cases and stop")
    options = parser.parse_args(arguments)
    options.ways = [way.strip() for way in options.ways.split(",")]
    for way in options.ways:
        if way not in cases.WAYS:
            parser.error(f"--ways must be among {', '.join(cases.WAYS)}, got {way!r}")
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.check and not options.recorded.is_file():
        parser.error(f"--recorded must be a file, got {options.recorded}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure, show, write, check."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.show:
        results, status = Results.read(options.show), 0
    else:
        chosen = choose(options)
        if options.list:
            print("\n".join(chosen))
            return 0
        if not chosen:
            print(f"[bench] --only must match a case, got {options.only}", file=sys.stderr)
            return 2
        if options.record and options.only and not is_of_programs(chosen):
            names = ", ".join((*LIMITED, CALLS))
            print(
                f"[bench] --only must name programs alone ({names}) where --record would drop all "
                f"other cases, got {options.only}",
                file=sys.stderr,
            )
            return 2
        results, status = measure(options, chosen)
        if options.record and options.only:
            results = in_place_of_recorded(results)
    print(tables.everything(results))
    print(f"\n{caption(results.about)}")
    write(results, options)
    for case, error in results.errors.items():
        print(f"[bench] {case}: {error}", file=sys.stderr)
        status = 1
    if options.check and not options.show:
        status = compare(results, options) or status
    return status


# ---- what is measured


def choose(options: argparse.Namespace) -> list[str]:
    """The names of the chosen cases, in order."""
    everything = [case.id for case in timed(options)] + [s.id for s in stacks(options)]
    everything += [*LIMITED, CALLS]
    chosen = cases.selected(everything, options.only)
    return [name for name in everything if name in chosen]


def is_of_programs(chosen: list[str]) -> bool:
    """Returns whether a program of its own measures each of these."""
    return set(chosen) <= {*LIMITED, CALLS}


def timed(options: argparse.Namespace) -> list[cases.Case]:
    """The cases, with the ways that were asked for."""
    found = []
    for case in cases.timed_cases(options.quick, device(options).type == "cuda"):
        ways = tuple(way for way in case.ways if way in options.ways)
        if ways:
            found.append(replace(case, ways=ways, seconds=case.seconds * options.seconds))
    return found


def stacks(options: argparse.Namespace) -> list[cases.Stack]:
    """The stacks, with the ways that were asked for."""
    return [stack for stack in cases.stacks(options.quick) if stack.way in options.ways]


def device(options: argparse.Namespace) -> torch.device:
    """Where to measure."""
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(options.device)


def measure(options: argparse.Namespace, chosen: list[str]) -> tuple[Results, int]:
    """The results, and the exit status of the programs that it runs."""
    start = time.perf_counter()
    about = describe(device(options), options.threads, environment(options))
    results = Results({**about, "quick": options.quick})
    wanted = [case for case in timed(options) if case.id in chosen]
    compile_ahead(wanted, options)
    for allocator in cases.ALLOCATORS:
        run_worker([case for case in wanted if case.allocator == allocator], options, results)
    measure_peaks([stack for stack in stacks(options) if stack.id in chosen], options, results)
    status = 0
    for name in LIMITED:
        status |= measure_limited(name, options, results) if name in chosen else 0
    status |= measure_calls(options, results) if CALLS in chosen else 0
    results.about["seconds"] = round(time.perf_counter() - start)
    return results, status


def environment(options: argparse.Namespace, allocator: str = "") -> dict[str, str]:
    """What a process that measures starts with."""
    path = os.pathsep.join(filter(None, [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    found = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(options.threads)}
    # Threads that wait by spinning, the default, make a call up to ten times as long where another
    # program wants one of the cores: what is measured then is the scheduler.
    found.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if allocator in TUNABLES:
        found["GLIBC_TUNABLES"] = TUNABLES[allocator]
    return found


def compile_ahead(found: list[cases.Case], options: argparse.Namespace) -> None:
    """Compile in two processes at a time, which halves the part of a run that measures nothing."""
    # Another allocator does not need other code.
    todo = [c for c in found if cases.COMPILED in c.ways and c.allocator == cases.DEFAULT]
    halves = [half for half in (todo[::2], todo[1::2]) if half]
    if halves:
        print(f"compiling {len(todo)} cases", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda half: worker(half, options, None), halves))


def worker(found: list[cases.Case], options: argparse.Namespace, out: Path | None) -> int:
    """Measure cases of one allocator in a process of their own; its exit status."""
    content: dict[str, Any] = {
        "cases": [case.as_json() for case in found],
        "threads": options.threads,
        "device": str(device(options)),
        "out": out and str(out),
    }
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps(content), encoding="utf-8")
        return subprocess.run(
            [sys.executable, "-m", "suite.worker", str(job)],
            env=environment(options, found[0].allocator),
            check=False,
        ).returncode


def run_worker(found: list[cases.Case], options: argparse.Namespace, results: Results) -> None:
    """Measure cases of one allocator, and add what comes back."""
    if not found:
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        status = worker(found, options, out)
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        for line in lines:
            results.add(json.loads(line))
        for case in found[len(lines) :]:
            results.errors[case.id] = f"the process ended with status {status}"


def measure_peaks(found: list[cases.Stack], options: argparse.Namespace, results: Results) -> None:
    """Peak memory, each in a process of its own; two at a time, for time does not matter here."""

    def one(stack: cases.Stack) -> None:
        given = {
            "name": stack.name,
            "dtype": stack.dtype,
            "size": stack.size,
            "way": stack.way,
            "device": str(device(options)),
            "threads": options.threads,
        }
        done = subprocess.run(
            [sys.executable, "-m", "suite.peak", json.dumps(given)],
            env=environment(options, PEAK),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            results.peaks[stack.id] = int(done.stdout)
            said = f"{results.peaks[stack.id] / 1e6:.1f} MB"
        else:
            last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
            results.errors[stack.id] = last[0]
            said = "failed"
        print(f"{stack.id:<60} {said}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, found))


def measure_calls(options: argparse.Namespace, results: Results) -> int:
    """What a call costs: call_cost.py, on one thread."""
    one_thread = {**environment(options), "OMP_NUM_THREADS": "1"}
    found, status = run_program("call_cost.py", options, one_thread, "--rounds", "30")
    refused(CALLS, "call_cost.py", found, status, results)
    results.calls = found
    return status


def measure_limited(name: str, options: argparse.Namespace, results: Results) -> int:
    """Rows with limits, which a program of its own measures on the CPU."""
    threads = str(options.threads)
    found, status = run_program(
        f"{name}.py", options, environment(options, cases.WARM), "--threads", threads
    )
    refused(name, f"{name}.py", found, status, results)
    if found is not None:
        results.limited[name] = found
    return status


def refused(name: str, program: str, found: Any, status: int, results: Results) -> None:
    """Add what --check refuses of a program's rows to the errors, for those are printed last."""
    lines = found.pop(WORSE) if found else []
    if status:
        results.errors[name] = "\n".join(lines) or f"{program} ended with status {status}"


def run_program(
    name: str, options: argparse.Namespace, environment: dict[str, str], *arguments: str
) -> tuple[Any, int]:
    """What a program of this folder writes as JSON, None where it fails; its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(HERE / name), "--out", str(out), *arguments]
        command += [flag for flag in ("--quick", "--check") if getattr(options, flag[2:])]
        status = subprocess.run(command, env=environment, check=False).returncode
        return json.loads(out.read_text(encoding="utf-8")) if out.exists() else None, status


# ---- what becomes of it


def in_place_of_recorded(results: Results) -> Results:
    """Returns the recorded results, in which the parts that were measured now are replaced."""
    recorded = Results.read(RECORDED)
    recorded.limited |= results.limited
    recorded.calls = results.calls or recorded.calls
    recorded.errors = results.errors
    return recorded


def write(results: Results, options: argparse.Namespace) -> None:
    """JSON and plots into the --out folder, or into the checkout."""
    options.out.mkdir(parents=True, exist_ok=True)
    target = RECORDED if options.record else options.out / "bench.json"
    if options.show is None or options.record:
        target.write_text(results.text(), encoding="utf-8")
        print(f"results  {target}")
    for path in plots.draw_all(results, pages.PAGE.parent if options.record else options.out):
        print(f"plot     {path}")
    if options.record:
        pages.write(results)
        print(f"page     {pages.PAGE}")


def compare(results: Results, options: argparse.Namespace) -> int:
    """1 where a ratio is far worse than the recorded one, twice in a row."""
    recorded = Results.read(options.recorded)
    limit = check.time_limit(results, recorded)
    if limit != check.WORSE:
        features = ", ".join(recorded.about.get("features", ()))
        cpu = recorded.about.get("cpu")
        print(f"recorded on {cpu} ({features}): times may be {limit:g} times the recorded ones")
    worse, compared = check.compare(results, recorded)
    again = {regression.case for regression in worse}
    if again:
        # A neighbour on a shared machine spoils one measurement, hardly the same case twice.
        print(f"measuring {len(again)} again, for longer", file=sys.stderr)
        suspects = [replace(c, seconds=3 * c.seconds) for c in timed(options) if c.id in again]
        run_worker(suspects, options, results)
        worse, compared = check.compare(results, recorded)
    for regression in worse:
        print(regression, file=sys.stderr)
    print(f"{compared} ratios compared to the recorded ones, {len(worse)} worse")
    if not compared:
        print("[bench] --check must have a recorded ratio to compare to, got none", file=sys.stderr)
    return 1 if worse or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
