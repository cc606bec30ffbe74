"""Outputs and gradients of a call, and how close two lists of them must be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Results = list[Tensor | None]


def gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor | None], **kwargs
) -> Results:
    """One gradient for each leaf, for these output gradients; None means that the loss does not use
    the output."""
    live = [
        (output, grad.clone() if grad._base is None else grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    if not live or not leaves:
        return [None] * len(leaves)
    kept, given = zip(*live, strict=True)
    return list(torch.autograd.grad(kept, leaves, given, allow_unused=True, **kwargs))


def assert_all_near(
    got: Results, want: Results, what: str, tolerance: float = 1e-7, *, zeros_for_none: bool = False
) -> int:
    """Compares `got` with `want`, relative to the size of each tensor; returns the number of
    tensors.

    With `zeros_for_none`, a missing gradient may be zeros.
    """
    assert len(got) == len(want), f"{what}: {len(got)} results, not {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if b is None and zeros_for_none and a is not None:
            assert not a.any(), f"{what}: result {i} must be None or zeros, got {a}"
        else:
            assert_near(a, b, f"{what}: result {i}", tolerance)
    return len(want)


def assert_near(got: Tensor | None, want: Tensor | None, what: str, tolerance: float) -> None:
    if want is None:
        assert got is None, f"{what} must be None, got {got}"
        return
    assert got is not None, f"{what} is None, not {want}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    size = want.detach().abs().max().item() if want.numel() else 0.0
    difference = (got.detach().double() - want.detach()).abs()
    # This is not `>`, which would let a NaN pass.
    assert not difference.numel() or difference.max() <= tolerance * max(1.0, size), (
        f"{what} differs by {difference.max():.3g}, its size is {size:.3g}"
    )
