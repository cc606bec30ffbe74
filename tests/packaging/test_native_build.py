"""csrc/kernels/cpu/isa.cmake: for which instruction sets kernels are built."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import date
from pathlib import Path
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import cmake_build  # noqa: E402
import run_on_processors  # noqa: E402
from cmake_build import tool  # noqa: E402

# With a processor that is only said to be there.
SCRIPT = """
foreach(name add_library target_sources target_include_directories target_compile_options
        target_compile_definitions set_source_files_properties transformer_ops_target)
  cmake_language(EVAL CODE "macro(${name})\\nendmacro()")
endforeach()
macro(file command)
  if(${command} STREQUAL GLOB)
    set(${ARGV1} kernel.cpp)
  else()
    string(REGEX MATCH "${ARGV4}" ${ARGV2} "${FLAGS}")
  endif()
endmacro()
set(CMAKE_SYSTEM_PROCESSOR x86_64)
include(csrc/kernels/cpu/isa.cmake)
message(STATUS "objects: ${TRANSFORMER_OPS_KERNEL_OBJECTS}")
message(STATUS "left out: ${TRANSFORMER_OPS_LEFT_OUT}")
"""
CUDA = "the CUDA backend, by TRANSFORMER_OPS_CUDA=OFF"
ZEN3 = "flags : fpu fma cx16 f16c avx avx2 bmi2"
SKYLAKE = "flags : fpu fma cx16 f16c avx avx2 bmi2 avx512f avx512dq avx512bw avx512vl"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux says what it can run")
@pytest.mark.parametrize("others", ["", CUDA])
@pytest.mark.parametrize(
    ("native", "sanitizer", "flags", "built"),
    [
        ("OFF", "OFF", "flags : fpu", "avx512 avx2 default"),
        ("ON", "OFF", "flags : fpu", "default"),
        ("ON", "OFF", ZEN3, "avx2"),
        ("ON", "OFF", SKYLAKE, "avx512"),
        ("ON", "address", ZEN3, "avx2 default"),
        ("ON", "address", SKYLAKE, "avx512 avx2 default"),
    ],
)
def test_kernels_for_this_machine(tmp_path, native, sanitizer, flags, built, others):
    script = tmp_path / "isa.cmake"
    script.write_text(SCRIPT, encoding="utf-8")
    options = [f"-DTRANSFORMER_OPS_NATIVE={native}", f"-DFLAGS={flags}"]
    options += [f"-DTRANSFORMER_OPS_SANITIZE={sanitizer}", f"-DTRANSFORMER_OPS_LEFT_OUT={others}"]
    done = subprocess.run(
        [tool("cmake"), *options, "-P", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line[3:].split(": ", 1) for line in done.stdout.splitlines())
    isas = re.findall(r"transformer_ops_kernels_(avx\w+|default)>", lines["objects"])
    assert isas == built.split()
    names = ", ".join(isa for isa in ("avx512", "avx2", "default") if isa not in isas)
    kernels = f"CPU kernels for {names} (TRANSFORMER_OPS_NATIVE=OFF builds them)" if names else ""
    assert lines["left out"] == "; ".join(text for text in (others, kernels) if text)


def test_tools_for_arm_that_cannot_be_installed_are_named(monkeypatch):
    monkeypatch.setattr(cmake_build, "ARM_TOOLS", {"/no/such/compiler": "g++-aarch64-linux-gnu"})
    monkeypatch.setattr(cmake_build.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"need g\+\+-aarch64-linux-gnu .* needs apt-get"):
        cmake_build.install_arm_tools()


def test_a_sample_of_processors_is_another_each_day(monkeypatch):
    levels = ["avx512_fp16", "avx512", "avx2", "default"]
    monkeypatch.setattr(run_on_processors._C, "processor_levels", lambda: levels)
    found = []
    for day in (1, 2, 3):
        today = Mock(today=lambda day=day: date(2026, 1, day))
        monkeypatch.setattr(run_on_processors, "date", today)
        _, name, *_, command = run_on_processors.parts(["--sample", "true"])
        assert command == "true"
        found.append(name.removeprefix("as on a processor with "))
    assert sorted(found) == sorted(levels[1:])


def test_two_days_run_all_tests_of_kernels_for_arm(monkeypatch):
    chosen = []
    monkeypatch.setattr(cmake_build, "install_arm_tools", lambda: None)
    monkeypatch.setattr(cmake_build, "cmake_build", lambda *args, **kwargs: None)
    monkeypatch.setattr(cmake_build, "run", lambda command, **kwargs: chosen.append(command[-1]))
    for day in (1, 2):
        monkeypatch.setattr(cmake_build, "date", Mock(today=lambda day=day: date(2026, 1, day)))
        cmake_build.build_and_run_arm_tests([], sample=True)
    names = [f"kernels.{shard}" for shard in range(4)]
    runs = [name for each in chosen for name in names if re.match(each, name)]
    assert sorted(runs) == names


def test_clang_builds_in_a_folder_of_its_own(monkeypatch):
    built = []
    monkeypatch.setattr(cmake_build, "install_arm_tools", lambda: None)
    monkeypatch.setattr(cmake_build, "run", lambda command, **kwargs: None)
    monkeypatch.setattr(
        cmake_build,
        "cmake_build",
        lambda folder, options, **_: built.append((folder, options.get("CMAKE_CXX_COMPILER"))),
    )
    for clang in (False, True):
        cmake_build.build_and_run_arm_tests([], clang=clang)
        cmake_build.build_and_run_tests(None, [], clang)
    assert built == [
        (cmake_build.ARM_FOLDER, None),
        (cmake_build.build_folder(), None),
        (Path(f"{cmake_build.ARM_FOLDER}-clang"), "clang++"),
        (cmake_build.build_folder("-clang"), "clang++"),
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("sysconfig.get_config_var = lambda name: 1", "a Python with the global lock, got a free-"),
        ("sysconfig.get_config_var = lambda name: 'cpython-313-x86_64-linux-musl'", "one for musl"),
        ("importlib.util.find_spec = lambda name: None", "torch >= 2.11, got none: install it"),
    ],
)
def test_a_python_that_the_library_cannot_be_built_for_is_refused(change, said):
    script = ROOT / "cmake" / "torch_info.py"
    code = f"import importlib.util, runpy, sysconfig; {change}; runpy.run_path({str(script)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"{sys.executable} must ")
    assert said in done.stderr
    assert not done.stdout
