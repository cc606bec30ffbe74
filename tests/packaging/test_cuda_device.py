"""What only a CUDA device has: streams, graphs, memory of its own, and other devices beside it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from fusion_cases import CASES, Case
from helpers import (
    as_tuple,
    assert_equal,
    assert_near,
    feed_forward,
    leaf,
    off_the_grid,
    residual,
)
from op_cases import SEED, run_seeded
from op_references import attention
from torch import Tensor, nn

import transformer_ops as tops

pytestmark = pytest.mark.cuda
every_fusion = pytest.mark.parametrize("case", CASES, ids=str)


def inputs_of(case: Case, rows: int) -> list[Tensor]:
    return [leaf(tensor.cuda()) for tensor in case.inputs(torch.randn(rows, 16))]


def step_of(module: nn.Module, *inputs: Tensor) -> Callable[[], list[Tensor]]:
    """A training step on these very tensors, nothing copied to the device: the outputs, then the
    gradients of inputs and parameters."""
    sources = [*inputs, *module.parameters()]

    def step() -> list[Tensor]:
        outputs = as_tuple(module(*inputs))
        grads = [torch.linspace(-1, 1, o.numel(), device=o.device) for o in outputs]
        grads = [grad.to(o.dtype).view(o.shape) for grad, o in zip(grads, outputs, strict=True)]
        found = torch.autograd.grad(outputs, sources, grads)
        return [*(output.detach() for output in outputs), *found]

    return step


def large_block(dropout: float = 0.1, dtype: torch.dtype = torch.bfloat16) -> tops.Sequential:
    return tops.Sequential(
        *residual(*feed_forward(256, 512), tops.Dropout(dropout)),
        tops.LayerNorm(256),
        tops.Linear(256, 512),
        tops.GELU(),
        tops.Linear(512, 256),
    ).to("cuda", dtype)


# ---- streams and memory

SLEEP = 1_000_000_000  # clock cycles: about half a second


def test_the_host_never_waits() -> None:
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    step = step_of(large_block(), x)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP)
        step()
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert done.query()


@every_fusion
def test_all_kernels_are_on_the_current_stream(case: Case) -> None:
    """Elsewhere they would find the input before it is written."""
    module = tops.Sequential(*case.make()).cuda()
    late = inputs_of(case, 33)
    want = run_seeded(step_of(module, *late))
    early = [torch.full_like(x, torch.nan).requires_grad_() for x in late]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP // 20)
        with torch.no_grad():
            for a, b in zip(early, late, strict=True):
                a.copy_(b)
        got = run_seeded(step_of(module, *early))
    torch.cuda.synchronize()
    assert_equal(got, want)


def test_streams_side_by_side() -> None:
    module = large_block(dropout=0.0)
    shape = (512, 256)
    xs = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(4)]
    steps = [step_of(module, x) for x in xs]
    want = [step() for step in steps]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    got: list[list[list[Tensor]]] = [[] for _ in steps]
    for _ in range(5):
        for stream, step, found in zip(streams, steps, got, strict=True):
            with torch.cuda.stream(stream):
                found.append(step())
    torch.cuda.synchronize()
    for found, right in zip(got, want, strict=True):
        for tensors in found:
            assert_equal(tensors, right)


def allocated_bytes() -> int:
    """Without the tensors of tests that have ended."""
    gc.collect()
    return torch.cuda.memory_allocated()


@every_fusion
def test_no_memory_is_left(case: Case) -> None:
    module = tops.Sequential(*case.make()).cuda()
    step = step_of(module, *inputs_of(case, 33))
    for _ in range(2):
        step()  # the first call may keep a workspace
    before = allocated_bytes()
    step()
    assert allocated_bytes() == before


@contextmanager
def at_most(reserved: float) -> Iterator[None]:
    """torch's allocator reserves no more bytes than these."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(reserved / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_in_the_middle_of_a_step(where: str) -> None:
    module = large_block(dropout=0.0)
    small = step_of(module, torch.randn(64, 256, device="cuda").bfloat16().requires_grad_())
    want = small()
    x = torch.randn(1 << 16, 256, device="cuda").bfloat16().requires_grad_()
    reached = ""

    def step() -> None:
        nonlocal reached
        reached = "forward"
        output = module(x)
        reached = "backward"
        grad = torch.ones_like(output)
        # What was saved stays, so that the peak is in backward.
        torch.autograd.grad(output, [x, *module.parameters()], grad, retain_graph=True)

    step()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    output = module(x)
    after_forward = torch.cuda.max_memory_reserved()
    del output
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    after_backward = torch.cuda.max_memory_reserved()
    assert start < after_forward < after_backward
    limits = {
        "forward": (start + after_forward) / 2,
        "backward": (after_forward + after_backward) / 2,
    }
    allocated = allocated_bytes()
    with at_most(limits[where]):
        with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
            step()
        assert reached == where
        assert allocated_bytes() == allocated  # the traceback held the graph
        assert_equal(small(), want)
    step()
    assert reached == "backward"


# ---- torch's kernels for attention


def check_attention(op: tops.Attention, reference: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Output and gradient against float64 on the CPU."""
    x, mask = inputs[0], [mask.cpu() for mask in inputs[1:]]
    exact = x.detach().cpu().double().requires_grad_()
    output, want = run_seeded(op, *inputs), reference(exact, *mask)
    assert_near(output, want, x.dtype, "output", factor=4)
    grad = torch.randn_like(output)
    (found,) = torch.autograd.grad(output, x, grad)
    (right,) = torch.autograd.grad(want, exact, grad.cpu().double())
    assert_near(found, right, x.dtype, "gradient", factor=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 160])
@pytest.mark.parametrize("stored", [torch.clone, off_the_grid])
def test_flash_attention(
    dtype: torch.dtype, causal: bool, head_dim: int, stored: Callable[[Tensor], Tensor]
) -> None:
    op = tops.Attention(6, 2, head_dim=head_dim, causal=causal)
    x = stored(torch.randn(2, 3, 33, 10 * head_dim, dtype=dtype, device="cuda")).requires_grad_()
    check_attention(op, attention(6, 2, causal=causal), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_attention(dtype: torch.dtype, masked: bool, causal: bool) -> None:
    """Calls of the same shape drop the same numbers: without scores, values that are unit vectors
    show which."""
    rows, heads, kv_heads, p = 32, 4, 2, 0.3
    op = tops.Attention(heads, kv_heads, head_dim=rows, p=p, causal=causal, mask=masked)
    x = torch.randn(3, rows, (heads + 2 * kv_heads) * rows, dtype=dtype, device="cuda")
    seen = torch.rand(rows, rows) + torch.eye(rows) > 0.2
    mask = [seen.cuda()] * masked
    probe = torch.zeros_like(x)
    probe[..., -kv_heads * rows :] = torch.eye(rows).repeat(1, kv_heads)
    left = run_seeded(op, probe, *mask).cpu().double()
    factors = (left.unflatten(-1, (heads, rows)).transpose(-2, -3) > 0) / (1 - p)
    allowed = torch.ones(rows, rows).bool()
    allowed = allowed & seen if masked else allowed
    allowed = allowed.tril() if causal else allowed
    assert abs(factors[..., allowed].mean() - 1) < 0.05
    reference = attention(heads, kv_heads, causal=causal, factors=factors.double())
    check_attention(op, reference, x.requires_grad_(), *mask)


def test_second_derivatives_with_dropout_of_attention_raise() -> None:
    op = tops.Attention(2, head_dim=4, p=0.5)
    x = torch.randn(3, 5, 24, device="cuda", requires_grad=True)
    output = op(x)
    with pytest.raises(RuntimeError, match="p must be 0 on CUDA where forward is computed again"):
        torch.autograd.grad(output.square().sum(), x, create_graph=True)


# ---- graphs


def two_seeded(step: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    torch.manual_seed(SEED)
    return [[tensor.clone() for tensor in step()] for _ in range(2)]


def assert_the_same_draws(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    """Both steps are right, and drop different elements."""
    assert not torch.equal(want[0][0], want[1][0])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_captured_training_step(dtype: torch.dtype) -> None:
    x = torch.randn(64, 256, device="cuda", dtype=dtype, requires_grad=True)
    step = step_of(large_block(0.5, dtype), x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    for _ in range(2):
        assert_the_same_draws(two_seeded(replay), two_seeded(step))
        with torch.no_grad():
            x.copy_(torch.randn_like(x))


def test_make_graphed_callables() -> None:
    module = large_block(0.5, torch.float32)
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    want = two_seeded(step_of(module, x))
    graphed = torch.cuda.make_graphed_callables(module, (torch.randn_like(x).requires_grad_(),))
    assert_the_same_draws(two_seeded(step_of(graphed, x)), want)


@every_fusion
def test_every_fusion_is_captured(case: Case) -> None:
    module = tops.Sequential(*case.make()).cuda()
    step = step_of(module, *inputs_of(case, 9))
    want = run_seeded(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    run_seeded(graph.replay)
    torch.testing.assert_close(results, want)


# ---- devices


def test_tensors_on_two_devices() -> None:
    module, x = large_block(), torch.randn(3, 256)
    message = r"\[\w+\] tensors must be on one device, got {} and {}"
    with pytest.raises(RuntimeError, match=message.format("cpu", "cuda:0")):
        module(x.bfloat16())
    with pytest.raises(RuntimeError, match=message.format("cuda:0", "cpu")):
        module.cpu()(x.bfloat16().cuda())
    module(x.bfloat16())


@pytest.mark.cuda(devices=2)
def test_several_devices() -> None:
    """Each on its own, the current device being the first."""
    module = large_block(0.5, torch.float32)
    modules = [module, copy.deepcopy(module).to("cuda:1")]
    found = []
    for i, twin in enumerate(modules):
        x = torch.linspace(-1, 1, 64 * 256).view(64, 256).to(f"cuda:{i}").requires_grad_()
        found.append(two_seeded(step_of(twin, x)))
        assert all(tensor.device == x.device for tensor in found[-1][0])
        assert torch.cuda.current_device() == 0
    cpu = [[[tensor.cpu() for tensor in step] for step in steps] for steps in found]
    assert_the_same_draws(cpu[1], cpu[0])
    with pytest.raises(RuntimeError, match="tensors must be on one device, got cuda:1 and cuda:0"):
        module(torch.randn(3, 256, device="cuda:1"))
