"""What two gloo processes run for `test_distributed.py`: DDP and FSDP2 against one process."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import transformer_ops as tops

STEPS = 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return tops.Sequential(
        tops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        tops.RMSNorm(16),
        tops.Linear(16, 64),
        tops.SwiGLU(),
        tops.Linear(32, 16),
        tops.AddExtraInput().set_extra_input_channel(0, "residual"),
        tops.LayerNorm(16),
        tops.Linear(16, 4),
    )


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 16, generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, rank: int | None) -> dict[str, Tensor]:
    """Trains a few steps; each rank sees its half of every batch. Returns the full parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        mine = batch if rank is None else batch.chunk(2)[rank]
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()
    return {name: full(p).detach() for name, p in model.state_dict().items()}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert len(got) == len(want)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5)


def check(rank: int) -> None:
    want = train(make_model(), None)
    ddp = DistributedDataParallel(make_model())
    compare({n.removeprefix("module."): t for n, t in train(ddp, rank).items()}, want)
    mesh = init_device_mesh("cpu", (2,))
    whole = fully_shard(make_model(), mesh=mesh)
    assert all(isinstance(p, DTensor) for p in whole.parameters())
    compare(train(whole, rank), want)
    # Each Linear is one unit, which is gathered and freed separately.
    parts = make_model()
    for module in (parts[2], parts[4], parts):
        fully_shard(module, mesh=mesh)
    compare(train(parts, rank), want)
    check_quantized(rank)
    check_delayed_weights()
    check_delayed(rank)


def quantized_model(recipe: tops.recipe.Recipe | None = None) -> nn.Module:
    torch.manual_seed(0)
    with tops.quantized_model_init(recipe=recipe):
        return tops.Sequential(tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32, bias=False))


def codes(tensor: Tensor) -> Tensor:
    """The bytes of a quantized tensor, or of this rank's part of it."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    assert isinstance(local, tops.QuantizedTensor)
    return local.codes.view(torch.uint8)


def check_quantized(rank: int) -> None:
    """Codes are sharded and gathered as codes, and the model trains."""
    whole, sharded = quantized_model(), quantized_model()
    for op in (sharded[0], sharded[2]):
        fully_shard(op, mesh=init_device_mesh("cpu", (2,)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (whole, sharded)]
    for batch in torch.randn(STEPS, 8, 32, generator=torch.Generator().manual_seed(1)):
        for model, optimizer, mine in zip(
            (whole, sharded), optimizers, (batch, batch.chunk(2)[rank]), strict=True
        ):
            optimizer.zero_grad()
            model(mine).square().mean().backward()
            optimizer.step()
        for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(full(other.grad), one.grad, rtol=1e-4, atol=1e-6)
    for place in (0, 2):
        mine = codes(whole[place].weight).chunk(2)[rank]
        # Adding in another order may change a code.
        assert (mine != codes(sharded[place].weight)).float().mean() < 0.01
    check_checkpoint(rank, sharded)
    replicated = DistributedDataParallel(quantized_model())
    replicated(torch.full((2, 32), float(rank))).sum().backward()
    weight = replicated.module[0].weight
    replicas = [quantized_model() for _ in range(2)]
    for k, replica in enumerate(replicas):
        replica(torch.full((2, 32), float(k))).sum().backward()
    mean = (replicas[0][0].weight.grad + replicas[1][0].weight.grad) / 2
    assert torch.equal(codes(weight), codes(replicas[0][0].weight))
    torch.testing.assert_close(weight.grad, mean)
    with tops.quantized_model_init():
        odd = tops.BasicLinear(32, 7)
    fully_shard(odd, mesh=init_device_mesh("cpu", (2,)))
    try:
        odd(torch.randn(2, 32))
    except ValueError as error:
        assert "rows must be divisible by the 2 ranks" in str(error)
    else:
        raise AssertionError("rows that the ranks do not divide were taken")


def check_delayed_weights() -> None:
    """The numbers of delayed weights are sharded, and one rank computes the same codes from them
    again."""
    whole, sharded = (quantized_model(tops.recipe.DelayedScaling()) for _ in range(2))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    weights = {name: full(tensor) for name, tensor in sharded.state_dict().items()}
    other = quantized_model(tops.recipe.DelayedScaling())
    other[0].reset_parameters()
    other.load_state_dict(weights)
    for place in (0, 2):
        assert type(weights[f"{place}.weight"]) is Tensor
        assert torch.equal(codes(other[place].weight), codes(whole[place].weight))
        torch.testing.assert_close(other[place].weight.scale, whole[place].weight.scale)


def check_delayed(rank: int) -> None:
    """All ranks have scales from the largest magnitude on any rank, with one reduction in each
    step."""
    recipe = tops.recipe.DelayedScaling(amax_history_len=2)
    torch.manual_seed(0)
    model = tops.Sequential(tops.Linear(8, 16), tops.GELU(), tops.Linear(16, 4))
    reductions = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: reductions.append(args) or reduce(*args, **kwargs)
    try:
        for k in range(3):
            with tops.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
                y = model(torch.full((2, 8), 1.0 + k + rank))
            y.sum().backward()
        alone = tops.recipe.DelayedScaling(amax_history_len=2, reduce_amax=False)
        with torch.no_grad(), tops.autocast(recipe=alone):
            model(torch.ones(2, 8))
    finally:
        dist.all_reduce = reduce
    # Ranks first agree on what is reduced; the first time there is nothing to reduce.
    rows = [args[0] for args in reductions if args[0].is_floating_point()]
    assert [row.shape for row in rows] == [(6,)] * 2 and len(reductions) == 5
    assert model[0].fp8_amax_history[:, 0].tolist() == [3.0, 2.0]
    assert model[0].fp8_scale[0] == 448.0 / 3.0
    both = [torch.empty(3) for _ in range(2)]
    dist.all_gather(both, model[2].fp8_scale)
    assert torch.equal(both[0], both[1]) and (both[0] != 1).all()


def check_checkpoint(rank: int, sharded: nn.Module) -> None:
    """One rank loads the codes that two ranks saved."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=folder[0])
    whole = quantized_model()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.zero_()
    state = {"model": whole.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    whole.load_state_dict(state["model"])
    for place in (0, 2):
        mine = codes(whole[place].weight).chunk(2)[rank]
        assert torch.equal(mine, codes(sharded[place].weight))
