"""Weight gradients reach their place in every order in which torch's engine is asked for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from process_groups import group_of_zeros
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import transformer_ops as tops

pytestmark = pytest.mark.takes(seconds=30)

SPLITS = torch.tensor([3, 0, 5])
ROWS = 8


class Grouped(nn.Module):
    """A grouped Linear with the same splits at each call."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.op = tops.GroupedLinear(3, 16, 16, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, SPLITS)


class PlainGrouped(nn.Module):
    """The same in plain torch."""

    def __init__(self, own: Grouped) -> None:
        super().__init__()
        self.ends = SPLITS.cumsum(0).tolist()
        self.own = copy.deepcopy(own.op._parameters)
        for name, parameter in self.own.items():
            setattr(self, name, parameter)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.tensor_split(x, self.ends[:-1])
        rows = [
            nn.functional.linear(
                part,
                self.own["weight"][k] if "weight" in self.own else self.own[f"weight{k}"],
                self.own.get(f"bias{k}"),
            )
            for k, part in enumerate(parts)
        ]
        return torch.cat(rows)


def plain_sequential(own: tops.Sequential) -> nn.Module:
    layers: list[nn.Module] = []
    for op in own:
        if isinstance(op, tops.Linear):
            layers.append(nn.Linear(16, 16, bias=op.bias is not None))
            layers[-1].load_state_dict(op.state_dict())
        else:
            layers.append(nn.GELU("tanh"))
    return nn.Sequential(*layers)


class Row(NamedTuple):
    """A module, made with the options of an op with a weight, and the same in plain torch."""

    make: Callable[..., nn.Module]
    plain: Callable[[Any], nn.Module]
    delays: bool = False


def mlp(**options: Any) -> tops.Sequential:
    return tops.Sequential(
        tops.Linear(16, 16, **options), tops.GELU(), tops.Linear(16, 16, **options)
    )


def weighted(**options: Any) -> tops.Sequential:
    return tops.Sequential(tops.Linear(16, 16, bias=False, **options), tops.GELU())


def split(**options: Any) -> tops.Sequential:
    """The first of two ranks, the other of which gives zeros."""
    options |= {"tensor_parallel_mode": "column", "tensor_parallel_group": group_of_zeros()}
    return tops.Sequential(tops.Linear(16, 32, **options))


ROWS_OF_OPS = {
    "Linear": Row(lambda **o: tops.Sequential(tops.Linear(16, 16, **o)), plain_sequential),
    "without bias": Row(weighted, plain_sequential),
    "fused": Row(mlp, plain_sequential),
    "split": Row(split, plain_sequential),
    "GroupedLinear": Row(Grouped, PlainGrouped, delays=True),
    "one grouped weight": Row(
        lambda **o: Grouped(single_grouped_weight=True, bias=False, **o), PlainGrouped, delays=True
    ),
}
# Each place, and the options of the op.
PLACES: dict[str, dict[str, bool]] = {
    "grad": {},
    "main_grad": {"accumulate_into_main_grad": True},
    "overwrite": {"accumulate_into_main_grad": True},
    "delay": {"delay_wgrad_compute": True},
    "delay main_grad": {"delay_wgrad_compute": True, "accumulate_into_main_grad": True},
}


# ---- the ways: each leaves gradients in x.grad and in the parameters

Way = Callable[[Tensor, Tensor, list[nn.Parameter], Tensor], None]


def add(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    for tensor, grad in zip(tensors, grads, strict=True):
        if grad is not None:
            tensor.grad = grad if tensor.grad is None else tensor.grad + grad


def whole(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    y.backward(g)


def one_call(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    add([x, *parameters], torch.autograd.grad(y, [x, *parameters], g, allow_unused=True))


def halves(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    add([x], torch.autograd.grad(y, [x], g, retain_graph=True))
    add(parameters, torch.autograd.grad(y, parameters, g, allow_unused=True))


def weights_first(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    grads = torch.autograd.grad(y, parameters, g, retain_graph=True, allow_unused=True)
    add(parameters, grads)
    add([x], torch.autograd.grad(y, [x], g))


def one_by_one(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    for tensor in [x, *parameters]:
        add([tensor], torch.autograd.grad(y, [tensor], g, retain_graph=True, allow_unused=True))


def twice(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    y.backward(g, retain_graph=True)
    y.backward(g)


def by_inputs(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    y.backward(g, inputs=[x], retain_graph=True)
    y.backward(g, inputs=parameters)


def pipelining(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    for parameter in parameters:
        if hasattr(parameter, "main_grad"):
            # torch asks for a gradient of each weight.
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    _, groups = stage_backward_input([y], [g], [x], iter(parameters))
    stage_backward_weight(iter(parameters), groups)
    drop_dummies(parameters)


def drop_dummies(parameters: list[nn.Parameter]) -> None:
    """Drops the zeros that marked weights have got as gradients."""
    for parameter in parameters:
        if getattr(parameter, "grad_added_to_main_grad", False):
            assert parameter.grad is not None and not parameter.grad.any()
            parameter.grad = None


def in_a_hook(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    def hook(grad: Tensor) -> None:
        handle.remove()
        y.backward(g, inputs=parameters, retain_graph=True)

    handle = x.register_hook(hook)
    y.backward(g, inputs=[x], retain_graph=True)


def behind_accumulation(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
    def hook(_: Tensor) -> None:
        handle.remove()
        add(parameters, torch.autograd.grad(y, parameters, g, allow_unused=True))

    handle = x.register_post_accumulate_grad_hook(hook)
    y.backward(g, inputs=[x], retain_graph=True)


WAYS: list[Way] = [whole, one_call, halves, weights_first, one_by_one, twice, by_inputs]
WAYS += [pipelining, in_a_hook, behind_accumulation]
COMPILED: list[Way] = [whole, one_call]


def start_of(weight: Tensor) -> Tensor:
    return torch.full_like(weight, 0.5, requires_grad=False)


def is_weight(name: str) -> bool:
    return name.rpartition(".")[2].startswith("weight")


def prepared(row: Row, place: str) -> tuple[nn.Module, nn.Module]:
    """A module and the same in plain torch."""
    torch.manual_seed(0)
    module = row.make(**PLACES[place])
    plain = row.plain(module)
    for name, parameter in module.named_parameters():
        if is_weight(name) and "accumulate_into_main_grad" in PLACES[place]:
            parameter.main_grad = start_of(parameter)  # type: ignore[attr-defined]
            parameter.overwrite_main_grad = place == "overwrite"  # type: ignore[attr-defined]
    return module, plain


def run(module: nn.Module, call: Callable[[Tensor], Tensor], way: Way) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, g = torch.randn(ROWS, 16, requires_grad=True), torch.randn(ROWS, 16)
    # What comes after may keep no gradient from reaching the op, nor the op's input from a graph.
    y = call(x)
    way(x, y, list(module.parameters()), g)
    assert x.grad is not None
    return y, x.grad


def check(row: Row, place: str, way: Way, *, compiled: bool = False) -> None:
    module, plain = prepared(row, place)
    call = torch.compile(module, backend="aot_eager") if compiled else module
    y, grad = run(module, call, way)
    if "delay" in place:
        assert all(p.grad is None for n, p in module.named_parameters() if is_weight(n))
        for op in module.modules():
            if isinstance(op, tops.GroupedLinear):
                for _ in range(4):
                    op.backward_dw()
        drop_dummies(list(module.parameters()))
    want_y, want_grad = run(plain, plain, way)
    torch.testing.assert_close((y, grad), (want_y, want_grad))
    passes = 2 if way is twice else 1
    pairs = zip(module.named_parameters(), plain.parameters(), strict=True)
    for (name, parameter), want in pairs:
        if not hasattr(parameter, "main_grad"):
            torch.testing.assert_close(parameter.grad, want.grad, msg=name)
            continue
        assert parameter.grad is None
        right = want.grad / passes if place == "overwrite" else 0.5 + want.grad
        torch.testing.assert_close(parameter.main_grad, right, msg=name)


CELLS = [
    pytest.param(row, place, id=f"{name}-{place}")
    for name, row in ROWS_OF_OPS.items()
    for place in PLACES
    if row.delays or "delay" not in place
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("row", "place"), CELLS)
def test_as_plain_torch(row: Row, place: str, way: Way) -> None:
    check(row, place, way)


@pytest.mark.parametrize("way", COMPILED, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("row", "place"), CELLS)
def test_compiled(row: Row, place: str, way: Way) -> None:
    check(row, place, way, compiled=True)


@pytest.mark.parametrize(("row", "place"), CELLS)
def test_the_gradient_of_the_input_alone_gives_weights_nothing(row: Row, place: str) -> None:
    """But for delayed ones: it is the first half of a backward whose second is `backward_dw()`."""
    module, _ = prepared(row, place)

    def input_alone(x: Tensor, y: Tensor, parameters: list[nn.Parameter], g: Tensor) -> None:
        add([x], torch.autograd.grad(y, [x], g))

    run(module, module, input_alone)
    for parameter in module.parameters():
        assert parameter.grad is None
        if hasattr(parameter, "main_grad"):
            assert torch.equal(parameter.main_grad, start_of(parameter))
    waiting = [op for op in module.modules() if getattr(op, "_delayed", None)]
    assert bool(waiting) == ("delay" in place)


@pytest.mark.parametrize(
    ("row", "place"), [cell for cell in CELLS if cell.values[1] in ("main_grad", "overwrite")]
)
def test_compiled_code_gives_all_gradients_or_none(row: Row, place: str) -> None:
    """Its backward is one graph, which adds to every buffer."""
    module, _ = prepared(row, place)
    x = torch.randn(ROWS, 16, requires_grad=True)
    y = torch.compile(module, backend="aot_eager")(x)
    with pytest.raises(RuntimeError, match="must be asked for the gradients of all its weights"):
        torch.autograd.grad(y.sum(), [x])
    for name, parameter in module.named_parameters():
        if is_weight(name):
            assert torch.equal(parameter.main_grad, start_of(parameter))
