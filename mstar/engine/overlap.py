"""Overlap: a step is launched before anyone has read what the step before it gave.

While requests only generate, the next step's ids are tokens that the device has. So the step is
planned as the one behind the next commit, and its ids are copied from where the tokens were
chosen; meanwhile the CPU records, tells and schedules. A request may turn out to have ended, or be
aborted: its row is computed all the same, into the slot of its last token, which is not counted as
stored, and nobody reads it.
What was launched is a ``Flight`` until the scheduler asks for it, or for what is left of it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mstar.engine.batch import Batch, NodeOutput


class Pending(ABC):
    """The output of a step of one token a segment, which the device may not have computed yet."""

    tokens: Tensor
    """int64 ``[num_segments]``, on the device; negative where there is none."""

    @abstractmethod
    def fetch(self) -> NodeOutput:
        """Wait for the output and return it; all segments are yielding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A step that was launched and that nobody has asked for."""

    batch: Batch
    """Its requests; some may have ended since."""
    pending: Pending
    revision: int
    """The resources' revisions that it was planned at, all together."""

    def rows_of(self, batch: Batch) -> Sequence[int] | None:
        """Return the rows that compute ``batch``; ``None``: it asks for something else."""
        if batch is self.batch:
            return range(len(batch.requests))
        if not batch.is_decode or batch.node != self.batch.node:
            return None
        row_of = {id(request): row for row, request in enumerate(self.batch.requests)}
        rows = [row_of.get(id(request), -1) for request in batch.requests]
        return None if -1 in rows else rows

    def fetch(self, rows: Sequence[int]) -> NodeOutput:
        """Wait for the output and return that of ``rows``."""
        output = self.pending.fetch()
        return output if len(rows) == len(self.batch.requests) else output.of(rows)
