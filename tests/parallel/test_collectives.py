"""Collectives in one process: the other ranks hold zeros (process_groups.py), or there are none."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import unfused
from helpers import saved_bytes, saved_tensors, storage_bytes, without_parameters
from process_groups import GroupOfZeros, group_of_zeros
from torch.distributed.device_mesh import init_device_mesh
from torch.export import Dim, export

import transformer_ops as tops

OPS = [tops.AllGather, tops.ReduceScatter, tops.AllReduce]
every_op = pytest.mark.parametrize("make", OPS, ids=lambda make: make.__name__)


@pytest.fixture
def group() -> GroupOfZeros:
    found = group_of_zeros()
    found.calls.clear()
    return found


@pytest.fixture
def world() -> None:
    """All ranks: two, of which the others do not take part."""
    dist.init_process_group("fake", rank=0, world_size=2)


def names(plan):
    return [step.name for step in plan.forward]


def test_calls_and_plan(group):
    module = tops.Sequential(
        tops.AllGather(group), tops.GELU(), tops.ReduceScatter(group), tops.AllReduce(group)
    )
    x = torch.randn(4, 8, requires_grad=True)
    module(x).sum().backward()
    rows = 4 * 8 * 4
    forward = [("gather", rows), ("scatter", 2 * rows), ("reduce", rows)]
    # The gradient is gathered, and what GELU was given is gathered again.
    assert group.calls == [*forward, ("gather", rows), ("gather", rows), ("scatter", 2 * rows)]
    (plan,) = module.plans()
    assert 'x1 = all_gather(x0, 2, "zeros2")' in str(plan)
    assert tops.Plan.parse(str(plan)) == plan
    assert names(plan) == ["AllGather", "GELU", "ReduceScatter", "AllReduce"]


def test_a_gather_is_done_again_and_its_input_kept(group):
    module = tops.Sequential(tops.AllGather(group), tops.Linear(8, 16))
    module(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert [name for name, _ in group.calls] == ["gather", "gather", "scatter"]
    assert "32 bytes a row saved for backward" in str(module.explain())
    (plan,) = module.plans()
    # One step gathers beside a product, and scatters beside another.
    assert (
        'gather_linear_backward(g3, s0.input, s1.weight, 2, "zeros2", [true, true, true])'
        in str(plan)
    )
    group.calls.clear()
    module(torch.randn(4, 8)).sum().backward()  # whose gradient nobody wants
    assert [name for name, _ in group.calls] == ["gather", "gather"]
    (plan,) = module.plans()
    assert 'x1 = recompute_all_gather(g2, s0.input, 2, "zeros2")' in str(plan)
    module = tops.Sequential(tops.AllGather(group), tops.Linear(8, 16), recompute="none")
    group.calls.clear()
    module(torch.randn(4, 8)).sum().backward()
    assert [name for name, _ in group.calls] == ["gather"]
    assert "64 bytes a row saved for backward" in str(module.explain())


# By name of a split product: how it is split, and the collectives of backward for the input, the
# weight and the bias alone.
HALVES = {
    "gather_linear": ("column", True, (["scatter"], ["gather"], [])),
    "linear_scatter": ("row", True, (["gather"],) * 3),
    "reduce_gradient_linear": ("column", False, (["reduce"], [], [])),
}


@pytest.mark.parametrize("name", HALVES)
def test_each_gradient_has_its_own_collectives(group, name):
    """A gather that all gradients read runs for each of them."""
    mode, sequence, wanted = HALVES[name]
    linear = tops.Linear(
        32, 24, tensor_parallel_mode=mode, tensor_parallel_group=group, sequence_parallel=sequence
    )
    module = tops.Sequential(linear)
    x = torch.randn(4, linear.weight.shape[1], requires_grad=True)
    y = module(x)
    (plan,) = module.plans()
    assert name in [step.name for step in plan.backward]
    tensors = (x, linear.weight, linear.bias)
    grad = torch.randn_like(y)
    whole = torch.autograd.grad(y, tensors, grad, retain_graph=True)
    for tensor, want, calls in zip(tensors, whole, wanted, strict=True):
        group.calls.clear()
        (got,) = torch.autograd.grad(y, tensor, grad, retain_graph=True)
        assert torch.equal(got, want)
        assert [call for call, _ in group.calls] == calls


def test_a_norm_before_a_gather_is_computed_again_too(group):
    module = tops.Sequential(tops.RMSNorm(8), tops.AllGather(group), tops.Linear(8, 16))
    module(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert "36 bytes a row saved for backward" in str(module.explain())


@every_op
def test_a_group_of_one_rank_hands_on(make):
    group = group_of_zeros(1)
    group.calls.clear()
    op = make(group)
    x = torch.randn(3, 8, requires_grad=True)
    y = op(x)
    assert torch.equal(y, x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 8)) and not group.calls


@every_op
def test_the_world_is_looked_up_at_the_call(make):
    op = make()
    want = rf"\[{make.__name__}\] process_group must exist in this process .*, got none"
    with pytest.raises(RuntimeError, match=want):
        op(torch.ones(4, 8))
    dist.init_process_group("fake", rank=0, world_size=2)
    shape = op(torch.ones(4, 8)).shape
    assert shape == {"AllGather": (8, 8), "ReduceScatter": (2, 8)}.get(make.__name__, (4, 8))
    dist.destroy_process_group()
    gc.collect()
    dist.init_process_group("fake", rank=0, world_size=4)
    shape = op(torch.ones(4, 8)).shape
    assert shape == {"AllGather": (16, 8), "ReduceScatter": (1, 8)}.get(make.__name__, (4, 8))
    assert repr(op) == f"{make.__name__}()" and op.process_group is None


def test_a_mesh_stands_for_its_group(world):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    op = tops.AllGather(mesh)
    assert op.process_group is mesh.get_group()
    assert op(torch.ones(2, 3)).shape == (4, 3)
    assert tops.AllGather(mesh["tp"]).process_group is mesh.get_group()
    wide = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match=r"\[AllGather\] process_group must be .*, got DeviceMesh"):
        tops.AllGather(wide)


@every_op
@pytest.mark.parametrize("bad", ["zeros2", 2, object(), dist.GroupMember.NON_GROUP_MEMBER])
def test_what_is_no_group(make, bad):
    with pytest.raises(ValueError, match=rf"\[{make.__name__}\] process_group must be .*, got"):
        make(bad)
    op = make()
    with pytest.raises(ValueError, match=rf"\[{make.__name__}\] process_group must be .*, got"):
        op.process_group = bad


@every_op
def test_copies_share_the_group(make, group):
    op = make(group)
    x = torch.randn(4, 8)
    want = op(x)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op)), copy.copy(op)):
        assert twin.process_group is group and torch.equal(twin(x), want)


def test_another_group_makes_other_plans(group):
    op = tops.AllGather(group)
    assert op(torch.ones(3, 2)).shape == (6, 2)
    op.process_group = group_of_zeros(4)
    assert op(torch.ones(3, 2)).shape == (12, 2)


def test_a_pickled_op_of_a_group_that_is_not_there():
    op = tops.AllGather(GroupOfZeros(2, "of another process"))
    op._group_name = "elsewhere"
    twin = pickle.loads(pickle.dumps(op))
    with pytest.raises(RuntimeError, match=r"\[AllGather\] process_group 'elsewhere' must exist"):
        twin(torch.ones(2, 2))


def test_rows_that_the_ranks_do_not_divide(group):
    want = r"\[ReduceScatter\] input must have a first dimension divisible by 2, got shape \[5, 3\]"
    with pytest.raises(RuntimeError, match=want):
        tops.ReduceScatter(group)(torch.ones(5, 3))
    assert not group.calls


def test_a_group_destroyed_before_backward():
    dist.init_process_group("fake", rank=0, world_size=2)
    x = torch.ones(2, 4, requires_grad=True)
    loss = tops.AllGather()(x).sum()
    dist.destroy_process_group()
    want = r"\[AllGather\] process group '\w*' must exist in this process, got none"
    with pytest.raises(RuntimeError, match=want):
        loss.backward()


@every_op
def test_torch_func_is_refused(make, group):
    want = r"\[\w+\] collectives must run outside of torch.func"
    with pytest.raises(NotImplementedError, match=want):
        torch.func.grad(lambda x: make(group)(x).sum())(torch.ones(4, 2))


def test_export(group):
    module = tops.Sequential(
        tops.AllGather(group), tops.Linear(8, 8), tops.GELU(), tops.ReduceScatter(group)
    )
    x = torch.randn(4, 8)
    program = export(module, (x,), dynamic_shapes=({0: Dim("rows")},))
    assert "all_gather(" in str(program.graph)
    for rows in (4, 6):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_gather_keeps_its_input(group, backend):
    """Neither merged with the first gather nor moved into forward."""
    module = tops.Sequential(tops.AllGather(group), tops.Linear(8, 16), tops.GELU())
    fast = torch.compile(module, fullgraph=True, backend=backend)
    x = torch.randn(4, 8, requires_grad=True)
    kept = saved_bytes(module, x, call=fast)
    assert kept == 4 * 8 * 4 + 8 * 16 * 4  # the shard, and GELU's input
    (got,) = torch.autograd.grad(fast(x).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(module(x).sum(), x)[0])
    group.calls.clear()
    fast(x).sum().backward()
    assert [name for name, _ in group.calls] == ["gather", "gather", "scatter"]


# ---- split products


def mlp(group, sequence):
    split = {"tensor_parallel_group": group, "sequence_parallel": sequence}
    return tops.Sequential(
        tops.Linear(8, 64, tensor_parallel_mode="column", **split),
        tops.GELU(),
        tops.Linear(64, 8, tensor_parallel_mode="row", **split),
    )


def test_collectives_of_an_mlp(group):
    """No more than needed, of the bytes that they have to move."""
    module, rows = mlp(group, True), 4
    x = torch.randn(rows, 8, requires_grad=True)
    shard, whole = rows * 8 * 4, 2 * rows * 8 * 4
    y = module(x)
    assert group.calls == [("gather", shard), ("scatter", whole)]
    group.calls.clear()
    y.sum().backward()
    assert group.calls == [("gather", shard), ("gather", shard), ("scatter", whole)]
    group.calls.clear()
    with torch.no_grad():
        module(x)
    assert group.calls == [("gather", shard), ("scatter", whole)]
    # Nobody wants the gradient of the input: it is not scattered.
    group.calls.clear()
    module(x.detach()).sum().backward()
    assert [name for name, _ in group.calls] == ["gather", "scatter", "gather", "gather"]
    group.calls.clear()
    module = mlp(group, False)
    module(x).sum().backward()
    assert group.calls == [("reduce", shard), ("reduce", shard)]


def test_products_are_computed_again_from_what_is_gathered_again(group):
    split = {"tensor_parallel_group": group, "sequence_parallel": True}
    module = tops.Sequential(
        tops.LayerNorm(8),
        tops.Linear(8, 6, tensor_parallel_mode="column", **split),
        tops.GELU(),
        tops.Linear(6, 8, tensor_parallel_mode="row", **split),
        recompute="products",
    )
    x = torch.randn(203, 8, requires_grad=True)
    leaves = [x, *module.parameters()]
    got = torch.autograd.grad(module(x).square().sum(), leaves)
    (plan,) = module.plans()
    text = str(plan)
    assert "recompute_all_gather" in text and "recompute_linear" in text
    with unfused():
        want = torch.autograd.grad(module(x).square().sum(), leaves)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("recompute", ["cheap", "none"])
@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ((2, 203, 8), [1, 1], [1, 1]),
        ((1500, 8), [108, 428, 428, 428, 108], [128, 414, 415, 415, 128]),
        ((200, 8), [64, 72, 64], [200]),
        ((140, 8), [76, 64], [140]),
        ((5, 8), [5], [5]),
    ],
)
def test_collectives_in_chunks_beside_products(group, recompute, shape, forward, backward):
    """The numbers of the ops one after another; what is sent is the same, piece by piece."""
    split = {"tensor_parallel_group": group, "sequence_parallel": True}
    module = tops.Sequential(
        tops.Linear(8, 6, tensor_parallel_mode="column", **split),
        tops.Linear(6, 8, tensor_parallel_mode="row", **split),
        recompute=recompute,
    )
    x = torch.randn(shape, requires_grad=True)
    leaves = [x, *module.parameters()]
    y = module(x)
    (plan,) = module.plans()
    assert names(plan) == ["gather_linear", "linear_scatter"]
    assert [step.name for step in plan.backward] == ["gather_linear", "linear_scatter"]
    row = x[0].nbytes  # the first dimension is what is cut
    assert group.calls == [
        *(("gather", count * row) for count in forward),
        *(("scatter", 2 * count * row) for count in forward),
    ]
    group.calls.clear()
    got = torch.autograd.grad(y.square().sum(), leaves)
    assert group.calls[: len(backward)] == [("gather", count * row) for count in backward]
    assert group.calls[len(backward) :] == [("gather", x.nbytes), ("scatter", 2 * x.nbytes)]
    with unfused():
        y_want = module(x)
        want = torch.autograd.grad(y_want.square().sum(), leaves)
    torch.testing.assert_close(y, y_want)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_what_an_mlp_keeps(group, backend):
    module = mlp(group, True)
    run = torch.compile(module, fullgraph=True, backend=backend) if backend else module
    x = torch.randn(4, 8, requires_grad=True)
    # x as it was given, 32 bytes a row; and for both ranks' rows what GELU was given, 32 wide.
    kept = 32 + 2 * 128
    assert saved_bytes(module, x, call=run) == 4 * kept
    y = run(x)
    group.calls.clear()
    y.sum().backward()
    assert sorted(name for name, _ in group.calls) == ["gather", "gather", "scatter"]
    if backend is None:
        assert f"{kept} bytes a row saved for backward" in str(module.explain())


# ---- a layer whose heads are split


def decoder_layer(group, sequence):
    split = {"tensor_parallel_group": group, "sequence_parallel": sequence}
    column, row = ({"tensor_parallel_mode": mode, **split} for mode in ("column", "row"))
    return tops.Sequential(
        tops.Residual(
            tops.RMSNorm(32),
            tops.PackedLinear(32, (32, 16, 16), bias=False, **column),
            tops.QKNorm(2, 1, head_dim=8),
            tops.RoPE(8, 3),
            tops.Attention(2, 1, head_dim=8, causal=True),
            tops.Linear(32, 32, bias=False, **row),
        ),
        tops.Residual(
            tops.RMSNorm(32),
            tops.PackedLinear(32, (48, 48), bias=False, **column),
            tops.SwiGLU(),
            tops.Linear(48, 32, bias=False, **row),
        ),
    )


@pytest.mark.parametrize("sequence", [False, True])
def test_a_split_layer_is_one_plan(group, sequence):
    module = decoder_layer(group, sequence)
    rows = 8  # of all ranks
    mine = rows // 2 if sequence else rows
    x, table = torch.randn(mine, 32, requires_grad=True), torch.randn(rows, 8)
    with saved_tensors() as kept:
        y = module(x, table, table)
    whole = rows * 32 * 4
    ends = [("gather", whole // 2), ("scatter", whole)] if sequence else [("reduce", whole)]
    assert group.calls == 2 * ends
    assert y.shape == x.shape and "PlanFunction" in y.grad_fn.name()
    (plan,) = module.plans()
    kinds = [kind for kind, _ in plan.ops]
    before = "AllGather" if sequence else "ReduceGradient"
    assert [kinds[k - 1] for k, kind in enumerate(kinds) if kind == "PackedLinear"] == 2 * [before]
    # Half of what one process saves of the heads and columns: queries, keys and values before
    # their norms, the output of attention and its statistics, gate and up. Besides: the inputs of
    # the norms and their statistics, of this rank's rows, and the tables.
    split, norms = (64 + 32 + 4 + 96) // 2, 2 * (32 + 1)
    kept_bytes = storage_bytes(without_parameters(kept, module))
    assert kept_bytes == 4 * (rows * split + mine * norms + table.numel())
    group.calls.clear()
    y.sum().backward()
    # Gathered rows that backward needs are gathered again.
    back = [("gather", whole // 2), *ends] if sequence else ends
    assert sorted(group.calls) == sorted(2 * back)


BAD_SPLITS: dict[str, tuple[dict[str, Any], str]] = {
    "sizes that do not divide": (
        {"out_features": (8, 5)},
        r"out_features\[1\] must be divisible by the 2 ranks of tensor_parallel_group, got 5",
    ),
    "row": (
        {"tensor_parallel_mode": "row"},
        r'tensor_parallel_mode must be "column" or None, because each weight is split by its own '
        r"rows .*, got 'row'",
    ),
    "group without mode": (
        {"tensor_parallel_mode": None},
        "tensor_parallel_group must come with a tensor_parallel_mode, got .* alone",
    ),
    "sequence without mode": (
        {"tensor_parallel_mode": None, "tensor_parallel_group": None, "sequence_parallel": True},
        "sequence_parallel must come with a tensor_parallel_mode, got True alone",
    ),
    "no group": (
        {"tensor_parallel_group": 2},
        "tensor_parallel_group must be a ProcessGroup .*, got 2",
    ),
    "no flag": ({"sequence_parallel": 1}, "sequence_parallel must be a bool, got 1"),
}


@pytest.mark.parametrize("name", BAD_SPLITS)
def test_products_that_cannot_be_split(group, name):
    arguments, message = BAD_SPLITS[name]
    column = {"tensor_parallel_mode": "column", "tensor_parallel_group": group}
    with pytest.raises(ValueError, match=rf"\[PackedLinear\] {message}"):
        tops.PackedLinear(**{"in_features": 4, "out_features": (8, 8), **column, **arguments})


# The heads of all ranks instead of this rank's two and one.
GLOBAL_HEADS = {
    "Attention": (
        lambda: tops.Attention(4, 2, head_dim=8),
        r"last dimension 64 \(queries of 4 heads, .* of 2 heads\), got shape \[4, 32\]",
    ),
    "RoPE": (
        lambda: tops.RoPE(8, 6),
        r"last dimension of at least 48 \(6 heads\), got shape \[4, 32\]",
    ),
    "QKNorm": (
        lambda: tops.QKNorm(4, 2, head_dim=8),
        r"at least 48 \(queries of 4 heads, keys of 2 heads\), got shape \[4, 32\]",
    ),
}


@pytest.mark.parametrize("name", GLOBAL_HEADS)
def test_heads_of_all_ranks(group, name):
    make, message = GLOBAL_HEADS[name]
    module = tops.Sequential(decoder_layer(group, False)[0][1], make())
    tables = [torch.ones(4, 8)] * module[1].num_extra_inputs
    with pytest.raises(RuntimeError, match=rf"\[{name}\] input must have .*{message}"):
        module(torch.randn(4, 32), *tables)


@pytest.mark.parametrize("product", [tops.PackedLinear, tops.Linear])
def test_a_norm_over_all_heads_needs_those_of_other_ranks(group, product):
    column = {"tensor_parallel_mode": "column", "tensor_parallel_group": group}
    sizes = (16, 16) if product is tops.PackedLinear else 32
    norm = tops.QKNorm(1, 1, head_dim=8, per_head=False)
    module = tops.Sequential(product(32, sizes, **column), norm)
    with pytest.raises(ValueError, match=r"\[QKNorm\] per_head must be True behind a product"):
        module(torch.randn(4, 32))


@pytest.mark.parametrize("product", [tops.Linear, tops.PackedLinear])
def test_a_group_of_one_rank_splits_nothing(product):
    layer = product(
        4,
        6 if product is tops.Linear else (6, 3),
        tensor_parallel_mode="column",
        tensor_parallel_group=group_of_zeros(1),
        sequence_parallel=True,
    )
    assert layer.tensor_parallel_mode is None and not layer.sequence_parallel
    assert next(layer.parameters()).shape == (6, 4)
    assert len(layer.basic_ops) == (2 if product is tops.Linear else 1)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_group_of_another_size(group, is_packed):
    layer = decoder_layer(group, True)[0][1] if is_packed else mlp(group, True)[0]
    layer._group_name = group_of_zeros(4).group_name
    want = r"\[\w*Linear\] tensor_parallel_group must have the 2 ranks .*, got 4"
    with pytest.raises(RuntimeError, match=want):
        layer(torch.ones(4, layer.in_features))


def test_a_shard_starts_as_a_part_of_the_whole(group):
    layer = tops.Linear(256, 64, tensor_parallel_mode="row", tensor_parallel_group=group)
    assert layer.weight.shape == (64, 128)
    assert 0.9 < layer.weight.abs().max() * 256**0.5 <= 1


def test_repr_of_split_products(group):
    layer = mlp(group, True)[0]
    want = "tensor_parallel_mode='column', tensor_parallel_size=2, sequence_parallel=True"
    assert want in repr(layer) and want in repr(decoder_layer(group, True)[0][1])
    assert next(str(op) for op in layer.basic_ops) == "AllGather(process_group='zeros2')"
