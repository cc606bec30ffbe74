"""Builds for the GPU at hand, tests, checks and measures, and writes report.json and report.txt.

    benchmarks/gpu_check.sh                      into $OUT, or build/gpu-check
    benchmarks/gpu_check.sh --only build,tests
    benchmarks/gpu_check.sh --day    measurements, each of minutes, once it is built; again until
                                     all are there: what ended well does not run again
    benchmarks/gpu_check.sh --list

From a bare checkout, without a network: needs a Python with torch (for CUDA), pytest, cmake, ninja
and nvcc of torch's CUDA version. The built libraries go into transformer_ops/ of the checkout, as
`make` would put them there. Every part has a time limit of its own and ends by itself: what fails
does not lose the rest, and the reports are written anew after each stage. Exits with 1 where a part
failed. A target that is missed is a line of the report, not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "gpu-check-work"
TOTAL_SECONDS = 530.0
# The most lines of a part's output in the reports.
JSON_LINES, TEXT_LINES = 30, 2000
# The time in which a part that is out of time can report its progress.
GRACE_SECONDS = 8.0

Command = list[str]


@dataclass
class Part:
    """Commands that run one after another, within a limit for all of them."""

    name: str
    limit: float
    commands: Callable[[], list[Command]]
    needs: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    result: Path | None = None  # the JSON that it writes


@dataclass
class Outcome:
    """What became of a part."""

    name: str
    status: str  # "ok", "failed", "timed out" or "not run"
    seconds: float = 0.0
    limit: float = 0.0
    reason: str = ""
    result: Any = None
    log: list[str] = field(default_factory=list)


# ---- the parts


def stages() -> list[list[Part]]:
    """Parts of one stage run side by side; only what is timed has the machine for itself."""
    python = sys.executable
    # The first import of torch on a machine reads gigabytes.
    machine = Part("machine", 60, lambda: [[python, "-c", MACHINE, str(WORK / "machine.json")]],
                   result=WORK / "machine.json")  # fmt: skip
    load = [python, "tests/cuda_load.py"]
    # racecheck does not survive cuBLASLt's kernels for compute capability 9.0.
    own = [*load, "--without-products"]
    table = [python, "-m", "suite.gpu"]
    compiled = Part("compile", 150, lambda: [[*table, "--compile-only"]], ("build",))
    bench = [python, "benchmarks/bench.py", "--device", "cuda", "--quick", "--out", str(WORK)]
    bench += ["--only", "/"]  # not the programs that measure a CPU
    train = [python, "examples/train_lm.py", "--device", "cuda", "--dtype", "bfloat16"]
    return [
        [machine],
        [Part("build", 170, build, env=architecture())],
        [
            Part("products", 90, products),
            Part("tests", 170, tests, ("build",), {"FAIL_WITHOUT_CUDA": "1"}),
            # Each tensor in an allocation of its own: the ends of all are guarded.
            Part("memcheck", 170, lambda: [[*sanitizer("memcheck", 49152), *load]], ("build",),
                 {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
            Part("racecheck", 170, lambda: [[*sanitizer("racecheck", 50152), *own]], ("build",)),
            compiled,
        ],
        # Before what can do with less time.
        [Part("train", 60, lambda: [[*train, "--steps", "60", "--out", str(WORK / "train")]],
              ("build",))],
        [Part("targets", 130, lambda: [[*table, "--out", str(WORK / "targets.json")]], ("build",),
              result=WORK / "targets.json")],
        [Part("models", 75, models, ("build",), result=WORK / "models.json")],
        [Part("bench", 90, lambda: [bench], ("build",), result=WORK / "bench.json")],
        [Part("profile", 45, lambda: [[python, "-m", "suite.gpu_profile"]], ("build",))],
    ]  # fmt: skip


def day() -> list[list[Part]]:
    """Measurements that are useful alone, in the order in which they matter."""
    python = sys.executable
    limits = {"recipes": 300, "loss": 200, "whole": 400, "llama": 400, "experts": 120, "host": 120,
              "adapters": 400}  # fmt: skip

    def part(name: str, limit: float) -> list[Part]:
        result = WORK / f"{name}.json"
        command = [python, "-m", "suite.gpu_day", name, "--out", str(result)]
        return [Part(name, limit, lambda: [command], result=result)]

    return [stages()[0], *(part(name, limit) for name, limit in limits.items())]


# In a process of its own: this one must outlive a torch that does not load.
MACHINE = """
import json, platform, sys, torch
if not torch.cuda.is_available():
    sys.exit("[gpu_check] device must be a CUDA GPU, got none that torch can use")
properties = torch.cuda.get_device_properties(0)
major, minor = torch.cuda.get_device_capability(0)
json.dump({
    "gpu": properties.name, "multiprocessors": properties.multi_processor_count,
    "memory_gib": round(properties.total_memory / 2**30, 1),
    "architecture": f"{major}.{minor}" + "a" * (major >= 9),
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
}, open(sys.argv[1], "w"))
"""


def architecture() -> dict[str, str]:
    """What to build for; 9.0a where the part "machine" found nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads((WORK / "machine.json").read_text(encoding="utf-8"))["architecture"]
        return {"TORCH_CUDA_ARCH_LIST": str(found)}
    return {"TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0a")}


def build() -> list[Command]:
    """By CMake alone: pip would ask for a setuptools of its own."""
    folder = str(WORK / "cmake")
    options = {
        "Python_EXECUTABLE": sys.executable,
        "TRANSFORMER_OPS_CUDA": "ON",
        # A compiler newer than ours may warn of more.
        "TRANSFORMER_OPS_WERROR": "OFF",
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    cmake = tool("cmake")
    return [
        [cmake, "-S", str(ROOT), "-B", folder, "-G", "Ninja", *defines],
        [cmake, "--build", folder, "--parallel", str(len(os.sched_getaffinity(0)))],
        [cmake, "--install", folder, "--prefix", str(ROOT)],
    ]


def products() -> list[Command]:
    """cuBLASLt against the formula: needs neither torch nor the build."""
    home, program = toolkit(), str(WORK / "check_products")
    sources = [
        "csrc/kernels/cuda/gemm.cpp",
        "csrc/kernels/cuda/gemm_plan.cpp",
        "tests/emulated/check_products.cpp",
        "tests/emulated/find.cpp",
    ]
    include = [f"-I{path}" for path in ("csrc", "tests/emulated", home / "include")]
    libraries = [f"-L{home / 'lib64'}", f"-Wl,-rpath,{home / 'lib64'}", "-lcublasLt", "-lcudart"]
    compiler = os.environ.get("CXX", "g++")
    return [
        [compiler, "-std=c++20", "-O2", *include, *sources, *libraries, "-o", program],
        [program],
    ]


def tests() -> list[Command]:
    """All that is marked "cuda", side by side where pytest-xdist is there."""
    # Only these files are imported: others want packages that the machine may lack.
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    marks = re.compile(r"mark\.cuda|every_device")
    files = [str(path) for path in found if marks.search(path.read_text(encoding="utf-8"))]
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    # A file that cannot be imported fails, and the others run.
    options = ["-m", "cuda", "-q", "-rfE", "--tb=short", "--continue-on-collection-errors"]
    return [[sys.executable, "-m", "pytest", *options, *parallel, *files]]


def models() -> list[Command]:
    """Whole models of transformers, where it is there."""
    if importlib.util.find_spec("transformers") is None:
        raise Missing("[gpu_check] transformers must be installed, got none")
    return [[sys.executable, "-m", "suite.gpu_models", "--out", str(WORK / "models.json")]]


def sanitizer(name: str, port: int) -> Command:
    """compute-sanitizer on our own kernels; two at a time need ports apart."""
    options = ["--error-exitcode", "9", "--kernel-name", "kns=transformer_ops"]
    # It waits for the first call of CUDA, which torch makes when it is loaded: we have a limit.
    connection = ["--launch-timeout", "0", "--port", str(port)]
    program = tool("compute-sanitizer", toolkit() / "bin", Path("/usr/local/cuda/bin"))
    return [program, "--tool", name, *options, *connection]


def tool(name: str, *places: Path) -> str:
    """A program that pip installed beside this Python, else on PATH, else in other places."""
    path = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), *map(str, places)]
    )
    found = shutil.which(name, path=path)
    if found is None:
        raise Missing(f"[gpu_check] {name} must be installed, got none on PATH")
    return found


def toolkit() -> Path:
    """The folder of the CUDA toolkit."""
    if "CUDA_HOME" in os.environ:
        return Path(os.environ["CUDA_HOME"])
    return Path(tool("nvcc", Path("/usr/local/cuda/bin"))).resolve().parents[1]


class Missing(Exception):
    """A tool that a part needs is not there."""


# ---- running them


def run_part(part: Part, failed: set[str], end: float) -> Outcome:
    """A part, unless one that it needs failed; stopped at its limit, or at the end of all."""
    broken = [name for name in part.needs if name in failed]
    if broken:
        return Outcome(part.name, "not run", reason=f"needs {broken[0]}")
    limit = min(part.limit, end - time.monotonic())
    outcome = Outcome(part.name, "failed", limit=round(limit, 1))
    if limit <= 0:
        outcome.reason = "no time was left"
        return outcome
    start = time.monotonic()
    log = WORK / f"{part.name}.log"
    if part.result is not None:
        part.result.unlink(missing_ok=True)
    with open(log, "wb") as stream:
        try:
            for command in part.commands():
                # The program of `python -c` is long, and known.
                stream.write(f"+ {' '.join(command).splitlines()[0][:300]}\n".encode())
                stream.flush()
                status = call(command, part.env, stream, start + limit - time.monotonic())
                if status is None:
                    outcome.status, outcome.reason = "timed out", f"took more than {limit:.0f} s"
                    break
                if status != 0:
                    outcome.reason = f"exit status {status}"
                    break
            else:
                outcome.status = "ok"
        except Missing as error:
            outcome.reason = str(error)
        except Exception as error:
            # Not to lose the other parts.
            outcome.reason = f"{type(error).__name__}: {error}"
    outcome.seconds = round(time.monotonic() - start, 1)
    outcome.log = log.read_text(encoding="utf-8", errors="replace").splitlines()
    read_result(part, outcome)
    return outcome


def call(command: Command, env: dict[str, str], stream: Any, seconds: float) -> int | None:
    """The exit status; None where it took too long. Its children end with it."""
    path = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    everything = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        **env,
    }
    # A group of its own, to end its children by.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=everything,
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # A shell's background job ignores it, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        return process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        # pytest says then what has failed so far, and Python where it was.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
        return None
    finally:
        # Whatever a command leaves behind would disturb what is timed next.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_result(part: Part, outcome: Outcome) -> None:
    """The JSON of a part; a part that ended well must have written it."""
    if part.result is None:
        return
    try:
        outcome.result = json.loads(part.result.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if outcome.status == "ok":
            outcome.status, outcome.reason = "failed", f"wrote no result: {error}"


# ---- reports


def write_reports(folder: Path, outcomes: list[Outcome], seconds: float, commit: str) -> None:
    """report.json with the end of each log, report.txt with more of it."""
    folder.mkdir(parents=True, exist_ok=True)
    ok = all(outcome.status == "ok" for outcome in outcomes)
    parts = [{**asdict(o), "log": o.log[-JSON_LINES:]} for o in outcomes]
    about = {"commit": commit, "seconds": round(seconds, 1), "ok": ok}
    content = json.dumps({**about, "parts": parts}, indent=1) + "\n"
    (folder / "report.json").write_text(content, encoding="utf-8")
    sections = [summary(outcomes, about)]
    for outcome in outcomes:
        title = f"---- {outcome.name}: {outcome.status} {outcome.reason}".rstrip()
        cut = [f"({len(outcome.log) - TEXT_LINES} lines left out)"][: len(outcome.log) > TEXT_LINES]
        sections.append("\n".join([title, *cut, *outcome.log[-TEXT_LINES:]]))
    (folder / "report.txt").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def summary(outcomes: list[Outcome], about: dict[str, Any]) -> str:
    """A line a part."""
    lines = [f"commit {about['commit']}, {about['seconds']} s, {'ok' if about['ok'] else 'FAILED'}"]
    for outcome in outcomes:
        if outcome.name == "machine" and outcome.result:
            lines.append(", ".join(f"{key} {value}" for key, value in outcome.result.items()))
        lines.append(line_of(outcome))
    return "\n".join(lines)


def line_of(outcome: Outcome) -> str:
    """What became of a part, in a line."""
    time_of = f"{outcome.seconds:6.1f} s of {outcome.limit:5.1f}"
    return f"{outcome.name:<10} {outcome.status:<10} {time_of}  {outcome.reason}".rstrip()


def commit() -> str:
    """The commit, and "+" where files differ from it; a copy without history has none."""
    try:
        found = [
            subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (
                ("rev-parse", "--short=10", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no"),
            )
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found[0] + "+" * bool(found[1])


# ---- the command line


def main(arguments: list[str] | None = None) -> int:
    """Run the stages, write the reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PARTS", help="comma-separated")
    parser.add_argument("--commit", help="what the reports name; default: git's, where it is there")
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    parser.add_argument("--day", action="store_true", help="measure, without what checks")
    options = parser.parse_args(arguments)
    of = day if options.day else stages
    names = [part.name for stage in of() for part in stage]
    if options.list:
        print("\n".join(names))
        return 0
    chosen = options.only.split(",") if options.only else names
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"--only must name parts among {', '.join(names)}, got {unknown[0]!r}")
    folder = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check")
    about = options.commit or commit()
    kept = earlier(folder, about) if options.day else []
    outcomes = run_stages(of, chosen, folder, about, kept)
    print(f"reports  {folder / 'report.json'} {folder / 'report.txt'}")
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def earlier(folder: Path, commit: str) -> list[Outcome]:
    """What ended well in the last run of this commit, which need not run again."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        parts = [Outcome(**part) for part in found["parts"] if part["status"] == "ok"]
        return parts if found["commit"] == commit else []
    return []


def run_stages(
    of: Callable[[], list[list[Part]]],
    chosen: list[str],
    folder: Path,
    commit: str,
    kept: list[Outcome],
) -> list[Outcome]:
    """The outcomes of all chosen parts, in order, behind those that are kept."""
    WORK.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    outcomes = list(kept)
    chosen = [name for name in chosen if name not in {outcome.name for outcome in kept}]
    for number in range(len(of())):
        # Again, for what the machine turned out to be.
        stage = [part for part in of()[number] if part.name in chosen]
        failed = {outcome.name for outcome in outcomes if outcome.status != "ok"}
        run = partial(run_part, failed=failed, end=start + TOTAL_SECONDS)
        with ThreadPoolExecutor(max(1, len(stage))) as pool:
            done = list(pool.map(run, stage))
        for outcome in done:
            print(line_of(outcome), flush=True)
        outcomes += done
        write_reports(folder, outcomes, time.monotonic() - start, commit)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
