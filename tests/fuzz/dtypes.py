"""Mixed dtypes of parameters and inputs, under autocast or not: fused against unfused ops."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from checks import unfused
from helpers import as_tuple
from torch import Tensor

import transformer_ops as tops

from .compare import Results, gradients
from .models import Features, Model, random_model

ISOLATED = False

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PALETTES = (FLOATS, FLOATS[:1], FLOATS[:2], FLOATS[1:2], FLOATS[1:3], FLOATS[2:])
# There are enough rows that one element on the other side of a ReLU's kink does not matter.
BATCHES = ((24,), (4, 8))
KINKED = (tops.ClampedSwiGLU, tops.ReLU, tops.ReGLU)
# Limits relative to the norm, by the coarsest dtype: roundings add up, and move numbers over kinks.
TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 0.15, torch.bfloat16: 0.4}
COARSEST = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Mixture:
    """A model, a dtype for each of its tensors, and whether autocast is on."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        self.seed = seed
        features = Features(random=rng.random() < 0.3, ties=True, layouts=True)
        self.model: Model = random_model(rng, features, longest=6, batches=BATCHES)
        self.autocast = rng.choice([None, None, None, torch.bfloat16, torch.float16])
        palette = rng.choice(PALETTES)
        main = rng.choice(palette)
        chance = rng.choice([0.2, 0.6])

        def dtype() -> torch.dtype:
            return rng.choice(palette) if rng.random() < chance else main

        self.inputs = [torch.randn(shape, dtype=dtype()) for shape in self.model.shapes]
        for parameter in self.model.module.parameters():
            parameter.data = parameter.data.to(dtype())
        for tensor in (*self.inputs, *self.model.module.parameters()):
            tensor.requires_grad_(rng.random() < 0.85)
        self.dropped = rng.random() < 0.2  # the loss leaves the last output out

    @property
    def leaves(self) -> list[Tensor]:
        tensors = (*self.inputs, *self.model.module.parameters())
        return [tensor for tensor in tensors if tensor.requires_grad]

    @property
    def tolerance(self) -> float:
        used = {t.dtype for t in (*self.inputs, *self.model.module.parameters())}
        return TOLERANCES[next(d for d in COARSEST if d in used or d == self.autocast)]

    def __str__(self) -> str:
        inputs = [str(tensor.dtype) for tensor in self.inputs]
        parameters = {n: str(p.dtype) for n, p in self.model.module.named_parameters()}
        frozen = [n for n, p in self.model.module.named_parameters() if not p.requires_grad]
        flags = [tensor.requires_grad for tensor in self.inputs]
        return (
            f"{self.model}\ninputs {inputs} {flags}, parameters {parameters}, frozen {frozen}, "
            f"autocast {self.autocast}, recompute {self.model.module.recompute}"
        )

    def given(self, outputs: tuple[Tensor, ...]) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(self.seed)
        grads: list[Tensor | None] = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs
        ]
        if self.dropped and len(grads) > 1:
            grads[-1] = None
        return grads

    def results(self, *, grad: bool = True) -> Results | str:
        """The outputs and gradients, or the error's text."""
        torch.manual_seed(self.seed)
        on = self.autocast is not None
        try:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", self.autocast, enabled=on):
                outputs = as_tuple(self.model.module(*self.inputs))
            found = gradients(outputs, self.leaves, self.given(outputs)) if grad else []
        except RuntimeError as error:
            return str(error)
        return [*outputs, *found]

    def exact(self) -> Results:
        """The same in float64 and plain torch."""
        inputs = [t.detach().double().requires_grad_(t.requires_grad) for t in self.inputs]
        own = {
            id(p): p.detach().double().requires_grad_(p.requires_grad)
            for p in self.model.module.parameters()
        }
        named = {name: own[id(p)] for name, p in self.model.all_parameters().items()}
        torch.manual_seed(self.seed)
        outputs = self.model.meaning(inputs, named)
        leaves = [tensor for tensor in (*inputs, *own.values()) if tensor.requires_grad]
        return [*outputs, *gradients(outputs, leaves, self.given(outputs))]


@contextmanager
def policy(module: tops.Sequential, recompute: str) -> Iterator[None]:
    before = module.recompute
    module.recompute = recompute
    try:
        yield
    finally:
        module.recompute = before


def assert_same_kind(got: Results, want: Results) -> None:
    """Compares shapes, dtypes, and which gradients are missing."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), f"result {i}: {a} against {b}"
        if a is not None and b is not None:
            assert a.dtype == b.dtype, f"result {i}: {a.dtype} against {b.dtype}"
            assert a.shape == b.shape, f"result {i}: {a.shape} against {b.shape}"


def assert_near(got: Results, want: Results, tolerance: float) -> None:
    """Compares by norms. Results that overflow 16 bits are infinite or NaN on one side at least,
    and are not compared."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a is None or b is None:
            continue
        a, b = a.detach().double(), b.detach().double()
        if not a.isfinite().all() or not b.isfinite().all():
            continue
        error, size = (a - b).norm().item(), b.norm().item()
        assert error <= tolerance * (1 + size), f"result {i}: error {error:.3g} of {size:.3g}"


def assert_forward_alone(mixture: Mixture, unfused_results: Results) -> None:
    found = mixture.results(grad=False)
    assert not isinstance(found, str), f"an error without gradients alone: {found}"
    outputs = unfused_results[: len(found)]
    assert_same_kind(found, outputs)
    assert_near(found, outputs, mixture.tolerance)


def check(mixture: Mixture) -> int:
    with unfused(), policy(mixture.model.module, "none"):
        plain = mixture.results()
    count = 1
    for recompute in ("cheap", "none", "products"):
        with policy(mixture.model.module, recompute):
            fused = mixture.results()
        if isinstance(plain, str) or isinstance(fused, str):
            assert isinstance(plain, str) and isinstance(fused, str), (
                f"one of two raises: {plain} (unfused) against {fused} (fused, {recompute})"
            )
            assert "INTERNAL ASSERT" not in fused, fused
            count += 1
            continue
        assert_same_kind(fused, plain)
        assert_near(fused, plain, mixture.tolerance)
        count += len(fused)
    if not isinstance(plain, str):
        for leaf, grad in zip(mixture.leaves, plain[-len(mixture.leaves) :], strict=False):
            assert grad is None or grad.dtype == leaf.dtype, f"{grad.dtype} of a {leaf.dtype}"
        exact = mixture.exact()
        # A number that rounding moves across a kink has a completely different gradient.
        kinked = KINKED if mixture.tolerance > 0.1 else (tops.ClampedSwiGLU,)
        has_kink = any(isinstance(op, kinked) for op in mixture.model.module.modules())
        compared = len(plain) - len(mixture.leaves) if has_kink else len(plain)
        assert_near(plain[:compared], exact[:compared], mixture.tolerance)
        assert_forward_alone(mixture, plain)
        count += len(plain)
    return count


def run_seed(seed: int) -> int:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    mixture = Mixture(rng, seed)
    try:
        return check(mixture)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{mixture}") from error
