"""The pool behind results: what is used again, what never is, what happens when memory is short."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import transformer_ops as tops
from transformer_ops import memory

pytestmark = [pytest.mark.usefixtures("few_objects"), pytest.mark.takes(seconds=20)]

ROWS, WIDTH = 256, 512
BYTES = ROWS * WIDTH * 4


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    gc.collect()
    before, limit = memory.stats().in_use_bytes, memory.limit()
    yield
    memory.set_limit(limit)
    gc.collect()
    assert memory.stats().in_use_bytes == before, "leaked"


def gelu(x: Tensor) -> Tensor:
    return torch.ops.transformer_ops.gelu(x)


def block() -> tops.Sequential:
    return tops.Sequential(
        tops.RMSNorm(WIDTH),
        tops.Linear(WIDTH, 2 * WIDTH),
        tops.SwiGLU(),
        tops.Linear(WIDTH, WIDTH),
        tops.Dropout(0.1),
    )


def step(module: torch.nn.Module, x: Tensor) -> None:
    module(x).sum().backward()
    module.zero_grad(set_to_none=True)
    x.grad = None


# ---- what is used again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_takes_fresh_memory_only_at_first(dtype: torch.dtype) -> None:
    module = block().to(dtype)
    x = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
    step(module, x)
    step(module, x)
    # Once in 4096 allocations the pool returns what stayed idle, and a step may miss it.
    runs = []
    for _ in range(3):
        before = memory.stats()
        for _ in range(3):
            step(module, x)
        runs.append((before, memory.stats()))
    before, after = min(runs, key=lambda run: run[1].misses - run[0].misses)
    assert after.misses == before.misses
    # At least: norm, two products, activation and dropout, each forward and backward.
    assert after.hits >= before.hits + 3 * 10
    assert after.idle_bytes == before.idle_bytes


def test_compiled_steps_recycle_too() -> None:
    module = torch.compile(block(), backend="aot_eager", fullgraph=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    step(module, x)
    step(module, x)
    before = memory.stats()
    step(module, x)
    after = memory.stats()
    assert after.misses == before.misses
    assert after.hits >= before.hits + 8


def test_the_same_numbers_with_and_without() -> None:
    module = block()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    results = []
    for limit in (0, 2**30, 2**30, 0):
        memory.set_limit(limit)
        torch.manual_seed(3)
        y = module(x)
        grads = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
        results.append([t.clone() for t in (y, *grads)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def is_product(got: Tensor, left: Tensor, right: Tensor) -> bool:
    """As torch multiplies; without instructions for bfloat16, as it does in float32."""
    if got.dtype is torch.bfloat16 and not tops.processor().multiplies_bfloat16:
        return torch.equal(got, torch.mm(left.float(), right.float()).to(got.dtype))
    return torch.equal(got, torch.mm(left, right))


def test_products_are_those_of_torch() -> None:
    x, weight, grad = torch.randn(96, 300), torch.randn(200, 300), torch.randn(96, 200)
    ops = torch.ops.transformer_ops
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        a, w, g = x.to(dtype), weight.to(dtype), grad.to(dtype)
        for left, right in ((a, w), (a.t().contiguous().t(), w), (a, w.t().contiguous().t())):
            assert is_product(ops.linear(left, right), left, right.t())
            grad_input, grad_weight = ops.linear_backward(g, left, right, [True, True])
            assert is_product(grad_input, g, right)
            assert is_product(grad_weight, g.t(), left)
            assert grad_input.is_contiguous() and grad_weight.is_contiguous()


def test_small_results_are_not_pooled() -> None:
    before = memory.stats()
    y = gelu(torch.randn(64, 255))
    assert memory.stats() == before
    y = gelu(torch.randn(64, 256))
    assert memory.stats().in_use_bytes == before.in_use_bytes + 65536
    assert y.data_ptr() % 64 == 0


# ---- what never is


def test_a_tensor_in_the_users_hands_keeps_its_memory() -> None:
    x = torch.randn(ROWS, WIDTH)
    want = gelu(x).clone()
    kept = gelu(x)
    views = [gelu(x)[3:5].t(), gelu(x).view(-1)[-7:], gelu(x).detach(), gelu(x).untyped_storage()]
    for _ in range(10):
        gelu(torch.zeros(ROWS, WIDTH))
    assert torch.equal(kept, want)
    assert torch.equal(views[0], want[3:5].t())
    assert torch.equal(views[1], want.view(-1)[-7:])
    assert torch.equal(views[2], want)
    assert torch.equal(torch.frombuffer(bytearray(views[3]), dtype=torch.float32), want.view(-1))  # type: ignore[call-overload]


def test_numpy_and_dlpack_keep_the_memory() -> None:
    x = torch.randn(ROWS, WIDTH)
    want = gelu(x).clone()
    array, other = gelu(x).numpy(), torch.from_dlpack(gelu(x))
    in_use = memory.stats().in_use_bytes
    for _ in range(5):
        gelu(torch.zeros(ROWS, WIDTH))
    assert torch.equal(torch.from_numpy(array), want)
    assert torch.equal(other, want)
    del array, other
    assert memory.stats().in_use_bytes == in_use - 2 * BYTES


def test_saved_tensors_live_until_backward() -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    (want,) = torch.autograd.grad(gelu(gelu(x)).sum(), x)
    y = gelu(gelu(x))
    for _ in range(5):
        gelu(torch.zeros(ROWS, WIDTH))
    (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, want)


def test_resize() -> None:
    x = torch.randn(ROWS, WIDTH)
    want = gelu(x).clone()
    y = gelu(x)
    in_use = memory.stats().in_use_bytes
    y.resize_(2 * ROWS, WIDTH)
    assert torch.equal(y[:ROWS], want)
    y.fill_(1)
    assert memory.stats().in_use_bytes == in_use + BYTES
    y.resize_(4)
    y.untyped_storage().resize_(16)  # to torch's own allocator
    assert memory.stats().in_use_bytes == in_use - BYTES
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(BYTES)  # and back
    y.resize_(ROWS, WIDTH).copy_(want)
    assert torch.equal(y, want)
    assert memory.stats().in_use_bytes == in_use
    z = gelu(x)
    z.set_(torch.zeros(3))  # type: ignore[call-overload]
    assert memory.stats().in_use_bytes == in_use


def test_data_swap_and_lazy_copies() -> None:
    x = torch.randn(ROWS, WIDTH)
    want = gelu(x).clone()
    y = gelu(x)
    y.data = torch.zeros(2)
    z = gelu(x)
    lazy = torch._lazy_clone(z)
    z.zero_()
    assert torch.equal(lazy, want)


def test_copies_and_pickles() -> None:
    y = gelu(torch.randn(ROWS, WIDTH))
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    for other in (copy.deepcopy(y), copy.copy(y), pickle.loads(pickle.dumps(y)), torch.load(file)):
        assert torch.equal(other, y)


def test_shared_memory() -> None:
    y = gelu(torch.randn(ROWS, WIDTH))
    want = y.clone()
    in_use = memory.stats().in_use_bytes
    y.share_memory_()
    assert y.is_shared()
    assert torch.equal(y, want)
    assert memory.stats().in_use_bytes == in_use - BYTES


# ---- threads and processes


def test_other_threads_may_drop_tensors() -> None:
    tensors: list[Tensor] = []
    failures: list[Exception] = []
    lock = threading.Lock()

    def work(seed: int) -> None:
        try:
            x = torch.full((ROWS, WIDTH), float(seed))
            want = torch.nn.functional.gelu(x, approximate="tanh")
            for _ in range(40):
                y = gelu(x)
                torch.testing.assert_close(y, want)
                with lock:
                    tensors.append(y)
                    if len(tensors) > 6:
                        del tensors[:5]
                memory.stats()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def run_script(script: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


HEADER = """
import os, torch, transformer_ops as tops
from transformer_ops import memory
torch.set_num_threads(1)
gelu = torch.ops.transformer_ops.gelu
"""


def test_a_forked_process_goes_on() -> None:
    script = (
        HEADER
        + """
x = torch.randn(256, 512)
kept = gelu(x)
gelu(x)  # idle now
want = kept.clone()
child = os.fork()
if child == 0:
    code = 1
    try:
        hits = memory.stats().hits
        kept.zero_()
        assert torch.equal(gelu(x), want) and memory.stats().hits == hits + 1
        del kept
        assert memory.trim() > 0
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(kept, want)
"""
    )
    run_script(script)


def test_tensors_may_outlive_the_interpreter() -> None:
    script = (
        HEADER
        + """
import builtins, threading
builtins.kept = gelu(torch.randn(256, 512))
def hold(tensor):
    threading.Event().wait()  # woken at the end, it would abort: destructors of torch take the GIL
threading.Thread(target=hold, args=(gelu(torch.randn(256, 512)),), daemon=True).start()
"""
    )
    run_script(script)


# ---- limits and counters


def test_limit_bounds_idle_memory() -> None:
    memory.set_limit(BYTES)
    x = torch.randn(ROWS, WIDTH)
    kept = [gelu(x) for _ in range(5)]
    released = memory.stats().released_bytes
    del kept
    stats = memory.stats()
    assert stats.idle_bytes <= memory.limit() == BYTES
    assert stats.released_bytes >= released + 4 * BYTES
    torch.testing.assert_close(gelu(x), torch.nn.functional.gelu(x, approximate="tanh"))


def test_limit_zero_switches_recycling_off() -> None:
    x = torch.randn(ROWS, WIDTH)
    old = gelu(x)
    memory.set_limit(0)
    before = memory.stats()
    assert before.idle_bytes == 0
    assert torch.equal(gelu(x), old)
    assert memory.stats() == before
    del old
    assert memory.stats().idle_bytes == 0


def test_trim_returns_what_it_gave_back() -> None:
    gelu(torch.randn(ROWS, WIDTH))
    idle = memory.stats().idle_bytes
    assert idle >= BYTES
    assert memory.trim() == idle
    assert memory.trim() == memory.stats().idle_bytes == 0


def test_peaks() -> None:
    x = torch.randn(ROWS, WIDTH)
    before = memory.stats()
    kept = [gelu(x) for _ in range(3)]
    after = memory.stats()
    assert after.peak_in_use_bytes >= before.in_use_bytes + 3 * BYTES
    assert after.peak_held_bytes >= after.peak_in_use_bytes
    del kept


@pytest.mark.parametrize("value", [-1, 2**63, 1.5, "1", None, True])
def test_bad_limit(value: object) -> None:
    limit = memory.limit()
    with pytest.raises(ValueError, match=r"^\[memory\] limit must be .*, got "):
        memory.set_limit(value)  # type: ignore[arg-type]
    assert memory.limit() == limit


def test_limit_from_the_environment() -> None:
    script = (
        HEADER
        + """
for value in ("", "-1", "1.5", "many", "1 ", "99999999999999999999"):
    os.environ["TRANSFORMER_OPS_POOL_LIMIT"] = value
    for use in (memory.limit, lambda: gelu(torch.randn(256, 512))):
        try:
            use()
        except ValueError as error:
            print(str(error).splitlines()[0])
os.environ["TRANSFORMER_OPS_POOL_LIMIT"] = "123456"
print(memory.limit())
"""
    )
    lines = run_script(script).splitlines()
    for i, value in enumerate(("", "-1", "1.5", "many", "1 ", "99999999999999999999")):
        text = f"[memory] TRANSFORMER_OPS_POOL_LIMIT must be a number of bytes, got '{value}'"
        assert lines[2 * i] == lines[2 * i + 1] == text
    assert lines[-1] == "123456"


def test_the_profiler_sees_results() -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        gelu(torch.randn(ROWS, WIDTH))
    rows = {row.key: row for row in profile.key_averages()}
    assert rows["transformer_ops::gelu"].cpu_memory_usage == BYTES


# ---- when memory is short


def fail_everywhere(make: str, rows: int = 2048, width: int = 2048) -> list[str]:
    """Steps under ever larger limits of the address space, each followed by one without a limit."""
    script = (
        HEADER
        + f"""
import gc, resource
module = {make}
x = torch.randn({rows}, {width}, requires_grad=True)
def step():
    torch.manual_seed(0)
    y = module(x)
    return torch.autograd.grad(y.sum(), [x, *module.parameters()])
def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
want = step()
gc.disable()
for megabytes in range(0, 400, 8):
    memory.trim()
    in_use = memory.stats().in_use_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + megabytes * 2**20, -1))
    place = "forward"
    try:
        y = module(x)
        place = "backward"
        grads = torch.autograd.grad(y.sum(), [x, *module.parameters()])
        place = "none"
        del grads
    except RuntimeError as error:
        ours = "[memory] tensor must fit into memory, got"
        if isinstance(error, torch.OutOfMemoryError):
            text = str(error)  # which ends early where its stream gets no memory, either
            assert text.startswith("[memory] tensor") and ours.startswith(text[: len(ours)]), error
        else:  # what torch itself asked for, or a few bytes of the C heap, which trim() has emptied
            own = ("DefaultCPUAllocator: can't allocate memory", "std::bad_alloc")
            assert any(text in str(error) for text in own), error
        error.__traceback__ = None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    y = None
    assert memory.stats().in_use_bytes == in_use, (megabytes, place)
    assert all(torch.equal(a, b) for a, b in zip(step(), want))
    print(place)
"""
    )
    return run_script(script).splitlines()


@pytest.mark.parametrize(
    "make",
    [
        "tops.Sequential(tops.RMSNorm(2048), tops.GELU(), tops.Dropout(0.1))",
        "tops.Sequential(tops.LayerNorm(2048), tops.SwiGLU(), tops.L2Normalization())",
    ],
)
def test_out_of_memory_in_the_middle_of_a_step(make: str) -> None:
    places = fail_everywhere(make)
    assert {"forward", "backward", "none"} == set(places)
    assert places[0] == "forward" and places[-1] == "none"


def test_a_request_that_no_machine_can_serve() -> None:
    before = memory.stats().in_use_bytes
    y = gelu(torch.randn(ROWS, WIDTH))
    with pytest.raises(
        RuntimeError, match=r"\[memory\] tensor must fit into memory, got \d+ bytes"
    ):
        y.untyped_storage().resize_(2**60)
    assert memory.stats().in_use_bytes == before + BYTES
    torch.testing.assert_close(gelu(y), torch.nn.functional.gelu(y, approximate="tanh"))


def failing(text: str) -> Callable[..., object]:
    # A new error each time: one kept here would keep, by its traceback, the graph that keeps it.
    def hook(*args: object) -> object:
        raise ValueError(text)

    return hook


def test_an_exception_in_the_middle_of_a_step_leaks_nothing() -> None:
    module = block()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    in_use = memory.stats().in_use_bytes
    y = module(x)
    y.register_hook(failing("in backward"))
    with pytest.raises(ValueError, match="in backward"):
        y.sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(failing("in forward"), lambda t: t):
        with pytest.raises(ValueError, match="in forward"):
            module(x)
    with pytest.raises(RuntimeError, match="must end in dimensions"):
        module(torch.randn(ROWS, WIDTH + 1))
    del y
    module.zero_grad(set_to_none=True)
    x.grad = None
    gc.collect()
    assert memory.stats().in_use_bytes == in_use
    step(module, x)
