"""A prefix cache as a set of token tuples; slow, unbounded, and independent of the package."""

from collections.abc import Hashable, Sequence

Slots = Sequence[Hashable]


class PrefixCache:
    """Every full page, and every page cut at an item's end, by all that stands up to its end."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._known: set[tuple[Hashable, ...]] = set()

    def add(self, world: Hashable, slots: Slots, item_ends: Sequence[int] = ()) -> None:
        """Take in a stream's written slots; its items end before the slots of ``item_ends``."""
        for end in (*range(self._page_size, len(slots) + 1, self._page_size), *item_ends):
            if end <= len(slots):
                self._known.add((world, *slots[:end]))

    def match(self, world: Hashable, slots: Slots, item_ends: Sequence[int] = ()) -> int:
        """Return how many slots are known, all but the last slot at most."""
        best = 0
        for end in range(self._page_size, len(slots), self._page_size):
            if (world, *slots[:end]) not in self._known:
                break
            best = end
        inside = [end for end in item_ends if best < end < min(best + self._page_size, len(slots))]
        cuts = [end for end in inside if (world, *slots[:end]) in self._known]
        return max(cuts, default=best)

    def clear(self) -> None:
        self._known.clear()
