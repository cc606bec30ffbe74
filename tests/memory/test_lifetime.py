"""What lives how long: modules die with their last reference, caches have a bound."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from op_cases import CASES, NAMES
from torch import nn

import transformer_ops as tops

pytestmark = pytest.mark.usefixtures("few_objects")


class Double(tops.BasicOperation):
    """A Python op in the split style."""

    def op_forward_compute(self, input_, **unused):
        return 2 * input_, ()

    def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
        pass

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


def block() -> tops.Sequential:
    return tops.Sequential(tops.LayerNorm(8), tops.Linear(8, 8), tops.GELU(), tops.Linear(8, 8))


def with_python_op() -> tops.Sequential:
    return tops.Sequential(tops.Linear(8, 8), Double(), tops.GELU())


def with_hook() -> tops.Sequential:
    made = block()
    made[1].register_forward_hook(lambda module, inputs, output: None)
    return made


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: tops.Linear(8, 8),
    "block": block,
    "nested": lambda: tops.Sequential(block(), tops.GELU()),
    "Python op": with_python_op,
    "hook": with_hook,
    "plain module between": lambda: tops.Sequential(
        tops.Linear(8, 8), nn.Tanh(), tops.Linear(8, 8)
    ),
}


def train(module: nn.Module) -> None:
    module(torch.randn(4, 8)).sum().backward()
    with torch.no_grad():
        module(torch.randn(4, 8))


def look_at(module: nn.Module) -> None:
    if isinstance(module, tops.Sequential):
        module.plans()
        str(module.explain())


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def is_freed(reference: weakref.ref[nn.Module]) -> bool:
    gc.collect()
    return reference() is None


@contextmanager
def freed_at_once(module: nn.Module) -> Iterator[None]:
    """At the end of the block, whose end must drop the last reference, no part is alive. The
    collector does not run."""
    parts = {name: weakref.ref(part) for name, part in module.named_modules()}
    parts |= {f"parameter {name}": weakref.ref(p) for name, p in module.named_parameters()}
    del module
    gc.disable()
    yield
    assert not [name for name, part in parts.items() if part() is not None]
    gc.enable()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_an_op_is_freed_with_its_last_reference(case):
    for calls in range(3):
        module, found = case.make(), None
        with freed_at_once(module):
            for _ in range(calls):
                found = module(*case.inputs())
                found = found if isinstance(found, tuple) else (found,)
                sum(one.sum() for one in found if one.requires_grad).backward()
            del module, found


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_sequential_is_freed_with_its_last_reference(make):
    module = make()
    with freed_at_once(module):
        train(module)
        look_at(module)
        del module


def test_a_deepcopy_that_was_called_is_freed():
    module = block()
    train(module)
    twin = copy.deepcopy(module)
    train(twin)
    reference = weakref.ref(twin[1])
    del twin
    assert is_freed(reference)
    train(module)


def test_a_replaced_layer_is_freed():
    module = block()
    train(module)
    reference = weakref.ref(module[1])
    module[1] = tops.Linear(8, 8)
    train(module)
    assert is_freed(reference)


def test_containers_of_parts_keep_the_owner_alive():
    x, linear = torch.randn(4, 8), tops.Linear(8, 8)
    product, bias = linear.basic_ops
    appended = tops.Sequential()
    appended.add_module("first", product)
    appended.append(bias)
    made: list[Any] = [tops.Sequential(product, bias), appended]
    made += [appended[:], tops.OperationFuser(appended), copy.deepcopy(appended)]
    expected, owner, copied = linear(x), weakref.ref(linear), made.pop()
    del linear, product, bias, appended
    torch.testing.assert_close(copied(x), expected)
    for container in made:
        torch.testing.assert_close(container(x), expected)
    gc.disable()
    del container
    while made:
        assert owner() is not None
        made.pop()
    assert owner() is None


def test_an_operation_fuser_is_freed():
    fuser = tops.OperationFuser([tops.Linear(8, 8), tops.GELU()])
    fuser(torch.randn(4, 8))
    fuser.plan()
    reference = weakref.ref(fuser)
    del fuser
    assert is_freed(reference)


def test_a_compiled_module_is_freed():
    module = block()
    torch.compile(module, backend="eager", fullgraph=True)(torch.randn(4, 8))
    reference = weakref.ref(module[1])
    del module
    assert is_freed(reference)


def test_backward_runs_after_its_module_is_gone():
    module, x = block(), torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), x)[0]
    output = module(x).sum()
    reference = weakref.ref(module)
    del module
    assert is_freed(reference)
    output.backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_finalizer_may_call_the_module_that_dies():
    """The collector clears a cycle in any order: what is left of a group must not crash."""
    seen = []

    class Calling(tops.Linear):
        def __del__(self) -> None:
            try:
                seen.append(self(torch.ones(1, 8)).shape)
            except Exception as error:
                seen.append(error)

    module = tops.Sequential(Calling(8, 8), tops.GELU())
    module(torch.randn(4, 8))
    module[0](torch.randn(4, 8))
    module.me = [module]  # a cycle, so that the collector has to find it
    del module
    gc.collect()
    assert seen == [torch.Size([1, 8])]


def test_an_annealed_dropout_takes_no_memory():
    dropout = tops.Dropout(0.1)
    module = tops.Sequential(tops.Linear(8, 8), tops.GELU(), tops.Linear(8, 8), dropout)
    x = torch.randn(4, 8)

    def anneal(steps: range) -> None:
        for step in steps:
            dropout.p = 0.1 + step * 1e-6
            module(x)

    anneal(range(300))
    gc.collect()
    before = resident_bytes()
    anneal(range(300, 2300))
    assert resident_bytes() - before < 4e6  # 18 KB a step before plans had a bound


def test_a_group_keeps_a_bounded_number_of_plans():
    module = tops.Sequential(*(tops.Linear(4, 4) for _ in range(4)))
    parameters = list(module.parameters())
    for mask in range(200):
        for bit, parameter in enumerate(parameters):
            parameter.requires_grad_(bool(mask >> bit & 1))
        module(torch.randn(2, 4))
    group = module._layout.whole._group
    assert 1 < group.cached_plans <= 64


def by_saving(ctx, output):
    ctx.save_for_backward(output)


def by_attribute(ctx, output):
    ctx.kept = output


def by_container(ctx, output):
    ctx.kept = {"outputs": [output], "factor": 2}


def kept(ctx):
    found = getattr(ctx, "kept", None)
    if isinstance(found, dict):
        assert found["factor"] == 2
        return found["outputs"][0]
    return ctx.saved_tensors[0] if found is None else found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("keep", [by_saving, by_attribute, by_container])
@pytest.mark.parametrize("last", [True, False], ids=["output", "before a native op"])
def test_an_output_on_the_context_of_its_op_dies_with_the_graph(keep, last, backward):
    outputs = []

    class Exp(tops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            output = input_.exp()
            outputs.append(weakref.ref(output))
            keep(ctx, output)
            return output

        def op_backward(self, ctx, grad_output):
            return grad_output * kept(ctx), ()

    module = tops.Sequential(Exp()) if last else tops.Sequential(Exp(), tops.GELU())
    x = torch.randn(4, 8, requires_grad=True)
    output = module(x)
    if backward:
        (found,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(found, again)
        if last:
            torch.testing.assert_close(found, x.exp())
    del output
    assert [found() for found in outputs] == [None]


def test_calls_that_keep_their_outputs_take_no_memory():
    class Exp(tops.BasicOperation):
        def op_forward(self, ctx, input_, **unused):
            ctx.kept = input_.exp()
            return ctx.kept

        def op_backward(self, ctx, grad_output):
            return grad_output * ctx.kept, ()

    module = tops.Sequential(Exp())
    x = torch.randn(4, 8, requires_grad=True)

    def storages() -> int:
        gc.collect()
        return sum(type(found) is torch.Tensor for found in gc.get_objects())

    module(x)
    before = storages()
    for _ in range(20):
        module(x)
    assert storages() <= before + 2
