"""benchmarks/gpu_check.sh where there is no GPU: it ends, part by part, and says what failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import cuda_load
import gpu_check
from gpu_check import Part
from suite import gpu, gpu_day, gpu_models, gpu_profile
from suite.cases import OURS

pytestmark = pytest.mark.takes(seconds=45)

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PYTHON = sys.executable


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setattr(gpu_check, "WORK", folder)
    return folder


def python(code: str, **others: Any) -> Part:
    return Part("a part", 20, lambda: [[PYTHON, "-c", code]], **others)


def run(part: Part, failed: set[str] | None = None, seconds: float = 30) -> gpu_check.Outcome:
    return gpu_check.run_part(part, failed or set(), time.monotonic() + seconds)


def assert_gone(pid: int) -> None:
    """Gone, or a zombie that nobody has waited for."""
    state = Path(f"/proc/{pid}/stat")
    for _ in range(50):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child still runs")


# ---- one part


def test_a_part_that_ends_well(work: Path) -> None:
    result = work / "result.json"
    code = f"import os; print('said', os.environ['A']); open({str(result)!r}, 'w').write('[1]')"
    outcome = run(python(code, env={"A": "b"}, result=result))
    assert (outcome.status, outcome.reason, outcome.result) == ("ok", "", [1])
    assert outcome.log[-1] == "said b"


def test_a_part_that_fails_stops_at_its_first_command(work: Path) -> None:
    commands = [[PYTHON, "-c", f"import sys; print({n}); sys.exit({n})"] for n in (0, 3, 0)]
    outcome = run(Part("a part", 20, lambda: commands))
    assert (outcome.status, outcome.reason) == ("failed", "exit status 3")
    assert [line for line in outcome.log if not line.startswith("+")] == ["0", "3"]


def test_a_part_that_takes_too_long_ends_with_its_children(work: Path) -> None:
    pid = work / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    outcome = run(python(code), seconds=3)
    assert (outcome.status, outcome.reason) == ("timed out", "took more than 3 s")
    assert outcome.seconds < 300
    assert_gone(int(pid.read_text()))


def test_a_part_out_of_time_says_how_far_it_came(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = work / "reached"

    class Reaching(subprocess.Popen[bytes]):
        """Its time is over once it has written the file, however busy the machine is."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or reached.exists():
                return super().wait(timeout)
            end = time.monotonic() + timeout
            while self.poll() is None and not reached.exists() and time.monotonic() < end:
                time.sleep(0.02)
            return super().wait(0)

    monkeypatch.setattr(subprocess, "Popen", Reaching)
    tests = work / "test_some.py"
    tests.write_text(
        f"""
def test_bad():
    assert 2 == 3

def test_long():
    open({str(reached)!r}, "w").close()
    __import__("time").sleep(600)
"""
    )
    command = [PYTHON, "-m", "pytest", "-p", "no:cacheprovider", str(tests)]
    monkeypatch.setattr(gpu_check, "GRACE_SECONDS", 60)
    outcome = run(Part("a part", 300, lambda: [command]), seconds=300)
    assert outcome.status == "timed out"
    said = "\n".join(outcome.log)
    assert "assert 2 == 3" in said
    assert "1 failed" in said
    # What does not listen is ended.
    monkeypatch.setattr(gpu_check, "GRACE_SECONDS", 0.5)
    reached.unlink()
    deaf = f"""
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
open({str(reached)!r}, "w").close()
time.sleep(600)
"""
    outcome = run(python(deaf), seconds=20)
    assert outcome.status == "timed out"
    assert outcome.seconds < 300


def test_what_a_command_leaves_behind_is_ended(work: Path) -> None:
    child = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {!r}]); print(p.pid)"
    )
    outcome = run(python(child.format("import time; time.sleep(60)")))
    assert outcome.status == "ok"
    assert_gone(int(outcome.log[-1]))


def test_an_error_in_what_a_part_would_run_is_its_own(work: Path) -> None:
    def commands() -> list[list[str]]:
        raise ValueError("no such thing")

    outcome = run(Part("a part", 20, commands))
    assert (outcome.status, outcome.reason) == ("failed", "ValueError: no such thing")


def test_what_a_part_lacks_is_said(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commands() -> list[list[str]]:
        return [[gpu_check.tool("no-such-program")]]

    outcome = run(Part("a part", 20, commands))
    assert outcome.status == "failed"
    assert outcome.reason == "[gpu_check] no-such-program must be installed, got none on PATH"
    assert run(python("", needs=("build",)), {"build"}).reason == "needs build"
    assert run(python("", needs=("build",)), {"build"}).status == "not run"
    assert run(python(""), seconds=0).reason == "no time was left"
    lost = run(python("", result=work / "none.json"))
    assert lost.status == "failed"
    assert lost.reason.startswith("wrote no result")
    # A result of an earlier run is not taken for this one's.
    (work / "old.json").write_text("[1]")
    assert run(python("", result=work / "old.json")).status == "failed"


# ---- all of them


def test_one_failure_does_not_lose_the_rest(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stages() -> list[list[Part]]:
        first, second, third, last = (python(f"print({n})") for n in range(4))
        first.name, second.name, third.name, last.name = "first", "second", "third", "last"
        second.commands = lambda: [[PYTHON, "-c", "raise SystemExit('no luck')"]]
        third.needs = ("second",)
        return [[first, second], [third, last]]

    monkeypatch.setattr(gpu_check, "stages", stages)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert gpu_check.main([]) == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    found = {part["name"]: part["status"] for part in report["parts"]}
    assert found == {"first": "ok", "second": "failed", "third": "not run", "last": "ok"}
    assert not report["ok"]
    text = (tmp_path / "out" / "report.txt").read_text()
    assert "no luck" in text
    assert "third      not run" in text
    assert gpu_check.main(["--only", "first,last"]) == 0


def test_parts_fit_into_nine_minutes_and_know_each_other() -> None:
    stages = gpu_check.stages()
    parts = [part for stage in stages for part in stage]
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    seen: set[str] = set()
    for stage in stages:
        assert all(set(part.needs) <= seen for part in stage)
        seen |= {part.name for part in stage}
    assert gpu_check.TOTAL_SECONDS <= 9 * 60
    # The tests' stage may take all of its time, and still leave most of it to what is timed.
    first = sum(max(part.limit for part in stage) for stage in stages[:3])
    assert gpu_check.TOTAL_SECONDS - first >= 120


def test_the_command_without_a_gpu(tmp_path: Path) -> None:
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path), "PYTHON": PYTHON,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks" / "gpu_check.sh"), "--only", "machine"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("machine    failed")
    text = (tmp_path / "report.txt").read_text()
    assert "[gpu_check] device must be a CUDA GPU, got none that torch can use" in text


def test_a_part_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(["--only", "build,trian"])
    assert caught.value.code == 2
    assert "--only must name parts among machine, build" in capsys.readouterr().err


# ---- what the parts run


def test_the_load_of_the_sanitizer_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cuda_load.py", "--device", "cpu"])
    cuda_load.main()
    count = len(cuda_load.op_cases.CASES) + len(cuda_load.fusion_cases.CASES) + 4
    assert capsys.readouterr().out == f"{2 * count} modules, forward and backward\n"


def test_the_table_of_targets_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "compiled", lambda module: module)
    gpu.compile_all(CPU, gpu.TINY)
    assert gpu.main(["--device", "cpu", "--tiny", "--out", str(tmp_path / "t.json")]) == 0
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["errors"] == []
    lines = {line["what"]: line for line in found["lines"]}
    assert len(lines) == 2 + 4 + 1 + 2 * 3 + 2 + 2
    saved = lines["Llama block, T=8, h=32, f=64, saved"]
    assert saved["ok"]
    assert saved["value"] == saved["limit"] == 2 * (32 + 2 * 64) + 4
    assert lines["RMSNorm forward, 8x32"]["ok"] is None
    assert set(lines["RMSNorm backward, 8x32"]["details"]) == {"eager", "compiled", OURS, "copy"}
    assert "SwiGLU backward, 8x32" in capsys.readouterr().out


def test_the_table_of_models_is_whole(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--tiny", "--out", str(tmp_path / "m.json")]
    assert gpu_models.main(arguments) == 0
    lines = json.loads((tmp_path / "m.json").read_text())["lines"]
    assert len(lines) == 4 * len(gpu_models.MODELS)
    assert all(line["ok"] is not False for line in lines)


def test_a_profile_of_the_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--device", "cpu", "--tiny", "--out", str(tmp_path / "p.json")]
    assert gpu_profile.main(run) == 0
    said = capsys.readouterr().out
    assert "Llama block, ours, T=8, h=32, f=64" in said
    found = json.loads((tmp_path / "p.json").read_text())
    # Six products, in three steps or in one.
    products = [row for row in found["Llama block, eager"] if row["name"] == "aten::mm"]
    assert [row["calls"] for row in products] == [6]


def test_a_failing_part_of_the_table_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: torch.device, sizes: gpu.Sizes) -> list[gpu.Line]:
        raise RuntimeError("[gemm] cuBLASLt must run a product, got X")

    line = gpu.Line("a thing", 2.0, "us", 1.5, False, "beside", {})
    monkeypatch.setattr(gpu, "PARTS", (broken, lambda device, sizes: [line]))
    assert gpu.main(["--device", "cpu", "--tiny"]) == 1
    said = capsys.readouterr()
    assert "broken: RuntimeError: [gemm] cuBLASLt must run a product" in said.err
    assert "2 us" in said.out
    assert "at most 1.5 us" in said.out
    assert "NO" in said.out
    assert line._replace(at_least=True).ok


@pytest.mark.parametrize("part", ["loss", "experts"])
def test_a_measurement_of_the_day(part: str, tmp_path: Path) -> None:
    out = tmp_path / "part.json"
    assert gpu_day.main([part, "--tiny", "--device", "cpu", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert not found["errors"] and all(line["value"] > 0 for line in found["lines"])


def test_a_day_goes_on_where_it_stopped(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [part.name for stage in gpu_check.day()[1:] for part in stage] == [*gpu_day.PARTS]
    ran: list[str] = []

    def day() -> list[list[Part]]:
        def part(name: str) -> Part:
            def commands() -> list[list[str]]:
                ran.append(name)
                return [[PYTHON, "-c", f"raise SystemExit({len(ran) == 2:d})"]]

            return Part(name, 20, commands)

        return [[part("first")], [part("second")]]

    monkeypatch.setattr(gpu_check, "day", day)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.main(["--day", "--commit", "a"]) == 1
    assert gpu_check.main(["--day", "--commit", "a"]) == 0
    assert ran == ["first", "second", "second"]
    assert gpu_check.main(["--day", "--commit", "b"]) == 0
    assert ran[3:] == ["first", "second"]
