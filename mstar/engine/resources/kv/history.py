"""PageHistory: what streams wrote and what was forgotten lately, to say why a prompt missed."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.keys import PageItem
from mstar.engine.resources.kv.stream import StreamKeys

Content = tuple[Sequence[int], Sequence[PageItem]]
"""Ids that fill the slots which a page's items leave, and the items."""


class PageHistory:
    """The streams that opened last, and the keys that were evicted last.

    A stream costs nothing but its ids; pages are looked for only when someone asks.

    Args:
        max_pages: Pages of streams, and evicted keys, that are remembered.
        clock: Returns the time in seconds.
    """

    def __init__(self, max_pages: int = 2**16, clock: Callable[[], float] = monotonic) -> None:
        self._max_pages = max_pages
        self.now = clock
        self._streams: deque[tuple[float, int, StreamKeys]] = deque()
        """When each opened, its pages then, and its keys; the first one first."""
        self._num_pages = 0
        self._evicted_at: dict[bytes, float] = {}

    def opened(self, keys: StreamKeys, num_pages: int) -> None:
        """Remember a stream.

        Args:
            keys: Names of its pages, those that it still is to fill among them.
            num_pages: Pages that it begins with, to keep the bound by.
        """
        self._streams.append((self.now(), num_pages, keys))
        self._num_pages += num_pages
        while self._num_pages > self._max_pages and len(self._streams) > 1:
            _, gone, _ = self._streams.popleft()
            self._num_pages -= gone

    def evicted(self, key: bytes) -> None:
        """Note that a page is forgotten now."""
        self._evicted_at.pop(key, None)
        self._evicted_at[key] = self.now()
        if len(self._evicted_at) > self._max_pages:
            del self._evicted_at[next(iter(self._evicted_at))]

    def evicted_at(self, key: bytes, before: float) -> float | None:
        """Return when a page was last forgotten, where that was before a time."""
        evicted_at = self._evicted_at.get(key)
        return evicted_at if evicted_at is not None and evicted_at <= before else None

    def siblings(self, asker: Opening, parent: bytes, before: float) -> Iterator[Content]:
        """Yield full pages that other streams, opened before a time, wrote behind ``parent``.

        The last stream's page comes first.
        """
        for opened_at, _, keys in reversed(self._streams):
            if opened_at <= before and keys.opening is not asker:
                number = keys.place_behind(parent)
                if number is not None and number < keys.num_indexed:
                    yield keys.content(number)

    def clear(self) -> None:
        """Remember nothing."""
        self._streams.clear()
        self._num_pages = 0
        self._evicted_at.clear()
