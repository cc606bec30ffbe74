"""Training under recipes in DDP, FSDP1, FSDP2 and `replicate`, straight and resumed."""

from pathlib import Path

import wrapped_worker
from ranks import spawn


def test_wrapped_training(tmp_path: Path) -> None:
    spawn(wrapped_worker.work, str(tmp_path), ranks=2)
