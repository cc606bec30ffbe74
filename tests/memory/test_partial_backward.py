"""What backward computes where the engine asks for some of the gradients."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_cases import CASES as FUSIONS
from fusion_cases import Case
from helpers import as_tuple, assert_equal
from op_cases import CASES as OPS
from op_cases import OpCase, run_seeded
from plan_calls import called
from recipe_cases import RECIPES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typed_op_samples import PAIRS, overload, samples

import transformer_ops as tops
from transformer_ops import _C

SPLITS = torch.tensor([12, 0, 20])


class Calls(TorchDispatchMode):
    """The typed ops that are called, with their output masks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "transformer_ops":
            name, values = called(func, args)
            schema = torch._C.parse_schema(_C.typed_op_schema(name))
            names = [argument.name for argument in schema.arguments]
            mask = values[names.index("output_mask")] if "output_mask" in names else ""
            self.found.append(f"{name}{mask and [int(wanted) for wanted in mask]}")
        return func(*args, **(kwargs or {}))


def calls(y: Tensor, wanted: list[Tensor], **options: Any) -> list[str]:
    with Calls() as seen:
        torch.autograd.grad(y.sum(), wanted, retain_graph=True, **options)
    return seen.found


def test_each_half_runs_its_own_products() -> None:
    module = tops.Sequential(tops.LayerNorm(16), tops.BasicLinear(16, 16), tops.LayerNorm(16))
    x = torch.randn(4, 16, requires_grad=True)
    y = module(x)
    first, linear, last = module
    norm = "layer_norm_backward[1, 1, 1]"
    whole, of_input = [norm, "linear_backward[1, 1]", norm], "layer_norm_backward[1, 0, 0]"
    recompute = ["recompute_layer_norm"]
    assert [c for c in calls(y, [x, *module.parameters()]) if c not in recompute] == whole
    assert calls(y, [x]) == [of_input, "linear_backward[1, 0]", of_input]
    of_weight = calls(y, [linear.weight])
    assert of_weight[0] == of_input and of_weight[-1] == "linear_backward[0, 1]"
    assert not any(call.startswith("layer_norm_backward") for call in of_weight[1:])
    assert calls(y, [last.weight]) == ["layer_norm_backward[0, 1, 0]"]
    of_bias = ["linear_backward[1, 0]", "layer_norm_backward[0, 0, 1]"]
    assert calls(y, [first.bias])[1:] == of_bias


def test_each_half_of_a_grouped_linear() -> None:
    op = tops.GroupedLinear(3, 16, 8)
    x = torch.randn(32, 16, requires_grad=True)
    y = op(x, SPLITS)
    weights = [op.weight0, op.weight1, op.weight2]
    biases = [op.bias0, op.bias1, op.bias2]
    assert calls(y, [x, *op.parameters()]) == ["grouped_linear_backward[1, 1, 1, 0]"]
    assert calls(y, [x]) == ["grouped_linear_backward[1, 0, 0, 0]"]
    assert calls(y, weights) == ["grouped_linear_backward[0, 1, 0, 0]"]
    assert calls(y, [weights[1]]) == ["grouped_linear_backward[0, 1, 0, 0]"]
    assert calls(y, biases) == ["grouped_linear_backward[0, 0, 1, 0]"]
    assert calls(y, [x, *biases]) == ["grouped_linear_backward[1, 0, 1, 0]"]


def test_fused_products_leave_out_what_nobody_wants() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    for name, fused in (("activation", "linear_activation"), ("mlp", "linear_glu")):
        y = SEQUENTIALS[name]()(x)
        of_x = [call for call in calls(y, [x]) if "linear" in call]
        assert len(of_x) == 2
        assert of_x[0].startswith(f"{fused}_backward[1, 0")
        assert of_x[1].startswith(("linear_backward[1, 0]", "bias_linear_backward[1, 0, 0]"))


def test_a_gradient_of_a_frozen_part_costs_no_product() -> None:
    """`.backward(inputs=...)` asks as `torch.autograd.grad` does."""
    module = tops.Sequential(tops.BasicLinear(16, 16), tops.LayerNorm(16))
    x = torch.randn(4, 16, requires_grad=True)
    y = module(x).sum()
    with Calls() as seen:
        y.backward(inputs=[module[1].weight])
    assert seen.found == ["layer_norm_backward[0, 1, 0]"]
    assert module[1].weight.grad is not None and x.grad is None


class Square(tops.BasicOperation):
    """x^2 in Python, with a count of its backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((32,), 1.5))
        self.backwards = 0

    def op_forward(self, ctx: Any, input_: Tensor, **unused: Any) -> Tensor:
        ctx.save_for_backward(input_)
        return input_ * input_ * self.weight

    def op_backward(self, ctx: Any, grad_output: Tensor) -> Any:
        self.backwards += 1
        (x,) = ctx.saved_tensors
        return 2 * x * self.weight * grad_output, ((grad_output * x * x).sum(0),)


def test_python_steps_run_for_what_needs_them() -> None:
    square = Square()
    module = tops.Sequential(tops.Linear(32, 32), square, tops.Linear(32, 32))
    x = torch.randn(4, 32, requires_grad=True)
    y = module(x).sum()
    expected = {module[2].weight: 0, square.weight: 1, module[0].bias: 1, x: 1}
    for wanted, count in expected.items():
        square.backwards = 0
        torch.autograd.grad(y, [wanted], retain_graph=True)
        assert square.backwards == count


# ---- some gradients at a time are all of them

SEQUENTIALS: dict[str, Callable[..., tops.Sequential]] = {
    "mlp": lambda **o: tops.Sequential(
        tops.RMSNorm(32), tops.Linear(32, 64), tops.SwiGLU(), tops.Linear(32, 32), **o
    ),
    "activation": lambda **o: tops.Sequential(
        tops.LayerNorm(32), tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32), **o
    ),
    "residual": lambda **o: tops.Sequential(
        tops.MakeExtraOutput(), tops.Linear(32, 32), tops.ReLU(), tops.Linear(32, 32), **o
    ),
    "norm and residual": lambda **o: tops.Sequential(
        tops.Bias(32), tops.MakeExtraOutput(), tops.LayerNorm(32), tops.Linear(32, 32), **o
    ),
    "rms norm and residual": lambda **o: tops.Sequential(
        tops.MakeExtraOutput(), tops.RMSNorm(32), tops.Linear(32, 32), **o
    ),
    "python": lambda **o: tops.Sequential(tops.Linear(32, 32), Square(), tops.Linear(32, 32), **o),
    "grouped": lambda **o: tops.Sequential(
        tops.GroupedLinear(3, 32, 64), tops.SwiGLU(), tops.GroupedLinear(3, 32, 32), **o
    ),
}
OPTIONS: dict[str, dict[str, str]] = {
    "plain": {},
    "int8": {"saved": "int8"},
    "no recompute": {"recompute": "none"},
}


def run(module: tops.Sequential, x: Tensor, recipe: Any) -> tuple[Tensor, ...]:
    extra = [SPLITS] * sum(isinstance(op, tops.GroupedLinear) for op in module)
    with tops.autocast(enabled=recipe is not None, recipe=recipe):
        found = module(x, *extra)
    return found if isinstance(found, tuple) else (found,)


def gradients(name: str, options: str, recipe: Any, parts: str) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    module = SEQUENTIALS[name](**OPTIONS[options])
    found: list[Tensor] = []
    for _ in range(2):
        x = torch.randn(32, 32, requires_grad=True)
        outputs = run(module, x, recipe)
        grads = [torch.randn_like(y) for y in outputs]
        wanted = [x, *module.parameters()]
        sets = {
            "whole": [wanted],
            "halves": [wanted[:1], wanted[1:]],
            "each": [[t] for t in wanted],
        }
        for some in sets[parts]:
            found += torch.autograd.grad(outputs, some, grads, retain_graph=True)
    # The next region writes to the scales of this module.
    return found, copy.deepcopy(module.state_dict())


# A recipe has saved formats of its own.
CELLS = [(o, r) for o in OPTIONS for r in (None, *RECIPES) if r is None or o != "int8"]


@pytest.mark.parametrize("parts", ["halves", "each"])
@pytest.mark.parametrize(("options", "recipe"), CELLS)
@pytest.mark.parametrize("name", SEQUENTIALS)
def test_bit_for_bit(name: str, options: str, recipe: str | None, parts: str) -> None:
    """The scales of a delayed recipe too."""
    chosen = None if recipe is None else RECIPES[recipe]
    whole, state = gradients(name, options, chosen, "whole")
    some, own = gradients(name, options, chosen, parts)
    for k, (got, want) in enumerate(zip(some, whole, strict=True)):
        assert torch.equal(got, want), k
    assert own.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(own[key], value), key


def check_one_by_one(call: Callable[..., Any], inputs: list[Tensor], others: list[Tensor]) -> None:
    """Each gradient alone is that of a call for all."""
    outputs = as_tuple(call(*inputs))
    outputs = tuple(y for y in outputs if y.requires_grad)
    wanted = [t for t in (*inputs, *others) if t.requires_grad]
    torch.manual_seed(3)
    grads = [torch.randn_like(y) for y in outputs]
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
    whole = torch.autograd.grad(outputs, wanted, grads, **options)
    for tensor, want in zip(wanted, whole, strict=True):
        (got,) = torch.autograd.grad(outputs, [tensor], grads, **options)
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case", [case for case in OPS if not case.distributed], ids=lambda c: c.name
)
def test_every_op(case: OpCase) -> None:
    op = case.build()
    check_one_by_one(lambda *x: run_seeded(op, *x), case.inputs(), list(op.parameters()))


@pytest.mark.parametrize("case", FUSIONS, ids=str)
def test_every_fusion(case: Case) -> None:
    module = tops.Sequential(*case.make())
    inputs = [t.requires_grad_() for t in case.inputs(torch.randn(3, 4, 16))]
    check_one_by_one(lambda *x: run_seeded(module, *x), inputs, list(module.parameters()))


def argument_names(name: str) -> list[str]:
    return [argument.name for argument in overload(name)._schema.arguments]


OPS_WITH_BACKWARD = {*PAIRS, *filter(None, PAIRS.values())}
MASKED = sorted(name for name in OPS_WITH_BACKWARD if "output_mask" in argument_names(name))


@pytest.mark.parametrize("name", MASKED)
def test_every_mask(name: str) -> None:
    """Each gradient alone, and all but one, are those of a call for all."""
    place = argument_names(name).index("output_mask")
    for sample in samples(name):
        mask = sample[place]
        whole = overload(name)(*copy.deepcopy(sample))
        wanted = [k for k, is_wanted in enumerate(mask) if is_wanted]
        for some in [*([k] for k in wanted), *([j for j in wanted if j != k] for k in wanted)]:
            if not some:
                continue
            narrowed = copy.deepcopy(sample)
            narrowed[place] = [k in some for k in range(len(mask))]
            found = overload(name)(*narrowed)
            for k in some:
                assert_equal(found[k], whole[k])


# By fused op, what each gradient costs alone: of the products of all, the halves.
HALVES = {
    "bias_linear_backward": (1, 1, 0),
    "gather_linear_backward": (1, 1, 0),
    "linear_activation_backward": (1, 1, 1),  # the bias sums what the input gets
    "linear_glu_backward": (1, 1),
    "linear_scatter_backward": (1, 1, 0),
    "reduce_gradient_linear_backward": (1, 1, 0),
    "scaled_grouped_linear_backward": (1, 1, 1),  # the scales, too
}


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="only MKL lists its products")
@pytest.mark.parametrize("name", HALVES)
def test_each_gradient_costs_its_own_products(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    def products(sample: Any, mask: list[bool]) -> int:
        sample = copy.deepcopy(sample)
        sample[place] = mask
        capfd.readouterr()
        with torch.backends.mkl.verbose(torch.backends.mkl.VERBOSE_ON):
            overload(name)(*sample)
        ctypes.CDLL(None).fflush(None)
        return capfd.readouterr().out.count("GEMM(")

    place = argument_names(name).index("output_mask")
    for sample in samples(name):
        given = sample[place]
        whole = products(sample, given)
        assert whole > 0 and whole % 2 == 0
        for k, halves in enumerate(HALVES[name]):
            if given[k]:
                alone = [i == k for i in range(len(given))]
                assert products(sample, alone) == halves * whole // 2, k


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("name", ["residual", "norm and residual", "rms norm and residual"])
def test_an_output_without_a_gradient(name: str, lost: int) -> None:
    module = SEQUENTIALS[name]()
    x = torch.randn(4, 32, requires_grad=True)
    outputs = module(x)
    wanted = [x, *module.parameters()]
    whole = torch.autograd.grad(outputs[lost].sum(), wanted, retain_graph=True, allow_unused=True)
    for tensor, want in zip(wanted, whole, strict=True):
        (got,) = torch.autograd.grad(
            outputs[lost].sum(), [tensor], retain_graph=True, allow_unused=True
        )
        assert (got is None) == (want is None) and (got is None or torch.equal(got, want))


def test_second_derivatives_of_some_gradients() -> None:
    module = SEQUENTIALS["mlp"]().double()
    x = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    parameters = list(module.parameters())

    def penalty(wanted: list[Tensor]) -> list[Tensor]:
        """Gradients of the square of the gradient of x, which is asked for with others."""
        (grad, *_) = torch.autograd.grad(module(x).sum(), wanted, create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), parameters, allow_unused=True))

    for got, want in zip(penalty([x]), penalty([x, *parameters]), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)


def test_what_is_saved_for_other_gradients_is_not_kept_alive() -> None:
    """A half gives back what it does not read before its own products."""
    module = tops.Sequential(tops.BasicLinear(16, 16), tops.LayerNorm(16))
    x = torch.randn(4, 16, requires_grad=True)
    for _ in range(3):
        y = module(x)
        torch.autograd.grad(y.sum(), [module[1].weight])
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y.sum(), [x])


def test_more_sets_than_are_kept() -> None:
    module = tops.Sequential(*(tops.Bias(4) for _ in range(8)))
    x = torch.randn(2, 4, requires_grad=True)
    y = module(x).sum()
    parameters = list(module.parameters())
    for number in range(1, 2**8):
        wanted = [p for k, p in enumerate(parameters) if number >> k & 1]
        for grad in torch.autograd.grad(y, wanted, retain_graph=True):
            assert torch.equal(grad, torch.full((4,), 2.0))
