"""Each fuzzer for some seconds, on the same seeds in every run: `make fuzz` looks further."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import FUZZERS

pytestmark = pytest.mark.takes(seconds=85)

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 7


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=550,
    )


@pytest.fixture(scope="module")
def all_fuzzers() -> subprocess.CompletedProcess[str]:
    """One process for all: each takes seconds to load what it tests."""
    return run("--seconds", SECONDS * len(FUZZERS))


@pytest.mark.parametrize("name", FUZZERS)
def test_fuzzer(name, all_fuzzers):
    found = all_fuzzers
    assert f"FAILED {name} " not in found.stdout, found.stdout[-8000:] + found.stderr[-2000:]
    lines = re.findall(rf"^{name} +(\d+) seeds +(\d+) checks", found.stdout, re.MULTILINE)
    assert len(lines) == 1, found.stdout[-8000:] + found.stderr[-2000:]
    seeds, checks = map(int, lines[0])
    assert seeds >= 1 and checks >= seeds


def test_no_fuzzer_fails(all_fuzzers):
    found = all_fuzzers
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]


def test_random_modules():
    """Each seed is forty modules."""
    found = run("--only", "modules", "--seeds", 3)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]


@pytest.mark.parametrize(
    ("seed", "how"),
    [(1, "planted failure"), (2, "the child ended with -11"), (3, "did not answer for 4 s")],
)
def test_a_failure_a_crash_and_a_hang_are_reported(seed, how):
    found = run("--only", "planted", "--seed", seed, "--seeds", 1, "--limit", 4)
    assert found.returncode == 1
    assert how in found.stdout
    assert f"run planted seed {seed}" in found.stdout
    assert f"python -m tests.fuzz --only planted --seed {seed} --seeds 1" in found.stdout


def test_the_command_of_a_failure_repeats_it():
    found = run("--only", "planted", "--seeds", 3)
    assert "FAILED planted seed 1" in found.stdout and "2 seeds" in found.stdout
    (command,) = re.findall("repeat it: python -m tests.fuzz (.*)", found.stdout)
    assert "planted failure" in run(*command.split()).stdout


def test_a_fixed_number_of_python_values():
    found = run("--only", "python_values", "--seeds", 3)
    assert found.returncode == 0, found.stdout[-8000:]
    assert int(re.findall(r"3 seeds +(\d+) checks", found.stdout)[0]) > 150


def test_an_unknown_fuzzer_is_an_error():
    found = run("--only", "pipeline")
    assert found.returncode == 1 and "--only must name fuzzers of" in found.stderr
