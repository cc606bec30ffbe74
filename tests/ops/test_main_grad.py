"""Weight gradients that the products themselves add to `main_grad`, in every step that has one.

`pytest --emulate-cuda` runs the CUDA bodies, and sees what they ask cuBLASLt for.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from fusion_cases import before
from test_epilogues import made, products
from test_typed_ops import op
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_ops as tops


class Case(NamedTuple):
    """Ops of which one accumulates, and the backward step that has its product."""

    step: str
    make: Callable[..., list[tops.FusibleOperation]]
    target: str = ""


def linear(n: int, accumulate: bool, **kwargs: Any) -> tops.BasicLinear:
    return tops.BasicLinear(16, n, accumulate_into_main_grad=accumulate, **kwargs)


def with_bias(accumulate: bool) -> tops.Linear:
    return tops.Linear(16, 24, accumulate_into_main_grad=accumulate)


CASES = [
    Case("BasicLinear", lambda a: before(linear(24, a)), "linear"),
    Case("bias_linear", lambda a: before(with_bias(a))),
    Case("linear_residual_scale", lambda a: before(tops.MakeExtraOutput(), linear(24, a))),
    Case("linear_residual_scale", lambda a: before(linear(24, a), tops.ConstantScale(-0.7))),
    Case("activation_linear", lambda a: before(tops.SReLU(), linear(24, a))),
    Case("linear_activation", lambda a: before(tops.GELU(), linear(24, a))),
    Case("linear_activation", lambda a: before(tops.Bias(16), tops.GELU(), linear(24, a))),
    Case("linear_glu", lambda a: before(tops.BasicLinear(16, 32), tops.SwiGLU(), linear(24, a))),
]
every_case = pytest.mark.parametrize("case", CASES, ids=[case.step for case in CASES])


class Calls(TorchDispatchMode):
    """The typed ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "transformer_ops":
            self.names.append(func._schema.name.removeprefix("transformer_ops::"))
        return func(*args, **(kwargs or {}))


def accumulating(module: tops.Sequential) -> Tensor:
    """The weight of the linear whose gradient is accumulated."""
    (found,) = (m for m in module if getattr(m, "accumulate_into_main_grad", False))
    return found.weight


def gradients(module: Any, x: Tensor) -> list[Tensor | None]:
    """The gradients of input and parameters."""
    sources = [x, *module.parameters()]
    outputs = module(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    grads = [torch.randn_like(output) for output in outputs]
    return list(torch.autograd.grad(outputs, sources, grads, allow_unused=True))


def backward(module: tops.Sequential, x: Tensor) -> tuple[list[Tensor | None], list[str]]:
    """Gradients of input and parameters, and the typed ops that gave them."""
    with Calls() as calls:
        return gradients(module, x), calls.names


@every_case
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("dtype", "main"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_every_product_accumulates(
    case: Case, dtype: torch.dtype, main: torch.dtype, overwrite: bool
) -> None:
    module = tops.Sequential(*case.make(True)).to(dtype)
    plain = tops.Sequential(*case.make(False)).to(dtype)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 3, 16, dtype=dtype, requires_grad=True)
    weight = accumulating(module)
    start = torch.randn(weight.shape, dtype=main)
    weight.main_grad = buffer = start.clone()
    weight.overwrite_main_grad = overwrite
    got, names = backward(module, x)
    want, _ = backward(plain, x)
    (place,) = (i for i, p in enumerate([x, *module.parameters()]) if p is weight)
    assert case.step in [step.name for step in module.plans()[0].backward]
    assert (case.target or case.step) + "_backward_into" in names
    gradient = want.pop(place).double()
    assert got.pop(place) is None
    # Not before: the gradient may be rounded to 16 bits on the way, and so may be the sum.
    right = gradient if overwrite else start.double() + gradient
    narrow = torch.bfloat16 in (dtype, main)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if narrow else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(buffer.double(), right, **tolerance)
    assert weight.main_grad is buffer and buffer._version == 1
    torch.testing.assert_close(got, want)


@every_case
def test_the_plan_names_the_buffer(case: Case) -> None:
    module = tops.Sequential(*case.make(True))
    weight = accumulating(module)
    weight.main_grad = torch.zeros_like(weight)
    backward(module, torch.randn(3, 16, requires_grad=True))
    text = str(module.plans()[0])
    (state,) = set(re.findall(r"st\d+\.main_grad", text))
    assert text.count(state) == 1
    # A text that gives the gradient to autograd would lose it: the product is told of the buffer.
    lost = text.replace(state, state.replace("st", "dp").replace("main_grad", "weight"))
    with pytest.raises(RuntimeError, match=rf"must yield the gradients .* got no {state}"):
        tops.Plan.parse(lost)


def test_under_autocast() -> None:
    module, plain = (tops.Sequential(*before(with_bias(a))) for a in (True, False))
    plain.load_state_dict(module.state_dict())
    weight, x = accumulating(module), torch.randn(5, 16, requires_grad=True)
    weight.main_grad = torch.zeros(24, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, other = module(x), plain(x)
    y.float().square().sum().backward()
    other.float().square().sum().backward()
    torch.testing.assert_close(weight.main_grad, plain[1].weight.grad, rtol=2e-2, atol=2e-2)
    assert weight.grad is None and module[1].bias.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: torch.zeros(16, 24).t(),  # columns
        lambda weight: torch.zeros(24, 32)[:, :16],
        lambda weight: weight.detach().new_zeros(24, 1).expand(24, 16).contiguous()[:, :16],
    ],
)
def test_any_strides(make: Callable[[Tensor], Tensor]) -> None:
    module = tops.Sequential(tops.GELU(), linear(24, True))
    weight, x = accumulating(module), torch.randn(5, 16, requires_grad=True)
    weight.main_grad = make(weight)
    y = module(x)
    y.sum().backward()
    want = torch.nn.functional.gelu(x, approximate="tanh").sum(0).expand(24, 16)
    torch.testing.assert_close(weight.main_grad, want.detach())


def test_what_no_product_takes_is_added_as_before() -> None:
    class Logged(Tensor):
        pass

    module = tops.Sequential(linear(24, True))
    weight, x = accumulating(module), torch.randn(5, 16, requires_grad=True)
    # A tensor of a class of its own; one that the gradient is broadcast to.
    for buffer in (torch.zeros(24, 16).as_subclass(Logged), torch.zeros(2, 24, 16)):
        weight.main_grad = buffer
        _, names = backward(module, x)
        assert "linear_backward" in names
        assert buffer.abs().sum() > 0


def test_empty_batches_leave_it_or_write_zeros() -> None:
    module = tops.Sequential(linear(24, True))
    weight = accumulating(module)
    for overwrite in (False, True):
        weight.main_grad, weight.overwrite_main_grad = torch.ones(24, 16), overwrite
        module(torch.randn(0, 16, requires_grad=True)).sum().backward()
        assert torch.equal(weight.main_grad, torch.full((24, 16), float(not overwrite)))


def into_sample(dtype: torch.dtype = torch.float64) -> list[Any]:
    shapes = ((6, 24), (6, 16), (24, 16))
    g, x, w = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return [g, x, w, [True, True], torch.randn(24, 16, dtype=dtype), False]


def test_schema_and_fake_tensors_of_the_op() -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op("linear_backward_into"), into_sample(), test_utils=checks)


def test_errors_come_before_anything_changes() -> None:
    sample = into_sample()
    buffer = sample[4]
    before = buffer.clone()
    call = op("linear_backward_into")
    with pytest.raises(RuntimeError, match=r"main_grad must have shape \[24, 16\], got \[16, 24\]"):
        call(*sample[:4], torch.zeros(16, 24), False)
    with pytest.raises(RuntimeError, match=r"main_grad must be float16, bfloat16"):
        call(*sample[:4], torch.zeros(24, 16, dtype=torch.int64), False)
    with pytest.raises(RuntimeError):
        call(sample[0][:5], *sample[1:])
    assert torch.equal(buffer, before) and buffer._version == 0


# ---- on CUDA


@pytest.mark.emulated
@pytest.mark.parametrize(
    "name", ["linear_backward", "linear_activation_backward", "bias_linear_backward"]
)
def test_16_bit_products_add_to_float32(name: str) -> None:
    x, w = made(torch.bfloat16, (64, 16), (24, 16))
    buffer = torch.zeros(24, 16)
    exact = torch.zeros(24, 16, dtype=torch.float64)
    rest = {
        "linear_backward": [[True, True]],
        "linear_activation_backward": ["gelu", [True, True, False]],
        "bias_linear_backward": [[True] * 3],
    }.get(name, [])
    for _ in range(20):
        g = torch.randn(64, 24).bfloat16()
        op(name + "_into")(g, x, w, *rest, buffer, False)
        y = (
            torch.nn.functional.gelu(x.float(), approximate="tanh").bfloat16()
            if "act" in name
            else x
        )
        exact += g.double().t() @ y.double()
        epilogue = "bgradb" if name.startswith("bias") else "plain"
        assert products()[0] == f"{epilogue} 24x16x64 bfloat16 -> float32 beta=1"
    # bfloat16 would round each sum by 2^-9.
    assert (buffer - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.emulated
def test_the_bias_gradient_keeps_its_dtype() -> None:
    g, x, w = made(torch.bfloat16, (64, 24), (64, 16), (24, 16))
    _, grad_bias = op("bias_linear_backward_into")(g, x, w, [True] * 3, torch.zeros(24, 16), True)
    assert grad_bias.dtype == torch.bfloat16
    assert products()[0] == "bgradb 24x16x64 bfloat16 -> float32"
    torch.testing.assert_close(grad_bias, g.float().sum(0).bfloat16())


def test_create_graph_is_one_clear_error() -> None:
    module = tops.Sequential(tops.Linear(8, 8, accumulate_into_main_grad=True), tops.GELU())
    module[0].weight.main_grad = torch.zeros_like(module[0].weight)
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(
        RuntimeError, match=r"\[BasicLinear\] create_graph=True must find no weight"
    ):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)
    assert not module[0].weight.main_grad.any()


# ---- under torch.compile


@every_case
@pytest.mark.parametrize("overwrite", [False, True])
def test_compiled_without_a_graph_break(case: Case, overwrite: bool) -> None:
    """The buffer is an input of the graph, which the products in its backward add to."""
    module, plain = (tops.Sequential(*case.make(a)) for a in (True, False))
    plain.load_state_dict(module.state_dict())
    x = torch.randn(2, 3, 16, requires_grad=True)
    weight = accumulating(module)
    weight.overwrite_main_grad = overwrite
    weight.main_grad = torch.zeros_like(weight)
    graphs = Graphs()
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    want = gradients(plain, x)
    (place,) = (i for i, p in enumerate([x, *module.parameters()]) if p is weight)
    gradient = want.pop(place)
    for calls in (1, 2):
        got = gradients(compiled, x)
        assert got.pop(place) is None
        torch.testing.assert_close(got, want)
        factor = 1 if overwrite else calls
        torch.testing.assert_close(weight.main_grad, factor * gradient, rtol=1e-4, atol=1e-4)
    assert graphs.frames == 1
    assert any("backward_into" in name for name in graphs.calls)


class Graphs:
    """A backend that notes what its graphs call, with AOTAutograd's."""

    def __init__(self) -> None:
        self.frames = 0
        self.calls: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.frames += 1
        return aot_autograd(fw_compiler=self.note, bw_compiler=self.note)(graph, inputs)

    def note(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        # A call that writes is an argument of the op that makes it functional.
        self.calls += [str(argument) for node in nodes for argument in (node.target, *node.args)]
        return make_boxed_func(graph.forward)


def one_linear() -> tuple[tops.Sequential, Tensor, Tensor]:
    module = tops.Sequential(tops.Linear(16, 8, accumulate_into_main_grad=True), tops.GELU())
    x = torch.randn(4, 16)
    plain = copy.deepcopy(module[0].weight.detach()).requires_grad_()
    y = torch.nn.functional.linear(x, plain, module[0].bias)
    (want,) = torch.autograd.grad(
        torch.nn.functional.gelu(y, approximate="tanh").square().sum(), plain
    )
    return module, x, want


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_compiled_code_sees_of_a_buffer(backend: str) -> None:
    """Another buffer, another dtype and another flag between two calls."""
    module, x, want = one_linear()
    weight = module[0].weight
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    weight.main_grad = torch.zeros_like(weight)
    compiled(x).square().sum().backward()
    torch.testing.assert_close(weight.main_grad, want)
    first, weight.main_grad = weight.main_grad, torch.ones_like(weight)
    compiled(x).square().sum().backward()
    torch.testing.assert_close(weight.main_grad, want + 1)
    torch.testing.assert_close(first, want)
    weight.overwrite_main_grad = True
    compiled(x).square().sum().backward()
    torch.testing.assert_close(weight.main_grad, want)
    weight.overwrite_main_grad = False
    weight.main_grad = torch.ones_like(weight, dtype=torch.float64)
    compiled(x).square().sum().backward()
    torch.testing.assert_close(weight.main_grad.float(), want + 1)
    assert weight.grad is None
    if backend != "eager" and torch.__version__.startswith("2.11."):
        return  # its AOTAutograd detaches what stands in for a buffer where no subclass may be
    # One that no product writes to.
    weight.main_grad = Subclass(torch.ones_like(weight))
    compiled(x).square().sum().backward()
    torch.testing.assert_close(weight.main_grad.as_subclass(Tensor), want + 1)
    assert weight.grad is None


class Subclass(Tensor):
    """A plain subclass, as frameworks have them for their buffers."""


@pytest.mark.parametrize("compiled", [False, True])
def test_a_frozen_weight_needs_no_buffer(compiled: bool) -> None:
    module, x, want = one_linear()
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    module[0].weight.requires_grad_(False)
    call(x).sum().backward()
    module[0].weight.requires_grad_(True)
    if compiled and not sees_that_a_weight_is_trained_again():
        torch._dynamo.reset()
    with torch.no_grad():
        call(x)
    with pytest.raises(Exception, match=r"\[Linear\] weight must have a main_grad"):
        call(x)
    module[0].weight.main_grad = torch.zeros_like(want)
    call(x).square().sum().backward()
    torch.testing.assert_close(module[0].weight.main_grad, want)


def sees_that_a_weight_is_trained_again() -> bool:
    """Whether torch compiles a plain Linear anew for it: torch 2.11 does not."""
    plain = torch.nn.Linear(8, 8)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for trains in (False, True):
        plain.weight.requires_grad_(trains)
        compiled(torch.randn(2, 8)).sum().backward()
    return plain.weight.grad is not None


def test_a_mark_is_set_by_python_alone() -> None:
    module, x, want = one_linear()
    weight = module[0].weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    compiled = torch.compile(module, backend="aot_eager")
    compiled(x).square().sum().backward()
    torch.testing.assert_close(weight.main_grad, want)
    assert weight.grad_added_to_main_grad is True and weight.grad.shape == weight.shape
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    # Without the mark it needs no break.
    del weight.grad_added_to_main_grad
    torch.compile(module, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    torch.testing.assert_close(weight.main_grad, 2 * want)


def test_two_forwards_before_their_backwards() -> None:
    """Autograd refuses the second in compiled code: its graph keeps the buffer that the first one
    changed. Eager code reads the buffer in backward."""
    module, x, want = one_linear()
    module[0].weight.main_grad = torch.zeros_like(want)
    for call, message in ((module, None), (torch.compile(module, backend="aot_eager"), "modified")):
        module[0].weight.main_grad.zero_()
        losses = [call(x).square().sum() for _ in range(2)]
        losses[0].backward()
        if message is None:
            losses[1].backward()
            torch.testing.assert_close(module[0].weight.main_grad, 2 * want)
        else:
            with pytest.raises(RuntimeError, match=message):
                losses[1].backward()
