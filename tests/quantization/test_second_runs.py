"""Second runs of checkpointed forwards, in the ways that scripts have them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.utils.checkpoint import checkpoint

import transformer_ops as tops
from transformer_ops import recipe as recipes
from transformer_ops.quantization import checkpoint_contexts, current_recipe
from transformer_ops.quantization.state import STATE

MX = recipes.MXFP8BlockScaling()
DELAYED = recipes.DelayedScaling(amax_history_len=3)
Function = Callable[[Tensor, tops.Sequential, tops.Sequential], Tensor]


def block(seed: int) -> tops.Sequential:
    torch.manual_seed(seed)
    return tops.Sequential(
        tops.LayerNorm(32), tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32)
    )


def rows(seed: int = 0) -> Tensor:
    return torch.randn(24, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def without_gradients(x: Tensor, a: tops.Sequential, b: tops.Sequential) -> Tensor:
    with torch.no_grad():
        gate = a(x)
    found: Tensor = b(x) * gate
    return found


def offloaded(x: Tensor, a: tops.Sequential, b: tops.Sequential) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        h = b(x)
    found: Tensor = h * h
    return found


def by_recipe(x: Tensor, a: tops.Sequential, b: tops.Sequential) -> Tensor:
    found: Tensor = a(x) if current_recipe() is None else b(x)
    return found


FUNCTIONS: dict[str, Function] = {
    "one block": lambda x, a, b: b(x),
    "a part without gradients": without_gradients,
    "non-reentrant inside": lambda x, a, b: checkpoint(b, x, use_reentrant=False),
    "reentrant inside": lambda x, a, b: checkpoint(b, x, use_reentrant=True),
    "contexts inside": lambda x, a, b: checkpoint(
        b, x, use_reentrant=False, context_fn=checkpoint_contexts
    ),
    "a module made inside": lambda x, a, b: tops.Sequential(*b)(x),
    "offloaded inside": offloaded,
    "by the recipe": by_recipe,
}


def validate(model: nn.Module) -> None:
    with torch.no_grad():
        model(rows(3))


def gradients(run: Callable[[Function], Function], function: Function, recipe: Any) -> list[Tensor]:
    a, b, x = block(1), block(2), rows()
    with tops.autocast(recipe=recipe):
        function(rows(5), a, b).sum().backward()
    a.zero_grad()
    b.zero_grad()
    with tops.autocast(recipe=recipe):
        y = run(function)(x, a, b)
    # What other calls do in between does not matter.
    validate(b)
    with tops.autocast(recipe=recipes.Float8CurrentScaling()):
        b(rows(4))
    y.sum().backward()
    found = [x.grad, *(p.grad for module in (a, b) for p in module.parameters())]
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("recipe", [MX, DELAYED], ids=["mxfp8", "delayed"])
def test_as_the_first_run(recipe: recipes.Recipe, name: str, reentrant: bool) -> None:
    def checkpointed(function: Function) -> Function:
        def run(x: Tensor, a: tops.Sequential, b: tops.Sequential) -> Tensor:
            found: Tensor = checkpoint(lambda x: function(x, a, b), x, use_reentrant=reentrant)
            return found

        return run

    want = gradients(lambda function: function, FUNCTIONS[name], recipe)
    found = gradients(checkpointed, FUNCTIONS[name], recipe)
    assert len(found) == len(want) > 4
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)


def test_a_composable_checkpoint() -> None:
    x, plain, wrapped = rows(), block(2), nn.Sequential(block(2))
    composable_checkpoint(wrapped)
    with tops.autocast(recipe=MX):
        outputs = wrapped(x), plain(x)
    one, other = (torch.autograd.grad(y.sum(), x)[0] for y in outputs)
    assert torch.equal(one, other)


def test_two_backward_passes() -> None:
    x, b = rows(), block(2)
    with tops.autocast(recipe=DELAYED):
        y = checkpoint(b, x, use_reentrant=False, context_fn=checkpoint_contexts)
        want = torch.autograd.grad(b(x).sum(), x)[0]
    for keep in (True, False):
        assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=keep)[0], want)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_two_regions_in_one_checkpoint(reentrant: bool) -> None:
    """Also after so many backward passes that equal numbers of them are different objects."""
    a, b, x = block(1), block(2), rows()

    def function(x: Tensor) -> Tensor:
        with tops.autocast(recipe=MX):
            y = a(x)
        with tops.autocast(recipe=recipes.Float8CurrentScaling()):
            found: Tensor = b(y)
        return found

    for _ in range(300):
        torch.ones(1, requires_grad=True).sum().backward()
    grads: list[Tensor] = []
    for y in (function(x), checkpoint(function, x, use_reentrant=reentrant)):
        x.grad = None
        y.sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_scales_that_are_loaded_in_between() -> None:
    x, b = rows(), block(2)
    for k in range(2):
        with tops.autocast(recipe=DELAYED):
            b(rows(k)).sum().backward()
    with tops.autocast(recipe=DELAYED):
        y, plain = checkpoint(b, x, use_reentrant=False), b(x)
    want = torch.autograd.grad(plain.sum(), x)[0]
    state = b.state_dict().items()
    b.load_state_dict({k: 2 * v if k.endswith("fp8_scale") else v for k, v in state})
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


def test_calls_that_are_no_second_run() -> None:
    """A hook of a backward pass calls a module that ran under a recipe before."""
    x, aux, b = rows(), block(7), block(1)
    with tops.autocast(recipe=MX):
        aux(x)
    want, seen = aux(x), []

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            seen.append(aux(x))

    y = b(x)
    y.register_hook(hook)
    y.sum().backward()
    assert torch.equal(seen[0], want)
    # A checkpoint without a recipe, of a group that was never called before.
    z = checkpoint(lambda x: tops.Sequential(*b)(x), x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], torch.autograd.grad(b(x).sum(), x)[0])


@pytest.mark.parametrize("threaded", [False, True], ids=["here", "in a thread"])
def test_compiled_code_beside_an_op(threaded: bool) -> None:
    first, second, x = block(1), block(2 + threaded), rows()
    compiled = torch.compile(second, backend="aot_eager", fullgraph=True)
    with tops.autocast(recipe=MX):
        y = checkpoint(lambda x: compiled(first(x)), x, use_reentrant=False)
        want = second(first(x))

    def run() -> None:
        y.sum().backward()

    if threaded:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(want.sum(), x)[0])


def test_second_runs_of_two_threads_beside_each_other() -> None:
    """Each has the scales of its first run, whoever enters and leaves first."""
    b, meeting = block(2), threading.Barrier(2, timeout=60)

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            meeting.wait()
            return grad

    def waits(x: Tensor) -> Tensor:
        y: Tensor = b(x)
        if torch._C._current_graph_task_id() != -1:
            meeting.wait()
        y = b(y)
        if torch._C._current_graph_task_id() != -1:
            meeting.wait()
        return y

    runs = []
    for i in range(2):
        x, plain = rows(i), rows(i)
        with tops.autocast(recipe=DELAYED):
            runs.append((x, checkpoint(waits, x, use_reentrant=False), plain, b(b(plain))))
        with tops.autocast(recipe=DELAYED), torch.no_grad():
            b(rows(i) * 7**i)
    wanted = [torch.autograd.grad(y.sum(), x)[0] for _, _, x, y in runs]
    threads = [threading.Thread(target=y.sum().backward) for _, y, _, _ in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (x, *_), want in zip(runs, wanted, strict=True):
        assert x.grad is not None and torch.equal(x.grad, want)


# ---- what is refused


@pytest.mark.parametrize("first", [True, False])
def test_a_region_that_only_one_run_enters(first: bool) -> None:
    enters, b = [first], block(2)

    def run(x: Tensor) -> Tensor:
        with tops.autocast(recipe=MX) if enters[0] else contextlib.nullcontext():
            found: Tensor = b(x)
            return found

    y = checkpoint(run, rows(), use_reentrant=False)
    enters[0] = not first
    with pytest.raises(RuntimeError, match=r"must enter the regions of its first run, got"):
        y.sum().backward()
    assert current_recipe() is None and not STATE.entries


def test_a_context_that_raises_leaves_nothing_behind() -> None:
    class Raises(contextlib.nullcontext[None]):
        def __enter__(self) -> None:
            raise ValueError("no")

    def contexts() -> Any:
        return checkpoint_contexts(lambda: (contextlib.nullcontext(), Raises()))

    with tops.autocast(recipe=MX):
        y = checkpoint(block(2), rows(), use_reentrant=False, context_fn=contexts)
    with pytest.raises(ValueError, match="no"):
        y.sum().backward()
    assert current_recipe() is None and not STATE.entries


def test_regions_that_are_left_in_another_order() -> None:
    with torch.autograd.graph.save_on_cpu():
        one, two = tops.autocast(recipe=MX), tops.autocast(recipe=DELAYED)
        one.__enter__()
        two.__enter__()
        one.__exit__()
        two.__exit__()
    assert not STATE.entries


@pytest.mark.parametrize("is_called", [False, True], ids=["at once", "called since"])
def test_scales_that_are_reset_before_the_second_run(is_called: bool) -> None:
    b, x = block(2), rows()
    for _ in range(2):
        with tops.autocast(recipe=DELAYED):
            y = checkpoint(b, x, use_reentrant=False)
            want = b(x)
    want = torch.autograd.grad(want.sum(), x)[0]
    tops.quantization.reset_scales(b)
    if is_called:
        with tops.autocast(recipe=DELAYED):
            b(rows())
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)
    assert torch.equal(b[1].fp8_scale, torch.ones(3))


def test_a_recipe_of_other_formats_since() -> None:
    b, x = block(2), rows()
    with tops.autocast(recipe=DELAYED):
        y = checkpoint(b, x, use_reentrant=False)
    tops.quantization.reset_scales(b)
    with tops.autocast(recipe=recipes.DelayedScaling(amax_history_len=7)):
        b(rows()).sum().backward()
    with pytest.raises(RuntimeError, match=r"scales must be for the recipe .* delayed 3"):
        y.sum().backward()
