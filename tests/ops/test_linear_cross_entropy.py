"""LinearCrossEntropy beyond its rows of op_cases.py: options, chunks, extra outputs, bad input, and
what it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import as_tuple, saved_tensors, storage_bytes
from op_references import linear_cross_entropy, targets_for
from torch import Tensor, nn

import transformer_ops as tops
from transformer_ops.ops import LinearCrossEntropy

H, V = 8, 13


def make(dtype: torch.dtype = torch.float64, **options: Any) -> LinearCrossEntropy:
    op = LinearCrossEntropy(H, V, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return op


def inputs(rows: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, H, dtype=dtype, requires_grad=True)
    return x, targets_for(x, V)


def gradients(loss: Tensor, *sources: Tensor, factor: float = 1.0) -> tuple[Tensor, ...]:
    return torch.autograd.grad((loss * factor).sum(), sources, retain_graph=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.2},
    "all smooth": {"label_smoothing": 1.0, "reduction": "sum"},
    "softcap": {"softcap": 1.5},
    "z": {"z_loss": 0.3},
    "all": {"label_smoothing": 0.1, "softcap": 2.5, "z_loss": 0.1, "bias": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@every_option
@pytest.mark.parametrize("gradients_in", ["forward", "backward"])
@pytest.mark.parametrize("chunk", [None, 1, 4, 11, 100])
def test_chunks_and_policies(options: dict[str, Any], gradients_in: str, chunk: int | None) -> None:
    """The same numbers whatever the chunk, whenever the gradients are made, and for a gradient of
    the loss that is not 1."""
    if options.get("reduction") == "none" and gradients_in == "forward":
        return
    op = make(gradients_in=gradients_in, chunk=chunk, **options)
    x, target = inputs()
    loss, want = (
        op(x, target),
        linear_cross_entropy(**options)(x, target, **dict(op.named_parameters())),
    )
    torch.testing.assert_close(loss, want)
    sources = (x, *op.parameters())
    for factor in (1.0, -0.37):
        torch.testing.assert_close(
            gradients(loss, *sources, factor=factor), gradients(want, *sources, factor=factor)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [48, 300])
def test_as_near_as_the_whole_product(dtype: torch.dtype, rows: int) -> None:
    """Chunks, also many of them, lose no more than the whole product in the same dtype, whose loss
    is in float32."""
    torch.manual_seed(5)
    h, v = 32, 400
    x = torch.randn(rows, h).to(dtype).requires_grad_()
    target = torch.randint(0, v, (rows,))
    op = LinearCrossEntropy(h, v, dtype=dtype, chunk=-(-rows // 16))
    exact = [t.detach().double().requires_grad_() for t in (x, op.weight)]
    right = torch.autograd.grad(F.cross_entropy(exact[0] @ exact[1].T, target) * 0.3, exact)
    plain = F.cross_entropy((x @ op.weight.T).float(), target) * 0.3
    plain_grads = torch.autograd.grad(plain, (x, op.weight))
    ours = torch.autograd.grad(op(x, target) * 0.3, (x, op.weight))
    for got, other, want in zip(ours, plain_grads, right, strict=True):
        error, allowed = ((t.double() - want).norm() for t in (got, other))
        assert error <= 1.3 * allowed + 2 * torch.finfo(dtype).eps * want.norm()


def test_small_gradients_of_float16() -> None:
    """The gradients of a mean over many rows do not underflow before they are scaled."""
    op = LinearCrossEntropy(4, 300, dtype=torch.float16)
    x = torch.randn(4096, 4, dtype=torch.float16, requires_grad=True)
    target = torch.randint(0, 300, (4096,))
    (got,) = torch.autograd.grad(op(x, target) * 4096, x)
    exact = x.detach().double().requires_grad_()
    loss = F.cross_entropy(exact @ op.weight.double().T, target) * 4096
    (want,) = torch.autograd.grad(loss, exact)
    assert (got.double() - want).norm() <= 0.003 * want.norm()


@pytest.mark.parametrize("gradients_in", ["forward", "backward"])
def test_accumulation_and_frozen_tensors(gradients_in: str) -> None:
    op = make(gradients_in=gradients_in, bias=True)
    x, target = inputs()
    want = gradients(op(x, target), x, *op.parameters())
    for _ in range(2):
        op(x, target).backward()
    for source, grad in zip((x, *op.parameters()), want, strict=True):
        torch.testing.assert_close(source.grad, 2 * grad)
    op.weight.requires_grad_(False)
    loss = op(x.detach(), target)
    torch.testing.assert_close(torch.autograd.grad(loss, op.bias)[0], want[2])
    loss = op(x, target)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], want[0])


def test_weights_tied_to_an_embedding() -> None:
    embedding = nn.Embedding(V, H, dtype=torch.float64)
    op = make(bias=False)
    op.weight = embedding.weight
    ids, target = torch.randint(0, V, (2, 5)), torch.randint(0, V, (2, 5))
    op(embedding(ids), target).backward()
    got = embedding.weight.grad
    assert got is not None
    weight = embedding.weight.detach().clone().requires_grad_()
    F.cross_entropy((weight[ids] @ weight.T).flatten(0, 1), target.flatten()).backward()
    torch.testing.assert_close(got, weight.grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_extra_outputs(compiled: bool) -> None:
    op = make(log_probs=True, accuracy=True)
    x, target = inputs()
    call: Any = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    loss, log_probs, accuracy = call(x, target)
    assert loss.requires_grad and not log_probs.requires_grad and not accuracy.requires_grad
    z, counts = x @ op.weight.T, target != -100
    want = z.log_softmax(-1).gather(-1, target.clamp_min(0)[:, None])[:, 0]
    torch.testing.assert_close(log_probs, torch.where(counts, want, 0).detach())
    right = ((z.argmax(-1) == target) & counts).sum() / counts.sum()
    torch.testing.assert_close(accuracy, right.double())
    assert len(as_tuple(make(accuracy=True)(x, target))) == 2


def test_accuracy_of_equal_logits() -> None:
    """The first of the largest logits is chosen, as by argmax."""
    op = LinearCrossEntropy(1, 40, accuracy=True)
    with torch.no_grad():
        op.weight.fill_(1)
    _, accuracy = op(torch.ones(4, 1), torch.tensor([0, 1, 39, 0]))
    assert accuracy == 0.5


def test_in_a_sequential() -> None:
    norm, head = tops.RMSNorm(H, dtype=torch.float64), make(bias=True)
    module = tops.Sequential(norm, head)
    x, target = inputs()
    want_norm = F.rms_norm(x, (H,), norm.weight, 1e-5)
    want = F.cross_entropy(F.linear(want_norm, head.weight, head.bias), target)
    compiled: Any = torch.compile(module, fullgraph=True, backend="aot_eager")
    for call in (module, compiled):
        loss = call(x, target)
        torch.testing.assert_close(loss, want)
        sources = (x, *module.parameters())
        torch.testing.assert_close(gradients(loss, *sources), gradients(want, *sources))
    scaled = tops.Sequential(head, tops.ConstantScale(0.5)).to(torch.bfloat16)
    loss = scaled(x.bfloat16(), target)
    assert loss.dtype == torch.float32 and loss.isfinite()
    loss.backward()


def test_under_autocast() -> None:
    op = make(torch.float32)
    x, target = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = op(x, target)
        want = F.cross_entropy(F.linear(x, op.weight).float(), target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=1e-3, atol=1e-3)
    for got, right in zip(
        gradients(loss, x, op.weight), gradients(want, x, op.weight), strict=True
    ):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, right, rtol=0.03, atol=0.003)


@pytest.mark.parametrize("gradients_in", ["forward", "backward"])
def test_all_targets_ignored(gradients_in: str) -> None:
    x, _ = inputs()
    ignored = torch.full((11,), -100)
    op = make(gradients_in=gradients_in, bias=True, accuracy=True)
    loss, accuracy = op(x, ignored)
    assert loss.isnan() and accuracy.isnan()
    assert not any(grad.any() for grad in gradients(loss, x, *op.parameters()))
    total = make(gradients_in=gradients_in, reduction="sum")(x, ignored)
    assert total == 0
    for dtype, options in itertools.product((torch.float32, torch.float16), OPTIONS.values()):
        if options.get("reduction") == "none":
            continue
        # Some divide a sum by the number of items, which is 0.
        op = make(dtype, gradients_in=gradients_in, **options)
        rows = x.detach().to(dtype).requires_grad_()
        for factor in (torch.inf, torch.nan):
            found = gradients(op(rows, ignored), rows, *op.parameters(), factor=factor)
            assert not any(grad.any() for grad in found)
    # A class may be the one that is ignored.
    zero = make(ignore_index=0)
    target = torch.arange(11) % 3
    want = F.cross_entropy(x @ zero.weight.T, target, ignore_index=0)
    torch.testing.assert_close(zero(x, target), want)


@every_option
@pytest.mark.parametrize("gradients_in", ["forward", "backward"])
def test_ignored_rows_are_not_computed(
    options: dict[str, Any], gradients_in: str, pytestconfig: pytest.Config
) -> None:
    if options.get("reduction") == "none" and gradients_in == "forward":
        return
    op = make(gradients_in=gradients_in, **options)
    right, target = inputs()
    target[1::2] = -100
    x = right.detach().clone()
    if pytestconfig.getoption("--emulate-cuda") is None:  # CUDA computes all rows
        x[1::2] = torch.nan
    x = x[None].requires_grad_()
    got = op(x, target[None])
    want = linear_cross_entropy(**options)(right, target, **dict(op.named_parameters()))
    torch.testing.assert_close(got, want.view(got.shape))
    (grad, *others), wanted = (
        gradients(loss, source, *op.parameters()) for loss, source in ((got, x), (want, right))
    )
    torch.testing.assert_close((grad[0], *others), wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_class_and_int32_targets(reduction: str) -> None:
    op = LinearCrossEntropy(H, 1, reduction=reduction, dtype=torch.float64)
    x, _ = inputs()
    loss = op(x, torch.zeros(11, dtype=torch.int32))
    assert not loss.any()
    assert not any(grad.any() for grad in gradients(loss, x, op.weight))


def test_infinite_and_nan_logits() -> None:
    op = LinearCrossEntropy(1, 5, dtype=torch.float64, reduction="none", bias=True)
    with torch.no_grad():
        op.weight.copy_(torch.arange(5.0)[:, None])
        assert op.bias is not None
        op.bias.copy_(torch.tensor([0, -torch.inf, 0, 0, 0]))
    x = torch.tensor([[1.0], [torch.nan], [-2.0], [800.0]], dtype=torch.float64)
    target = torch.tensor([0, 1, 1, 0])
    loss = op(x, target)
    want = F.cross_entropy(F.linear(x, op.weight, op.bias), target, reduction="none")
    torch.testing.assert_close(loss, want, equal_nan=True)
    assert loss[1].isnan() and loss[2].isinf() and loss[0].isfinite()


def test_bad_targets_change_nothing() -> None:
    op, (x, target) = make(), inputs()
    for bad in (V, -1, -101):
        wrong = target.clone()
        wrong[7] = bad
        text = r"\[LinearCrossEntropy\] target must lie in \[0, 13\) or be ignore_index, -100, got "
        with pytest.raises(IndexError, match=text + str(bad)):
            op(x, wrong)
    rows = (
        (target[:5], r"target must have shape \[11\], got \[5\]"),
        (target[:, None], r"target must have shape \[11\], got \[11, 1\]"),
        (target.double(), r"target must hold integers, got"),
        (target.to(torch.int16), r"target must have dtype Long or Int, got Short"),
    )
    for wrong, text in rows:
        with pytest.raises(RuntimeError, match=rf"\[LinearCrossEntropy\] {text}"):
            op(x, wrong)
    # No gradient can be wanted of integers, and one of a float target is refused.
    with pytest.raises(RuntimeError, match=r"target must hold integers"):
        op(x, target.double().requires_grad_())
    assert op(x, target).isfinite()


def test_second_derivatives() -> None:
    """They are right if backward computes the gradients, and refused if forward made them, also if
    the input's values are known."""
    x, target = inputs()
    assert torch.autograd.gradgradcheck(lambda x: make_seeded("backward")(x, target), (x,))
    for module in (make(), tops.Sequential(tops.RMSNorm(H, dtype=torch.float64), make())):
        loss = module(x, target)
        with pytest.raises(
            NotImplementedError,
            match=r'\[LinearCrossEntropy\] second derivatives must have gradients_in="backward"',
        ):
            torch.autograd.grad(loss, x, create_graph=True)


def make_seeded(gradients_in: str) -> LinearCrossEntropy:
    torch.manual_seed(3)
    return make(gradients_in=gradients_in)


# ---- memory


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that tensors take at a time in a call, beyond those before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("gradients_in", ["forward", "backward"])
def test_the_whole_logits_never_exist(gradients_in: str) -> None:
    rows, h, v, chunk = 640, 32, 4096, 64
    op = LinearCrossEntropy(h, v, gradients_in=gradients_in, chunk=chunk)
    x = torch.randn(rows, h, requires_grad=True)
    target = torch.randint(0, v, (rows,))
    op(x, target).backward()  # what later calls reuse
    x.grad = op.weight.grad = None
    peak = peak_bytes(lambda: op(x, target).backward())
    allowed = 4 * (chunk * v + v * h + rows * h + 20 * rows)
    # At least the logits of a chunk and the gradient of the weight, and not twice either.
    assert 4 * (chunk * v + v * h) <= peak <= 1.1 * allowed


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_backward_allocates_nothing(factor: float) -> None:
    """Forward makes the gradients in their last memory; backward scales them in place and returns
    them."""
    op = LinearCrossEntropy(64, 512)
    x = torch.randn(300, 64, requires_grad=True)
    target = torch.randint(0, 512, (300,))
    with saved_tensors() as saved:
        op(x, target)
    assert storage_bytes(saved) == 4 * (300 * 64 + 512 * 64 + 1)
    loss = op(x, target) * factor
    before = tops.memory.stats()
    loss.backward()
    after = tops.memory.stats()
    assert after.hits + after.misses == before.hits + before.misses
    assert x.grad is not None and op.weight.grad is not None


def test_kept_graphs_keep_their_gradients() -> None:
    """Backward overwrites no gradient that a later backward needs."""
    op = LinearCrossEntropy(64, 512)
    x = torch.randn(300, 64, requires_grad=True)
    loss = op(x, torch.randint(0, 512, (300,)))
    first = gradients(loss, x, op.weight, factor=0.5)
    copies = [grad.clone() for grad in first]
    second = gradients(loss, x, op.weight, factor=0.5)
    for a, b, copy in zip(first, second, copies, strict=True):
        assert torch.equal(a, b) and torch.equal(a, copy)
