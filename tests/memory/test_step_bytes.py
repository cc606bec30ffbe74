"""What a training step holds, byte by byte, and optimizers that step in backward."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import transformer_ops as tops
from transformer_ops.memory import StepBytes, step_bytes
from transformer_ops.reports import progress

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuse_models
import saved_formats
from helpers import html_cells
from suite import measure

pytestmark = pytest.mark.takes(seconds=35)

COUNT = 4096
BYTES = 4 * COUNT


class Exponential(nn.Module):
    """exp(x * w): forward saves the result alone, beside the input and the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COUNT))
        self.unused = nn.Parameter(torch.randn(COUNT))
        self.register_buffer("table", torch.zeros(COUNT))

    def forward(self, x: Tensor, times: int = 1) -> dict[str, Tensor]:
        self.table += 1
        assert times == 1
        return {"loss": (x * self.weight).exp().sum()}


def momentum(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.1, momentum=0.9)


def test_bytes_by_hand() -> None:
    module, x = Exponential(), torch.randn(COUNT)
    found = step_bytes(module, x, times=1, optimizer=momentum(module))
    # At the peak a gradient is computed beside the saved tensor; the loss and its gradient are
    # single numbers.
    want = StepBytes(
        parameters=3 * BYTES,
        inputs=BYTES,
        gradients=0,
        optimizer_states=BYTES,
        saved=BYTES,
        scratch=BYTES + 8,
    )
    assert found == want and found.peak == sum(want)
    assert found.as_dict() == {**want._asdict(), "peak": found.peak}
    # The input wants a gradient, too: at the peak there are both, and that of the exponential.
    asking = step_bytes(module, x.requires_grad_())
    rest = {"gradients": 2 * BYTES, "optimizer_states": 0, "saved": 0}
    assert asking == want._replace(**rest)
    text = str(found)
    assert "saved for backward       16.0 KiB" in text and "112.0 KiB at its peak" in text
    assert len(text.splitlines()) == 7 and all(len(line) <= 80 for line in text.splitlines())
    assert ["optimizer states", "16.0 KiB"] in html_cells(found._repr_html_())


@pytest.mark.parametrize("saved", ["exact", "fp8"])
def test_many_rows_all_is_saved_at_the_peak(saved: str) -> None:
    size = saved_formats.Size(2048, 64, 256)
    blocks = [saved_formats.make_block(saved_formats.Policy(saved), size) for _ in range(4)]
    module, x = nn.Sequential(*blocks), saved_formats.make_input(size)
    found = step_bytes(module, x, loss=lambda y: y.sum())
    kept = measure.saved_bytes(module, [x], [*module.parameters(), x])
    # With AMX, decoding in the last block takes more than what it has freed by then.
    assert kept == found.saved or (saved == "fp8" and 0.75 * kept < found.saved < kept)
    assert kept > 0.5 * found.peak
    assert found.inputs == x.nbytes


def test_a_report_compares_both() -> None:
    model = fuse_models.Model()
    report = tops.fuse(model)
    x, loss = torch.randint(0, 10, (8, 64)), lambda y: y.square().mean()
    found = report.step(x, loss=loss)
    assert found.after == step_bytes(model, x, loss=loss)
    tops.unfuse(model)
    assert found.before == step_bytes(model, x, loss=loss)
    assert found.after.saved < 0.8 * found.before.saved
    assert found.after.peak < found.before.peak
    assert found.as_dict() == {"before": found.before.as_dict(), "after": found.after.as_dict()}
    lines = str(found).splitlines()
    assert len(lines) == 7 and all(len(line) <= 80 for line in lines)
    assert html_cells(found._repr_html_())[0] == ["at the peak", "without ops", "with ops"]


class Trained(nn.Module):
    """A statistic, random numbers, and a weight with a `main_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.ops = tops.Sequential(
            tops.Linear(8, 8, accumulate_into_main_grad=True), tops.Dropout(0.5)
        )
        weight: Any = self.ops[0].weight
        weight.main_grad = torch.ones_like(weight)
        weight.grad_added_to_main_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.ops(self.norm(x)).square().sum()


def contents(module: nn.Module, optimizer: Optimizer, x: Tensor) -> list[Any]:
    """Every tensor that a step writes, with its address; and numbers."""
    tensors = [*module.parameters(), *module.buffers(), x]
    tensors += [t.grad for t in (*module.parameters(), x) if t.grad is not None]
    tensors += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    tensors += [vars(p)["main_grad"] for p in module.parameters() if "main_grad" in vars(p)]
    numbers = [(t.data_ptr(), t.tolist()) for t in tensors]
    flags = [getattr(p, "grad_added_to_main_grad", None) for p in module.parameters()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return [numbers, flags, groups, len(optimizer.state), torch.get_rng_state().tolist()]


class Terminal(io.StringIO):
    """Takes what a terminal would show."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "seconds", "has_tqdm", "shows"),
    [
        (Terminal, 0.0, True, True),
        (Terminal, 60.0, True, False),
        (io.StringIO, 0.0, True, False),
        (Terminal, 0.0, False, False),
    ],
    ids=["slow", "quick", "no terminal", "no tqdm"],
)
def test_progress_shows_in_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
    stderr: type[io.StringIO],
    seconds: float,
    has_tqdm: bool,
    shows: bool,
) -> None:
    seen = stderr()
    monkeypatch.setattr(sys, "stderr", seen)
    monkeypatch.setattr(progress, "_SILENT_SECONDS", seconds)
    if not has_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    found = step_bytes(nn.Linear(2, 2), torch.ones(1, 2), loss=Tensor.sum)
    assert found.peak > 0
    assert ("bytes of a step" in seen.getvalue()) == shows


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_lasts(steps: int, fails: bool) -> None:
    module, x = Trained(), torch.randn(4, 8, requires_grad=True)
    optimizer = AdamW(module.parameters(), lr=0.1)
    for _ in range(steps):
        module(x).backward()
        optimizer.step()
    before = contents(module, optimizer, x)
    if fails:
        calls: list[Tensor] = []

        def second(y: Tensor) -> Tensor:
            calls.append(y)
            assert len(calls) == 1, "the second step"
            return y

        with pytest.raises(AssertionError, match="the second step"):
            step_bytes(module, x, optimizer=optimizer, loss=second)
    else:
        step_bytes(module, x, optimizer=optimizer)
    assert contents(module, optimizer, x) == before
    assert all(not vars(p).get("_post_accumulate_grad_hooks") for p in module.parameters())


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"optimizer": "adam"}, TypeError, r"^\[memory\] optimizer must be .*, got 'adam'"),
        ({"optimizer": 3}, TypeError, r"^\[memory\] optimizer must be .*, got 3"),
        ({}, ValueError, r"^\[memory\] loss must .*, got a tensor of shape \(2, 4\)"),
        ({"loss": lambda y: None}, ValueError, r"^\[memory\] loss must .*, got None"),
    ],
)
def test_bad_arguments(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        step_bytes(nn.Linear(4, 4), torch.randn(2, 4), **given)


def test_it_needs_a_module_and_no_profiler() -> None:
    with pytest.raises(TypeError, match=r"^\[memory\] module must be an nn\.Module, got <built-in"):
        step_bytes(torch.exp, torch.randn(2))
    with torch.autograd.profiler.profile(use_kineto=False):
        with pytest.raises(RuntimeError, match=r"^\[memory\] step_bytes must run without a profil"):
            step_bytes(nn.Linear(4, 1), torch.randn(1, 4))


# ---- optimizers that step in backward


class Tied(nn.Module):
    """One weight in two Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.first = tops.Sequential(tops.Linear(16, 16), tops.GELU())
        self.second = tops.Sequential(tops.RMSNorm(16), tops.Linear(16, 16))
        self.second[1].weight = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def plan() -> nn.Module:
    return tops.Sequential(tops.LayerNorm(16), tops.Linear(16, 32), tops.SwiGLU())


def packed() -> nn.Module:
    return tops.Sequential(tops.RMSNorm(16), tops.PackedLinear(16, (16, 16)), tops.SwiGLU())


def grouped() -> nn.Module:
    return nn.Sequential(tops.Sequential(tops.Linear(16, 32), tops.GELU(), tops.Linear(32, 16)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "a plan": plan, "PackedLinear": packed, "tied weights": Tied, "fp8": grouped,
}  # fmt: skip


def step_in_backward(module: nn.Module, make: Callable[[list[Any]], Optimizer]) -> list[Optimizer]:
    """As docs/memory.md has it."""
    optimizers = {p: make([p]) for p in module.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def trained(name: str, compiled: bool, in_backward: bool) -> dict[str, Tensor]:
    """The parameters after three steps."""
    torch.manual_seed(0)
    module = MODULES[name]()
    if name == "fp8":
        module[0].saved = "fp8"
    make = lambda parameters: AdamW(parameters, lr=0.1)  # noqa: E731
    optimizers = step_in_backward(module, make) if in_backward else [make(module.parameters())]
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    for _ in range(3):
        call(torch.randn(8, 16)).square().sum().backward()
        if in_backward:
            assert all(p.grad is None for p in module.parameters())
        else:
            optimizers[0].step()
            optimizers[0].zero_grad()
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_in_backward_is_a_step_after_it(name: str, compiled: bool) -> None:
    after, within = (trained(name, compiled, in_backward) for in_backward in (False, True))
    assert all(torch.equal(within[name], want) for name, want in after.items())
    torch.manual_seed(0)
    assert not any(torch.equal(p, after[n]) for n, p in MODULES[name]().named_parameters())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_weight_with_a_main_grad_has_no_gradient_to_step_on(compiled: bool) -> None:
    """Its gradient is in the buffer, for an optimizer that reads it."""
    module = tops.Sequential(
        tops.Linear(16, 16, accumulate_into_main_grad=True), tops.GELU(), tops.Linear(16, 16)
    )
    first, last = (module[i].weight for i in (0, 2))
    first.main_grad = torch.zeros_like(first)
    step_in_backward(module, lambda parameters: SGD(parameters, lr=0.1))
    before = [weight.detach().clone() for weight in (first, last)]
    call = torch.compile(module, backend="aot_eager") if compiled else module
    call(torch.randn(8, 16)).square().sum().backward()
    assert torch.equal(first, before[0]) and first.main_grad.norm() > 0
    assert not torch.equal(last, before[1])
    found = step_bytes(module, torch.randn(8, 16), loss=lambda y: y.sum())
    assert found.gradients >= first.main_grad.nbytes


def test_a_step_in_backward_holds_the_gradients_of_one_block() -> None:
    """Six Llama blocks of few rows, with saved="fp8"."""
    peaks = []
    size = saved_formats.Size(32, 128, 512)
    for in_backward in (False, True):
        blocks = [saved_formats.make_block(saved_formats.Policy("fp8"), size) for _ in range(6)]
        module, x = nn.Sequential(*blocks), saved_formats.make_input(size)
        make = lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731
        optimizers = step_in_backward(module, make) if in_backward else make(module.parameters())
        found = step_bytes(module, x, optimizer=optimizers, loss=lambda y: y.square().mean())
        peaks.append(found)
    after, within = peaks
    assert after[:2] == within[:2] and after.optimizer_states == within.optimizer_states
    weights = after.parameters
    # All gradients but the first block's norm's and its last product's.
    assert after.gradients > 0.9 * weights
    assert 0.8 * weights / 6 < within.gradients <= weights / 6
    assert within.peak < after.peak - 0.5 * weights
