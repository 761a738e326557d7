"""TierStack: tiers from the fastest to the slowest, as one store; knows no medium."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mstar.engine.resources.kv.tiers.base import Change, Evicted, Image, Name, Source, Tier


class Stored(NamedTuple):
    """A page as a tier gives it back."""

    num_slots: int
    """Slots that the key vouches for."""
    image: Image
    """Valid until the next ``get``, ``put`` or ``clear``; not to be written to."""
    medium: str
    """Where it was."""


class TierStack:
    """What falls out of one tier goes to the next; what is found stays where it is.

    Args:
        tiers: At least one, all of one page size, the fastest first.
        on_change: Told what becomes of keys, by the thread that calls the stack and never inside
            one of its tiers. Applied in order, the changes give exactly what each medium holds.
    """

    def __init__(
        self, tiers: Sequence[Tier], on_change: Callable[[Change], object] | None = None
    ) -> None:
        assert tiers, "a stack of no tiers"
        assert len({tier.page_nbytes for tier in tiers}) == 1, "tiers of different page sizes"
        self.tiers = tuple(tiers)
        self._on_change = on_change
        if on_change is not None:
            for tier in self.tiers:
                tier.watch()
            self.poll()

    def put(self, names: Sequence[Name], image: Source) -> None:
        """Keep a copy of a page; see ``Tier.put``."""
        self._put(0, names, image)
        self.poll()

    def _put(self, level: int, names: Sequence[Name], image: Source) -> None:
        if level < len(self.tiers):
            for evicted in self.tiers[level].put(names, image):
                self._put(level + 1, evicted.names, evicted.image)

    def wait_room(self, timeout: float) -> bool:
        """Wait until ``put`` would not drop a page for want of room to queue it, in any tier.

        Args:
            timeout: In seconds.
        """
        deadline = time.monotonic() + timeout
        return all(tier.wait_room(max(0.0, deadline - time.monotonic())) for tier in self.tiers)

    def find(self, key: bytes) -> str | None:
        """Return the fastest medium that seems to have ``key``; reads no content."""
        for tier in self.tiers:
            if key in tier:
                return tier.medium
        return None

    def get(self, key: bytes) -> Stored | None:
        """Return the page of ``key`` from the fastest tier that has it sound.

        ``None`` may come also for a key that ``find`` has just found.
        """
        stored = None
        for tier in self.tiers:
            if (content := tier.get(key)) is not None:
                stored = Stored(*content, tier.medium)
                break
        self.poll()
        return stored

    def clear(self) -> int:
        """Empty all tiers; returns how many pages went, each counted once a tier."""
        count = sum(tier.clear() for tier in self.tiers)
        self.poll()
        return count

    def poll(self) -> None:
        """Report what changed; a slow tier's writes may fail long after their ``put``."""
        if self._on_change is None:
            return
        # The slowest first: a page that moves down is never reported as nowhere.
        for tier in reversed(self.tiers):
            for change in tier.take_changes():
                self._on_change(change)

    def close(self, flush: bool = True, timeout: float = 60.0) -> None:
        """End the tiers' work.

        Args:
            flush: Hand what the process would lose to the next tier that keeps it, as much as fits
                there, the last used first.
            timeout: For every tier's work together, in seconds.
        """
        deadline = time.monotonic() + timeout
        if flush:
            for upper, lower in zip(self.tiers, self.tiers[1:], strict=False):
                _hand_down(upper, lower, deadline)
        for tier in self.tiers:
            tier.close(max(0.0, deadline - time.monotonic()))
        self.poll()

    def check(self) -> None:
        """Verify the books of every tier."""
        for tier in self.tiers:
            tier.check()


def _hand_down(upper: Tier, lower: Tier, deadline: float) -> None:
    handed: list[Evicted] = []
    for page in upper.transient():
        remaining = deadline - time.monotonic()
        if len(handed) == lower.max_pages or remaining <= 0 or not lower.wait_room(remaining):
            break
        lower.put(page.names, page.image)
        handed.append(page)
    lower.flush(max(0.0, deadline - time.monotonic()))
    # The most useful came first in case time runs out; a second put only counts as a use, and
    # leaves them in the order in which they were used.
    for page in reversed(handed):
        if all(key in lower for key, _ in page.names):
            lower.put(page.names, page.image)
