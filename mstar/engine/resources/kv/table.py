"""PageTable: which pages each stream holds and how far they are written; knows no keys."""

import numpy as np
import numpy.typing as npt

from mstar.engine.resources.kv.layout import SINK_PAGE


class PageTable:
    """Rows of page ids, one a stream, with the stored length of each.

    Args:
        num_rows: Streams at first; grows as needed.
        max_pages: Pages a stream may hold.
    """

    def __init__(self, num_rows: int, max_pages: int) -> None:
        self.max_pages = max_pages
        self._pages = np.full((num_rows, max_pages), SINK_PAGE, np.int32)
        self._free = list(range(num_rows - 1, -1, -1))
        self.num_pages = np.zeros(num_rows, np.int64)
        """``[num_rows]``: pages of each stream."""
        self.stored = np.zeros(num_rows, np.int64)
        """``[num_rows]``: written slots of each stream, in tokens."""

    def take_row(self) -> int:
        """Return an empty row."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def give_row(self, row: int) -> npt.NDArray[np.int32]:
        """Empty the row and return the pages it held, in order."""
        pages = self.pages(row).copy()
        self._pages[row, : len(pages)] = SINK_PAGE
        self.num_pages[row] = 0
        self.stored[row] = 0
        self._free.append(row)
        return pages

    def pages(self, row: int) -> npt.NDArray[np.int32]:
        """Return the row's pages in order, as a view."""
        return self._pages[row, : self.num_pages[row]]

    def extend(self, row: int, pages: list[int] | npt.NDArray[np.int32]) -> None:
        """Put ``pages`` behind those of the row."""
        start = int(self.num_pages[row])
        end = start + len(pages)
        assert end <= self.max_pages, f"row {row}: {end} pages, at most {self.max_pages} fit"
        self._pages[row, start:end] = pages
        self.num_pages[row] = end

    def extend_each(self, counts: list[tuple[int, int]], pages: list[int]) -> None:
        """Deal ``pages`` out to rows, ``(row, count)`` each."""
        start = 0
        for row, count in counts:
            if count == 1:
                index = int(self.num_pages[row])
                assert index < self.max_pages, f"row {row}: at most {self.max_pages} pages fit"
                self._pages[row, index] = pages[start]
                self.num_pages[row] = index + 1
            else:
                self.extend(row, pages[start : start + count])
            start += count

    def cut(self, row: int, num_pages: int) -> npt.NDArray[np.int32]:
        """Shorten the row to ``num_pages`` and return the pages that went, in order."""
        gone = self._pages[row, num_pages : self.num_pages[row]].copy()
        self._pages[row, num_pages : self.num_pages[row]] = SINK_PAGE
        self.num_pages[row] = num_pages
        return gone

    def replace(self, row: int, index: int, page: int) -> int:
        """Put ``page`` at ``index`` of the row and return the page that was there."""
        old = int(self._pages[row, index])
        self._pages[row, index] = page
        return old

    def gather(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return ``[len(rows), longest]``: the rows' pages, filled up with the sink page."""
        width = int(self.num_pages[rows].max()) if len(rows) else 0
        return self._pages[rows, :width]

    def lookup(
        self, rows: npt.NDArray[np.int64], indices: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """Return the page at ``indices[i]`` of ``rows[i]``."""
        return self._pages[rows, indices]

    def _grow(self) -> None:
        old = len(self.stored)
        new = max(2 * old, 8)
        pages = np.full((new, self.max_pages), SINK_PAGE, np.int32)
        pages[:old] = self._pages
        self._pages = pages
        self.num_pages = np.concatenate([self.num_pages, np.zeros(new - old, np.int64)])
        self.stored = np.concatenate([self.stored, np.zeros(new - old, np.int64)])
        self._free.extend(range(new - 1, old - 1, -1))
