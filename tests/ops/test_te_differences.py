"""Differences from te.ops: what `Quantize` returns, and when delayed scales move; and one from
torch that is theirs, too: gradients at a limit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from op_references import clamped
from recipe_cases import EVERY_RECIPE, RECIPES
from torch import Tensor

import transformer_ops as tops
from transformer_ops.recipe import DelayedScaling, Recipe

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def rows(dtype: torch.dtype, spread: int = 9) -> Tensor:
    """Rows whose magnitudes differ by up to 2^(2 spread)."""
    x = torch.randn(40, 64, dtype=torch.float64)
    return (x * torch.exp2(torch.randint(-spread, spread, (40, 1)))).to(dtype)


def called(module: Any, x: Tensor, recipe: Recipe) -> Tensor:
    """The third call: under delayed scaling its scales come from the first two."""
    for _ in range(3):
        with tops.autocast(recipe=recipe):
            y: Tensor = module(x)
    return y


# ---- Quantize returns plain tensors


@every_dtype
@pytest.mark.parametrize("name", RECIPES)
def test_what_quantize_returns_is_what_a_quantizer_makes_of_it(
    name: str, dtype: torch.dtype
) -> None:
    """Exact but for NVFP4, whose tensor scale is no power of two, so that float32 has more digits
    of it than a second rounding finds again."""
    recipe, quantize = RECIPES[name], tops.Quantize()
    # Blocks of NVFP4 that are no smaller than 1 / 28672 of the largest number.
    x = rows(dtype, 5 if "nvfp4" in name else 9)
    y = called(quantize, x, recipe)
    assert type(y) is Tensor and y.dtype == dtype and not torch.equal(y, x)
    quantizer = quantize.get_quantizer("forward", 0)
    assert quantizer is not None
    quantized = quantizer(y)
    assert isinstance(quantized, tops.QuantizedTensor) and quantized.format == quantizer.format
    rtol = 1e-6 if "nvfp4" in name and dtype is torch.float32 else 0
    for found in (quantized, quantizer(x)):
        torch.testing.assert_close(found.dequantize(), y, rtol=rtol, atol=0)


@every_dtype
@pytest.mark.parametrize("name", [name for name in RECIPES if "nvfp4" not in name])
def test_a_sequential_that_ends_with_quantize_feeds_the_next(name: str, dtype: torch.dtype) -> None:
    """As one Sequential of all, bit for bit: a second rounding changes nothing."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    norm, linear = tops.RMSNorm(64, dtype=dtype), tops.BasicLinear(64, 48, dtype=dtype)
    first, other = tops.Sequential(norm, tops.Quantize()), copy.deepcopy(linear)  # own scales
    x = rows(dtype)
    results = []
    for run, last in ((lambda x: other(first(x)), other), (tops.Sequential(norm, linear), linear)):
        leaf = x.clone().requires_grad_()
        y = called(run, leaf, recipe)
        results.append((y.detach(), *torch.autograd.grad(y.sum(), [leaf, last.weight])))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_nvfp4_rounds_twice_where_blocks_run_along_other_dimensions() -> None:
    recipe = RECIPES["nvfp4"]
    torch.manual_seed(0)
    norm, linear = tops.RMSNorm(64), tops.BasicLinear(64, 48)
    found = []
    for run in (tops.Sequential(norm, tops.Quantize(), linear), tops.Sequential(norm, linear)):
        y = called(run, torch.randn(40, 64, generator=torch.Generator().manual_seed(1)), recipe)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), linear.weight)))
    (y, grad), (want, want_grad) = found
    torch.testing.assert_close(y, want, rtol=0, atol=1e-5)
    assert 0.01 < (grad - want_grad).norm() / want_grad.norm() < 0.2


@every_dtype
@pytest.mark.parametrize("name", [name for name in RECIPES if "nvfp4" not in name])
def test_a_quantized_input_gives_what_its_numbers_do(name: str, dtype: torch.dtype) -> None:
    recipe, linear, x = RECIPES[name], tops.BasicLinear(64, 48, dtype=dtype), rows(dtype)
    wanted = called(linear, x, recipe)
    quantizer = linear.get_quantizer("forward", 0)
    assert quantizer is not None
    quantized = quantizer(x)
    assert isinstance(quantized, tops.QuantizedTensor)
    assert torch.equal(called(linear, quantized, recipe), wanted)


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_a_leaf_gradient_is_plain_and_adds_up_exactly(name: str) -> None:
    quantize, recipe = tops.Quantize(forward=False, backward=True), EVERY_RECIPE[name]
    grads = [rows(torch.bfloat16) for _ in range(2)]
    x = rows(torch.bfloat16).requires_grad_()
    parts: list[Tensor] = []
    torch.manual_seed(0)
    for grad in grads:
        y = called(quantize, x, recipe)
        parts += torch.autograd.grad(y, x, grad)
    assert not torch.equal(parts[0], grads[0])
    torch.manual_seed(0)
    for grad in grads:
        called(quantize, x, recipe).backward(grad)
    assert type(x.grad) is Tensor
    if name != "delayed":  # whose scales have moved since
        assert torch.equal(x.grad, parts[0] + parts[1])


def test_what_quantize_returns_is_compiled_and_exported() -> None:
    recipe = tops.recipe.MXFP8BlockScaling()
    module, x = tops.Sequential(tops.RMSNorm(64), tops.Quantize()), torch.randn(8, 64)
    with torch.no_grad(), tops.autocast(recipe=recipe):
        y = module(x)
        assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), y)
        program = torch.export.export(module, (x,))
    assert torch.equal(program.module()(x), y)


# ---- when delayed scales move

RECIPE = DelayedScaling(amax_history_len=2)
LARGEST = (448.0, 448.0, 57344.0)
DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
# "f": a forward of inputs of this size; "first" and "last": the backward of the first, or the last,
# one that has had none; "v": a forward in a region of its own without gradients.
Event = tuple[str, float]
ENTER, EXIT = ("enter", 0.0), ("exit", 0.0)


def a_region_each(*steps: tuple[float, float]) -> list[Event]:
    return [event for x, g in steps for event in (ENTER, ("f", x), EXIT, ("first", g))]


def numbers(size: float) -> Tensor:
    torch.manual_seed(0)
    x = torch.rand(16, 16) - 0.5
    return x * size / x.abs().max()


def ours(events: list[Event]) -> list[Tensor]:
    """Outputs and input gradients. The weight is an identity, which every scale leaves exact, so
    they are the rounded inputs and output gradients."""
    op = tops.BasicLinear(16, 16)
    with torch.no_grad():
        op.weight.copy_(torch.eye(16))
    found: list[Tensor] = []
    waiting: list[tuple[Tensor, Tensor]] = []
    region = tops.autocast(recipe=RECIPE)
    for kind, size in events:
        if kind == "enter":
            region.__enter__()
        elif kind == "exit":
            region.__exit__(None, None, None)
        elif kind == "v":
            with torch.no_grad(), region:
                op(numbers(size))
        elif kind == "f":
            x = numbers(size).requires_grad_()
            waiting.append((x, op(x)))
            found.append(waiting[-1][1].detach())
        else:
            x, y = waiting.pop(0 if kind == "first" else -1)
            found += torch.autograd.grad(y, x, numbers(size))
    return found


class Theirs:
    """The rule of te.ops: row 0 of a history takes what is met; scales of forward move at the exit
    of a region, with gradient mode on, and those of gradients when the module that was called first
    in its region ends its backward."""

    def __init__(self) -> None:
        self.scale, self.met = [1.0] * 3, [0.0] * 3
        self.history: list[list[float]] = [[], [], []]
        self.found: list[Tensor] = []

    def round(self, place: int, x: Tensor) -> Tensor:
        self.met[place] = max(self.met[place], float(x.abs().max()))
        scale, most = torch.tensor(self.scale[place]), LARGEST[place]
        return (x * scale).clamp(-most, most).to(DTYPES[place]).float() * (1 / scale)

    def move(self, *places: int) -> None:
        for place in places:
            rows = [self.met[place], *self.history[place]]
            self.history[place] = rows[: RECIPE.amax_history_len - 1]
            self.met[place] = 0.0
            if max(rows) > 0:
                self.scale[place] = float(torch.tensor(LARGEST[place]) / torch.tensor(max(rows)))

    def run(self, events: list[Event]) -> list[Tensor]:
        is_first, waiting = False, []
        for kind, size in events:
            if kind == "enter":
                is_first = True
            elif kind == "exit":
                self.move(0, 1)
            elif kind == "v":
                self.round(0, numbers(size))
                self.round(1, torch.eye(16))
            elif kind == "f":
                self.found.append(self.round(0, numbers(size)))
                self.round(1, torch.eye(16))
                waiting.append(is_first)
                is_first = False
            else:
                self.found.append(self.round(2, numbers(size)))
                if waiting.pop(0 if kind == "first" else -1):
                    self.move(2)
        return self.found


def where_they_differ(events: list[Event]) -> list[int]:
    pairs = zip(ours(events), Theirs().run(events), strict=True)
    close = [torch.allclose(a, b, rtol=3e-7, atol=0) for a, b in pairs]
    return [i for i, same in enumerate(close) if not same]


STEPS = [(1.0, 1e-4), (30.0, 3e-5), (0.2, 7e-3), (3.0, 1e-4), (5.0, 2e-4)]


def test_the_usual_loop_has_their_scales() -> None:
    assert where_they_differ(a_region_each(*STEPS)) == []


def two_forwards_in_a_region(*backwards: str) -> list[Event]:
    events: list[Event] = []
    for x, g in STEPS:
        events += [ENTER, ("f", x), ("f", x / 3), EXIT, *((which, g) for which in backwards)]
    return events


def test_two_forwards_in_a_region_have_their_scales() -> None:
    """As of a sum of two losses, whose backward begins with the last one."""
    assert where_they_differ(two_forwards_in_a_region("last", "last")) == []


def test_the_backward_of_the_first_module_moves_the_scales_of_later_ones_in_theirs() -> None:
    differing = where_they_differ(two_forwards_in_a_region("first", "first"))
    # The second backward of a step, of 4 results.
    assert differing and all(i % 4 == 3 for i in differing)
    within = [ENTER, ("f", 1.0), ("first", 1e-4), ("f", 2.0), ("first", 3e-3), EXIT]
    assert where_they_differ(within) == [3]


def test_a_backward_after_the_next_region_has_the_scales_of_its_forward() -> None:
    events = a_region_each((1.0, 1e-4))
    events += [ENTER, ("f", 2.0), EXIT, ENTER, ("f", 3.0), EXIT, ("first", 3e-3), ("first", 1e-5)]
    assert where_they_differ(events) == [5]


def test_validation_counts_in_theirs_alone() -> None:
    events = [*a_region_each((1.0, 1e-4)), ("v", 100.0), *a_region_each((1.0, 1e-4), (1.0, 1e-4))]
    assert where_they_differ(events) == [4]


def test_a_checkpoint_between_steps_has_the_scales_of_the_step_before() -> None:
    op = tops.BasicLinear(16, 16)
    x = torch.full((4, 16), 3.0)
    with tops.autocast(recipe=RECIPE):
        op(x).sum().backward()
    state = {name: tensor.clone() for name, tensor in op.state_dict().items()}
    assert state["fp8_scale"].tolist() == [1.0] * 3 and state["fp8_amax"][0] == 3.0
    resumed = tops.BasicLinear(16, 16)
    resumed.load_state_dict(state)
    for one in (op, resumed):
        with tops.autocast(recipe=RECIPE):
            one(x)
        assert one.fp8_scale[0] == torch.tensor(448.0) / torch.tensor(3.0)


# ---- gradients at the limit of a clamped unit

LIMIT = 0.75


def clamped_by_torch(x: Tensor) -> Tensor:
    gate, linear = x.chunk(2, dim=-1)
    gate, linear = gate.clamp(max=LIMIT), linear.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


@pytest.mark.parametrize("op", ["ClampedSwiGLU", "ScaledClampedQGeGLU"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_passes_at_the_limit(op: str, dtype: torch.dtype) -> None:
    module = getattr(tops, op)(limit=LIMIT)
    scales = [torch.ones(4, dtype=dtype)] if op.startswith("Scaled") else []
    # At the limit, within it and beyond it: of the gate, and of the other half.
    gates = torch.tensor([LIMIT, 0.5, 1.0, 0.5], dtype=dtype)
    others = torch.tensor([0.5, -LIMIT, LIMIT, 1.0], dtype=dtype)
    x = torch.stack([gates, others], dim=-1).requires_grad_()
    found, passing, torchs = (
        torch.autograd.grad(call(x).sum(), x)[0]
        for call in (
            lambda x: module(x, *scales),
            lambda x: clamped(x, limit=LIMIT),
            clamped_by_torch,
        )
    )
    torch.testing.assert_close(found, passing)
    passes = torch.tensor([[True, True], [True, True], [False, True], [True, False]])
    assert torch.equal(found != 0, passes)
    # Elsewhere both are the same; at the limit torch's depends on its version.
    at_limit = x.detach().abs() == LIMIT
    torch.testing.assert_close(found[~at_limit], torchs[~at_limit])
    assert at_limit.sum() == 3 and torch.all(
        (torchs == 0) | torch.isclose(torchs, found, rtol=1e-2)
    )
