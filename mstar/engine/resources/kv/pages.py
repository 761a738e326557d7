"""PagePool: who holds each physical page, and which page goes next; knows no keys.

Every page is in one of three states::

    free      nobody holds it, nothing worth keeping      taken first, last freed first
    held      ``ref_count`` holders
    retained  nobody holds it, kept for reuse             taken when no free page is left,
                                                          longest unused first

A retained page may be protected for a time: it goes only when all that are not have gone. The page
before it in its stream is protected as long or longer, so that no page outlives its prefix.

Retained pages wait in a queue of whole releases, so that giving back ten thousand pages is one
entry; entries that were taken up again are skipped when they come to the front.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

PageArray = npt.NDArray[np.int32]


class PagePool:
    """A fixed number of pages with reference counts.

    Args:
        num_pages: Pages to hand out; their ids are ``1 … num_pages``, since 0 is the sink.
        on_evict: Called with the ids of retained pages just before they are handed out anew, a
            stream's last page first.
        max_protected: Pages that may be protected at once.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        num_pages: int,
        on_evict: Callable[[list[int]], object],
        max_protected: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_pages = num_pages
        self._max_protected = max_protected
        self._time = clock
        self._until = np.zeros(num_pages + 1, np.float64)
        """Until when each page is protected, by ``clock``."""
        self._protected: list[tuple[float, int, list[int]]] = []
        """Heap of releases of protected pages: until when, their clock, and the pages."""
        self._expired: list[tuple[int, float, list[int]]] = []
        """Heap of those whose time is over: clock, until when, and the pages."""
        self._on_evict = on_evict
        self._free: list[int] = list(range(num_pages, 0, -1))
        self._ref_count = np.zeros(num_pages + 1, np.int32)
        self._is_kept = np.zeros(num_pages + 1, np.bool_)
        self._released_at = np.zeros(num_pages + 1, np.int64)
        self._queue: deque[tuple[int, list[int]]] = deque()
        self._num_queued = 0
        """Pages in the queue, those that were taken up again counted too."""
        self._clock = 0
        self.num_retained = 0
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Pages that hold nothing worth keeping."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that ``try_allocate`` could hand out."""
        return len(self._free) + self.num_retained

    @property
    def num_held(self) -> int:
        """Pages with at least one holder."""
        return self.num_pages - self.num_available

    def ref_count(self, page: int) -> int:
        """Return how many holders the page has."""
        return int(self._ref_count[page])

    def try_allocate(self, count: int) -> list[int] | None:
        """Return ``count`` pages with one holder each, or ``None`` if there are not so many."""
        if count > self.num_available:
            return None
        free = self._free
        if count <= len(free):
            cut = len(free) - count
            pages = free[cut:]
            del free[cut:]
            pages.reverse()
        else:
            pages = free[::-1]
            free.clear()
            evicted = [self._evict() for _ in range(count - len(pages))]
            self._on_evict(evicted)
            pages += evicted
        if count == 1:
            self._ref_count[pages[0]] = 1
        elif count:
            self._ref_count[pages] = 1
        return pages

    def retain(self, pages: Sequence[int] | PageArray) -> None:
        """Add a holder to each of ``pages``, which are distinct and held or retained."""
        if len(pages) == 0:
            return
        ids = np.asarray(pages, np.int64)
        counts = self._ref_count[ids]
        self.num_retained -= int(np.count_nonzero(counts == 0))
        self._ref_count[ids] = counts + 1

    def release(self, pages: Sequence[int] | PageArray) -> None:
        """Take a holder from each of ``pages``, distinct and in the order of their stream.

        Pages that nobody holds any more become free, or retained if they are kept; of one
        release, the stream's last page is evicted first, so that no page outlives its prefix.
        """
        if len(pages) == 0:
            return
        ids = np.asarray(pages, np.int64)
        counts = self._ref_count[ids] - 1
        assert int(counts.min()) >= 0, f"released more often than held: {ids[counts < 0]}"
        self._ref_count[ids] = counts
        idle = ids[counts == 0][::-1]
        if not len(idle):
            return
        kept = self._is_kept[idle]
        if kept.all():
            self._enqueue(idle)
            return
        self._free.extend(idle[~kept].tolist())
        self._until[idle[~kept]] = 0
        if kept.any():
            self._enqueue(idle[kept])

    def keep(self, page: int) -> None:
        """Retain this held page once nobody holds it."""
        self._is_kept[page] = True

    def is_kept(self, page: int) -> bool:
        """Tell whether the page is retained once nobody holds it."""
        return bool(self._is_kept[page])

    def unkeep(self, page: int) -> None:
        """Let this held page become free once nobody holds it."""
        assert self._ref_count[page] > 0, f"page {page} is not held"
        self._is_kept[page] = False
        self._until[page] = 0

    def protect(self, pages: Sequence[int], seconds: float) -> int:
        """Protect held pages from now on, as many of them as the bound allows.

        Args:
            pages: A stream's from its first on, in order.
            seconds: How long; it never shortens what was granted before.

        Returns:
            How many of the pages, from the first on, are protected so long.
        """
        now = self._time()
        ids = np.asarray(pages, np.int64)
        is_new = self._until[ids] <= now
        room = self._max_protected - int(np.count_nonzero(self._until > now))
        granted = int(np.count_nonzero(np.cumsum(is_new) <= room))
        ids = ids[:granted]
        self._until[ids] = np.maximum(self._until[ids], now + seconds)
        return granted

    def drop_kept(self) -> int:
        """Keep nothing any more: retained pages become free. Returns how many did."""
        dropped = np.nonzero(self._is_kept & (self._ref_count == 0))[0]
        self._free.extend(dropped.tolist())
        self._is_kept[:] = False
        self._queue.clear()
        self._protected.clear()
        self._expired.clear()
        self._until[:] = 0
        self._num_queued = 0
        self.num_retained = 0
        return len(dropped)

    def _enqueue(self, pages: npt.NDArray[np.int64]) -> None:
        self._clock += 1
        self._released_at[pages] = self._clock
        self._num_queued += len(pages)
        self.num_retained += len(pages)
        if self._max_protected:
            until = self._until[pages]
            if (until > self._time()).any():
                self._enqueue_protected(pages, until)
                return
        self._queue.append((self._clock, pages[::-1].tolist()))
        if self._num_queued > 2 * self.num_pages:
            self._compact()

    def _enqueue_protected(
        self, pages: npt.NDArray[np.int64], until: npt.NDArray[np.float64]
    ) -> None:
        """Queue a release by how long its pages are protected; those that are not go first."""
        for end in np.unique(until).tolist():
            part = pages[until == end][::-1].tolist()
            if end > self._time():
                heapq.heappush(self._protected, (end, self._clock, part))
            else:
                self._queue.append((self._clock, part))

    def _expire(self) -> None:
        """Let releases whose time is over compete with all others by when they were used last."""
        now = self._time()
        while self._protected and self._protected[0][0] <= now:
            until, clock, pages = heapq.heappop(self._protected)
            heapq.heappush(self._expired, (clock, until, pages))

    def _oldest(self) -> tuple[int, list[int]]:
        """Return the next release to evict from: its clock, and its pages.

        A page is released no sooner than those behind it in its stream. Of one release, what was
        never protected stands behind what was, and goes first.
        """
        if self._expired and (not self._queue or self._expired[0][0] < self._queue[0][0]):
            clock, _, pages = self._expired[0]
            return clock, pages
        if not self._queue:
            _, clock, pages = heapq.heappop(self._protected)
            self._queue.append((clock, pages))
        return self._queue[0]

    def _drop_oldest(self, pages: list[int]) -> None:
        """Forget the release of ``pages``, which ``_oldest`` has returned."""
        if self._expired and self._expired[0][2] is pages:
            heapq.heappop(self._expired)
        else:
            self._queue.popleft()

    def _is_current(self, page: int, clock: int) -> bool:
        return (
            self._released_at[page] == clock
            and self._ref_count[page] == 0
            and bool(self._is_kept[page])
        )

    def _compact(self) -> None:
        """Drop entries of the queue that were taken up again, so that it stays bounded."""
        old, self._queue = self._queue, deque()
        kept, self._protected = self._protected, []
        expired, self._expired = self._expired, []
        self._num_queued = self.num_retained
        for clock, pages in old:
            current = [page for page in pages if self._is_current(page, clock)]
            if current:
                self._queue.append((clock, current))
        for until, clock, pages in kept:
            current = [page for page in pages if self._is_current(page, clock)]
            if current:
                heapq.heappush(self._protected, (until, clock, current))
        for clock, until, pages in expired:
            current = [page for page in pages if self._is_current(page, clock)]
            if current:
                heapq.heappush(self._expired, (clock, until, current))

    def _evict(self) -> int:
        self._expire()
        while True:
            clock, pages = self._oldest()
            while pages:
                page = pages.pop()
                self._num_queued -= 1
                if self._is_current(page, clock):
                    self.num_retained -= 1
                    self.num_evictions += 1
                    self._is_kept[page] = False
                    self._until[page] = 0
                    return page
            self._drop_oldest(pages)

    def check(self) -> None:
        """Verify that every page is in exactly one state and the counts agree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert 0 not in free, "the sink page was freed"
        assert self._ref_count[0] == 0, f"the sink page has {self._ref_count[0]} holders"
        entries = [*self._queue, *((clock, pages) for _, clock, pages in self._protected)]
        entries += [(clock, pages) for clock, _, pages in self._expired]
        queued = sum(len(pages) for _, pages in entries)
        assert queued == self._num_queued, (queued, self._num_queued)
        retained: set[int] = set()
        for clock, pages in entries:
            for page in pages:
                if self._is_current(page, clock):
                    assert page not in retained, f"page {page} is retained twice"
                    retained.add(page)
        assert len(retained) == self.num_retained, (len(retained), self.num_retained)
        held = set(np.nonzero(self._ref_count)[0].tolist())
        assert not free & held, f"free and held: {free & held}"
        assert not free & retained, f"free and retained: {free & retained}"
        total = len(free) + len(held) + len(retained)
        assert total == self.num_pages, (len(free), len(held), len(retained), self.num_pages)
