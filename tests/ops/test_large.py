"""More than 2^31 elements: indices must not wrap. About 9 GB of memory."""

import pytest
import torch

import transformer_ops  # noqa: F401  (registers the ops)

pytestmark = pytest.mark.takes(seconds=25)

OPS = torch.ops.transformer_ops
WIDTH = 4096
ROWS = 2**31 // WIDTH + 3
TAIL = 5


def test_more_than_two_to_the_31_elements():
    x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    tail = torch.randn(TAIL, WIDTH).bfloat16()
    x[-TAIL:] = tail
    assert x.numel() > 2**31

    y, mask = OPS.relu(x, True)
    want, want_mask = OPS.relu(tail, True)
    assert torch.equal(y[-TAIL:], want) and not y[:TAIL].any()
    assert torch.equal(mask[-TAIL * WIDTH // 8 :], want_mask) and not mask[: TAIL * WIDTH].any()
    del y, mask

    weight = torch.randn(WIDTH)
    y, rstd = OPS.rms_norm(x, weight, [WIDTH], 1e-5, False)
    want, want_rstd = OPS.rms_norm(tail, weight, [WIDTH], 1e-5, False)
    assert torch.equal(y[-TAIL:], want) and torch.equal(rstd[-TAIL:], want_rstd)
    del y, rstd

    y = OPS.swiglu(x, 0)
    assert torch.equal(y[-TAIL:], OPS.swiglu(tail, 0))
    del y

    # The last row draws bits of its own, not again those of the first.
    x[:TAIL] = 1
    x[-TAIL:] = 1
    y, _ = OPS.dropout(x, 0.5, False)
    first, last = y[:TAIL] != 0, y[-TAIL:] != 0
    for kept in (first, last):
        assert abs(kept.double().mean().item() - 0.5) < 0.02
    assert abs((first == last).double().mean().item() - 0.5) < 0.02
