"""check_fusion refuses each of many wrong fusions, and accepts the right ones."""

import pytest
from wrong_fusions import PATTERNS, RIGHT, WRONG, Row, Typed, X

from transformer_ops.testing import check_fusion

pytestmark = pytest.mark.takes(seconds=30)


def check(kind, fused, pattern, make, extra_inputs):
    return check_fusion(fused, make, X, *extra_inputs, kind=kind, pattern=pattern)


@pytest.mark.parametrize("fused", RIGHT, ids=lambda fused: fused.__name__)
def test_a_right_fusion(fused):
    kind, pattern, make, extra_inputs = PATTERNS[fused.__name__]
    report = check(kind, fused, pattern, make, extra_inputs)
    assert all(report.slots_read.values()) and (not report.not_tried or issubclass(fused, Typed))


@pytest.mark.parametrize("row", WRONG, ids=lambda row: row.name)
def test_a_wrong_fusion(row: Row):
    with pytest.raises((AssertionError, RuntimeError), match=row.message or None):
        check(row.kind, row.fused, row.pattern, row.make, row.extra_inputs)


def test_there_are_many():
    assert len({row.name for row in WRONG}) == len(WRONG) >= 40
