"""Recipes on grouped products where no host knows which rows are of one group: the CUDA bodies and
the meanings of what rounds groups. `pytest --emulate-cuda` runs the bodies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import explained
from plan_calls import plan_op
from recipe_cases import EVERY_RECIPE, RECIPES
from test_cuda_build import default_dtype, fake_cuda
from test_grouped import experts, routed
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_ops as tops
from transformer_ops import _C

o = torch.ops.transformer_ops

FORMATS = [
    "e4m3",
    "e5m2",
    "e4m3 pow2",
    "e5m2 pow2",
    "e4m3 1x128",
    "e5m2 1x128",
    "e4m3 128x1",
    "e5m2 128x1",
    "e4m3 128x128",
    "e5m2 128x128",
    "mx e4m3",
    "mx e5m2",
    "mx e4m3 32x1",
    "mx e5m2 32x1",
    "nvfp4",
    "nvfp4 16x1",
    "nvfp4 16x16",
    "nvfp4 4over6",
    "nvfp4 4over6 mse 16x1",
    "nvfp4 4over6 448 16x16",
    "int8 1x32",
    "int8 1x128",
]
every_format = pytest.mark.parametrize("format", FORMATS)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
# Rows and their width, which no block divides; groups, of which some are empty or of one row.
LAYOUTS = [
    (104, 72, [40, 0, 3, 57]),
    (104, 33, [1, 1, 0, 0, 102]),
    (400, 136, [129, 0, 1, 256]),
    (40, 5, [0, 0, 0]),
    (7, 9, []),
    (0, 16, [0, 0]),
    (30, 0, [10, 20]),
    (1, 8, [1]),
]


def hard_rows(rows: int, h: int, dtype: torch.dtype) -> Tensor:
    """Far apart, with NaN, infinity and rows of zeros; the last one is NaN."""
    x = torch.randn(rows, h, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-3, 4, (rows, 1))
    x = x.to(dtype)
    if x.numel() > 40:
        x[0], x[-1] = 0, torch.nan
        x[3, 1], x[5, 2], x[6, 0], x[1, 0] = torch.nan, torch.inf, -torch.inf, -torch.nan
    return x


def assert_same(a: Tensor, b: Tensor) -> None:
    """Bit for bit; NaN may have any."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    is_same = (a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())
    assert is_same.all()


def meaning(name: str, *arguments: Any) -> list[Tensor]:
    return _C.decomposition(name, arguments)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operand_dtypes(dtype: torch.dtype) -> list[str]:
    """What products take such numbers in."""
    return ["float64"] if dtype is torch.float64 else ["float32", named(dtype)]


# ---- typed ops: bodies, and meanings without a host read, agree


@every_format
@every_dtype
def test_rows_of_groups(format: str, dtype: torch.dtype) -> None:
    for rows, h, sizes in LAYOUTS:
        x, splits = hard_rows(rows, h, dtype), torch.tensor(sizes, dtype=torch.int64)
        for wanted in operand_dtypes(dtype):
            (y,) = plan_op("quantize_dequantize_groups")([x], splits, format, wanted)
            assert_same(meaning("quantize_dequantize_groups", [x], splits, format, wanted)[0], y)
            assert not y[sum(sizes) :].any()
            first = 0
            for size in sizes:
                alone = o.quantize_dequantize(x[first : first + size], format, wanted)
                assert_same(y[first : first + size], alone)
                first += size
            (again,) = plan_op("quantize_dequantize_groups.saved")(x, [x], splits, format, wanted)
            assert_same(again, y)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@every_dtype
def test_rows_by_given_scales(format: str, dtype: torch.dtype) -> None:
    for rows, h, sizes in LAYOUTS:
        x, splits = hard_rows(rows, h, dtype), torch.tensor(sizes, dtype=torch.int64)
        scale = torch.rand(3, len(sizes)) * 10 + 0.1
        for wanted in operand_dtypes(dtype):
            arguments = ([x], scale, 1, splits, format, wanted)
            (y,), amax = plan_op("quantize_dequantize_groups_scaled")(*arguments)
            for a, b in zip(
                meaning("quantize_dequantize_groups_scaled", *arguments), (y, amax), strict=True
            ):
                assert_same(a, b)
            first = 0
            for group, size in enumerate(sizes):
                own, one = x[first : first + size], scale[:, group].contiguous()
                alone, largest = o.quantize_dequantize_scaled(own, one, 1, format, wanted)
                assert_same(y[first : first + size], alone)
                assert_same(amax[group], largest if size > 0 else torch.tensor(-1.0))
                first += size
            assert not y[first:].any()
            (again,) = plan_op("quantize_dequantize_groups_scaled.saved")(x, *arguments)
            assert_same(again, y)


@every_format
@pytest.mark.parametrize("shape", [(3, 40, 33), (2, 16, 128), (1, 7, 5), (0, 4, 4), (2, 0, 8)])
def test_stacks_and_lists(format: str, shape: tuple[int, ...]) -> None:
    stack = hard_rows(shape[0] * shape[1], shape[2], torch.bfloat16).view(shape)
    scale = torch.rand(3, shape[0]) * 10 + 0.1
    for given in ([stack], list(stack)):
        if not given:
            continue
        arguments = (given, None, format, "float32")
        found = plan_op("quantize_dequantize_groups")(*arguments)
        for a, b in zip(meaning("quantize_dequantize_groups", *arguments), found, strict=True):
            assert_same(a, b)
        whole = found[0] if given[0].dim() == 3 else torch.stack(found)
        for a, b in zip(whole, stack, strict=True):
            assert_same(a, o.quantize_dequantize(b, format, "float32"))
        if format in ("e4m3", "e5m2"):
            arguments = (given, scale, 2, None, format, "float32")
            found, amax = plan_op("quantize_dequantize_groups_scaled")(*arguments)
            want = meaning("quantize_dequantize_groups_scaled", *arguments)
            for a, b in zip([*found, amax], want, strict=True):
                assert_same(a, b)


@pytest.mark.parametrize("sizes", [[5000, 0, 1, 4000], [300] * 30, [1] * 9000])
def test_the_largest_of_many_rows(sizes: list[int]) -> None:
    """More than a warp, a block of threads or one round of them has."""
    x, splits = torch.randn(9010, 16).bfloat16(), torch.tensor(sizes)
    arguments = ([x], torch.ones(3, len(sizes)), 0, splits, "e4m3", "float32")
    amax = plan_op("quantize_dequantize_groups_scaled")(*arguments)[1]
    parts = x[: sum(sizes)].float().abs().split(sizes)
    want = [part.max() if len(part) > 0 else torch.tensor(-1.0) for part in parts]
    assert torch.equal(amax, torch.stack(want))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_turned_groups(dtype: torch.dtype) -> None:
    for rows, h, sizes in LAYOUTS:
        x, splits = torch.randn(rows, h).to(dtype), torch.tensor(sizes, dtype=torch.int64)
        if rows > 90:
            x[50, 3], x[-1] = torch.inf, torch.nan
        y = o.hadamard_columns(x, x, splits)
        torch.testing.assert_close(*meaning("hadamard_columns", x, x, splits), y, equal_nan=True)
        first = 0
        for size in sizes:
            own = x[first : first + size]
            torch.testing.assert_close(
                y[first : first + size], o.hadamard_columns(own, own), equal_nan=True
            )
            first += size
        assert not y[first:].any()


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4 16x1", "mx e4m3", "e5m2"])
def test_groups_rounded_at_random(format: str) -> None:
    x, sizes = torch.randn(104, 48), [40, 0, 3, 57]
    x[:40] *= 1000
    splits = torch.tensor(sizes)
    arguments = ([x], splits, format, "float32")
    (nearest,) = plan_op("quantize_dequantize_groups")(*arguments)
    for draw in (
        lambda: plan_op("quantize_dequantize_groups_stochastic")(*arguments)[0],
        lambda: meaning("quantize_dequantize_groups_stochastic", *arguments)[0],
    ):
        draws = torch.stack([draw() for _ in range(200)])
        assert not draws[:, 100:].any()
        low, high = draws.amin(0), draws.amax(0)
        # Each number becomes one of the two around it, by the scale of its group.
        assert ((draws == low) | (draws == high)).all()
        assert ((nearest == low) | (nearest == high)).all()
        for part in torch.arange(100).split(sizes):
            error = (draws.mean(0) - x)[part].norm()
            assert error <= 0.35 * (nearest - x)[part].norm() or len(part) == 0


@pytest.mark.parametrize("sizes", [[-3, 5, 2], [4, 300, -1], [2**40, 1, 0]])
@every_format
def test_sizes_that_fit_no_rows(format: str, sizes: list[int]) -> None:
    """No host sees them, and nothing beyond the rows is read."""
    x, splits = torch.randn(20, 24), torch.tensor(sizes)
    (y,) = meaning("quantize_dequantize_groups", [x], splits, format, "float32")
    assert y.shape == x.shape
    (y,) = meaning("hadamard_columns", x, x, splits)
    assert y.shape == x.shape


@pytest.mark.emulated
@pytest.mark.parametrize("sizes", [[-3, 5, 2], [4, 300, -1], [2**40, 1, 0]])
@every_format
def test_kernels_stay_within_rows(format: str, sizes: list[int]) -> None:
    x, splits = torch.randn(20, 24), torch.tensor(sizes)
    arguments = ([x], splits, format, "float32")
    assert_same(
        plan_op("quantize_dequantize_groups")(*arguments)[0],
        meaning("quantize_dequantize_groups", *arguments)[0],
    )


# ---- nothing is read on the host


class Reads(TorchDispatchMode):
    """Notes what would have a host wait for a GPU: numbers and tensors that go from one to the
    other, and sizes that depend on data."""

    NAMES = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        self.calls.append(name)
        tensors = [t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if "copy" not in name:
            # A number on the host is an argument of a kernel.
            tensors = [t for t in tensors if t.dim() > 0 or t.device.type == "cuda"]
        if name in self.NAMES or len({t.device.type for t in tensors}) > 1:
            self.found.append(name)
        return result


def meanings(x: Tensor, splits: Tensor) -> Iterator[tuple[str, list[Any]]]:
    scale = torch.ones(3, 4)
    for format in ("e4m3", "e5m2 128x1", "mx e4m3", "nvfp4 16x1", "nvfp4 16x16", "int8 1x32"):
        yield "quantize_dequantize_groups", [[x], splits, format, "float32"]
        if not format.startswith("int8"):
            yield "quantize_dequantize_groups_stochastic", [[x], splits, format, "float32"]
            # This op rounds one matrix.
            yield "quantize_dequantize_stochastic", [x, format, "float32"]
    for format in ("e4m3", "e5m2"):
        arguments = [[x], scale, 0, splits, format, "float32"]
        yield "quantize_dequantize_groups_scaled", arguments
    yield "hadamard_columns", [x, x, splits]
    yield "hadamard_columns", [x, x, None]


def test_no_meaning_reads_on_the_host() -> None:
    with fake_cuda():
        x, splits = torch.empty(104, 72, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
        for name, arguments in meanings(x, splits):
            with Reads() as reads:
                found = meaning(name, *arguments)
            assert found[0].device.type == "cuda" and found[0].shape == x.shape
            assert len(reads.calls) > 5 and reads.found == [], name


@pytest.mark.parametrize("format", ["e4m3", "mx e4m3 32x1", "nvfp4 16x1"])
def test_sizes_may_be_symbols(format: str) -> None:
    """Traced once, for any number of rows and groups."""

    def run(x: Tensor, splits: Tensor) -> Tensor:
        (rounded,) = meaning("quantize_dequantize_groups", [x], splits, format, "float32")
        return meaning("hadamard_columns", x, rounded, splits)[0]

    x, splits = torch.randn(104, 72), torch.tensor([40, 0, 3, 57])
    graph = make_fx(run, tracing_mode="symbolic")(x, splits)
    y, others = torch.randn(50, 20), torch.tensor([17, 20])
    assert_same(graph(y, others), run(y, others))


def test_a_host_read_would_be_seen() -> None:
    with fake_cuda():
        x = torch.empty(3)
        for read in (x.cpu, x.sum().cpu, lambda: x.copy_(torch.empty(3, device="cpu"))):
            with Reads() as reads:
                read()
            assert reads.found in (["_to_copy"], ["copy_"])
        with pytest.raises(RuntimeError), Reads():
            x.sum().item()


@pytest.mark.emulated
@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_a_step_reads_nothing_on_the_host(name: str) -> None:
    """And kernels round to the nearest, not the meaning."""
    module, inputs = grouped(torch.bfloat16)
    step(module, inputs, name)
    with torch.profiler.profile() as profile:
        step(module, inputs, name)
    names = {event.name for event in profile.events()}
    # The profiler names the op that reaches what plans alone call.
    assert "quantize_dequantize_groups" in str(module.plans()[-1])
    assert any("run_call" in name for name in names)
    assert not names & {f"aten::{read}" for read in Reads.NAMES}
    assert ("aten::bucketize" in names) == (name == "nvfp4 at random")


# ---- whole modules


def grouped(
    dtype: torch.dtype = torch.float32, single: bool = True, bias: bool = True
) -> tuple[tops.Sequential, list[Tensor]]:
    """A module, and what it is called with."""
    torch.manual_seed(0)
    options = {"single_grouped_weight": single, "single_grouped_bias": single and bias}
    op = tops.GroupedLinear(4, 72, 50, bias=bias, dtype=dtype, **options)
    return tops.Sequential(op), [torch.randn(104, 72, dtype=dtype), torch.tensor([40, 0, 3, 57])]


def layer(dtype: torch.dtype) -> tuple[tops.Sequential, list[Tensor]]:
    torch.manual_seed(0)
    x, ids, probs = routed(20, 3, 2, 64, dtype)
    with default_dtype(dtype):
        module = tops.Sequential(tops.RMSNorm(64), *experts(3, 64, 32))
    return module, [x.detach(), ids, probs.detach()]


def step(module: Any, inputs: list[Tensor], name: str) -> list[Tensor]:
    """The output and all gradients, of the same numbers at random."""
    torch.manual_seed(1)
    return step_from_here(module, inputs, name)


def step_from_here(module: Any, inputs: list[Tensor], name: str) -> list[Tensor]:
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    with tops.autocast(recipe=EVERY_RECIPE[name]):
        y = module(*leaves)
    wanted = [t for t in (*leaves, *module.parameters()) if t.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted)]


modules = pytest.mark.parametrize(
    "make",
    [grouped, lambda dtype: grouped(dtype, single=False), layer],
    ids=["stack", "list", "layer"],
)
in_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@modules
@in_dtypes
@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_on_fake_cuda_tensors(name: str, dtype: torch.dtype, make: Any) -> None:
    """Shapes both ways; the plan is that of the CPU."""
    module, inputs = make(dtype)
    real = step(module, inputs, name)
    (want,) = module.plans()
    with fake_cuda():
        fake, given = make(dtype)
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in given]
        with tops.autocast(recipe=EVERY_RECIPE[name]):
            y = fake(*leaves)
        (plan,) = fake.plans()
        # By its node: the autograd engine asks the driver for the device's streams.
        with torch.no_grad():
            grads = y.grad_fn(torch.empty_like(y))
        variables = [getattr(node, "variable", None) for node, _ in y.grad_fn.next_functions]
        found = {id(v): g for v, g in zip(variables, grads, strict=True) if v is not None}
        wanted = [t for t in (*leaves, *fake.parameters()) if t.requires_grad]
        results = [y, *(found[id(t)] for t in wanted)]
    assert str(plan) == str(want)
    assert y.dtype == real[0].dtype
    # The dtype of a gradient is that of the product until the engine takes it.
    for a, b in zip(results, real, strict=True):
        assert (a.device.type, a.shape) == ("cuda", b.shape)
    assert "emulated, by products of decoded tensors" in explained(module)


@pytest.mark.emulated
@modules
@in_dtypes
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_are_as_near_as_formats_allow(name: str, dtype: torch.dtype, make: Any) -> None:
    module, inputs = make(dtype)
    exact = copy.deepcopy(module)
    for _ in range(2):  # delayed scales are of an earlier step
        found = step(module, inputs, name)
    with tops.autocast(enabled=False):
        y = exact(*inputs)
    assert (found[0] - y).norm() <= (0.35 if "nvfp4" in name else 0.15) * y.norm()
    assert all(t.isfinite().all() for t in found)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [n for n in EVERY_RECIPE if n != "nvfp4 at random"])
def test_compiled_code_has_no_break(name: str, dynamic: bool) -> None:
    one, inputs = grouped()
    other = copy.deepcopy(one)
    fast = torch.compile(other, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    if name == "delayed":
        step(one, inputs, name), step(other, inputs, name)
    want = step(one, inputs, name)
    torch.testing.assert_close(step(fast, inputs, name), want)


@pytest.mark.parametrize("name", [n for n in EVERY_RECIPE if n != "delayed"])
def test_a_program_for_cuda(name: str) -> None:
    """Exported from fake CUDA tensors, in one graph without a read on the host."""
    with fake_cuda():
        module, inputs = grouped()
        with tops.autocast(recipe=EVERY_RECIPE[name]), torch.no_grad():
            program = torch.export.export(module, tuple(inputs))
    code = program.graph_module.code
    assert "quantize_dequantize_groups" in code
    assert not any(f".{read}." in code for read in (*Reads.NAMES, "_to_copy", "_assert_scalar"))


# ---- on a GPU


def on_gpu(make: Any, dtype: torch.dtype) -> tuple[tops.Sequential, list[Tensor]]:
    module, inputs = make(dtype)
    return module.cuda(), [t.cuda() for t in inputs]


@pytest.mark.cuda
@modules
@in_dtypes
@pytest.mark.parametrize("name", RECIPES)
def test_a_gpu_has_the_cpus_numbers(name: str, dtype: torch.dtype, make: Any) -> None:
    module, inputs = make(dtype)
    fast, given = on_gpu(make, dtype)
    for _ in range(2):
        want, got = step(module, inputs, name), step(fast, given, name)
    assert str(module.plans()[0]) == str(fast.plans()[0])
    for a, b in zip(got, want, strict=True):
        assert (a.cpu() - b).double().norm() <= 2**-5 * b.double().norm()


@pytest.mark.cuda
@modules
@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_a_step_that_never_waits(name: str, make: Any) -> None:
    """Twice by itself, then in a graph that is replayed with other rows."""
    module, inputs = on_gpu(make, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step_from_here(module, inputs, name)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step_from_here(module, inputs, name)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step_from_here(module, inputs, name)
    inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    if name not in ("delayed", "nvfp4 at random"):  # of other scales, of other numbers
        torch.testing.assert_close(results, step_from_here(module, inputs, name))
    assert all(t.isfinite().all() for t in results)
