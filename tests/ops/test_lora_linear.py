"""Products with adapters: against the same in plain PyTorch and, for numbers, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import saved_bytes
from op_references import lora_linear
from torch import Tensor, nn
from torch.func import functional_call

import transformer_ops as tops

WIDTH, COLUMNS = 48, (40, 24, 8)
ADAPTED, SCALING = (0, 2, 0), (0.5, 0.25, 1.0)
reference = lora_linear(ADAPTED, SCALING)


def make(
    dtype: torch.dtype = torch.float32, adapter_dtype: torch.dtype | None = None, **options: Any
) -> tops.LoRALinear:
    torch.manual_seed(0)
    op = tops.LoRALinear(
        WIDTH,
        COLUMNS,
        (4, 3, 2),
        scaling=SCALING,
        adapted=ADAPTED,
        dtype=dtype,
        adapter_dtype=adapter_dtype,
        **options,
    )
    for name, parameter in op.named_parameters():
        if name.startswith(("bias", "lora_b")):
            nn.init.normal_(parameter, std=0.3)
    return op


def trained(op: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in op.named_parameters() if p.requires_grad}


def gradients(op: Any, x: Tensor, parameters: dict[str, Tensor], grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(op(x), [x, *parameters.values()], grad))


def data(rows: int = 700, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, WIDTH).to(dtype).requires_grad_()
    return x, torch.randn(rows, sum(COLUMNS)).to(dtype)


@pytest.mark.parametrize(
    "adapter_dtype", [torch.float32, torch.bfloat16], ids=["float32 adapters", "bfloat16"]
)
def test_adapters_of_another_dtype_keep_it(adapter_dtype: torch.dtype) -> None:
    """In bfloat16 with float32 adapters, their gradients are as exact as statements' (PEFT)."""
    op = make(torch.bfloat16, adapter_dtype)
    x, grad = data(dtype=torch.bfloat16)
    found = gradients(op, x, trained(op), grad)
    assert [one.dtype for one in found[1:]] == [adapter_dtype] * 6
    assert op(x).dtype == torch.bfloat16

    def errors(results: list[Tensor]) -> list[float]:
        pairs = zip(results, wanted, strict=True)
        return [float((one.double() - want).norm() / want.norm()) for one, want in pairs]

    exact = copy.deepcopy(op).double()
    x64 = x.detach().double().requires_grad_()
    wanted = gradients(
        lambda x: reference(x, **dict(exact.named_parameters())), x64, trained(exact), grad.double()
    )
    plain = gradients(lambda x: reference(x, **dict(op.named_parameters())), x, trained(op), grad)
    for ours, theirs in zip(errors(found), errors(plain), strict=True):
        assert ours <= 1.05 * theirs + 1e-6


def test_autocast_casts_adapters() -> None:
    op, (x, grad) = make(), data()
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x)
    assert y.dtype == torch.bfloat16
    found = torch.autograd.grad(y, [x, *trained(op).values()], grad.bfloat16())
    assert {one.dtype for one in found} == {torch.float32}
    want = gradients(op, x, trained(op), grad)
    for one, other in zip(found, want, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


def masks_of(op: tops.LoRALinear, x: Tensor) -> Tensor:
    """What the adapters read of ones: the mask of the next call, which the generator determines."""
    state = torch.get_rng_state()
    probe = tops.LoRALinear(WIDTH, WIDTH, WIDTH, dropout=op.p, bias=False)
    for name, parameter in probe.named_parameters():
        with torch.no_grad():
            parameter.copy_(torch.eye(WIDTH) if name.startswith("lora") else torch.zeros(()))
    torch.set_rng_state(state)
    found = probe(torch.ones_like(x)).detach()
    torch.set_rng_state(state)
    return found


def test_dropout() -> None:
    """It drops what adapters read, scales the rest, and saves one bit for each element."""
    op, (x, grad) = make(dropout=0.25), data()
    mask = masks_of(op, x)
    assert 0.2 < (mask == 0).float().mean() < 0.3
    torch.testing.assert_close(mask.max(), torch.tensor(1 / 0.75))
    parameters = dict(op.named_parameters())

    def plain(x: Tensor) -> Tensor:
        base = lora_linear((), ())(x, **{k: p for k, p in parameters.items() if "lora" not in k})
        zeros = {k: p if "lora" in k else torch.zeros_like(p) for k, p in parameters.items()}
        return base + reference(x * mask, **zeros)

    state = torch.get_rng_state()
    torch.testing.assert_close(op(x), plain(x))
    torch.set_rng_state(state)
    found = gradients(op, x, trained(op), grad)
    torch.testing.assert_close(found, gradients(plain, x, trained(op), grad), rtol=1e-4, atol=1e-4)
    torch.set_rng_state(state)
    hessian = [
        torch.autograd.grad(one.square().sum(), x)[0]
        for one in torch.autograd.grad(op(x), [op.lora_a0], grad, create_graph=True)
    ]
    again = torch.autograd.grad(plain(x), [op.lora_a0], grad, create_graph=True)[0]
    torch.testing.assert_close(
        hessian[0], torch.autograd.grad(again.square().sum(), x)[0], rtol=1e-3, atol=1e-2
    )
    assert saved_bytes(op, x) - saved_bytes(make(), x) == -(-x.numel() // 8)
    op.eval()
    torch.testing.assert_close(op(x), make()(x))


def test_what_is_saved() -> None:
    """With frozen weights, x is kept for A alone, and recomputed behind a norm."""
    op, (x, _) = make(), data()
    hidden = 9 * 4 * len(x)
    assert saved_bytes(op, x) == x.numel() * 4 + hidden
    for k in range(3):
        getattr(op, f"lora_a{k}").requires_grad_(False)
    assert saved_bytes(op, x) == hidden
    block = tops.Sequential(tops.RMSNorm(WIDTH), make())
    assert saved_bytes(block, x) == x.numel() * 4 + 4 * len(x) + hidden


@pytest.mark.parametrize("recompute", ["none", "cheap", "products"])
@pytest.mark.parametrize("saved", ["exact", "int8"])
def test_a_block(recompute: str, saved: str) -> None:
    def block(**options: Any) -> tops.Sequential:
        torch.manual_seed(2)
        up = tops.LoRALinear(WIDTH, (64, 64), 4, scaling=0.5, bias=False)
        down = tops.LoRALinear(64, WIDTH, 4, scaling=0.5)
        nn.init.normal_(up.lora_b0, std=0.1)
        nn.init.normal_(down.lora_b0, std=0.1)
        return tops.Sequential(
            tops.Residual(tops.RMSNorm(WIDTH), up, tops.SwiGLU(), down), **options
        )

    plain, fused = block(recompute="none"), block(recompute=recompute, saved=saved)
    x, _ = data()
    grad = torch.randn_like(x)
    want = gradients(plain, x, trained(plain), grad)
    found = gradients(fused, x, trained(fused), grad)
    tolerance = 1e-5 if saved == "exact" else 0.05
    for one, other in zip(found, want, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()
    if recompute == "products" and saved == "exact":
        assert saved_bytes(fused, x) < 0.5 * saved_bytes(plain, x)
        compiled = torch.compile(fused, fullgraph=True)
        torch.testing.assert_close(
            gradients(compiled, x, trained(fused), grad), found, rtol=1e-4, atol=1e-4
        )


def test_main_grad_of_a_trained_weight() -> None:
    op, (x, grad) = make(accumulate_into_main_grad=True), data()
    for i in range(3):
        weight = getattr(op, f"weight{i}").requires_grad_()
        weight.main_grad = torch.ones_like(weight)
    op(x).backward(grad)
    want = make().requires_grad_()
    want(x).backward(grad)
    for i in range(3):
        torch.testing.assert_close(
            getattr(op, f"weight{i}").main_grad - 1, getattr(want, f"weight{i}").grad
        )
    torch.testing.assert_close(op.lora_a1.grad, want.lora_a1.grad)


def test_functional_call() -> None:
    op, (x, _) = make(), data(5)
    doubled = {name: 2 * p.detach() for name, p in op.named_parameters()}
    torch.testing.assert_close(functional_call(op, doubled, x), reference(x, **doubled))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lora_b0", (40, 5), r"lora_b0 must have shape \[40, 4\], got \[40, 5\]"),
        ("lora_a1", (3, 47), r"lora_a1 must have shape \[3, 48\], got \[3, 47\]"),
        ("lora_a2", (0, 48), r"lora_a2 must have shape \[rank, 48\] with a rank of at least 1"),
    ],
)
def test_tensors_that_do_not_fit(name: str, shape: tuple[int, ...], message: str) -> None:
    op, (x, _) = make(), data(5)
    setattr(op, name, nn.Parameter(torch.zeros(shape)))
    with pytest.raises(RuntimeError, match=rf"^\[LoRALinear\] {message}"):
        op(x)
