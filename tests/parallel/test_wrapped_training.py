"""Training under recipes in DDP, FSDP1, FSDP2 and `replicate`, straight and resumed."""

from pathlib import Path

import pytest
import wrapped_worker
from pairs import all_rows, pairs_of_all
from ranks import spawn
from wrapped_worker import AXES, REFUSED, REFUSED_ROWS, TABLE, WRAPPERS, refusal

pytestmark = pytest.mark.takes(seconds=35)


def test_every_two_values_meet() -> None:
    """In rows that run, but for pairs that are refused in every row."""
    pairs = pairs_of_all([row for row in all_rows(AXES) if refusal(row) is None])
    assert pairs_of_all(TABLE) == pairs == pairs_of_all(all_rows(AXES))
    assert all(refusal(row) is None for row in TABLE)
    assert len(TABLE) <= 36  # recipes times kinds of checkpointing are 30


def test_every_refused_combination_is_tried() -> None:
    for some, message in REFUSED:
        rows = [row for row in REFUSED_ROWS if some.items() <= row.items()]
        assert {row["wrapper"] for row in rows} == set(WRAPPERS)
        assert all(refusal(row) == message for row in rows)


def test_wrapped_training(tmp_path: Path) -> None:
    spawn(wrapped_worker.work, str(tmp_path), ranks=2)
