"""One model over several processes: tensor and sequence parallelism, FSDP2 over what is left.

torchrun (or `train_lm.py --tensor-parallel`, which calls it) starts the processes. Each has its own
windows of a batch; those of a tensor-parallel group share the products of all of theirs.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from transformer_ops.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from .model import GPT

TIMEOUT = timedelta(minutes=10)


class Ranks:
    """The processes of a run. Alone, without torchrun, all of this does nothing."""

    def __init__(self, tensor_parallel: int, device: torch.device) -> None:
        self.tensor_parallel = tensor_parallel
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.index = int(os.environ.get("RANK", "0"))
        self.device = device
        self.is_alone = "RANK" not in os.environ
        if self.is_alone:
            return
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=TIMEOUT)
        shape = (self.count // tensor_parallel, tensor_parallel)
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0

    def split(self, model: GPT) -> None:
        """Parameters become DTensors, of which each rank has a part."""
        if self.is_alone:
            return
        column = ColwiseParallel(input_layouts=Shard(0))
        row = RowwiseParallel(output_layouts=Shard(0))
        whole = SequenceParallel()
        plan = {
            "tokens": whole,
            "positions": whole,
            "blocks.*.attention_in.norm": whole,
            "blocks.*.attention_in.qkv": column,
            "blocks.*.attention_out.project": row,
            "blocks.*.mlp.norm": whole,
            "blocks.*.mlp.up": column,
            "blocks.*.mlp.down": row,
            "head.*": whole,
        }
        parallelize_module(model, self.mesh["tp"], plan)
        if self.count > self.tensor_parallel:
            for block in model.blocks:
                fully_shard(block, mesh=self.mesh["dp"])
            fully_shard(model, mesh=self.mesh["dp"])

    def part(self, batch: Tensor) -> Tensor:
        """This rank's windows."""
        return batch if self.is_alone else batch.chunk(self.count)[self.index]

    def backward(self, loss: Tensor) -> None:
        """Runs backward of the mean over this rank's windows, so that gradients are those of the
        mean over all ranks."""
        # FSDP2 takes the mean over its ranks; within a tensor-parallel group gradients add up.
        (loss / self.tensor_parallel).backward()

    def mean(self, value: float) -> float:
        """The mean over all ranks."""
        if self.is_alone:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.count

    def any(self, flag: bool) -> bool:
        """Whether it is set on some rank: what all of them go by."""
        return self.mean(float(flag)) > 0

    def finish(self) -> None:
        """Leave the process group."""
        if not self.is_alone:
            dist.destroy_process_group()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The states of model and optimizer, with whole tensors, on the first rank or in a single
    process."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizer, options=options)


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model with whole tensors, on every rank."""
    state = model.state_dict()
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}


def load_whole(model: nn.Module, optimizer: torch.optim.Optimizer, states: tuple[Any, Any]) -> None:
    """The inverse, where each rank has the whole tensors."""
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states[0],
        optim_state_dict=states[1],
        options=StateDictOptions(full_state_dict=True),
    )
