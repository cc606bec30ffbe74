"""What of the CUDA backend needs no device: fake tensors, plans, bodies, the build's options."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fusion_cases import CASES as FUSIONS
from helpers import DTYPES, as_tuple
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from typed_op_samples import NAMES, PAIRS, samples
from typed_op_samples import overload as op

import transformer_ops as tops
from transformer_ops import _C
from transformer_ops._loader import build_info

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda", 0)
# Read before any test runs: one loads an op of its own.
WITHOUT_CUDA = _C.typed_ops_without_cuda()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Fakes are made in it: `module.to(dtype)` does not take their parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made here are fakes on a CUDA device."""
    with FakeTensorMode(), CUDA:
        yield


# ---- fake tensors


@pytest.mark.parametrize("name", NAMES)
def test_typed_op_on_fake_cuda_tensors(name):
    for dtype in DTYPES:
        for sample in samples(name, dtype):
            real = as_tuple(op(name)(*sample))
            with fake_cuda():
                fakes = pytree.tree_map_only(
                    Tensor, lambda v: torch.empty(v.shape, dtype=v.dtype), list(sample)
                )
                results = as_tuple(op(name)(*fakes))
            for a, b in zip(*map(pytree.tree_leaves, (results, real)), strict=True):
                assert (a.device, a.shape, a.dtype) == (CUDA, b.shape, b.dtype)


def forward_and_plan(case):
    """The main input and the parameters of a fusion's row, its outputs, and its plan."""
    module = tops.Sequential(*case.make())
    x = torch.empty(6, 16, requires_grad=True)
    inputs = [x, *(torch.empty_like(x) for _ in range(case.extra_inputs))]
    outputs = as_tuple(module(*inputs))
    (plan,) = module.plans()
    return [x, *module.parameters()], outputs, str(plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", FUSIONS, ids=str)
def test_sequential_on_fake_cuda_tensors(case, dtype):
    """Shapes and dtypes both ways; the plan is that of the CPU."""
    with default_dtype(dtype):
        _, real, want = forward_and_plan(case)
        with fake_cuda():
            leaves, outputs, plan = forward_and_plan(case)
    assert plan == want
    for a, b in zip(outputs, real, strict=True):
        assert (a.device, a.shape, a.dtype) == (CUDA, b.shape, dtype)
    # By its node: the autograd engine asks the driver for the device's streams.
    (node,) = {output.grad_fn for output in outputs}
    with torch.no_grad():
        grads = as_tuple(node(*(torch.empty_like(output) for output in outputs)))
    found = {
        n.variable: grad
        for (n, _), grad in zip(node.next_functions, grads, strict=True)
        if n is not None
    }
    assert len(found) == len(leaves)
    for leaf in leaves:
        grad = found[leaf]
        assert (grad.device, grad.shape, grad.dtype) == (CUDA, leaf.shape, dtype)


# ---- registration


def test_every_typed_op_has_a_cuda_body_and_kernel():
    # One without a body for the CPU runs its meaning on both.
    assert WITHOUT_CUDA == []
    for name in {"run_call", *PAIRS, *filter(None, PAIRS.values())}:
        found = torch._C._dispatch_has_kernel_for_dispatch_key(f"transformer_ops::{name}", "CUDA")
        assert found, name


# ---- the binary


def cuobjdump() -> str:
    """From the toolkit, else the one that comes with Triton."""
    triton = importlib.util.find_spec("triton")
    folders = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"]
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends/nvidia/bin"))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
    found = shutil.which("cuobjdump", path=path)
    assert found is not None, f"cuobjdump must be on {path}"
    return found


def architectures_in(library: Path) -> set[str]:
    """The architectures as TORCH_CUDA_ARCH_LIST lists them: machine code, and "+PTX" for PTX
    only."""
    found = set()
    for option, tail in (("--list-elf", ""), ("--list-ptx", "+PTX")):
        command = [cuobjdump(), option, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        versions = re.findall(r"\.sm_(\d+)(\d[af]?)\.", done.stdout)
        found |= {f"{major}.{minor}{tail}" for major, minor in versions}
    return found


def test_the_architectures_are_those_of_the_build():
    library = Path(_C.__file__).parent / "libtransformer_ops_cuda.so"
    if build_info().CUDA is None:
        assert not library.exists()
        return
    wanted = set()
    for version in build_info().CUDA["architectures"].split(";"):
        wanted |= {version.removesuffix("+PTX"), version}
    assert architectures_in(library) == wanted


# ---- CMake's part

# cmake/cuda.cmake, with a toolkit and a torch that are only said to be there.
SCRIPT = """
macro(find_package name)
endmacro()
macro(enable_language name)
endmacro()
macro(file command out)  # GLOB, for the signs of a GPU
  set(${out} ${GPU})
endmacro()
set(TORCH_VERSION 2.11.0)
include(cmake/cuda.cmake)
message(STATUS "architectures: ${CMAKE_CUDA_ARCHITECTURES}")
message(STATUS "python: ${TRANSFORMER_OPS_CUDA_PYTHON}")
message(STATUS "left out: ${TRANSFORMER_OPS_LEFT_OUT}")
"""
TOOLKIT = {
    "CUDAToolkit_NVCC_EXECUTABLE": "nvcc",
    "CUDAToolkit_VERSION": "13.0.88",
    "CUDAToolkit_VERSION_MAJOR": "13",
    "CUDAToolkit_LIBRARY_DIR": "lib64",
    "CUDA_cublasLt_LIBRARY": "libcublasLt.so",
}
TORCH = {"TORCH_CUDA_VERSION": "13.2"}


def configure(
    folder: Path, found: dict[str, str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.cmake"
    script.write_text(SCRIPT)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TRANSFORMER_", "TORCH_"))}
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert cmake is not None
    return subprocess.run(
        [cmake, *(f"-D{name}={value}" for name, value in found.items()), "-P", str(script)],
        cwd=ROOT,
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("found", "environment", "message"),
    [
        (
            TOOLKIT | TORCH,
            {"TRANSFORMER_OPS_CUDA": "MAYBE"},
            "TRANSFORMER_OPS_CUDA must be AUTO, ON or OFF, got MAYBE",
        ),
        (
            TORCH,
            {"TRANSFORMER_OPS_CUDA": "ON"},
            "TRANSFORMER_OPS_CUDA=ON: a CUDA toolkit with nvcc is needed, found none (set CUDACXX "
            "or CUDAToolkit_ROOT)",
        ),
        (
            TOOLKIT | TORCH | {"CUDA_cublasLt_LIBRARY": ""},
            {"TRANSFORMER_OPS_CUDA": "ON"},
            "TRANSFORMER_OPS_CUDA=ON: the CUDA toolkit must have cuBLASLt, found none in lib64",
        ),
        (
            TOOLKIT,
            {"TRANSFORMER_OPS_CUDA": "ON"},
            "TRANSFORMER_OPS_CUDA=ON: torch must be built with CUDA, got 2.11.0 without",
        ),
        (
            TOOLKIT | {"TORCH_CUDA_VERSION": "12.8"},
            {"TRANSFORMER_OPS_CUDA": "ON"},
            "TRANSFORMER_OPS_CUDA=ON: the toolkit must be of torch's CUDA 12, got 13.0.88",
        ),
        *[
            (
                TOOLKIT | TORCH,
                {"TRANSFORMER_OPS_CUDA": "AUTO", "TORCH_CUDA_ARCH_LIST": f"8.0;{bad}"},
                f"TORCH_CUDA_ARCH_LIST must hold versions such as 9.0a or 10.0+PTX, got {bad}",
            )
            for bad in ("Ampere", "90", "9.0b", "9.0-PTX")
        ],
    ],
)
def test_cmake_errors(tmp_path, found, environment, message):
    done = configure(tmp_path, found, environment)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())  # CMake breaks lines


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (TORCH, "a CUDA toolkit with nvcc is needed"),
        (TOOLKIT, "torch must be built with CUDA"),
        (TOOLKIT | {"TORCH_CUDA_VERSION": "12.8"}, "the toolkit must be of torch's CUDA 12"),
    ],
)
def test_auto_builds_for_the_cpu_where_something_is_missing(tmp_path, found, reason):
    environment = {"TRANSFORMER_OPS_CUDA": "AUTO", "TORCH_CUDA_ARCH_LIST": "of no interest then"}
    done = configure(tmp_path, found, environment)
    assert done.returncode == 0, done.stderr
    assert "TRANSFORMER_OPS_CUDA=AUTO: building for CPU only: " + reason in done.stdout
    assert "python: None" in done.stdout
    assert "left out: the CUDA backend: " + reason in done.stdout


GPU = {"GPU": "/dev/nvidiactl"}
WITH_CUDA = ("-- left out: \n", "architectures: 80-real")
NO_GPU = ("left out: the CUDA backend, for want of a GPU (TRANSFORMER_OPS_CUDA=ON builds it)",)
BY_OFF = ("left out: the CUDA backend, by TRANSFORMER_OPS_CUDA=OFF", "python: None")


@pytest.mark.parametrize(
    ("found", "asked", "said"),
    [
        ({}, None, NO_GPU),
        (GPU, None, WITH_CUDA),
        (GPU | {"CUDAToolkit_NVCC_EXECUTABLE": ""}, None, ("left out: the CUDA backend: a CUDA",)),
        ({}, "AUTO", WITH_CUDA),
        ({}, "ON", WITH_CUDA),
        (GPU, "OFF", BY_OFF),
        # As a CMake option; the environment comes first.
        ({"TRANSFORMER_OPS_CUDA": "ON"}, None, WITH_CUDA),
        (GPU | {"TRANSFORMER_OPS_CUDA": "ON"}, "OFF", BY_OFF),
    ],
)
def test_what_is_built(tmp_path, found, asked, said):
    environment = {} if asked is None else {"TRANSFORMER_OPS_CUDA": asked}
    done = configure(tmp_path, TOOLKIT | TORCH | found, environment)
    assert done.returncode == 0, done.stderr
    for line in said:
        assert line in done.stdout


@pytest.mark.parametrize(
    ("given", "cmake"),
    [
        (None, "80-real;90a-real;100-real;100-virtual"),
        ("9.0a", "90a-real"),
        ("8.0 9.0a+PTX", "80-real;90a-real;90a-virtual"),
        ("8.0, 12.0", "80-real;120-real"),
    ],
)
def test_architectures(tmp_path, given, cmake):
    environment = {"TRANSFORMER_OPS_CUDA": "ON"}
    if given is not None:
        environment["TORCH_CUDA_ARCH_LIST"] = given
    done = configure(tmp_path, TOOLKIT | TORCH, environment)
    assert done.returncode == 0, done.stderr
    assert f"-- architectures: {cmake}\n" in done.stdout
    said = (given or "8.0;9.0a;10.0+PTX").replace(", ", ";").replace(" ", ";")
    assert f'-- python: {{"toolkit": "13.0.88", "architectures": "{said}"}}' in done.stdout
