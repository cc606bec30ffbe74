"""The CUDA backend: every row against float64 on the CPU, on a device or on emulated kernels
(`pytest --emulate-cuda`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from checks import check_fusion, check_op
from fusion_cases import CASES as FUSIONS
from fusion_cases import Case as FusionCase
from helpers import as_tuple, every_dtype, floating, off_the_grid, strided, twin
from op_cases import CASES, NAMES, OpCase, nothing, run_seeded
from op_references import (
    clamped,
    gated,
    interleaved,
    l2_normalization,
    layer_norm,
    qgelu,
    rms_norm,
    srelu,
)
from test_compile import FUSED, assert_same, block, compiled
from torch import Tensor, nn
from user_fusions import gradients

import transformer_ops as tops

pytestmark = pytest.mark.cuda(emulated=True)
every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)
every_fusion = pytest.mark.parametrize("case", FUSIONS, ids=str)


def leave_to_torch(case: OpCase, device: torch.device) -> None:
    """Skips what test_cuda_device.py tests: torch's attention on CUDA drops other numbers."""
    if case.name == "Attention-dropout" and device.type == "cuda":
        pytest.skip("test_cuda_device.py has dropout of attention")


def on(device: torch.device, tensors: list[Tensor]) -> list[Tensor]:
    return [twin(tensor.to(device)) for tensor in tensors]


# ---- numbers


@every_dtype
@every_case
def test_op(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    leave_to_torch(case, device)
    op = case.build(dtype).to(device)
    # Tails that no vector fills, one row, none, and, where the op allows it, no dimension.
    shapes = [case.shape, (129, *case.row), case.row, (2, 0, 3, *case.row)]
    # torch's product rounds the logits of the loss to 16 bits.
    factor = 3 if case.accumulates_output else 1
    for shape in shapes + [()] * case.elementwise:
        check_op(case, op, on(device, case.inputs(dtype, shape)), dtype, factor=factor)


@every_dtype
@every_case
def test_op_on_any_layout(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    leave_to_torch(case, device)
    op = case.build(dtype).to(device)
    inputs = on(device, case.inputs(dtype))
    check_op(case, op, [strided(x) for x in inputs], dtype, expand_grads=True)
    like = [x.detach().transpose(0, 1) for x in inputs[: 1 + case.extra_inputs]]
    check_op(case, op, case.with_extras(like), dtype)
    for parameter in op.parameters():
        parameter.data = off_the_grid(parameter.data)
    moved = [off_the_grid(x.detach()).requires_grad_(x.requires_grad) for x in inputs]
    check_op(case, op, moved, dtype)


def wide(width: int) -> Iterator[OpCase]:
    """Rows that take many threads, or several blocks of them."""
    rows: list[tuple[str, Callable[[], tops.FusibleOperation], Callable[..., Tensor], int]] = [
        ("LayerNorm", lambda: tops.LayerNorm(width), layer_norm(), 1),
        ("RMSNorm", lambda: tops.RMSNorm(width, eps=0.1), rms_norm(0.1), 1),
        ("L2Normalization", lambda: tops.L2Normalization(eps=1e-3), l2_normalization(1e-3), 1),
        ("Bias", lambda: tops.Bias(width), lambda x, bias: x + bias, 1),
        ("QGELU", tops.QGELU, qgelu, 1),
        ("ReLU", tops.ReLU, nn.functional.relu, 1),
        ("SReGLU", tops.SReGLU, gated(srelu), 2),
        ("ClampedSwiGLU", tops.ClampedSwiGLU, clamped, 2),
    ]
    if width % 8 == 0:
        make = lambda: tops.SwiGLU(glu_interleave_size=8)  # noqa: E731
        reference = interleaved(8, gated(nn.functional.silu))
        rows.append(("SwiGLU-interleaved", make, reference, 2))
    for name, make, reference, times in rows:
        yield OpCase(f"{name}-{width}", make, reference, nothing, row=(times * width,))


@every_dtype
@pytest.mark.parametrize("case", [*wide(1031), *wide(4096), *wide(20480)], ids=lambda c: c.name)
def test_wide_rows(case: OpCase, dtype: torch.dtype, device: torch.device) -> None:
    count = 67 if device.type == "cuda" else 3
    op, inputs = case.build(dtype).to(device), case.inputs(dtype, (count, *case.row))
    check_op(case, op, on(device, inputs), dtype, factor=4)


@every_dtype
@every_fusion
def test_fusion(case: FusionCase, dtype: torch.dtype, device: torch.device) -> None:
    check_fusion(case, dtype, device)


# The others have none: their gradients are made in forward.
@pytest.mark.parametrize("case", [c for c in CASES if c.saves_input], ids=lambda c: c.name)
def test_second_derivatives(case: OpCase, device: torch.device) -> None:
    leave_to_torch(case, device)
    op = case.build(torch.float64).to(device)
    inputs = on(device, case.inputs(torch.float64, (2, *case.row)))
    tensors = (*inputs, *op.parameters())

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return floating(as_tuple(run_seeded(op, *tensors[: len(inputs)])))

    assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("name", FUSED)
def test_fusion_under_compile(name: str, device: torch.device) -> None:
    case = FUSED[name]
    module = tops.Sequential(*case.make()).to(device)
    fast, counter = compiled(module)
    for batch in (4, 7):
        inputs = [t.to(device) for t in case.inputs(torch.randn(batch, 16))]
        assert_same(module, fast, inputs, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


def test_block_under_inductor(device: torch.device) -> None:
    module = block().to(device)
    fast, counter = compiled(module, "inductor")
    for batch in (4, 6, 11):
        assert_same(module, fast, [torch.randn(batch, 16, device=device)], rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    module = block().eval().to(device)
    x = torch.randn(3, 5, 16, device=device)
    want = gradients(copy.deepcopy(module).cpu().double(), x.cpu().double())
    with torch.autocast(device.type, dtype):
        got = gradients(module, x)
        assert tops.Linear(16, 4, device=device)(x).dtype == dtype
        with torch.autocast(device.type, enabled=False):
            assert tops.Linear(16, 4, device=device)(x).dtype == torch.float32
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32  # the residual and the parameters are
        assert (a.cpu().double() - b).norm() <= 2e-2 * b.norm()
