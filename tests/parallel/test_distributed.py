"""Several gloo processes give the numbers of one: DDP, FSDP2, collectives, tensor parallelism."""

import gpt_worker
import parallel_worker
import pytest
import torch
from lm.parallel import Ranks
from ranks import spawn

pytestmark = pytest.mark.takes(seconds=40)


def test_parallel(tmp_path):
    torch.save(gpt_worker.one_process(), tmp_path / "one_process.pt")
    for size in (4, 2):
        spawn(parallel_worker.work, str(tmp_path), size, ranks=size)
    gpt_worker.check_resumed(Ranks(1, torch.device("cpu")), tmp_path)
