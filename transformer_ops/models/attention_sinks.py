"""Sinks in the statements of an attention module: one more score of each row, whose value is 0.

Either the softmax is over the scores and those of sinks, of which the last is dropped; or what
attention gives is multiplied by the part of all probabilities that is not the sink's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .attention_statements import Path, Rows, Scores, Sinks, Unknown

__all__ = ["LogSums", "SinkReader"]


@dataclass(eq=False)
class LogSums(Rows):
    """`logsumexp` of rows of scores; less the scores of sinks, if there are some; or the sigmoid of
    that."""

    scores: Scores
    sinks: Path = ()
    is_part: bool = False


class SinkReader:
    """What the statements do to sinks."""

    # The scores of attention, once it is found.
    attended: Scores | None = None

    def with_sinks(self, scores: Scores, sinks: Sinks, dim: Any = 0) -> Scores:
        """Scores with one column more."""
        shape = *scores.at.shape[:-1], scores.at.shape[-1] + 1
        wanted = _by_head(shape[:-1]).unsqueeze(-1)
        is_known = scores.p is None and not scores.sinks and scores.has_columns
        if dim not in (-1, 3) or not is_known or not _are_equal(sinks.at, wanted):
            raise Unknown("its scores are changed")
        at = torch.arange(math.prod(shape)).view(shape)
        return replace(scores, at=at, sinks=sinks.path, has_sink=True)

    def columns(self, scores: Scores, index: Any) -> Scores:
        """An indexing of scores, which may drop the column of a sink."""
        found = replace(scores, at=scores.at[index])
        if not scores.has_sink or scores.p is None or not scores.has_columns:
            return found
        if not _are_equal(found.at, scores.at[..., :-1]):
            return found
        at = torch.arange(found.at.numel()).view(found.at.shape)
        return replace(found, at=at, has_sink=False)

    def log_sums(self, scores: Any, dim: Any = None, keepdim: Any = False) -> LogSums:
        """`torch.logsumexp` of all scores of a row."""
        is_known = isinstance(scores, Scores) and scores.p is None and not scores.sinks
        if not is_known or not scores.has_columns or dim != -1 or keepdim:
            raise Unknown("it sums something else")
        shape = scores.at.shape[:-1]
        return LogSums(torch.arange(math.prod(shape)).view(shape), scores)

    def less_sinks(self, sums: Any, sinks: Sinks) -> LogSums:
        """Each sum less the score of the sink of its head."""
        if not isinstance(sums, LogSums) or sums.sinks:
            raise Unknown("its sinks are others")
        shape = sums.scores.at.shape[:-1]
        is_known = _are_equal(sums.at, torch.arange(sums.at.numel()).view(shape))
        is_known &= len(sinks.at.shape) == 3 and sinks.at.shape[1] == shape[1]
        if not is_known or not _are_equal(sinks.at.expand(shape), _by_head(shape)):
            raise Unknown("its sinks are others")
        return replace(sums, sinks=sinks.path)

    def part_of(self, sums: Any) -> LogSums:
        """The part of probabilities that is not the sink's: a sigmoid."""
        if not isinstance(sums, LogSums) or not sums.sinks or sums.is_part:
            raise Unknown("its sigmoid is of something else")
        return replace(sums, is_part=True)

    def times_part(self, rows: Rows, part: Rows) -> Rows:
        """What attention gives, by the part of probabilities that is not the sink's."""
        reader: Any = self
        attended = self.attended
        if type(rows) is not Rows:
            rows, part = part, rows
        if isinstance(part, LogSums) and part.is_part and type(rows) is Rows and attended:
            scores, shape = part.scores, part.scores.at.shape[:-1]
            same = ("query", "key", "scale", "is_masked", "masking")
            is_same = all(getattr(scores, one) is getattr(attended, one) for one in same)
            is_whole = _are_equal(part.at, torch.arange(math.prod(shape)).view(*shape, 1))
            is_whole &= _are_equal(rows.at, reader.output_of(reader.found).at)
            if is_same and is_whole and not reader.found.sinks:
                reader.found = reader.found._replace(sinks=part.sinks)
                return rows
        raise Unknown("it multiplies something else")


def _by_head(shape: tuple[int, ...]) -> Tensor:
    """[batch, heads, rows]: which head each is of."""
    if len(shape) != 3:
        raise Unknown("its scores are changed")
    return torch.arange(shape[1]).view(1, -1, 1).expand(shape)


def _are_equal(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool(found.eq(wanted).all())
