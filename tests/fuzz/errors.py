"""The errors that a caller's mistake may end in."""

from __future__ import annotations

EXPECTED = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
# These texts do not name the op, the rule and the value, or ask for a report to PyTorch's
# developers.
UNCLEAR = ("INTERNAL ASSERT", "report a bug", "std::", "bad_function_call", "_M_", "stoi", "stoll")
UNCLEAR += ("Unable to cast Python instance", "object has no attribute")


def assert_clear(error: Exception, context: str = "") -> None:
    assert isinstance(error, EXPECTED), f"an unclear error: {error!r}\n{context}"
    found = [part for part in UNCLEAR if part in str(error)]
    assert not found, f"an unclear error: {error!r}\n{context}"
