"""Delayed scaling: scales from earlier calls, against the same in plain torch."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from helpers import assert_equal, explained, saved_bytes
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.plan.plan import Plan
from transformer_ops.quantization import checkpoint_contexts, reset_scales
from transformer_ops.recipe import DelayedScaling as Delayed

SHORT = Delayed(amax_history_len=4)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class Reference(torch.autograd.Function):
    """x W^T with the scales of one product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: State) -> Tensor:
        ctx.rounded, ctx.state = (state.round(x, 0), state.round(weight, 1)), state
        return ctx.rounded[0] @ ctx.rounded[1].t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), grad = ctx.rounded, ctx.state.round(grad, 2)
        return grad @ weight, grad.t() @ x, None


class State:
    def __init__(self, recipe: Delayed) -> None:
        self.recipe, self.scale = recipe, [torch.tensor(1.0)] * 3
        self.history: list[list[Tensor]] = [[], [], []]
        self.met: list[list[Tensor]] = [[], [], []]
        forward = torch.float8_e5m2 if recipe.fp8_format is recipes.Format.E5M2 else None
        is_e4m3 = recipe.fp8_format is recipes.Format.E4M3
        backward = torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2
        self.dtypes = [forward or torch.float8_e4m3fn] * 2 + [backward]

    def round(self, tensor: Tensor, place: int) -> Tensor:
        self.met[place].append(tensor.float().abs().max())
        dtype, scale = self.dtypes[place], self.scale[place]
        codes = (tensor.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
        return codes.to(tensor.dtype) / scale

    def enter(self) -> None:
        for place in range(3):
            if self.met[place]:
                self.history[place].insert(0, torch.stack(self.met[place]).max())
                self.met[place] = []
                rows = self.history[place][: self.recipe.amax_history_len]
                amax = rows[0] if self.recipe.amax_compute_algo == "most_recent" else max(rows)
                if amax > 0:
                    largest = torch.tensor(LARGEST[self.dtypes[place]])
                    self.scale[place] = largest / amax / 2**self.recipe.margin


def linear(dtype: torch.dtype = torch.float32) -> tops.Sequential:
    torch.manual_seed(0)
    return tops.Sequential(tops.Linear(72, 50, bias=False)).to(dtype)


def inputs(k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs of another magnitude at each step; their gradients are far from 1."""
    torch.manual_seed(k)
    size = [1.0, 30.0, 0.2, 3.0][k % 4]
    return size * torch.randn(70, 72, dtype=dtype), 1e-4 * size * torch.randn(70, 50, dtype=dtype)


def step(module: Any, k: int, recipe: Delayed = SHORT, **region: Any) -> tuple[Tensor, ...]:
    x, grad = inputs(k, next(module.parameters()).dtype)
    x.requires_grad_()
    with tops.autocast(recipe=recipe, **region):
        y = module(x)
    return y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], grad)


def update() -> None:
    """Updates the scales of all existing products."""
    with tops.autocast(recipe=SHORT):
        pass


def scales(module: Any) -> Tensor:
    return torch.stack([m.fp8_scale for m in module.modules() if hasattr(m, "fp8_scale")]).clone()


@pytest.mark.parametrize(
    "recipe",
    [
        Delayed(),
        Delayed(margin=1, fp8_format=recipes.Format.E4M3, amax_history_len=2),
        Delayed(fp8_format=recipes.Format.E5M2, amax_compute_algo="most_recent"),
    ],
    ids=["max", "margin", "most_recent"],
)
def test_steps_are_those_of_the_formula(recipe: Delayed) -> None:
    module, state = linear(torch.float64), State(recipe)
    weight = module[0].weight
    for k in range(5):
        got = step(module, k, recipe)
        x, grad = inputs(k, torch.float64)
        state.enter()
        x.requires_grad_()
        y = Reference.apply(x, weight, state)
        want = y, *torch.autograd.grad(y, [x, weight], grad)
        torch.testing.assert_close(module[0].fp8_scale, torch.stack(state.scale), rtol=2e-7, atol=0)
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= 1e-6 * b.norm()
        with torch.no_grad():
            weight.mul_(1.7)
    history = module[0].fp8_amax_history
    assert history.shape == (recipe.amax_history_len, 3)
    for place in range(3):
        rows = torch.stack(state.history[place][: len(history)])
        torch.testing.assert_close(history[: len(rows), place], rows, rtol=2e-7, atol=0)


@pytest.mark.parametrize("length", [1, 7, 8, 35, 1024])
def test_the_largest_of_a_history_wherever_it_is(length: int) -> None:
    module, recipe = linear(), Delayed(amax_history_len=length)
    step(module, 0, recipe)
    op = module[0]
    for row in range(0, length, 1 if length < 100 else 41):
        op.fp8_amax.fill_(0.5)
        op.fp8_grad_amax.fill_(-1)
        op.fp8_amax_history.fill_(0.25)
        # It is at `row` when the latest one has come in; of the last row it has left.
        op.fp8_amax_history[row] = torch.tensor([2.0, 0.375, 4.0])
        with tops.autocast(recipe=recipe):
            pass
        found = [2.0, 0.5, 4.0] if row + 1 < length else [0.5] * 3
        assert torch.equal(op.fp8_scale, op.fp8_largest / torch.tensor(found))


def test_a_scale_that_stays_is_the_same_tensor() -> None:
    module = linear()
    step(module, 0)
    step(module, 0)
    known = module[0].fp8_scale
    step(module, 0)
    assert module[0].fp8_scale is known
    step(module, 1)
    with torch.no_grad():
        module[0].weight.mul_(2)
    step(module, 1)
    changed, before = module[0].fp8_scale, known.clone()
    step(module, 1)
    assert module[0].fp8_scale is not changed
    assert torch.equal(known, before)


def test_the_plan_shows_scales_as_states() -> None:
    module = linear()
    step(module, 0)
    plan = module.plans()[0]
    text = str(plan)
    assert "\nstates st0.fp8_amax st0.fp8_grad_amax st0.fp8_scale\n" in text
    assert (
        "t0.rounded_input, st0.fp8_amax = "
        'quantize_dequantize_scaled(x0, st0.fp8_scale, 0, "e4m3", "float32")' in text
    )
    assert "st0.fp8_grad_amax = quantize_dequantize_scaled(g1, st0.fp8_scale, 2," in text
    assert Plan.parse(text) == plan
    shown = explained(module)
    assert "input e4m3, weight e4m3, output gradient e5m2, scales from the last 4 regions" in shown
    with torch.no_grad(), tops.autocast(recipe=SHORT):
        module(inputs(0)[0])
    assert "amax = " not in str(module.plans()[0]).replace("t0.amax", "")


# ---- when scales change


def test_scales_change_on_entering_an_outermost_region_with_gradients() -> None:
    module = linear()
    step(module, 0)
    first = scales(module)
    assert torch.equal(first, torch.ones(1, 3))
    x, _ = inputs(1)
    recorded = module[0].fp8_amax.clone(), module[0].fp8_grad_amax.clone()
    module.eval()
    with torch.no_grad(), tops.autocast(recipe=SHORT):
        module(1000 * x)
    with torch.inference_mode(), tops.autocast(recipe=SHORT):
        module(1000 * x)
    assert torch.equal(scales(module), first)
    assert torch.equal(module[0].fp8_amax, recorded[0])
    assert torch.equal(module[0].fp8_grad_amax, recorded[1])
    with tops.autocast():
        with tops.autocast(recipe=SHORT):
            assert not torch.equal(scales(module), first)
        second = scales(module)
        module(x)
    with tops.autocast(recipe=SHORT):
        module(x)
        with tops.autocast(), tops.autocast(recipe=SHORT):
            assert torch.equal(scales(module), second)
            module(2 * x)
    # The largest of all calls of a region counts, and a role that no call had stays as it is.
    with tops.autocast(recipe=SHORT):
        pass
    assert module[0].fp8_amax_history[0, 0] == 2 * x.abs().max()
    assert scales(module)[0, 2] == second[0, 2]


def test_microbatches_of_a_region_count_together() -> None:
    module, (x, grad) = linear(), inputs(1)
    with tops.autocast(recipe=SHORT):
        outputs = [module(size * x) for size in (1.0, 3.0, 2.0)]
    for y, size in zip(outputs, (2.0, 5.0, 1.0), strict=True):
        y.backward(size * grad)
    with tops.autocast(recipe=SHORT):
        found = module[0].fp8_amax_history
    want = torch.stack([3 * x.abs().max(), module[0].weight.abs().max(), 5 * grad.abs().max()])
    assert torch.equal(found[0], want) and not found[1].any()


def test_backward_keeps_to_the_scales_of_its_forward() -> None:
    module = linear()
    step(module, 0)
    other = copy.deepcopy(module)
    x, grad = inputs(1)
    with tops.autocast(recipe=SHORT):
        y, z = module(x), other(x)
    z.backward(grad)
    with tops.autocast(recipe=SHORT):
        module(100 * x)
    assert not torch.equal(scales(module), torch.ones(1, 3))
    y.backward(grad)
    assert torch.equal(module[0].weight.grad, other[0].weight.grad)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0])
def test_what_no_scale_can_be_made_of(value: float) -> None:
    module = linear()
    step(module, 1)
    step(module, 1)
    before, history = scales(module), module[0].fp8_amax_history.clone()
    with tops.autocast(recipe=Delayed(amax_history_len=4, amax_compute_algo="most_recent")):
        y = module(torch.full((4, 72), value))
    assert y.isfinite().all() == (value == 0) or value == float("inf")
    with tops.autocast(recipe=Delayed(amax_history_len=4, amax_compute_algo="most_recent")):
        pass
    assert scales(module)[0, 0] == before[0, 0]
    is_zero = module[0].fp8_amax_history[0, 0] == 0
    assert is_zero if value == 0 else module[0].fp8_amax_history[0, 0] == history[0, 0]


def test_a_changed_recipe() -> None:
    module = linear()
    step(module, 0)
    step(module, 0)
    before = scales(module)
    with tops.autocast(recipe=recipes.Float8CurrentScaling()):
        module(inputs(2)[0])
    step(module, 1, Delayed(amax_history_len=4, margin=2))
    torch.testing.assert_close(scales(module), before / 4)
    for recipe in (Delayed(), Delayed(amax_history_len=4, fp8_format=recipes.Format.E4M3)):
        with pytest.raises(RuntimeError, match=r"\[Linear\] scales must be for the recipe"):
            step(module, 1, recipe)
    assert len(module[0].fp8_amax_history) == 4
    reset_scales(module)
    assert not hasattr(module[0], "fp8_scale")
    step(module, 1, Delayed())
    assert len(module[0].fp8_amax_history) == 1024
    reset_scales(module)
    step(module, 1)
    assert torch.equal(scales(module), torch.ones(1, 3))


@pytest.mark.parametrize("enters_between", [False, True])
def test_activation_checkpointing(enters_between: bool) -> None:
    module = linear()
    step(module, 0)
    plain = copy.deepcopy(module)
    x, grad = inputs(1)
    x.requires_grad_()
    with tops.autocast(recipe=SHORT):
        y = checkpoint(module, x, use_reentrant=False, context_fn=checkpoint_contexts)
        z = plain(x)
    want = torch.autograd.grad(z, list(plain.parameters()), grad)
    if enters_between:
        with tops.autocast(recipe=SHORT):
            module((x / 100).detach())
            plain((x / 100).detach())
    assert_equal(torch.autograd.grad(y, list(module.parameters()), grad), want)
    # Nothing was recorded twice. (Only one of the backwards came before the region in between.)
    for name in ("fp8_amax", "fp8_scale", "fp8_amax_history"):
        found, meant = getattr(module[0], name), getattr(plain[0], name)
        assert torch.equal(found[..., :2], meant[..., :2]), name


# ---- compiled


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fullgraph(backend: str) -> None:
    module = tops.Sequential(tops.Linear(72, 64), tops.GELU(), tops.Linear(64, 50, bias=False))
    other = copy.deepcopy(module)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for k in range(3):
        torch.testing.assert_close(step(compiled, k), step(other, k), rtol=1e-4, atol=1e-7)
        update()
        torch.testing.assert_close(scales(module), scales(other), rtol=1e-5, atol=0)
    assert counter.frame_count == 1
    assert not torch.equal(scales(module), torch.ones(2, 3))
    # Two microbatches of a region.
    x, grad = inputs(1)
    for run in (compiled, other):
        with tops.autocast(recipe=SHORT):
            for size in (1.0, 2.0):
                run(size * x).backward(grad)
    update()
    torch.testing.assert_close(scales(module), scales(other), rtol=1e-5, atol=0)


def microbatches(run: Any, module: Any) -> list[Tensor]:
    """Two forwards before their backwards, the later one first: gradients, and what they make."""
    outputs, (x, grad) = [], inputs(1)
    for _ in range(2):
        with tops.autocast(recipe=SHORT):
            outputs = [run(size * x) for size in (1.0, 3.0)]
        for y, size in zip(reversed(outputs), (1.0, 2.0), strict=True):
            y.backward(size * grad)
    update()
    gradients = [p.grad for p in module.parameters()]
    return [*outputs, *gradients, scales(module), module[0].fp8_amax_history]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_forwards_before_their_backwards_in_compiled_code(backend: str) -> None:
    module, other = linear(), linear()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    torch.testing.assert_close(
        microbatches(compiled, module), microbatches(other, other), rtol=1e-5, atol=1e-9
    )


def test_one_graph_with_two_calls_of_a_module() -> None:
    module, other, (x, grad) = linear(), linear(), inputs(1)
    for run in (torch.compile(lambda x: module(x) + module(3 * x), backend="aot_eager"), None):
        with tops.autocast(recipe=SHORT):
            y = run(x) if run else other(x) + other(3 * x)
        y.backward(grad)
    update()
    assert torch.equal(scales(module), scales(other))
    torch.testing.assert_close(module[0].weight.grad, other[0].weight.grad)


def test_without_a_compiler_torch_refuses_forwards_before_their_backwards() -> None:
    """AOTAutograd ends a backward that writes to a buffer with `copy_`, and saves the buffer for
    that: run as an ATen call, `copy_` raises the version that the other backward checks. What a
    compiler makes of it raises none."""
    module = linear()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        microbatches(torch.compile(module, fullgraph=True, backend="aot_eager"), module)


class Twice(tops.BasicOperation):
    def op_forward_compute(self, input_: Tensor, **unused: Any) -> Any:
        return 2 * input_, ()

    def op_forward_save_ctx(self, *args: Any, **unused: Any) -> None:
        pass

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        return 2 * grad_output, ()


def test_python_steps_and_main_grad_in_a_graph() -> None:
    linear = tops.BasicLinear(72, 50, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(50, 72)
    module = tops.Sequential(linear, Twice())
    run = torch.compile(module, fullgraph=True, backend="aot_eager")
    (x, grad), state = inputs(1), State(SHORT)
    for _ in range(2):
        with tops.autocast(recipe=SHORT):
            y = run(x)
        y.backward(grad)
        state.enter()
        z = Reference.apply(x, linear.weight.detach(), state)
        state.round(2 * grad, 2)
    torch.testing.assert_close(y, 2 * z)
    torch.testing.assert_close(linear.fp8_scale, torch.stack(state.scale))
    assert linear.weight.main_grad.any() and linear.weight.grad is None


def test_a_region_within_a_graph_is_refused() -> None:
    module, (x, _) = linear(), inputs(0)

    def run(x: Tensor) -> Tensor:
        with tops.autocast(recipe=SHORT):
            return module(x)

    with pytest.raises(Exception, match="must be entered outside of compiled code"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(x)


def test_export_freezes_scales() -> None:
    module = linear()
    for k in range(2):
        step(module, k)
    x, _ = inputs(1)
    with torch.no_grad(), tops.autocast(recipe=SHORT):
        want = module.eval()(x)
        program = torch.export.export(module, (x,))
    assert torch.equal(program.module()(x), want)
    assert torch.equal(program.constants["0.fp8_scale"], module[0].fp8_scale)


def test_fake_modules_leave_regions_as_they_are() -> None:
    module, other = linear(), linear()
    with FakeTensorMode():
        fake = tops.Sequential(tops.Linear(72, 50, bias=False))
        for k in range(3):
            step(fake, k)
    assert isinstance(fake[0].fp8_scale, FakeTensor)
    for k in range(3):
        step(module, k)
    del fake
    for k in range(3):
        step(other, k)
    assert torch.equal(module[0].fp8_scale, other[0].fp8_scale)


# ---- states as buffers


def test_a_state_dict_resumes_bit_for_bit() -> None:
    module = linear()
    for k in range(2):
        step(module, k)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    resumed = linear()
    resumed.load_state_dict(state, strict=True)
    for k in range(2, 4):
        assert_equal(step(module, k), step(resumed, k))
    assert torch.equal(scales(module), scales(resumed))
    resumed[0].load_state_dict(nn.Linear(72, 50, bias=False).state_dict(), strict=True)
    assert torch.equal(scales(module), scales(resumed))


def test_a_state_dict_that_does_not_fit() -> None:
    module, other, e4m3 = linear(), linear(), linear()
    step(module, 0)
    step(other, 0, Delayed(amax_history_len=3))
    step(e4m3, 0, Delayed(amax_history_len=4, fp8_format=recipes.Format.E4M3))
    before = copy.deepcopy(module.state_dict())
    incomplete = {k: v for k, v in before.items() if not k.endswith("largest")}
    torn = {k: v[:2] if k.endswith("scale") else v for k, v in before.items()}
    empty = {k: v[:0] if k.endswith("history") else v for k, v in before.items()}
    for state, message in (
        (other.state_dict(), "must be for the recipe .*delayed 4', got those for .*delayed 3'"),
        (e4m3.state_dict(), "got those for 'e4m3, e4m3, e4m3, delayed 4'"),
        (incomplete, "must be loaded together, got none of 0.fp8_largest"),
        (torn, "of one module, got tensors that do not fit"),
        (empty, "of one module, got tensors that do not fit"),
    ):
        state = {k: v + 1 if k.endswith("weight") else v for k, v in state.items()}
        with pytest.raises(RuntimeError, match=message):
            module.load_state_dict(state)
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[name]), name


def test_scales_stay_what_they_are() -> None:
    module = linear()
    step(module, 0)
    step(module, 1)
    before = scales(module)
    module.bfloat16()
    assert module[0].fp8_scale.dtype == torch.float32 and torch.equal(scales(module), before)
    assert step(module, 1)[0].dtype == torch.bfloat16
    fresh = linear()
    with torch.inference_mode(), tops.autocast(recipe=SHORT):
        fresh(inputs(0)[0])
    assert not fresh[0].fp8_scale.is_inference()


def test_no_rounded_tensor_is_kept() -> None:
    module = linear()
    x = inputs(0)[0].requires_grad_()
    kept = saved_bytes(module, x)
    with tops.autocast(recipe=SHORT):
        # The scales.
        assert saved_bytes(module, x) <= kept + 12


# ---- arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [("margin", 0.5), ("amax_history_len", 0), ("amax_compute_algo", "mean"), ("reduce_amax", 1)],
)
def test_arguments(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\[DelayedScaling\] {name} must be"):
        Delayed(**{name: value})
    with pytest.raises(TypeError, match="amax_reduction_group must be a process group or None"):
        tops.autocast(recipe=SHORT, amax_reduction_group=[0])
