"""What two gloo processes run for `test_distributed_failures.py`: one does something different, and
the other must end with an error. Each writes the errors of all cases to a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from process_groups import OLD_GROUPS
from ranks import start_group

import transformer_ops as tops


def mlp(group: Any) -> tops.Sequential:
    split = {"sequence_parallel": True, "tensor_parallel_group": group}
    return tops.Sequential(
        tops.RMSNorm(8),
        tops.Linear(8, 16, tensor_parallel_mode="column", **split),
        tops.GELU(),
        tops.Linear(16, 8, tensor_parallel_mode="row", **split),
    )


def step(module: tops.Sequential, with_grad: bool = True) -> None:
    x = torch.randn(4, 8, requires_grad=with_grad)
    y = module.requires_grad_(with_grad)(x)
    if with_grad:
        y.sum().backward()


def other_plan(rank: int, module: tops.Sequential) -> None:
    """One rank runs a backward, whose collectives meet those of the other rank's next forward."""
    step(module)
    for _ in range(2):
        step(module, with_grad=rank == 0)


def other_rows(rank: int, module: tops.Sequential) -> None:
    """The ranks have different numbers of rows."""
    module(torch.randn(4 + 2 * rank, 8))


def death(rank: int, module: tops.Sequential) -> None:
    """One process ends without a message."""
    step(module)
    if rank == 1:
        os._exit(0)
    step(module)


def work(rank: int, folder: str) -> None:
    """Runs one rank of all cases, each in a group of its own."""
    start_group(rank, 2, folder)
    told = {}
    for case in (death,) if OLD_GROUPS else (other_plan, other_rows, death):
        # This has the effect of TORCH_DISTRIBUTED_DEBUG, which is read when torch is loaded.
        level = dist.DebugLevel.OFF if case is death else dist.DebugLevel.DETAIL
        dist.set_debug_level(level)
        module = mlp(dist.new_group())
        try:
            case(rank, module)
        except RuntimeError as error:
            told[case.__name__] = str(error)
            Path(folder, f"told{rank}").write_text(json.dumps(told))
    # This exits at once, because the rest of the groups would wait for the other process.
    os._exit(0)
