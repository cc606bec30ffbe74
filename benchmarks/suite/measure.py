"""One case: the times of its ways, and what each saves for backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .cases import (
    COMPILED_WAYS,
    DTYPES,
    EAGER,
    FORWARD,
    OPS,
    TRAINING,
    Case,
    make_inputs,
    make_module,
)
from .timing import Call, Clock, interleave

COPY, PRODUCTS = "copy", "products"


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """A row of the results: milliseconds by pass and way, and saved bytes by way.

    Beside the ways stands what bounds them: for an op a copy of its input into memory that is
    there, for a block its matrix products, into memory that is there.
    """
    passes: dict[str, dict[str, Call]] = {FORWARD: {}, TRAINING: {}}
    saved = {}
    inputs = prepare(case, device)
    for way in case.ways:
        call, parameters = make_way(case, way, device)
        passes[FORWARD][way], passes[TRAINING][way] = make_calls(call, inputs, parameters)
        passes[TRAINING][way]()
        saved[way] = saved_bytes(call, inputs, parameters)
    for name, calls in passes.items():
        calls |= bound(case, name, inputs[0].detach(), device)
    clock = Clock(device)
    rows = {}
    for name, calls in passes.items():
        # A forward pass is a part of what is trained: half of the time is enough for it.
        seconds = case.seconds / (2 if name == FORWARD else 1)
        rows[name] = interleave(calls, seconds, clock)
    return {"case": case.as_json(), "ms": rows, "saved": saved}


def compile_only(case: Case, device: torch.device) -> None:
    """Fill Inductor's cache on disk with what `measure` will compile."""
    inputs = prepare(case, device)
    for way in case.ways:
        if way in COMPILED_WAYS:
            call, parameters = make_way(case, way, device)
            make_calls(call, inputs, parameters)[1]()


def prepare(case: Case, device: torch.device) -> list[Tensor]:
    """A fresh start, and the inputs of a case."""
    # What an earlier case left would make Dynamo guard on more, or go back to eager code.
    torch._dynamo.reset()
    torch.manual_seed(0)
    return make_inputs(case.name, case.size, DTYPES[case.dtype], device)


def make_way(case: Case, way: str, device: torch.device) -> tuple[Any, list[Tensor]]:
    """What to call, and its parameters."""
    module = make_module(case.name, way, case.size, DTYPES[case.dtype]).to(device)
    return compiled(module) if way in COMPILED_WAYS else module, list(module.parameters())


def compiled(module: nn.Module) -> Any:
    """`torch.compile` of a module, for these sizes alone, an error where it breaks the graph."""
    return torch.compile(module, fullgraph=True, dynamic=False)


def make_calls(module: Any, inputs: list[Tensor], parameters: list[Tensor]) -> tuple[Call, Call]:
    """Forward with gradients on; forward and backward for inputs and parameters."""
    wanted = [*inputs, *parameters]
    grad = torch.randn_like(module(*inputs))

    def forward() -> object:
        return module(*inputs)

    def training() -> object:
        return torch.autograd.grad(module(*inputs), wanted, grad)

    return forward, training


def bound(case: Case, pass_name: str, x: Tensor, device: torch.device) -> dict[str, Call]:
    """What no way can do without, as a call."""
    if case.name in OPS:
        target = x.clone()
        return {COPY: lambda: target.copy_(x)}
    weights = [p.detach() for p in make_way(case, EAGER, device)[1] if p.dim() == 2]
    return {PRODUCTS: products(x, weights, training=pass_name == TRAINING)}


def products(x: Tensor, weights: list[Tensor], training: bool) -> Call:
    """The products of two Linears, [T, h] with [n, h] and [T, f] with [h, f].

    Training adds the four of the backward pass: each weight's gradient and each input's.
    """
    up, down = weights
    hidden, activated = x.new_empty(len(x), len(up)), x.new_ones(len(x), down.shape[1])
    y, grad = torch.empty_like(x), torch.ones_like(x)
    grad_activated, grad_hidden = torch.empty_like(activated), torch.ones_like(hidden)
    grad_up, grad_down, grad_x = torch.empty_like(up), torch.empty_like(down), torch.empty_like(x)

    def forward() -> None:
        torch.mm(x, up.t(), out=hidden)
        torch.mm(activated, down.t(), out=y)

    def forward_and_backward() -> None:
        forward()
        torch.mm(grad, down, out=grad_activated)
        torch.mm(grad.t(), activated, out=grad_down)
        torch.mm(grad_hidden, up, out=grad_x)
        torch.mm(grad_hidden.t(), x, out=grad_up)

    return forward_and_backward if training else forward


def saved_bytes(module: Any, inputs: Iterable[Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes that a call keeps for backward: distinct storages, whole, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(*inputs)
    # Alive until here: a storage freed on the way would lend its address to the next.
    del out
    return sum(found.values())
