"""Collectives in one process: the other ranks hold zeros (process_groups.py), or there are none."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from checks import unfused
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
def world(tmp_path) -> Iterator[None]:
    """All ranks: two, of which the others do not take part."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


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
    try:
        shape = op(torch.ones(4, 8)).shape
        assert shape == {"AllGather": (8, 8), "ReduceScatter": (2, 8)}.get(make.__name__, (4, 8))
        dist.destroy_process_group()
        gc.collect()
        dist.init_process_group("fake", rank=0, world_size=4)
        shape = op(torch.ones(4, 8)).shape
        assert shape == {"AllGather": (16, 8), "ReduceScatter": (1, 8)}.get(make.__name__, (4, 8))
        assert repr(op) == f"{make.__name__}()" and op.process_group is None
    finally:
        dist.destroy_process_group()


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
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    fast = torch.compile(module, fullgraph=True, backend=backend)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = fast(x)
    own = {p.data_ptr() for p in module.parameters()}
    sizes = {t.data_ptr(): t.nbytes for t in kept if t.data_ptr() not in own}
    assert sum(sizes.values()) == 4 * 8 * 4 + 8 * 16 * 4  # the shard, and GELU's input
    (got,) = torch.autograd.grad(y.sum(), x)
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
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_an_mlp_keeps(group):
    module = mlp(group, True)
    module(torch.randn(4, 8, requires_grad=True)).sum().backward()
    # x as it was given, 32 bytes a row; and for both ranks' rows what GELU was given, 32 wide.
    assert f"{32 + 2 * 128} bytes a row saved for backward" in str(module.explain())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_a_compiled_mlp_keeps(group, backend):
    module = mlp(group, True)
    fast = torch.compile(module, fullgraph=True, backend=backend)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = fast(x)
    own = {p.data_ptr() for p in module.parameters()}
    sizes = {t.data_ptr(): t.nbytes for t in kept if t.data_ptr() not in own}
    assert sum(sizes.values()) == 4 * (32 + 2 * 128)
    group.calls.clear()
    y.sum().backward()
    assert sorted(name for name, _ in group.calls) == ["gather", "gather", "scatter"]


def test_a_group_of_one_rank_splits_nothing():
    layer = tops.Linear(
        4,
        6,
        tensor_parallel_mode="column",
        tensor_parallel_group=group_of_zeros(1),
        sequence_parallel=True,
    )
    assert layer.tensor_parallel_mode is None and not layer.sequence_parallel
    assert layer.weight.shape == (6, 4) and len(layer.basic_ops) == 2


def test_a_group_of_another_size(group):
    layer = mlp(group, True)[0]
    layer._group_name = group_of_zeros(4).group_name
    want = r"\[Linear\] tensor_parallel_group must have the 2 ranks .*, got 4"
    with pytest.raises(RuntimeError, match=want):
        layer(torch.ones(4, 8))


def test_a_shard_starts_as_a_part_of_the_whole(group):
    torch.manual_seed(0)
    layer = tops.Linear(256, 64, tensor_parallel_mode="row", tensor_parallel_group=group)
    assert layer.weight.shape == (64, 128)
    assert 0.9 < layer.weight.abs().max() * 256**0.5 <= 1


def test_repr_of_split_products(group):
    layer = mlp(group, True)[0]
    want = "tensor_parallel_mode='column', tensor_parallel_size=2, sequence_parallel=True"
    assert want in repr(layer)
    assert next(str(op) for op in layer.basic_ops) == "AllGather(process_group='zeros2')"
