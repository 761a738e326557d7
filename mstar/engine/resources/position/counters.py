"""SpanCounters: the position of every slot of a layout, whichever steps compute it."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from mstar.engine.resources.position.config import PositionConfig, PosScheme
from mstar.engine.resources.spans import Span


class SpanCounters:
    """Where a stream's counter stands at each slot of its layout and behind.

    An item moves the counter by its ``advance`` once it is whole, and else as the scheme does.
    Under ``SEQUENTIAL`` a slot inside a span is as far behind the span's start as in slots. Under
    ``BLOCK`` all slots of an item, or of ids with no item between them, are at one position.

    Args:
        spans: The layout; at least one span.
        config: Names the scheme.
    """

    def __init__(self, spans: Sequence[Span], config: PositionConfig) -> None:
        self._is_block = config.scheme is PosScheme.BLOCK
        self._step = config.block_step
        self._starts: list[int] = [0]
        """First slot of each run, and the slot behind the last."""
        self._counters: list[int] = [0]
        """Counter at each of these."""
        for is_item, group in groupby(spans, lambda span: span.digest is not None):
            runs = list(group)
            if not is_item:
                runs = [Span(sum(run.length for run in runs))]
            for run in runs:
                self._starts.append(self._starts[-1] + run.length)
                self._counters.append(self._counters[-1] + self._move(run))

    def _move(self, run: Span) -> int:
        if run.advance is not None:
            return run.advance
        if self._is_block:
            return self._step if run.length else 0
        return run.length

    @property
    def num_slots(self) -> int:
        """Slots of the layout; behind it come generated ids."""
        return self._starts[-1]

    def at(self, slot: int) -> int:
        """Return the counter of a stream that has stored ``slot`` slots."""
        run = bisect_right(self._starts, slot) - 1
        if run == len(self._starts) - 1:
            behind = slot - self._starts[-1]
            return self._counters[-1] + behind * (self._step if self._is_block else 1)
        return self._counters[run] + (0 if self._is_block else slot - self._starts[run])

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions of slots ``start`` to ``stop``."""
        ids = np.empty(stop - start, np.int64)
        done = start
        while done < stop:
            run = bisect_right(self._starts, done)
            end = min(stop, self._starts[run]) if run < len(self._starts) else stop
            first = self.at(done)
            if run == len(self._starts):
                step = self._step if self._is_block else 1
            else:
                step = 0 if self._is_block else 1
            ids[done - start : end - start] = first + step * np.arange(end - done)
            done = end
        return ids
