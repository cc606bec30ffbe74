"""csrc/kernels/cpu/isa.cmake: for which instruction sets kernels are built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from cmake_build import tool  # noqa: E402

# With a processor that is only said to be there.
SCRIPT = """
foreach(name add_library target_sources target_include_directories target_compile_options
        target_compile_definitions transformer_ops_target)
  cmake_language(EVAL CODE "macro(${name})\\nendmacro()")
endforeach()
macro(file command)
  if(${command} STREQUAL GLOB)
    set(${ARGV1} kernel.cpp)
  else()
    set(${ARGV2} ${FLAGS})
  endif()
endmacro()
set(CMAKE_SYSTEM_PROCESSOR x86_64)
include(csrc/kernels/cpu/isa.cmake)
message(STATUS "objects: ${TRANSFORMER_OPS_KERNEL_OBJECTS}")
message(STATUS "left out: ${TRANSFORMER_OPS_LEFT_OUT}")
"""
CUDA = "the CUDA backend, by TRANSFORMER_OPS_CUDA=OFF"
AVX512 = "kernels for AVX-512, which this machine lacks (TRANSFORMER_OPS_NATIVE=OFF builds them)"


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux says what it can run")
@pytest.mark.parametrize("others", ["", CUDA])
@pytest.mark.parametrize(
    ("native", "flags", "is_built"),
    [("OFF", "", True), ("ON", "flags : avx512vl", True), ("ON", "", False)],
)
def test_kernels_that_the_machine_cannot_run(tmp_path, native, flags, is_built, others):
    script = tmp_path / "isa.cmake"
    script.write_text(SCRIPT, encoding="utf-8")
    options = [f"-DTRANSFORMER_OPS_NATIVE={native}", f"-DFLAGS={flags}"]
    options.append(f"-DTRANSFORMER_OPS_LEFT_OUT={others}")
    done = subprocess.run(
        [tool("cmake"), *options, "-P", str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = dict(line[3:].split(": ", 1) for line in done.stdout.splitlines())
    assert ("transformer_ops_kernels_avx512>" in lines["objects"]) == is_built
    assert "transformer_ops_kernels_avx2>" in lines["objects"]
    wanted = [text for text in (others, "" if is_built else AVX512) if text]
    assert lines["left out"] == "; ".join(wanted)
