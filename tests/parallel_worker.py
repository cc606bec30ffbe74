"""What several gloo processes run for `test_distributed.py`, each compared with one process:
collectives and tensor parallelism."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import distributed_worker
import gpt_worker
import torch
import torch.distributed as dist
from process_groups import DETAIL
from ranks import full, group_of_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import transformer_ops as tops
from transformer_ops.ops.collective import ReduceGradient
from transformer_ops.parallel import (
    ColwiseParallel,
    ExpertParallel,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    local,
)

OPS = (tops.AllGather, tops.ReduceScatter, tops.AllReduce, ReduceGradient)


def draw(seed: int, size: int, *shape: int, equal: bool = False) -> list[Tensor]:
    """A tensor for each rank, the same in all processes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(size)]
    return tensors[:1] * size if equal else tensors


# ---- the ops


def loss_of_all(op: type, inputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    """The loss of all ranks in one process. What all ranks have in common counts once."""
    if op is tops.AllGather:
        outputs = [torch.cat(inputs)] * len(inputs)
    elif op is tops.ReduceScatter:
        outputs = list(torch.stack(inputs).sum(0).chunk(len(inputs)))
    elif op is tops.AllReduce:
        outputs = [torch.stack(inputs).sum(0)]
    else:
        outputs = inputs[:1] * len(inputs)
    losses = [(y.square() * w).sum() for y, w in zip(outputs, weights, strict=False)]
    return torch.stack(losses).sum()


def check_op(op: type, rank: int, size: int) -> None:
    """Checks values, gradients and second derivatives."""
    whole = 2 * size
    rows, given_rows = {tops.AllGather: (2, whole), tops.ReduceScatter: (whole, 2)}.get(
        op, (whole, whole)
    )
    inputs = draw(0, size, rows, 3, equal=op is ReduceGradient)
    weights = draw(1, size, given_rows, 3, equal=op is tops.AllReduce)
    given = draw(2, size, rows, 3, equal=op is ReduceGradient)

    leaves = [x.clone().requires_grad_() for x in inputs]
    if op is ReduceGradient:
        leaves = leaves[:1] * size
    distinct = leaves[:1] if op is ReduceGradient else leaves
    first = torch.autograd.grad(loss_of_all(op, leaves, weights), distinct, create_graph=True)
    penalty = torch.stack([(g * v).sum() for g, v in zip(first, given, strict=False)]).sum()
    second = torch.autograd.grad(penalty, distinct)
    mine = 0 if op is ReduceGradient else rank

    x = inputs[rank].clone().requires_grad_()
    layer = tops.Sequential(op())
    (got,) = torch.autograd.grad((layer(x).square() * weights[rank]).sum(), x, create_graph=True)
    torch.testing.assert_close(got, first[mine])
    (got,) = torch.autograd.grad((got * given[rank]).sum(), x)
    torch.testing.assert_close(got, second[mine])
    (got,) = torch.autograd.grad((layer(x).square() * weights[rank]).sum(), x)
    torch.testing.assert_close(got, first[mine])
    if size == 2:  # which takes its time
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        (got,) = torch.autograd.grad((fast(x).square() * weights[rank]).sum(), x)
        torch.testing.assert_close(got, first[mine])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = inputs[rank].to(dtype)
        torch.testing.assert_close(layer(low).double(), layer(inputs[rank]), rtol=0.02, atol=0.02)


# ---- split products


def check_linear(mode: str, sequence: bool, bias: bool, rank: int, size: int) -> None:
    """A shard of the weight gives its part of the result of the whole weight."""
    rows, h, f = 3 * size, 2 * size, 4 * size
    x, weight, b, c = (
        draw(k, 1, *shape)[0] for k, shape in enumerate(((rows, h), (f, h), (f,), (rows, f)))
    )
    whole = [tensor.requires_grad_() for tensor in (x, weight, b)]
    y = torch.nn.functional.linear(x, weight, b if bias else None)
    want = torch.autograd.grad((y.square() * c).sum(), whole, allow_unused=True)

    def part(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor if dim is None else tensor.chunk(size, dim)[rank]

    split = 0 if mode == "column" else 1
    of_rows = 0 if sequence else None
    of_x, of_y = (of_rows, 1) if mode == "column" else (1, of_rows)
    layer = tops.Linear(
        h,
        f,
        bias=bias,
        dtype=torch.float64,
        tensor_parallel_mode=mode,
        sequence_parallel=sequence,
    )
    with torch.no_grad():
        layer.weight.copy_(part(weight, split))
        if bias:
            # By "row" the biases of all ranks are added.
            layer.bias.copy_(part(b, 0) if mode == "column" else b / size)
    mine = part(x, of_x).detach().requires_grad_()
    modules = [layer]
    if bias and size == 2:
        modules.append(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    for module in modules:
        got = module(mine)
        torch.testing.assert_close(got, part(y, of_y))
        loss = (got.square() * part(c, of_y)).sum()
        sources = [mine, *layer.parameters()]
        dx, dw, *db = torch.autograd.grad(loss, sources)
        torch.testing.assert_close(dx, part(want[0], of_x))
        torch.testing.assert_close(dw, part(want[1], split))
        if bias:
            torch.testing.assert_close(db[0], part(want[2], 0 if mode == "column" else None))


# ---- a decoder layer, split by heads

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 16, 8, 4, 4


def decoder_layer(ranks: int, split: dict[str, Any] | None = None) -> tops.Sequential:
    """The layer of a rank, and a branch whose product is whole on each. Without `split`, all
    products are whole."""
    heads, kv_heads = HEADS // ranks, KV_HEADS // ranks
    column: dict[str, Any] = {"dtype": torch.float64}
    row: dict[str, Any] = {"dtype": torch.float64, "bias": False}
    if split is not None:
        column |= {"tensor_parallel_mode": "column", **split}
        row |= {"tensor_parallel_mode": "row", **split}
    sizes = [n * HEAD_DIM for n in (HEADS, KV_HEADS, KV_HEADS)]
    return tops.Sequential(
        tops.Residual(
            {
                "norm": tops.RMSNorm(WIDTH, dtype=torch.float64),
                "qkv": tops.PackedLinear(WIDTH, sizes, **column),
                "qk": tops.QKNorm(heads, kv_heads, head_dim=HEAD_DIM, dtype=torch.float64),
                "rope": tops.RoPE(HEAD_DIM, heads + kv_heads),
                "attention": tops.Attention(heads, kv_heads, head_dim=HEAD_DIM, causal=True),
                "out": tops.Linear(HEADS * HEAD_DIM, WIDTH, **row),
            }
        ),
        tops.Residual(
            {
                "norm": tops.RMSNorm(WIDTH, dtype=torch.float64),
                "up": tops.PackedLinear(WIDTH, (24, 24), **column),
                "act": tops.SwiGLU(),
                "down": tops.Linear(24, WIDTH, **row),
            }
        ),
        tops.Residual(
            {
                "norm": tops.LayerNorm(WIDTH, dtype=torch.float64),
                "act": tops.GELU(),
                "whole": tops.Linear(WIDTH, WIDTH, dtype=torch.float64),
            }
        ),
    )


def by_styles(mesh: DeviceMesh, sequence: bool) -> tops.Sequential:
    """The same layer, split by the styles of `transformer_ops.parallel`."""
    rows = Shard(0) if sequence else Replicate()
    norm = SequenceParallel() if sequence else ReplicateParallel()
    # A rank's heads alone give a part of the gradients of QKNorm.
    plan = {"*.norm": norm, "2.whole": norm, "0.qk": SequenceParallel()}
    plan |= dict.fromkeys(("0.qkv", "1.up"), ColwiseParallel(input_layouts=rows))
    plan |= dict.fromkeys(("0.out", "1.down"), RowwiseParallel(output_layouts=rows))
    return parallelize_module(decoder_layer(mesh.size()), mesh, plan)


def check_decoder_layer(sequence: bool, shape: tuple[int, ...], rank: int, size: int) -> None:
    """A rank's heads and columns give its part of what the whole layer gives."""
    table, x, c = (draw(k, 1, *sizes)[0] for k, sizes in enumerate(((8, 4), shape, shape)))
    torch.manual_seed(0)
    whole = decoder_layer(1)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    leaf = x.requires_grad_()
    y = whole(leaf, table, table)
    wanted = torch.autograd.grad((y.square() * c).sum(), [leaf, *whole.parameters()])
    of_names = dict(zip((n for n, _ in whole.named_parameters()), wanted[1:], strict=True))

    def part(name: str, tensor: Tensor) -> Tensor:
        module = name.split(".")[1]
        dim = {"qkv": 0, "up": 0, "out": 1, "down": 1}.get(module)
        return tensor if dim is None else tensor.chunk(size, dim)[rank]

    def of_rows(tensor: Tensor) -> Tensor:
        return tensor.chunk(size)[rank] if sequence else tensor

    split = decoder_layer(size, {"sequence_parallel": sequence})
    split.load_state_dict({name: part(name, t) for name, t in whole.state_dict().items()})
    torch.manual_seed(0)
    styled = by_styles(init_device_mesh("cpu", (size,)), sequence)
    state = styled.state_dict()
    assert state.keys() == whole.state_dict().keys()
    for name, tensor in whole.state_dict().items():
        local(state[name]).copy_(part(name, tensor))
    runs = [(split, split), (styled, styled)]
    if size == 2 and sequence and len(shape) == 2:  # which takes its time
        runs.append((split, torch.compile(split, fullgraph=True, backend="aot_eager")))
    for module, run in runs:
        mine = of_rows(x.detach()).requires_grad_()
        got = run(mine, table, table)
        torch.testing.assert_close(got, of_rows(y))
        loss = (got.square() * of_rows(c)).sum()
        dx, *grads = torch.autograd.grad(loss, [mine, *module.parameters()])
        torch.testing.assert_close(dx, of_rows(wanted[0]))
        for (name, _), grad in zip(module.named_parameters(), grads, strict=True):
            if isinstance(grad, DTensor):
                torch.testing.assert_close(grad.full_tensor(), of_names[name])
                continue
            if "qk." in name or (sequence and ("norm" in name or "whole" in name)):
                dist.all_reduce(grad)  # of this rank's heads or rows
            torch.testing.assert_close(grad, part(name, of_names[name]))


# ---- experts


def expert_layer(delay: bool = False) -> tops.Sequential:
    """A layer on the rows of all ranks, from the gather to the scatter, which one process skips."""
    torch.manual_seed(0)
    router = tops.Router(8, 4, 2, dtype=torch.float64)
    router.set_extra_output_channel(0, "ids", output_to_caller=False)
    router.set_extra_output_channel(1, "probs", output_to_caller=False)
    dispatch = tops.Dispatch(4)
    dispatch.set_extra_input_channel(0, "ids").set_extra_input_channel(1, "probs")
    for k, name in enumerate(("splits", "permuted_probs", "positions")):
        dispatch.set_extra_output_channel(k, name, output_to_caller=False)
    options = {"bias": False, "single_grouped_weight": True, "dtype": torch.float64}
    options["delay_wgrad_compute"] = delay
    up, down = tops.GroupedLinear(4, 8, 12, **options), tops.GroupedLinear(4, 6, 8, **options)
    return tops.Sequential(
        {
            "norm": tops.RMSNorm(8, dtype=torch.float64),
            "gather": tops.Identity(),
            "router": router,
            "dispatch": dispatch,
            "up": up.set_extra_input_channel(0, "splits"),
            "act": tops.ScaledSwiGLU().set_extra_input_channel(0, "permuted_probs"),
            "down": down.set_extra_input_channel(0, "splits"),
            "combine": tops.Combine().set_extra_input_channel(0, "positions"),
            "scatter": tops.Identity(),
        }
    )


def shared_experts(mesh: DeviceMesh, delay: bool = False) -> tops.Sequential:
    """The same layer, with its experts split over the ranks of a mesh."""
    parts = dict(expert_layer(delay).named_children())
    parts |= {"gather": tops.AllGather(mesh), "scatter": tops.ReduceScatter(mesh)}
    shared = tops.Sequential(parts)
    plan = {"norm": SequenceParallel(), "router": SequenceParallel()}
    plan |= dict.fromkeys(("dispatch", "up", "down"), ExpertParallel())
    return parallelize_module(shared, mesh, plan)


def train_experts(layer: nn.Module, replicas: int, parts: slice, part: int, of: int) -> Tensor:
    """The losses of three steps on the rows of some replicas, of which this rank has a part."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.02)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        (rows,) = draw(step, 1, replicas * 8, 8)
        loss = torch.zeros((), dtype=torch.float64)
        for x in rows.chunk(replicas)[parts]:
            y, aux = layer(x.chunk(of)[part])
            loss = loss + y.square().sum() + aux / of
        loss = loss / len(range(replicas)[parts])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_sharded_experts(rank: int, size: int, experts: int) -> None:
    """FSDP2 over replicas, in each of which `experts` ranks split the experts, equals one
    process."""
    replicas = size // experts
    names = ("replica", "experts")
    mesh = init_device_mesh("cpu", (replicas, experts), mesh_dim_names=names)
    whole = expert_layer()
    want = train_experts(whole, replicas, slice(None), 0, 1)
    shared = shared_experts(mesh["experts"])
    fully_shard(shared, mesh=mesh["replica"])
    weight = shared.up.weight
    assert isinstance(weight, DTensor) and weight.to_local().shape[0] == 4 // size
    mine = rank // experts
    losses = train_experts(shared, replicas, slice(mine, mine + 1), rank % experts, experts)
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / replicas, want)
    for name, tensor in shared.state_dict().items():
        torch.testing.assert_close(full(tensor), whole.state_dict()[name])


def check_experts(rank: int, size: int) -> None:
    """Each rank has its experts and its rows; the numbers equal those of one process."""
    x = draw(5, 1, 8, 8)[0].requires_grad_()
    whole = expert_layer()
    y, aux = whole(x)
    loss = y.square().sum() + aux
    want = torch.autograd.grad(loss, [x, *whole.parameters()])

    shared = shared_experts(init_device_mesh("cpu", (size,)))
    assert shared.up.weight.to_local().shape == (4 // size, 12, 8)
    mine = x.detach().chunk(size)[rank].requires_grad_()
    modules = [shared]
    if size == 2:  # which takes its time
        modules.append(torch.compile(shared, fullgraph=True, backend="aot_eager"))
    for module in modules:
        got, aux_loss = module(mine)
        torch.testing.assert_close(got, y.chunk(size)[rank])
        torch.testing.assert_close(aux_loss, aux)
        # All ranks have the same auxiliary loss; it counts once.
        loss = got.square().sum() + aux_loss / size
        found = torch.autograd.grad(loss, [mine, *shared.parameters()])
        torch.testing.assert_close(found[0], want[0].chunk(size)[rank])
        for tensor, expected in zip(found[1:], want[1:], strict=True):
            torch.testing.assert_close(tensor.full_tensor(), expected)
    late = shared_experts(shared.up.weight.device_mesh, delay=True)
    got, aux_loss = late(mine)
    (got.square().sum() + aux_loss / size).backward()
    assert late.up.weight.grad is None and late.router.weight.grad is not None
    late.up.backward_dw()
    late.down.backward_dw()
    for parameter, expected in zip(late.parameters(), want[1:], strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected)


def check_delayed(rank: int, size: int) -> None:
    """DDP averages a weight gradient that is computed later when `backward_dw()` returns it."""
    options = {"bias": False, "dtype": torch.float64}
    torch.manual_seed(0)
    late = tops.GroupedLinear(2, 3, 4, delay_wgrad_compute=True, **options)
    plain = tops.GroupedLinear(2, 3, 4, **options)
    plain.load_state_dict(late.state_dict())
    inputs, splits = draw(6, size, 5, 3), torch.tensor([2, 3])
    for x in inputs:
        (plain(x, splits).square().sum() / size).backward()
    shared = nn.parallel.DistributedDataParallel(late)
    for _ in range(2):
        late.zero_grad()
        shared(inputs[rank], splits).square().sum().backward()
        assert late.weight0.grad is None
        late.backward_dw()
        for a, b in zip(late.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def check_halves(mode: str, sequence: bool, rank: int, size: int) -> None:
    """Each gradient alone equals that of a backward for all. For a row product, ranks may want
    different gradients, because the gather is the same for all of them."""
    rows = 640 * size  # so many that backward gathers them in chunks
    torch.manual_seed(rank)
    layer = tops.Linear(4 * size, 6 * size, tensor_parallel_mode=mode, sequence_parallel=sequence)
    mine = rows // size if mode == "column" and sequence else rows
    x = torch.randn(mine, layer.weight.shape[1], requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    tensors = [x, layer.weight, layer.bias]
    whole = torch.autograd.grad(y, tensors, grad, retain_graph=True)
    orders = [[0, 1, 2]]
    if mode == "row":
        orders.append([(k + rank) % 3 for k in range(3)])
    for order in orders:
        for k in order:
            (got,) = torch.autograd.grad(y, tensors[k], grad, retain_graph=True)
            assert torch.equal(got, whole[k]), (mode, sequence, k)


# ---- no rank waits forever


def check_modes() -> None:
    """All ranks alternate training, eval, no-grad and frozen layers; torch compares their calls."""
    # This has the effect of TORCH_DISTRIBUTED_DEBUG=DETAIL for groups that are made from now on.
    dist.set_debug_level(DETAIL)
    layer = by_styles(DeviceMesh.from_group(dist.new_group(), "cpu"), sequence=True)
    x, table = draw(0, 1, 4, WIDTH)[0], draw(1, 1, 8, 4)[0]  # 4 rows of a rank, 8 of both
    for step in range(200):
        layer.train(step % 4 != 1)
        layer[0].requires_grad_(step % 4 != 2)
        with torch.set_grad_enabled(step % 4 != 3):
            y = layer(x, table, table)
        if y.requires_grad:
            y.sum().backward()
    dist.set_debug_level(dist.DebugLevel.OFF)


def work(rank: int, folder: str, size: int) -> None:
    """Runs one rank. The folder has the results of one process and of other jobs."""
    with group_of_ranks(rank, size, folder):
        for op in OPS:
            check_op(op, rank, size)
        for mode, sequence, bias in itertools.product(
            ("column", "row"), (False, True), (False, True)
        ):
            check_linear(mode, sequence, bias, rank, size)
        for mode, sequence in (("column", True), ("row", True), ("column", False)):
            check_halves(mode, sequence, rank, size)
        for sequence, shape in ((False, (8, WIDTH)), (True, (8, WIDTH)), (True, (4, 8, WIDTH))):
            check_decoder_layer(sequence, shape, rank, size)
        check_experts(rank, size)
        check_delayed(rank, size)
        for experts in (1, 2):
            check_sharded_experts(rank, size, experts)
        if size == 2:  # which takes its time
            distributed_worker.check(rank)
            check_modes()
        gpt_worker.check(Path(folder))
