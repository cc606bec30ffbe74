"""Random pipelines of up to 8 ops against plain PyTorch: the text of the plan, many threads."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import as_tuple, assert_near, leaf, strided
from op_cases import CASES, OpCase
from torch import Tensor

import transformer_ops as tops

COUNT = 60
LONGEST = 8
WIDTHS = (8, 16, 32)
SHAPES = ((5,), (), (3, 4), (0,), (2, 0), (2, 1, 3))
# Random or shape-changing ops have no place between others here.
ROWS = {case.name: case for case in CASES}
SAME_WIDTH = [
    "GELU",
    "GELU-exact",
    "QGELU",
    "ReLU",
    "SReLU",
    "SiLU",
    "ConstantScale",
    "Identity",
    "L2Normalization",
]
SAME_WIDTH += ["Dropout-eval", "Dropout-none"]
HALVING = [
    "GLU",
    "GEGLU",
    "GEGLU-exact",
    "QGEGLU",
    "ReGLU",
    "SReGLU",
    "SwiGLU",
    "SwiGLU-interleaved",
]
HALVING += ["SiTUGLU", "ClampedSwiGLU"]
KINDS = (*SAME_WIDTH, *HALVING, "Linear", "Linear", "Linear", "BasicLinear", "Bias", "LayerNorm")
KINDS += ("RMSNorm", "AddExtraInput", "MakeExtraOutput", "ReLU", "SReLU", "GELU")


@dataclass
class Pipeline:
    """Ops, what each means, and the widths of the tensors that they take and give."""

    ops: list[tops.FusibleOperation] = field(default_factory=list)
    references: list[OpCase] = field(default_factory=list)
    width: int = 16
    extra_widths: list[int] = field(default_factory=list)
    # For each op: the channel it writes or reads, if any.
    channels: list[str | None] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)

    def sequential(self, dtype: torch.dtype) -> tops.Sequential:
        module = tops.Sequential(*self.ops).to(dtype)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.4)
        return module

    def reference(self, module: tops.Sequential, x: Tensor, extra: list[Tensor], weights: list):
        """The same in plain PyTorch; `weights` are the parameters of each op by name."""
        extra, outputs = list(extra), []
        kept: dict[Any, Any] = {}
        for case, channel, own in zip(self.references, self.channels, weights, strict=True):
            if case.name == "AddExtraInput":
                x = x + (kept[channel] if channel else extra.pop(0))
            elif case.name == "MakeExtraOutput":
                kept[channel] = x
                if channel not in self.hidden:
                    outputs.append(x * 1)
            else:
                x = case.reference(x, **own)
        return (x, *outputs)


def make_op(name: str, width: int, rng: random.Random) -> tuple[tops.FusibleOperation, int]:
    if name in ("Linear", "BasicLinear"):
        out = rng.choice(WIDTHS)
        return getattr(tops, name)(width, out), out
    if name in ("Bias", "LayerNorm", "RMSNorm"):
        return getattr(tops, name)(width), width
    return ROWS[name].make(), width // 2 if name in HALVING else width


def make_pipeline(seed: int) -> Pipeline:
    rng = random.Random(seed)
    made = Pipeline()
    width = made.width
    open_channels: list[tuple[str, int]] = []
    for position in range(rng.randint(1, LONGEST)):
        name = rng.choice(KINDS)
        if name in HALVING and width < 16:
            name = "Linear"
        op, out = make_op(name, width, rng)
        channel = None
        if name == "MakeExtraOutput":
            channel = f"c{position}"
            hide = rng.random() < 0.5
            if hide:
                made.hidden.add(channel)
            op.set_extra_output_channel(0, channel, output_to_caller=not hide)
            open_channels.append((channel, width))
        if name == "AddExtraInput":
            fitting = [c for c, w in open_channels if w == width]
            if fitting and rng.random() < 0.7:
                channel = rng.choice(fitting)
                op.set_extra_input_channel(0, channel)
            else:
                made.extra_widths.append(width)
        made.ops.append(op)
        made.references.append(ROWS[name])
        made.channels.append(channel)
        width = out
    return made


def sources_of(pipeline: Pipeline, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    widths = [pipeline.width, *pipeline.extra_widths]
    return [torch.randn((*shape, width)).to(dtype).requires_grad_() for width in widths]


def run(call, sources, parameters, grads):
    """Outputs and all gradients; None where a source has none."""
    outputs = as_tuple(call(*sources))
    live = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in live], [*sources, *parameters], [g for _, g in live], allow_unused=True
    )
    return [*outputs, *found]


def by_text(group: tops.OperationFuser):
    """The group's last plan, printed, parsed and run."""

    def call(*sources: Tensor):
        parameters = [t for op in group._basic_ops for t in op._parameter_tensors()]
        text = str(group.plan())
        return tuple(
            torch.ops.transformer_ops.run_plan(text, sources[0], list(sources[1:]), parameters)
        )

    return call


def assert_plan_text(plan: tops.Plan) -> None:
    again = tops.Plan.parse(str(plan))
    assert again == plan and str(again) == str(plan)
    assert [s.ops for s in again.forward] == [s.ops for s in plan.forward]
    covered = [op for step in plan.forward for op in step.ops]
    assert covered == list(range(len(plan.ops)))
    assert [op for step in plan.backward for op in step.ops] == covered


def compare(pipeline: Pipeline, seed: int, dtype: torch.dtype, *, text: bool = True) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[seed % len(SHAPES)]
    module = pipeline.sequential(dtype)
    sources = sources_of(pipeline, shape, dtype)
    if seed % 3 == 1:
        sources = [strided(tensor) for tensor in sources]
    parameters = list(module.parameters())
    exact = [leaf(tensor, torch.float64) for tensor in sources]
    weights = [{n: leaf(p, torch.float64) for n, p in op.named_parameters()} for op in module]
    wanted = pipeline.reference(module, exact[0], exact[1:], weights)
    grads = [
        torch.ones(()).expand(o.shape)
        if seed % 4 == 2
        else torch.randn(o.shape, generator=generator)
        for o in wanted
    ]
    all_weights = [tensor for own in weights for tensor in own.values()]
    want = [
        *wanted,
        *torch.autograd.grad(
            wanted, [*exact, *all_weights], [g.double() for g in grads], allow_unused=True
        ),
    ]
    grads = [g.to(dtype) for g in grads]
    got = run(module, sources, parameters, grads)
    factor = {torch.float64: 100, torch.float32: 50, torch.bfloat16: 1}[dtype]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if b is None:
            assert a is None or not a.any(), i
        elif dtype == torch.bfloat16:
            # Roundings pile up over 8 ops: the error against the size of the tensor.
            size = b.abs().max().item() if b.numel() else 1.0
            assert (a.double() - b).abs().le(0.1 * size + 0.05).all(), f"result {i}"
        else:
            size = max(1.0, b.abs().max().item() if b.numel() else 1.0)
            assert_near(a / size, b / size, dtype, f"result {i}", factor=factor)
    (group,) = module._groups()
    assert_plan_text(group.plan())
    if not text:
        return
    again = run(by_text(group), sources, parameters, grads)
    for i, (a, b) in enumerate(zip(again, got, strict=True)):
        assert (a is None) == (b is None), i
        if a is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), f"the text differs in result {i}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(COUNT))
def test_pipeline(seed, dtype):
    compare(make_pipeline(seed), seed, dtype)


@pytest.mark.parametrize("seed", range(0, COUNT, 3))
def test_partly_frozen(seed):
    """Gradients do not depend on which other sources want one."""
    pipeline, rng = make_pipeline(seed), random.Random(seed)
    module = pipeline.sequential(torch.float64)
    sources = sources_of(pipeline, (3,), torch.float64)
    parameters = list(module.parameters())
    tensors = [*sources, *parameters]
    full = run(module, sources, parameters, grads_of(module(*sources)))
    chosen = [rng.random() < 0.5 for _ in tensors]
    if not any(chosen):
        chosen[-1] = True
    for tensor, wanted in zip(tensors, chosen, strict=True):
        tensor.requires_grad_(wanted)
    outputs = as_tuple(module(*sources))
    live = [(o, g) for o, g in zip(outputs, grads_of(outputs), strict=True) if o.requires_grad]
    wanted = [t for t, w in zip(tensors, chosen, strict=True) if w]
    got = torch.autograd.grad(  # type: ignore[call-overload]
        [o for o, _ in live], wanted, [g for _, g in live], allow_unused=True
    )
    want = [g for g, w in zip(full[len(outputs) :], chosen, strict=True) if w]
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    (group,) = module._groups()
    assert_plan_text(group.plan())


def grads_of(outputs):
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(o.shape, generator=generator, dtype=torch.float64) for o in as_tuple(outputs)
    ]


@pytest.mark.parametrize("seed", range(0, COUNT, 5))
def test_gradgradcheck(seed):
    pipeline = make_pipeline(seed)
    module = pipeline.sequential(torch.float64)
    sources = sources_of(pipeline, (2,), torch.float64)
    parameters = list(module.parameters())

    def function(*tensors):
        return tuple(o for o in as_tuple(module(*tensors[: len(sources)])) if o.requires_grad)

    torch.manual_seed(seed)
    assert torch.autograd.gradgradcheck(
        function, (*sources, *parameters), fast_mode=True, atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("seed", range(0, COUNT, 6))
def test_under_compile(seed):
    pipeline = make_pipeline(seed)
    module = pipeline.sequential(torch.float64)
    sources = sources_of(pipeline, (3,), torch.float64)
    parameters = list(module.parameters())
    grads = grads_of(module(*sources))
    want = run(module, sources, parameters, grads)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(fast, sources, parameters, grads), want, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b)


def test_many_threads_at_once():
    """Threads that share modules, plan, run and go backward at the same time."""
    shared = [make_pipeline(seed).sequential(torch.float64) for seed in range(8)]

    def work(index: int) -> list[Tensor]:
        seed = index % len(shared)
        pipeline = make_pipeline(seed)
        generator = torch.Generator().manual_seed(seed)
        widths = [pipeline.width, *pipeline.extra_widths]
        # Different batches and grad modes make different plans and shapes.
        sources = [
            torch.randn((2 + index // len(shared) % 3, w), generator=generator, dtype=torch.float64)
            for w in widths
        ]
        for tensor in sources:
            tensor.requires_grad_(index % 2 == 0)
        module = shared[seed]
        results: list[Any] = []
        for _ in range(5):
            outputs = as_tuple(module(*sources))
            live = [
                (o, g) for o, g in zip(outputs, grads_of(outputs), strict=True) if o.requires_grad
            ]
            wanted = [t for t in (*sources, *module.parameters()) if t.requires_grad]
            if live and wanted:
                results += torch.autograd.grad(
                    [o for o, _ in live], wanted, [g for _, g in live], allow_unused=True
                )
            with torch.no_grad():
                results += as_tuple(module(*sources))
        return results

    alone = [work(index) for index in range(48)]
    with ThreadPoolExecutor(12) as pool:
        for want, got in zip(alone, pool.map(work, range(48)), strict=True):
            for a, b in zip(got, want, strict=True):
                assert a is None if b is None else torch.equal(a, b)


def test_many_threads_compare_with_the_reference():
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(compare, make_pipeline(seed), seed, torch.float64, text=False)
            for seed in range(COUNT)
        ]
        for job in jobs:
            job.result()


def test_threads_plan_again_while_the_registry_changes():
    module = make_pipeline(3).sequential(torch.float64)
    sources = sources_of(make_pipeline(3), (3,), torch.float64)
    want = as_tuple(module(*sources))

    def unchanged(ops, **_):
        return list(ops)

    def work(_: int) -> None:
        for _ in range(1000):
            torch.testing.assert_close(as_tuple(module(*sources)), want)

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(work, index) for index in range(6)]
        while not all(job.done() for job in jobs):
            with tops.register_forward_fusion(unchanged):
                time.sleep(0.001)
        for job in jobs:
            job.result()
