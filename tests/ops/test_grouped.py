"""Mixtures of experts: GroupedLinear, Dispatch and Combine beyond the rows of op_cases.py."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from checks import unfused
from helpers import TOLERANCES, leaf, saved_bytes
from op_references import grouped_linear, places_of
from torch import Tensor
from torch.nn import functional as F

import transformer_ops as tops

o = torch.ops.transformer_ops


def experts(e: int, h: int, f: int, *, scaled: Callable[..., Any] = tops.ScaledSwiGLU) -> list[Any]:
    """The ops between the router and the residual: Dispatch to Combine."""
    dispatch = tops.Dispatch(e)
    for k, name in enumerate(("splits", "probs", "positions")):
        dispatch.set_extra_output_channel(k, name, output_to_caller=False)
    options = {"bias": False, "single_grouped_weight": True}
    wide = f if isinstance(scaled(), tops.ScaledSReLU) else 2 * f
    return [
        dispatch,
        tops.GroupedLinear(e, h, wide, **options).set_extra_input_channel(0, "splits"),
        scaled().set_extra_input_channel(0, "probs"),
        tops.GroupedLinear(e, f, h, **options).set_extra_input_channel(0, "splits"),
        tops.Combine().set_extra_input_channel(0, "positions"),
    ]


def loop_over_experts(x: Tensor, ids: Tensor, probs: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    y = torch.zeros_like(x)
    for expert in range(len(up)):
        token, k = (ids == expert).nonzero(as_tuple=True)
        a, b = (x[token] @ up[expert].T).chunk(2, -1)
        rows = (F.silu(a) * b * probs[token, k, None]).to(x.dtype) @ down[expert].T
        y = y.index_add(0, token, rows)
    return y


def routed(tokens: int, e: int, k: int, h: int, dtype: torch.dtype = torch.float32) -> Any:
    x = torch.randn(tokens, h, dtype=dtype, requires_grad=True)
    scores = torch.randn(tokens, e)
    probs, ids = scores.softmax(-1).topk(k)
    return x, ids, leaf(probs, torch.promote_types(dtype, torch.float32))


def backends() -> dict[str, Callable[[Any], Any]]:
    compiled = lambda name: lambda m: torch.compile(m, fullgraph=True, backend=name)  # noqa: E731
    return {
        "eager": lambda m: m,
        "aot_eager": compiled("aot_eager"),
        "inductor": compiled("inductor"),
    }


# ---- a layer


@pytest.mark.parametrize("way", backends())
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("e", "k", "h", "f", "kept"), [(8, 2, 256, 512, 4624), (64, 8, 256, 128, 4672)]
)
def test_what_a_layer_keeps(
    way: str, norm: bool, e: int, k: int, h: int, f: int, kept: int
) -> None:
    """2h + k (4f + 8) bytes a token; a norm adds 4. The splits come once."""
    ops = [tops.RMSNorm(h)] * norm + experts(e, h, f)
    module = tops.Sequential(*ops).to(torch.bfloat16)
    x, ids, probs = routed(64, e, k, h, torch.bfloat16)
    run = backends()[way](module)
    run(x, ids, probs)
    assert kept == 2 * h + k * (4 * f + 8)
    assert saved_bytes(module, x, ids, probs, call=run) == len(x) * (kept + 4 * norm) + 8 * e


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_layer_is_a_loop_over_experts(way: str, dtype: torch.dtype) -> None:
    module = tops.Sequential(*experts(5, 16, 8)).to(dtype)
    run = backends()[way](module)
    for tokens in (37, 1, 0, 64):
        x, ids, probs = routed(tokens, 5, 2, 16, dtype)
        tensors = (x, probs, *module.parameters())
        exact = [leaf(t, torch.float64) for t in tensors]
        y = run(x, ids, probs)
        want = loop_over_experts(exact[0], ids, *exact[1:])
        grad = torch.randn(y.shape).to(dtype)
        rtol, atol = (8 * tolerance for tolerance in TOLERANCES[dtype])
        torch.testing.assert_close(y.double(), want, rtol=rtol, atol=atol)
        found = torch.autograd.grad(y, tensors, grad)
        right = torch.autograd.grad(want, exact, grad.double())
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol)


def test_second_derivatives_of_a_layer() -> None:
    module = tops.Sequential(tops.RMSNorm(4), *experts(3, 4, 4)).double()
    x, ids, probs = routed(5, 3, 2, 4, torch.float64)

    def run(x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        names = dict(zip(dict(module.named_parameters()), weights, strict=True))
        return torch.func.functional_call(module, names, (x, ids, probs))

    assert torch.autograd.gradgradcheck(run, (x, probs, *module.parameters()))


def test_no_size_depends_on_data() -> None:
    module = tops.Sequential(*experts(4, 16, 8))
    tokens = torch.export.Dim("tokens", min=2, max=512)
    tensors = tuple(t.detach() for t in routed(9, 4, 2, 16))
    shapes = ({0: tokens}, ({0: tokens}, {0: tokens}))
    program = torch.export.export(module, tensors, dynamic_shapes=shapes)
    targets = {str(node.target) for node in program.graph.nodes}
    assert not {t for t in targets if "aten.item" in t or "_local_scalar_dense" in t}
    assert "u0" not in str(program.graph)
    for count in (9, 2, 31):
        tensors = [t.detach() for t in routed(count, 4, 2, 16)]
        torch.testing.assert_close(program.module()(*tensors), module(*tensors))


# ---- the joint step


def with_bias(ops: list[Any]) -> None:
    ops[3] = tops.GroupedLinear(3, 8, 16, single_grouped_weight=True, single_grouped_bias=True)
    ops[3].set_extra_input_channel(0, "splits")


def frozen(ops: list[Any]) -> None:
    ops[1].weight.requires_grad_(False)


def accumulating(ops: list[Any]) -> None:
    ops[1].accumulate_into_main_grad = True
    ops[1].weight.main_grad = torch.zeros(3, 16, 16)


def other_splits(ops: list[Any]) -> None:
    ops[3] = tops.GroupedLinear(3, 8, 16, bias=False, single_grouped_weight=True)


def visible_probs(ops: list[Any]) -> None:
    ops[0].set_extra_output_channel(1, "probs", output_to_caller=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_bias, "a product has a bias"),
        (frozen, "a weight needs no gradient"),
        (accumulating, "a weight accumulates into main_grad"),
        (
            other_splits,
            "an op does not take its splits, probabilities or positions from the dispatch",
        ),
        (visible_probs, "another op reads the probabilities"),
    ],
)
def test_why_a_layer_is_not_one_step(change: Callable[[list[Any]], None], reason: str) -> None:
    ops = experts(3, 16, 8)
    change(ops)
    x, ids, probs = routed(9, 3, 2, 16)
    extra = [torch.bincount(ids.flatten(), minlength=3)] if change is other_splits else []
    module = tops.Sequential(*ops)
    y = module(x, ids, probs, *extra)
    y = y[0] if isinstance(y, tuple) else y
    misses = [m.reason for m in module.plans()[0].near_misses if m.fusion == "moe_mlp"]
    assert misses == [reason]
    weights = [ops[1].weight, ops[3].weight]
    exact = [leaf(t, torch.float64) for t in (x, probs, *weights)]
    want = loop_over_experts(exact[0], ids, *exact[1:])
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(
        grad.double(), torch.autograd.grad(want.sum(), exact[0])[0], rtol=1e-4, atol=1e-5
    )


# ---- splits

SPLITS = {
    "one empty": [3, 0, 9],
    "all in one": [0, 12, 0],
    "none": [0, 0, 0],
    "a tail": [2, 3, 1],
    "sixteen and more": [7, 2, 3],
}


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("times", [1, 8])
def test_splits(splits: list[int], dtype: torch.dtype, times: int) -> None:
    """Rounded up in 16 bits; rows in no group are zeros, whatever is in them."""
    op = tops.GroupedLinear(3, 16, 8, single_grouped_weight=True, single_grouped_bias=True).to(
        dtype
    )
    x = torch.randn(12 * times, 16).to(dtype).requires_grad_()
    sizes = times * torch.tensor(splits)
    used = int(sizes.sum())
    with torch.no_grad():
        x[used:] = torch.nan
    y = op(x, sizes)
    grad = torch.randn(y.shape).to(dtype)
    grad[used:] = torch.nan
    parameters = {name: leaf(p, torch.float64) for name, p in op.named_parameters()}
    exact = leaf(x.detach()[:used], torch.float64)
    want = grouped_linear(exact, sizes, **parameters)
    rtol, atol = (4 * tolerance for tolerance in TOLERANCES[dtype])
    torch.testing.assert_close(y[:used].double(), want, rtol=rtol, atol=atol)
    assert torch.equal(y[used:], torch.zeros_like(y[used:]))
    found = torch.autograd.grad(y, [x, *op.parameters()], grad)
    right = torch.autograd.grad(want, [exact, *parameters.values()], grad[:used].double())
    assert torch.equal(found[0][used:], torch.zeros_like(x[used:]))
    for a, b in zip((found[0][:used], *found[1:]), right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol)


@pytest.mark.emulated
@pytest.mark.parametrize("single", [True, False])
def test_groups_are_multiplied_by_torch(single: bool) -> None:
    """The output, the gradients of input and weights, and those of the biases: a product each."""
    options = {"single_grouped_weight": single, "single_grouped_bias": single}
    op = tops.GroupedLinear(3, 16, 8, **options).bfloat16()
    x = torch.randn(12, 16).bfloat16().requires_grad_()
    with torch.profiler.profile() as profile:
        op(x, torch.tensor([3, 0, 7])).square().sum().backward()
    names = [event.name for event in profile.events()]
    assert names.count("aten::_grouped_mm") == 4
    assert "aten::matmul" not in names
    torch.ops.transformer_ops_emulated.set_multiplies_groups(False)
    try:
        grads = [tensor.grad.clone() for tensor in (x, *op.parameters())]
        for tensor in (x, *op.parameters()):
            tensor.grad = None
        op(x, torch.tensor([3, 0, 7])).square().sum().backward()
    finally:
        torch.ops.transformer_ops_emulated.set_multiplies_groups(True)
    for tensor, grad in zip((x, *op.parameters()), grads, strict=True):
        torch.testing.assert_close(tensor.grad, grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_splits_of_any_integer_dtype(dtype: torch.dtype) -> None:
    op = tops.GroupedLinear(3, 16, 8)
    x, sizes = torch.randn(12, 16), torch.tensor([3, 4, 5])
    strided = torch.stack([sizes, sizes], -1).to(dtype)[:, 0]
    assert torch.equal(op(x, strided), op(x, sizes))


# Float32 products of this size run in oneDNN on AMD processors with AVX-512.
WIDE = (torch.float32, 512, 1024)


@pytest.mark.parametrize(("dtype", "width", "hidden"), [(torch.bfloat16, 16, 8), WIDE])
def test_a_nan_stays_in_its_group(dtype: torch.dtype, width: int, hidden: int) -> None:
    """Rows that a product takes along to be of a round number change nothing."""
    op = tops.GroupedLinear(2, width, hidden, single_grouped_weight=True, bias=False).to(dtype)
    x = torch.randn(80, width).to(dtype)
    x[41:] = torch.nan
    x.requires_grad_()
    y = op(x, torch.tensor([41, 39]))
    assert y[:41].isfinite().all()
    grads = torch.autograd.grad(y, [x, op.weight], torch.ones_like(y))
    assert grads[0].isfinite().all() and grads[1][0].isfinite().all()


@pytest.mark.skipif(not tops.processor().prefers_onednn, reason="MKL multiplies float32")
def test_few_shapes_are_compiled(capfd: pytest.CaptureFixture[str]) -> None:
    """oneDNN compiles a kernel for each new shape; all numbers of rows are rounded up alike."""
    _, width, hidden = WIDE
    op = tops.GroupedLinear(3, width, hidden, bias=False, single_grouped_weight=True)
    x = torch.randn(120, width, requires_grad=True)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        op(x, torch.tensor([33, 47, 40])).sum().backward()
    lines = [line.split(",") for line in capfd.readouterr().out.splitlines()]
    found = [line[-2] for line in lines if "exec" in line and "matmul" in line]
    shapes = {
        f"48x{width}:{width}x{hidden}",
        f"48x{hidden}:{hidden}x{width}",
        f"{hidden}x48:48x{width}",
    }
    assert set(found) - {"8x8:8x8"} == shapes


def test_wide_experts_are_a_loop_over_them() -> None:
    """Each of the three ways in which a layer runs, with experts of 33 to 47 rows."""
    _, width, hidden = WIDE
    options = {"bias": False, "single_grouped_weight": True}
    up = tops.GroupedLinear(3, width, 2 * hidden, **options)
    down = tops.GroupedLinear(3, hidden, width, **options)
    splits, probs = torch.tensor([33, 47, 40]), torch.rand(120)
    x = torch.randn(120, width, requires_grad=True)
    exact_x, exact_up, exact_down = (leaf(t, torch.float64) for t in (x, up.weight, down.weight))
    a, b = grouped_linear(exact_x, splits, weight=exact_up).chunk(2, -1)
    want = grouped_linear(F.silu(a) * b * probs.double()[:, None], splits, weight=exact_down)
    grad = torch.randn(120, width)
    exact = torch.autograd.grad(want, [exact_x, exact_up, exact_down], grad.double())
    layer = tops.Sequential(up, tops.ScaledSwiGLU(), down)
    parts = ("grouped_mlp", "grouped_linear_scaled", "scaled_grouped_linear")
    for first, count in (("grouped_mlp", 0), ("grouped_linear_scaled", 1), ("GroupedLinear", 3)):
        rules = [rule for rule in tops.fusions() if rule.name in parts[:count]]
        with ExitStack() as stack:
            for rule in rules:
                stack.enter_context(rule.disabled())
            y = layer(x, splits, probs, splits)
            found = torch.autograd.grad(y, [x, up.weight, down.weight], grad)
            (plan,) = layer.plans()
        assert plan.forward[0].name == first and len(rules) == count
        for mine, right in zip((y, *found), (want, *exact), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-3)


BAD_SPLITS = {
    "length": ([3, 9], "splits must have shape [3], got [2]"),
    "negative": ([3, -1, 4], "splits must be at least 0, got -1"),
    "beyond the rows": ([3, 8, 2], "splits must add up to at most 12 rows, got more"),
    "far beyond": ([2**63 - 1, 2**63 - 1, 2], "splits must add up to at most 12 rows, got more"),
}


@pytest.mark.parametrize("case", BAD_SPLITS)
def test_bad_splits(case: str) -> None:
    splits, text = BAD_SPLITS[case]
    op = tops.GroupedLinear(3, 16, 8)
    x = torch.randn(12, 16, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        op(x, torch.tensor(splits))
    assert str(caught.value).startswith(f"[GroupedLinear] {text}")
    op(x, torch.tensor([3, 8, 1]))


def test_bad_tensors() -> None:
    op, x = tops.GroupedLinear(3, 16, 8, scale_bias=True), torch.randn(12, 16)
    sizes, scales = torch.tensor([3, 4, 5]), torch.ones(12)
    for bad, text in (
        ((sizes.float(), scales), "splits must hold integers, got float32"),
        ((sizes.bool(), scales), "splits must hold integers, got Bool"),
        ((sizes.to("meta"), scales), "tensors must be on one device, got cpu and meta"),
        ((sizes, scales[:5]), r"scales must have a number for each row, shape \[12\], got \[5\]"),
        ((sizes, scales.long()), "scales must be float16, bfloat16, float32 or float64"),
    ):
        with pytest.raises(RuntimeError, match=text):
            op(x, *bad)
    with pytest.raises(ValueError, match="extra inputs must be 2 for splits and scales, got 1"):
        op(x, sizes)
    with pytest.raises(ValueError, match="extra inputs must be 1 for splits, got 2"):
        tops.GroupedLinear(3, 16, 8)(x, sizes, scales)


def test_bad_input_of_a_layer() -> None:
    """The joint step says what its ops say, before anything has changed."""
    module = tops.Sequential(*experts(3, 16, 8))
    x, ids, probs = routed(9, 3, 2, 16)
    module(x, ids, probs)
    assert [step.name for step in module.plans()[0].forward] == ["moe_mlp"]
    beyond, below = ids.clone(), ids.clone()
    beyond[4, 1], below[0, 0] = 3, -2
    for inputs, text in (
        ((x, beyond, probs), r"\[Dispatch\] expert_ids must lie in \[-1, 3\), got 3"),
        ((x, below, probs), r"\[Dispatch\] expert_ids must lie in \[-1, 3\), got -2"),
        ((x, ids[:5], probs), r"\[Dispatch\] expert_ids must have leading dimensions \[9\]"),
        ((x, ids, probs[:, :1]), r"\[Dispatch\] probs must have shape \[9, 2\], got \[9, 1\]"),
        (
            (x, ids.to("meta"), probs),
            r"\[Dispatch\] tensors must be on one device, got",
        ),
        (
            (x[:, :8], ids, probs),
            r"\[GroupedLinear\] up must have shape \[\*, \*, 8\]",
        ),
    ):
        with pytest.raises(RuntimeError, match=rf"^{text}.* \(op \d of the Sequential\)$"):
            module(*inputs)
    with pytest.raises(RuntimeError, match="expert_ids must hold integers, got float32"):
        module(x, ids.float(), probs)


@pytest.mark.parametrize("ids", ["one expert", "dropped", "no rows"])
def test_a_layer_with_empty_experts(ids: str) -> None:
    module = tops.Sequential(*experts(3, 16, 8))
    x, chosen, probs = routed(0 if ids == "no rows" else 40, 3, 1, 16)
    chosen.fill_(-1 if ids == "dropped" else 1)
    y = module(x, chosen, probs)
    grads = torch.autograd.grad(y.sum(), [x, probs, *module.parameters()])
    exact = [leaf(t, torch.float64) for t in (x, probs, *module.parameters())]
    want = loop_over_experts(exact[0], chosen, *exact[1:])
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-5)
    right = torch.autograd.grad(want.sum(), exact, materialize_grads=True)
    for a, b in zip(grads, right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


# ---- dispatch


def test_dispatch_sorts_and_keeps_the_order() -> None:
    ids = torch.tensor([[2, 0], [0, -1], [1, 2], [0, 2]])
    x, probs = torch.arange(4.0).unsqueeze(-1), torch.arange(8.0).view(4, 2)
    y, splits, permuted, positions = tops.Dispatch(4)(x, ids, probs)
    assert y.flatten().tolist() == [0, 1, 3, 2, 0, 2, 3, 0]
    assert splits.tolist() == [3, 1, 3, 0]
    assert permuted.tolist() == [1, 2, 6, 4, 0, 5, 7, 0]
    assert positions.tolist() == [[4, 0], [1, -1], [3, 5], [2, 6]]
    assert torch.equal(positions, places_of(ids))
    back = tops.Combine()(y, positions)
    assert back.flatten().tolist() == [0, 1, 4, 6]


def test_bad_ids_and_positions() -> None:
    x, ids, probs = routed(4, 3, 2, 8)
    for bad in (3, -2):
        wrong = ids.clone()
        wrong[1, 0] = bad
        with pytest.raises(RuntimeError, match=rf"expert_ids must lie in \[-1, 3\), got {bad}"):
            tops.Dispatch(3)(x, wrong, probs)
            tops.Dispatch(3, first_expert=1, local_experts=1)(x, wrong, probs)
    with pytest.raises(RuntimeError, match="within the 3 experts, got 2 and 2"):
        tops.Dispatch(3, first_expert=2, local_experts=2)(x, ids, probs)
    with pytest.raises(RuntimeError, match=r"probs must have shape \[4, 2\], got \[4, 1\]"):
        tops.Dispatch(3)(x, ids, probs[:, :1])
    with pytest.raises(RuntimeError, match=r"expert_ids must have leading dimensions \[4\]"):
        tops.Dispatch(3)(x, ids[:3], probs[:3])
    with pytest.raises(RuntimeError, match="expert_ids must hold integers, got float32"):
        tops.Dispatch(3)(x, ids.float(), probs)
    y, _, _, positions = tops.Dispatch(3)(x, ids, probs)
    for bad, text in (
        (8, r"must lie in \[-1, 8\), got 8"),
        (-2, "must lie in"),
        (0, "must differ"),
    ):
        wrong = positions.clone()
        wrong[wrong == 1] = bad
        with pytest.raises(RuntimeError, match=rf"\[Combine\] positions {text}"):
            tops.Combine()(y, wrong)
    with pytest.raises(RuntimeError, match="positions must have dtype Int, got Long"):
        tops.Combine()(y, positions.long())


# ---- parameters


@pytest.mark.parametrize("single", [False, True])
def test_state_dicts_of_both_layouts_load_into_both(single: bool) -> None:
    make = lambda single: tops.GroupedLinear(  # noqa: E731
        3, 16, 8, single_grouped_weight=single, single_grouped_bias=single
    )
    first, second = make(single), make(not single)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.normal_()
    second.load_state_dict(first.state_dict())
    x, sizes = torch.randn(12, 16), torch.tensor([3, 4, 5])
    assert torch.equal(first(x, sizes), second(x, sizes))
    assert set(second.state_dict()) != set(first.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        make(not single).load_state_dict(tops.GroupedLinear(3, 16, 9).state_dict())


def test_parameters_for_each_group() -> None:
    """They are taken, and get gradients, as they are, wherever they lie."""
    op = tops.GroupedLinear(3, 16, 8)
    apart = tops.GroupedLinear(3, 16, 8, single_grouped_weight=True, single_grouped_bias=True)
    apart.load_state_dict(op.state_dict())
    x, sizes = torch.randn(12, 16), torch.tensor([3, 0, 5])
    for module in (op, apart, copy.deepcopy(op).double(), pickle.loads(pickle.dumps(op))):
        module(x, sizes).square().sum().backward()
    for name in ("weight", "bias"):
        for k, grad in enumerate(getattr(apart, name).grad):
            own = getattr(op, f"{name}{k}")
            assert torch.equal(own.grad, grad) and own.grad.shape == own.shape
    assert len({p.grad.untyped_storage().data_ptr() for p in op.parameters()}) == 6
    x.requires_grad_()
    y = op(x, sizes)
    with torch.no_grad():
        op.weight1.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.no_grad():
        op.weight1.sub_(1)
    x = x.detach()
    op.zero_grad()
    op(x, sizes).square().sum().backward()
    fast = torch.compile(op, fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(fast(x, sizes).square().sum(), list(op.parameters()))
    for a, parameter in zip(grads, op.parameters(), strict=True):
        torch.testing.assert_close(a, parameter.grad)
    op.weight1.requires_grad_(False)
    op.zero_grad()
    op(x, sizes).sum().backward()
    assert op.weight1.grad is None and op.weight0.grad is not None


def listed(ops: list[Any]) -> list[Any]:
    """The same with a parameter for each expert."""
    found = []
    for op in ops:
        if isinstance(op, tops.GroupedLinear):
            own = tops.GroupedLinear(op.num_groups, op.in_features, op.out_features, bias=False)
            own.load_state_dict(op.state_dict())
            op = own.set_extra_input_channel(0, "splits")
        found.append(op)
    return found


@pytest.mark.parametrize("way", backends())
def test_a_layer_with_a_parameter_for_each_expert(way: str) -> None:
    """The joint step takes and gives lists: no tensor of all experts is made."""
    single = tops.Sequential(*experts(5, 16, 8))
    module = tops.Sequential(*listed(experts(5, 16, 8)))
    module.load_state_dict(single.state_dict())
    run = backends()[way](module)
    for tokens in (37, 1):
        x, ids, probs = routed(tokens, 5, 2, 16)
        found = torch.autograd.grad(run(x, ids, probs).square().sum(), (x, *module.parameters()))
        want = torch.autograd.grad(single(x, ids, probs).square().sum(), (x, *single.parameters()))
        up, down = torch.stack(found[1:6]), torch.stack(found[6:])
        torch.testing.assert_close((found[0], up, down), want, rtol=0, atol=0)
    module(x, ids, probs)
    assert [step.name for step in module.plans()[0].forward] == ["moe_mlp"]
    text = str(module.plans()[0])
    assert "[p1.weight0..4], [p3.weight0..4]" in text and "[dp1.weight0..4], [dp3" in text
    assert str(tops.Plan.parse(text)) == text


def test_nothing_is_stacked_in_a_graph() -> None:
    targets: set[str] = set()

    def backend(graph: Any, inputs: Any) -> Any:
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph

    op = tops.GroupedLinear(3, 16, 8)
    x, sizes = torch.randn(12, 16), torch.tensor([3, 4, 5])
    aot = torch._dynamo.backends.common.aot_autograd(fw_compiler=backend, bw_compiler=backend)
    torch.compile(op, fullgraph=True, backend=aot)(x, sizes).sum().backward()
    assert "transformer_ops.grouped_linear.default" in targets
    assert "transformer_ops.grouped_linear_backward.default" in targets
    assert not [t for t in targets if any(word in t for word in ("stack", "cat", "clone", "copy"))]


def test_a_list_of_another_length() -> None:
    op = tops.GroupedLinear(3, 16, 8)
    x, sizes = torch.randn(12, 16), torch.tensor([3, 4, 5])
    op(x, sizes)
    weights = list(op.parameters())[:3]
    for bad, text in (
        (weights[:2], r"splits must have shape \[2\], got \[3\]"),
        ([*weights[:2], torch.randn(8, 15)], r"weight must have shape \[8, 16\], got \[8, 15\]"),
        ([torch.stack(weights)], "weight must be a tensor for each group where single_grouped"),
        ([], "weight must be given, got an empty list"),
    ):
        with pytest.raises(RuntimeError, match=rf"\[grouped_linear\] {text}"):
            o.grouped_linear(x, sizes, bad, [], None, False, True)
    op.num_groups = 2
    with pytest.raises(RuntimeError, match=r"splits must have shape \[2\], got \[3\]"):
        op(x, sizes)
    op(x, sizes[:2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
def test_rows_that_somebody_else_has_sorted(splits: list[int], dtype: torch.dtype) -> None:
    """Two products with the activation between them are one step, if their splits are the same."""
    options = {"bias": False, "single_grouped_weight": True}
    module = tops.Sequential(
        tops.GroupedLinear(3, 16, 32, **options),
        tops.ScaledSwiGLU(),
        tops.GroupedLinear(3, 16, 8, **options),
    ).to(dtype)
    sizes = 4 * torch.tensor(splits)
    x = torch.randn(48, 16).to(dtype).requires_grad_()
    scales = torch.rand(48).to(dtype).requires_grad_()
    leaves = [x, scales, *module.parameters()]
    grad = torch.randn(48, 8).to(dtype)
    others = sizes.roll(1)
    for down in (sizes, others):
        found = module(x, sizes, scales, down)
        grads = torch.autograd.grad(found, leaves, grad)
        assert [step.name for step in module.plans()[0].forward] == ["grouped_mlp"]
        with unfused():
            want = module(x, sizes, scales, down)
            wanted = torch.autograd.grad(want, leaves, grad)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close((found, *grads), (want, *wanted), rtol=tolerance, atol=tolerance)
        used = max(int(sizes.sum()), 0)
        assert not found[used:].any() and not grads[0][used:].any() and not grads[1][used:].any()
    with torch.no_grad():
        inferred = module(x, sizes, scales, sizes)
        names = [step.name for step in module.plans()[0].forward]
    assert names == ["grouped_linear_scaled", "GroupedLinear"]
    torch.testing.assert_close(inferred, module(x, sizes, scales, sizes), rtol=2e-2, atol=2e-2)


def test_why_two_products_are_no_one_step() -> None:
    x, scales, sizes = torch.randn(12, 16), torch.rand(12), torch.tensor([3, 0, 9])

    def misses(module: tops.Sequential) -> set[str]:
        module(x.requires_grad_(), sizes, scales, sizes)
        return {m.reason for m in module.plans()[0].near_misses if m.fusion == "grouped_mlp"}

    def mlp(recompute: str = "cheap", **options: Any) -> tops.Sequential:
        made = {"bias": False, "single_grouped_weight": True} | options
        return tops.Sequential(
            tops.GroupedLinear(3, 16, 32, **made),
            tops.ScaledSwiGLU(),
            tops.GroupedLinear(3, 16, 8, **made),
            recompute=recompute,
        )

    assert misses(mlp()) == set()
    assert misses(mlp(bias=True)) == {"a product has a bias"}
    assert misses(mlp("none")) == {'nothing is recomputed (recompute="none")'}
    frozen = mlp()
    frozen[0].weight.requires_grad_(False)
    assert misses(frozen) == {"a weight needs no gradient"}


@pytest.mark.parametrize("name", ["ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSReLU"])
def test_an_activation_that_is_always_computed_again(name: str) -> None:
    """What the second product takes is kept under recompute="none", unless the op says no."""
    kept, grads = [], []
    for again in (False, True):
        torch.manual_seed(0)
        scaled = lambda again=again: getattr(tops, name)(activation_recompute_in_mlp=again)  # noqa: E731
        module = tops.Sequential(*experts(3, 16, 8, scaled=scaled), recompute="none")
        x, ids, probs = routed(9, 3, 2, 16)
        kept.append(saved_bytes(module, x, ids, probs))
        y = module(x, ids, probs)
        grads.append(torch.autograd.grad(y.square().sum(), [x, probs, *module.parameters()]))
        names = [step.name for step in module.plans()[0].backward]
        assert ("grouped_mlp" in names) == again
    assert kept[0] - kept[1] == 9 * 2 * 8 * 4
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
