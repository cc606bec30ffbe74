"""Seeds, tolerances by dtype, and the one decision on tests that need a CUDA device."""

import os

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--emulate-cuda",
        metavar="LIBRARY",
        help="run the CUDA bodies of the typed ops on CPU tensors, with the kernels of this library "
        "(libtransformer_ops_emulated.so of a build with TRANSFORMER_OPS_TESTS)",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device (FAIL_WITHOUT_CUDA=1 insists)")
    emulated = config.getoption("--emulate-cuda")
    if emulated is not None:
        import transformer_ops  # noqa: F401  # first: it registers the ops

        torch.ops.load_library(emulated)


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    message = "needs a CUDA device, got none"
    if os.environ.get("FAIL_WITHOUT_CUDA") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(autouse=True)
def _same_start_for_every_test():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
