"""A prefix cache as a set of token tuples; slow, unbounded, and independent of the package."""

from collections.abc import Hashable, Sequence

Slots = Sequence[Hashable]


class PrefixCache:
    """Every full page that was ever written, by all that stands up to its end."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._known: set[tuple[Hashable, ...]] = set()

    def add(self, world: Hashable, slots: Slots) -> None:
        """Take in the full pages of a stream's written slots."""
        for end in range(self._page_size, len(slots) + 1, self._page_size):
            self._known.add((world, *slots[:end]))

    def match(self, world: Hashable, slots: Slots) -> int:
        """Return how many slots of full pages are known, all but the last slot at most."""
        best = 0
        for end in range(self._page_size, len(slots), self._page_size):
            if (world, *slots[:end]) not in self._known:
                break
            best = end
        return best

    def clear(self) -> None:
        self._known.clear()
