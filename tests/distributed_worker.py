"""What two gloo processes run for `test_distributed.py`: DDP and FSDP2 against one process."""

from __future__ import annotations

import torch
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
    """A few steps; each rank sees its half of every batch. Returns the full parameters."""
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
    # One unit for each Linear, gathered and freed on its own.
    parts = make_model()
    for module in (parts[2], parts[4], parts):
        fully_shard(module, mesh=mesh)
    compare(train(parts, rank), want)
