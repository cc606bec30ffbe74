"""Tolerances of results, by dtype; and tensors for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import transformer_ops as tops

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

every_dtype = pytest.mark.parametrize(
    "dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)
every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)

# (relative, absolute) for one op: a few roundings in that dtype, with sums in a wider one.
TOLERANCES = {
    torch.float64: (1e-9, 1e-11),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 2e-3),
}


def assert_near(
    got: Tensor, want: Tensor, dtype: torch.dtype, what: str, factor: float = 1
) -> None:
    """Checks `got` (of any dtype) against `want` (float64), both on any device, within the
    tolerance of `dtype`."""
    rtol, atol = TOLERANCES[dtype]
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    torch.testing.assert_close(
        got.cpu().double(),
        want.cpu(),
        rtol=rtol * factor,
        atol=atol * factor,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def assert_equal(got: Any, want: Any) -> None:
    """Checks that tensors, or lists of them, are the same numbers of the same dtype."""
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def differentiable(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that require a gradient, which integers do not."""
    return tuple(tensor for tensor in tensors if tensor.requires_grad)


def floating(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that are not integers."""
    return tuple(tensor for tensor in tensors if tensor.is_floating_point())


def strided(tensor: Tensor) -> Tensor:
    """The same values, with a last dimension that is not contiguous."""
    return tensor.clone().unsqueeze(-1).expand(*tensor.shape, 2).clone()[..., 0]


def off_the_grid(tensor: Tensor) -> Tensor:
    """The same values at an address that is aligned only to the size of one element."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].view_as(tensor).copy_(tensor)


def leaf(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy that requires a gradient; integers do not."""
    if not tensor.is_floating_point():
        return tensor.clone()
    return tensor.detach().to(dtype or tensor.dtype).clone().requires_grad_()


def twin(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy that requires a gradient if the tensor does; others than numbers keep their dtype."""
    return leaf(tensor, dtype).requires_grad_(tensor.requires_grad)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Sets torch's option for float32 products on CUDA, which `monkeypatch` cannot undo."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    settings.allow_tf32 = allowed
    try:
        yield
    finally:
        settings.allow_tf32 = before


def residual(*body: tops.FusibleOperation) -> list[tops.FusibleOperation]:
    """x + body(x)."""
    fork = tops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False)
    return [fork, *body, tops.AddExtraInput().set_extra_input_channel(0, "residual")]


def feed_forward(width: int, hidden: int) -> list[tops.FusibleOperation]:
    up, down = tops.Linear(width, 2 * hidden), tops.Linear(hidden, width)
    return [tops.RMSNorm(width), up, tops.SwiGLU(), down]


def explained(module: Any) -> str:
    """What explain() prints, in one line."""
    return " ".join(str(module.explain()).split())


def html_cells(table: str) -> list[list[str]]:
    """The texts of a table, by rows."""
    rows = ElementTree.fromstring(table).iter("tr")
    return [[cell.text or "" for cell in row] for row in rows]


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages of the tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that calls save for backward."""
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def without_parameters(tensors: list[Tensor], module: torch.nn.Module) -> list[Tensor]:
    own = {p.untyped_storage()._cdata for p in module.parameters()}
    return [t for t in tensors if t.untyped_storage()._cdata not in own]


def saved_bytes(
    module: torch.nn.Module, *inputs: Tensor, call: Callable[..., Any] | None = None
) -> int:
    """Bytes of the distinct storages that the call of a module saves, without its parameters; by
    `call`, of a call that runs the module."""
    with saved_tensors() as found:
        (call or module)(*inputs)
    return storage_bytes(without_parameters(found, module))


def widened_bytes(rows: int, inner: int, columns: int) -> int:
    """The bytes that a bfloat16 product needs besides its operands and its result."""
    return 0 if tops.processor().multiplies_bfloat16 else block_bytes(rows, inner, columns)


def block_bytes(rows: int, inner: int, columns: int) -> int:
    """The same on a processor without bfloat16 instructions: one block of each matrix, in float32.

    See docs/architecture.md, "Memory".
    """
    rows, inner, columns = min(rows, 1024), min(inner, 512), min(columns, 1024)
    return 4 * (rows * inner + inner * columns + rows * columns)
