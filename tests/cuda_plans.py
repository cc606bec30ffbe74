"""Plans for CUDA under a recipe, made without a GPU: products take codes and scales. CPU kernels or
emulated kernels run them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_ops as tops
from transformer_ops.plan.plan import Plan
from transformer_ops.quantization import reset_scales
from transformer_ops.recipe import Recipe

o = torch.ops.transformer_ops

DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def on_cuda(module: tops.Sequential, x: Tensor, recipe: Recipe) -> tops.Sequential:
    """A copy that, as far as its planner knows, has run under a recipe on a GPU: none of its
    tensors has memory."""
    twin = copy.deepcopy(module)
    reset_scales(twin)
    with FakeTensorMode(), tops.autocast(recipe=recipe):
        for part in twin.modules():
            for name, value in part.named_parameters(recurse=False):
                fake = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                setattr(part, name, torch.nn.Parameter(fake, value.requires_grad))
        twin(torch.empty(x.shape, dtype=x.dtype, device="cuda", requires_grad=x.requires_grad))
    return twin


def run_for_cuda(module: tops.Sequential, x: Tensor, recipe: Recipe) -> list[Tensor]:
    """The output and the gradients of the parameters by the plan for CUDA."""
    # Another region computes new scales.
    states = {name: value.clone() for name, value in module.state_dict().items()}
    return run(on_cuda(module, x, recipe).plans()[0], module, x, states)


def run(plan: Plan, module: tops.Sequential, x: Tensor, states: dict[str, Tensor]) -> list[Tensor]:
    parameters = [p.detach().requires_grad_() for p in module.parameters()]
    places = [i for i, m in enumerate(module) for _ in getattr(m, "basic_ops", [m])]
    given = [states[f"{places[value.op]}.{value.name}"] for value in plan.states]
    y = o.run_plan(str(plan), x, [], [*parameters, *given])[0]
    return [y, *torch.autograd.grad(y.float().square().sum(), parameters)]


def step(module: tops.Sequential, x: Tensor, recipe: Recipe) -> list[Tensor]:
    """The same with the module's own plan under a recipe."""
    with tops.autocast(recipe=recipe):
        y = module(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), list(module.parameters()))]


def block(width: int, hidden: int) -> tops.Sequential:
    torch.manual_seed(0)
    return tops.Sequential(
        tops.RMSNorm(width),
        tops.Linear(width, hidden),
        tops.GELU(),
        tops.Linear(hidden, 2 * width, bias=False),
        tops.SwiGLU(),
        tops.Linear(width, width),
    ).bfloat16()


def assert_near_in_norm(found: list[Tensor], want: list[Tensor], error: float = 2**-6) -> None:
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        assert (a.to(b.device) - b).double().norm() <= error * b.double().norm()


def assert_as_exact(found: list[Tensor], want: list[Tensor], exact: list[Tensor]) -> None:
    """Rounding in another place moves a code here and there: the numbers of two devices are as far
    from the exact ones, and not as far from each other."""
    for a, b, c in zip(found, want, exact, strict=True):
        assert a.dtype == b.dtype == torch.bfloat16
        mine, theirs, right = (tensor.detach().cpu().double() for tensor in (a, b, c))
        error, allowed = (mine - right).norm(), (theirs - right).norm()
        assert 0.6 * allowed <= error <= 1.5 * allowed
        assert (mine - theirs).norm() <= 0.9 * allowed


def exact_step(module: tops.Sequential, x: Tensor) -> list[Tensor]:
    """The same in float64, without a recipe."""
    twin = copy.deepcopy(module).double()
    y = twin(x.double())
    return [y, *torch.autograd.grad(y.square().sum(), list(twin.parameters()))]


def check_that_no_host_reads_a_number(module: tops.Sequential, x: Tensor, recipe: Recipe) -> None:
    step(module, x, recipe)  # which makes states
    plan = on_cuda(module, x, recipe).plans()[0]
    with torch.profiler.profile() as profile:
        run(plan, module, x, module.state_dict())
    names = {event.name for event in profile.events()}
    assert any("linear_scaled" in name for name in names)
    assert any("linear_backward_scaled" in name for name in names)
    assert not names & {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"}


def check_that_compiled_code_has_no_break(
    module: tops.Sequential,
    x: Tensor,
    recipe: Recipe,
    *,
    dynamic: bool | None = None,
    backend: str = "inductor",
    error: float = 2**-6,
) -> None:
    text, want = str(on_cuda(module, x, recipe).plans()[0]), run_for_cuda(module, x, recipe)
    parameters = [p.detach().requires_grad_() for p in module.parameters()]
    run = torch.compile(
        lambda x, given: o.run_plan(text, x, [], given)[0],
        fullgraph=True,
        dynamic=dynamic,
        backend=backend,
    )
    y = run(x, parameters)
    got = [y, *torch.autograd.grad(y.float().square().sum(), parameters)]
    assert_near_in_norm(got, want, error)


def check_a_captured_step(module: tops.Sequential, x: Tensor, recipe: Recipe) -> None:
    """Checks a step on a GPU, in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(module, x, recipe)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(module, x, recipe)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(results, step(module, x, recipe))
