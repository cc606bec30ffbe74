"""Seeds, tolerances by dtype, and the one place that decides about tests that need a CUDA
device."""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest
import torch
import torch._dynamo.guards

import transformer_ops as tops
from transformer_ops._loader import build_info
from transformer_ops.models.rules import _rules as fuse_rules


def pytest_addoption(parser):
    parser.addoption(
        "--emulate-cuda",
        metavar="LIBRARY",
        help="run the CUDA bodies of the typed ops on CPU tensors, with the kernels of this "
        "library (libtransformer_ops_emulated.so of a build with TRANSFORMER_OPS_TESTS)",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "cuda(devices=1, backend=True, emulated=False): needs this many CUDA devices and, with "
        "`backend`, a build with CUDA; with `emulated`, --emulate-cuda will do "
        "(FAIL_WITHOUT_CUDA=N insists on N devices)",
    )
    config.addinivalue_line("markers", "emulated: needs --emulate-cuda")
    config.addinivalue_line(
        "markers",
        "slow: takes a minute or more, or differs little from a row beside it "
        '(leave out: -m "not slow")',
    )
    config.addinivalue_line(
        "markers", "takes(seconds): of a whole file; the files that take longest start first"
    )
    emulated = config.getoption("--emulate-cuda")
    if emulated is not None:
        torch.ops.load_library(emulated)
    # Dynamo empties the processor's caches to time the guards of each new graph, 25 ms of 80, and
    # only logs the time.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    # For each kind of device that is not there, `torch.manual_seed` stores the stack as a text.
    # That takes longer than most calls that are tested.
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None
    # By default torch lets cuBLAS add up parts of a product in 16 bits.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def pytest_collection_modifyitems(items):
    """The slowest files start first, so that the processes of pytest-xdist end together: each runs
    a file at a time, in this order with --no-loadscope-reorder."""
    counts = Counter(item.path for item in items)

    def order(item):
        takes = item.get_closest_marker("takes")
        # A test takes 0.02 s, unless its file says otherwise.
        return -(takes.kwargs["seconds"] if takes else 0.02 * counts[item.path]), str(item.path)

    items.sort(key=order)


def what_is_missing(devices: int = 1, backend: bool = True) -> str | None:
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < devices:
        return f"CUDA devices must be at least {devices}, got {found}"
    if backend and build_info().CUDA is None:
        return "transformer_ops must be built with TRANSFORMER_OPS_CUDA=ON, got a CPU build"
    return None


def pytest_runtest_setup(item):
    if item.get_closest_marker("emulated") and item.config.getoption("--emulate-cuda") is None:
        pytest.skip("the CUDA bodies must be emulated (--emulate-cuda), got no library")
    marker = item.get_closest_marker("cuda")
    if marker is None:
        return
    needs = dict(marker.kwargs)
    if needs.pop("emulated", False) and item.config.getoption("--emulate-cuda") is not None:
        return
    message = what_is_missing(**needs)
    if message is None:
        return
    if int(os.environ.get("FAIL_WITHOUT_CUDA", "0")) >= needs.get("devices", 1):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture
def device(request) -> torch.device:
    """The device on which the ops' CUDA kernel wrappers run."""
    emulated = request.config.getoption("--emulate-cuda") is not None
    return torch.device("cpu") if emulated else torch.device("cuda", 0)


@pytest.fixture(scope="module")
def few_objects():
    """For tests that collect garbage: older objects are excluded. With the objects of a few
    thousand tests, one collection takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _no_fusion_is_left():
    """The rules of a library that a file loads would show in every explain() after it."""
    before = set(tops.fusions())
    yield
    for handle in set(tops.fusions()) - before:
        handle.remove()


@pytest.fixture(autouse=True)
def _same_start_for_every_test():
    torch.manual_seed(0)
    torch._dynamo.reset()
    threads, rules = torch.get_num_threads(), set(fuse_rules)
    yield
    gc.enable()
    torch.set_num_threads(threads)
    for name in set(fuse_rules) - rules:
        del fuse_rules[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
