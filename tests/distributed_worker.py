"""What two gloo processes run for `test_distributed.py`: DDP and FSDP2 against one process."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import feed_forward, residual
from ranks import full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import transformer_ops as tops

STEPS = 3


def quantized_model(recipe: tops.recipe.Recipe | None = None) -> nn.Module:
    torch.manual_seed(0)
    with tops.quantized_model_init(recipe=recipe):
        return tops.Sequential(tops.Linear(32, 64), tops.GELU(), tops.Linear(64, 32, bias=False))


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    ops = residual(*feed_forward(32, 64))
    return tops.Sequential(*ops, tops.LayerNorm(32), tops.Linear(32, 4))


def products(model: nn.Module) -> list[tops.Linear]:
    return [op for op in model.modules() if isinstance(op, tops.Linear)]


def by_fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def by_products(model: nn.Module) -> nn.Module:
    """Each Linear is one unit, which is gathered and freed separately."""
    mesh = init_device_mesh("cpu", (2,))
    for module in (*products(model), model):
        fully_shard(module, mesh=mesh)
    return model


def train_both(make: Any, wrap: Any, rank: int) -> list[nn.Module]:
    """The model on whole batches and, wrapped, on this rank's half of each, after a few steps. Both
    must have the same gradients."""
    models = [make(), wrap(make())]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for batch in torch.randn(STEPS, 8, 32, generator=torch.Generator().manual_seed(1)):
        parts = (batch, batch.chunk(2)[rank])
        for model, optimizer, mine in zip(models, optimizers, parts, strict=True):
            optimizer.zero_grad()
            model(mine).square().mean().backward()
            optimizer.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(full(other.grad), one.grad, rtol=1e-4, atol=1e-6)
    return models


def check(rank: int) -> None:
    for make in (plain_model, quantized_model):
        for wrap in (DistributedDataParallel, by_fsdp2):
            train_both(make, wrap, rank)
    _, parts = train_both(plain_model, by_products, rank)
    assert all(isinstance(p, DTensor) for p in parts.parameters())
    check_quantized(rank)
    check_delayed_weights()
    check_delayed(rank)


def codes(tensor: Tensor) -> Tensor:
    """The bytes of a quantized tensor, or of this rank's part of it."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    assert isinstance(local, tops.QuantizedTensor)
    return local.codes.view(torch.uint8)


def check_quantized(rank: int) -> None:
    """Codes are sharded and gathered as codes, and the model trains."""
    whole, sharded = train_both(quantized_model, by_products, rank)
    for place in (0, 2):
        mine = codes(whole[place].weight).chunk(2)[rank]
        # Adding in another order may change a code.
        assert (mine != codes(sharded[place].weight)).float().mean() < 0.01
    check_checkpoint(rank, sharded)
    with tops.quantized_model_init():
        odd = tops.BasicLinear(32, 7)
    fully_shard(odd, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="rows must be divisible by the 2 ranks"):
        odd(torch.randn(2, 32))


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
