"""SpanCounters: the position of every slot of a layout, whichever steps compute it."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from mstar.engine.resources.position.config import PositionConfig, PosScheme
from mstar.engine.resources.spans import Grid, Span

GRID_AXES = 3
"""Axes that a grid places slots on."""


class SpanCounters:
    """Where a stream's counter stands at each slot of its layout and behind.

    An item moves the counter by its ``advance`` once it is whole, and else as its grid or the
    scheme does. Under ``SEQUENTIAL`` a slot inside a span is as far behind the span's start as in
    slots. Under ``BLOCK`` all slots of an item, or of ids with no item between them, are at one
    position. A grid says how far each of its slots is behind its start on each axis.

    Args:
        spans: The layout; at least one span.
        config: Names the scheme and the number of axes, which a grid needs three of.
    """

    def __init__(self, spans: Sequence[Span], config: PositionConfig) -> None:
        self._is_block = config.scheme is PosScheme.BLOCK
        self._step = config.block_step
        self._axes = config.axes
        self._grids: dict[int, Grid] = {}
        """Of the runs that have one, by the run's number."""
        self._starts: list[int] = [0]
        """First slot of each run, and the slot behind the last."""
        self._counters: list[int] = [0]
        """Counter at each of these."""
        for is_item, group in groupby(spans, lambda span: span.digest is not None):
            runs = list(group)
            if not is_item:
                runs = [Span(sum(run.length for run in runs))]
            for run in runs:
                if run.grid is not None:
                    assert config.axes == GRID_AXES, (config.axes, run)
                    self._grids[len(self._starts) - 1] = run.grid
                self._starts.append(self._starts[-1] + run.length)
                self._counters.append(self._counters[-1] + self._move(run))

    def _move(self, run: Span) -> int:
        if run.advance is not None:
            return run.advance
        if run.grid is not None:
            return run.grid.advance
        if self._is_block:
            return self._step if run.length else 0
        return run.length

    @property
    def num_slots(self) -> int:
        """Slots of the layout; behind it come generated ids."""
        return self._starts[-1]

    def at(self, slot: int) -> int:
        """Return the counter of a stream that has stored ``slot`` slots.

        Inside a grid, where no one number tells the position, it is that of the grid's start.
        """
        run = bisect_right(self._starts, slot) - 1
        if run == len(self._starts) - 1:
            behind = slot - self._starts[-1]
            return self._counters[-1] + behind * (self._step if self._is_block else 1)
        stays = self._is_block or run in self._grids
        return self._counters[run] + (0 if stays else slot - self._starts[run])

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions of slots ``start`` to ``stop``.

        The result is ``[stop - start]``, and ``[axes, stop - start]`` where there are several.
        """
        ids = np.empty((self._axes, stop - start), np.int64)
        done = start
        while done < stop:
            run = bisect_right(self._starts, done)
            end = min(stop, self._starts[run]) if run < len(self._starts) else stop
            first = self.at(done)
            if run == len(self._starts):
                step = self._step if self._is_block else 1
            else:
                step = 0 if self._is_block else 1
            own = ids[:, done - start : end - start]
            grid = self._grids.get(run - 1)
            if grid is None:
                own[:] = first + step * np.arange(end - done)
            else:
                begin = self._starts[run - 1]
                own[:] = first + grid_places(grid, done - begin, end - begin)
            done = end
        return ids if self._axes > 1 else ids[0]


def grid_places(grid: Grid, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Return ``[3, stop - start]``: time, row and column of slots ``start`` to ``stop``."""
    frame, place = np.divmod(np.arange(start, stop), grid.rows * grid.columns)
    row, column = np.divmod(place, grid.columns)
    return np.stack((np.array(grid.times, np.int64)[frame], row, column))
