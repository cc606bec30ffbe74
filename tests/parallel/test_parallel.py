"""Styles for `parallelize_module`, in one process: a fake world of two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import transformer_ops as tops
from transformer_ops.parallel import (
    ColwiseParallel,
    ExpertParallel,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    deinterleave_glu,
    interleave_glu,
    local,
)


@pytest.fixture
def mesh() -> DeviceMesh:
    dist.init_process_group("fake", rank=0, world_size=2)
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def split(module: nn.Module, mesh: DeviceMesh, plan) -> nn.Module:
    # Each rank takes its part of what it has: a fake world sends nothing.
    return parallelize_module(module, mesh, plan, src_data_rank=None)


def block(act: tops.FusibleOperation | None = None) -> tops.Sequential:
    act = act or tops.GELU()
    wide = 32 if act._is_gated else 64
    return tops.Sequential(
        {
            "norm": tops.RMSNorm(16),
            "up": tops.Linear(16, 64),
            "act": act,
            "down": tops.Linear(wide, 16),
        }
    )


def plan_for(sequence: bool):
    rows = Shard(0) if sequence else Replicate()
    return {
        "norm": SequenceParallel() if sequence else ReplicateParallel(),
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows),
    }


@pytest.mark.parametrize("sequence", [False, True])
def test_one_group_without_hooks(mesh, sequence):
    module = split(block(), mesh, plan_for(sequence))
    x = torch.randn(4, 16, requires_grad=True)
    module(x).sum().backward()
    (plan,) = module.plans()
    around = ("AllGather", "ReduceScatter") if sequence else ("ReduceGradient", "AllReduce")
    kinds = [kind for kind, _ in plan.ops]
    want = ["RMSNorm", around[0], "BasicLinear", "Bias", "GELU", "BasicLinear", "Bias", around[1]]
    assert kinds == want
    placements = {name: p.placements for name, p in module.named_parameters()}
    assert placements == {
        "norm.weight": (Replicate(),),
        "up.weight": (Shard(0),),
        "up.bias": (Shard(0),),
        "down.weight": (Shard(1),),
        "down.bias": (Replicate(),),
    }
    for parameter in module.parameters():
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.shape == parameter.shape
    # GELU's input: this rank's 32 columns, of all rows by sequence; and what the norm kept.
    kept = 16 * 4 + 4 + 32 * 4 * (2 if sequence else 1)
    assert f"{kept} bytes a row saved for backward" in str(module.explain())
    state = block().state_dict()
    assert {name: t.shape for name, t in module.state_dict().items()} == {
        name: t.shape for name, t in state.items()
    }


def test_compiled(mesh):
    module = split(block(), mesh, plan_for(False))
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16, requires_grad=True)
    y = fast(x)
    torch.testing.assert_close(y, module(x))
    got = torch.autograd.grad(y.sum(), list(module.parameters()))
    want = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.to_local(), b.to_local())


def test_a_bias_of_all_ranks_is_shared(mesh):
    """Each adds its part, and gets the gradient of the whole."""
    module = split(tops.Linear(16, 8), mesh, RowwiseParallel())
    with torch.no_grad():
        module.bias.to_local().fill_(6.0)
    y = module(torch.zeros(3, 8))
    assert torch.equal(y, torch.full((3, 8), 3.0))
    y.sum().backward()
    assert torch.equal(module.bias.grad.to_local(), torch.full((8,), 3.0))


def test_gates_need_an_interleaved_order(mesh):
    module = split(block(tops.SwiGLU()), mesh, plan_for(True))
    want = r"\[SwiGLU\] glu_interleave_size must be set behind a product that is split by columns"
    with pytest.raises(ValueError, match=want):
        module(torch.randn(4, 16))
    module = split(block(tops.SwiGLU(glu_interleave_size=32)), mesh, plan_for(True))
    with pytest.raises(ValueError, match=r"2 \* size divides the 32 columns of each rank, got 32"):
        module(torch.randn(4, 16))
    module = split(block(tops.SwiGLU(glu_interleave_size=16)), mesh, plan_for(True))
    assert module(torch.randn(4, 16)).shape == (4, 16)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_interleaved_order(size):
    weight, x = torch.randn(16, 3), torch.randn(5, 3)
    halves = tops.SwiGLU()(x @ weight.T)
    inner = interleave_glu(weight, size)
    got = tops.SwiGLU(glu_interleave_size=size)(x @ inner.T)
    # The columns of the output are in their old order.
    torch.testing.assert_close(got, halves)
    assert torch.equal(deinterleave_glu(inner, size), weight)
    bias = torch.randn(16)
    assert torch.equal(deinterleave_glu(interleave_glu(bias, size), size), bias)


@pytest.mark.parametrize("bad", [0, 3, 16])
def test_what_cannot_be_interleaved(bad):
    for function in (interleave_glu, deinterleave_glu):
        with pytest.raises(ValueError, match="must have rows divisible by"):
            function(torch.ones(16, 2), bad)


@pytest.mark.parametrize("sequence", [False, True])
def test_packed_products_give_matching_gates(mesh, sequence):
    """Each weight is split by itself, so that the unit needs no interleaved order."""
    parts = dict(block(tops.SwiGLU()).named_children())
    module = tops.Sequential(parts | {"up": tops.PackedLinear(16, (32, 32))})
    module = split(module, mesh, plan_for(sequence))
    x = torch.randn(4, 16, requires_grad=True)
    module(x).sum().backward()
    up = module.up
    for parameter in up.parameters():
        assert parameter.placements == parameter.grad.placements == (Shard(0),)
        assert parameter.shape[0] == 32 and parameter.to_local().shape[0] == 16
    around = "AllGather" if sequence else "ReduceGradient"
    assert [op._kind for op in up.basic_ops] == [around, "PackedLinear"]


BAD = [
    (lambda m: ColwiseParallel(input_layouts=Shard(1)), ValueError, "input_layouts must be"),
    (lambda m: ColwiseParallel(output_layouts=Replicate()), ValueError, "output_layouts must be"),
    (lambda m: RowwiseParallel(input_layouts=Replicate()), ValueError, "input_layouts must be"),
    (
        lambda m: split(nn.Linear(4, 4), m, ColwiseParallel()),
        TypeError,
        "be a Linear, BasicLinear or",
    ),
    (lambda m: split(tops.Linear(4, 5), m, ColwiseParallel()), ValueError, "out_features must be"),
    (lambda m: split(tops.Linear(5, 4), m, RowwiseParallel()), ValueError, "in_features must be"),
    (
        lambda m: split(tops.PackedLinear(4, (4, 3)), m, ColwiseParallel()),
        ValueError,
        r"out_features\[1\] must be divisible by the 2 ranks",
    ),
    (
        lambda m: split(tops.PackedLinear(4, (4, 4)), m, RowwiseParallel()),
        TypeError,
        "must be a Linear or BasicLinear of transformer_ops, got PackedLinear",
    ),
    (
        lambda m: split(split(tops.Linear(4, 4), m, RowwiseParallel()), m, RowwiseParallel()),
        ValueError,
        "must not be split yet, got 'row'",
    ),
    (
        lambda m: split(tops.Combine(), m, ExpertParallel()),
        TypeError,
        "a Dispatch or GroupedLinear",
    ),
    (
        lambda m: split(tops.Dispatch(3), m, ExpertParallel()),
        ValueError,
        "divisible by the 2 ranks",
    ),
    (
        lambda m: split(split(tops.Dispatch(4), m, ExpertParallel()), m, ExpertParallel()),
        ValueError,
        "local_experts must be all 4, got 2",
    ),
    (
        lambda m: split(tops.GroupedLinear(2, 4, 4), m, ExpertParallel()),
        ValueError,
        "parameters must be one weight and at most one bias",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_styles(mesh, make, error, message):
    with pytest.raises(error, match=message):
        make(mesh)


def test_dtensors_where_none_belong(mesh):
    module = tops.Sequential(tops.Linear(4, 4), tops.GELU())
    x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()], src_data_rank=None)
    want = r"inputs must be local tensors, got a DTensor; call its to_local\(\)"
    with pytest.raises(TypeError, match=want):
        module(x)
    assert module(x.to_local()).shape == (4, 4)
    shard = distribute_tensor(module[0].weight, mesh, [Shard(0)], src_data_rank=None)
    module[0].weight = nn.Parameter(shard)
    want = r"\[Linear\] weight must be placed as \(R.*,\) for tensor_parallel_mode=None"
    with pytest.raises(RuntimeError, match=want):
        module(torch.ones(4, 4))


def test_local(mesh):
    tensor = torch.ones(4)
    assert local(tensor) is tensor
    parameter = nn.Parameter(distribute_tensor(tensor, mesh, [Replicate()], src_data_rank=None))
    assert isinstance(parameter, DTensor) and torch.equal(local(parameter), tensor)
    local(parameter, partial=True).sum().backward()
    assert parameter.grad.shape == (4,)
