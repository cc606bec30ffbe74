"""Several gloo processes give the numbers of one: DDP, FSDP2, collectives, tensor parallelism."""

import distributed_worker
import parallel_worker
import pytest
import torch


def test_two_processes(tmp_path):
    torch.multiprocessing.spawn(distributed_worker.work, (str(tmp_path / "rendezvous"),), nprocs=2)


@pytest.mark.parametrize("size", [2, 4])
def test_parallel(tmp_path, size):
    arguments = (str(tmp_path / "rendezvous"), size)
    torch.multiprocessing.spawn(parallel_worker.work, arguments, nprocs=size)
