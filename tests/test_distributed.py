"""DDP and FSDP2 over two gloo processes give the parameters of one process."""

import distributed_worker
import torch


def test_two_processes(tmp_path):
    torch.multiprocessing.spawn(distributed_worker.work, (str(tmp_path / "rendezvous"),), nprocs=2)
