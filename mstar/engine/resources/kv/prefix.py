"""PrefixIndex: page key to page, and the longest reusable prefix; knows no streams."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """A page whose first slots, up to where an item ends, have a name of their own."""

    page: int
    end: int
    """Slots from the page's start, in tokens."""


class Names(NamedTuple):
    """What one page was indexed by."""

    key: bytes | None
    """Of the whole page; ``None``: it is not full, or not known to be."""
    ends: tuple[tuple[bytes, int], ...]
    """End keys, and how many slots each names."""


class PrefixIndex:
    """Which page holds the KV that a key names.

    A key is indexed only while the key it was folded from is, so that a hit never has a hole
    beneath it.
    """

    def __init__(self) -> None:
        self.version = 0
        """Counts changes."""
        self._page: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}
        self._parent: dict[int, int | None] = {}
        self._num_children: dict[int, int] = {}
        self._cuts: dict[bytes, list[Cut]] = {}
        self._ends: dict[int, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        """Return how many pages are indexed."""
        return len(self._parent)

    def get(self, key: bytes) -> int | None:
        """Return the page that holds the KV of ``key``."""
        return self._page.get(key)

    def cut(self, key: bytes) -> Cut | None:
        """Return a page whose first slots the end key ``key`` names."""
        cuts = self._cuts.get(key)
        return cuts[0] if cuts else None

    def key(self, page: int) -> bytes | None:
        """Return the key that ``page`` is indexed by."""
        return self._key.get(page)

    def is_leaf(self, page: int) -> bool:
        """Tell whether ``page`` is indexed and nothing builds on it."""
        return page in self._parent and not self._num_children.get(page)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest indexed beginning of a chain of keys."""
        known = self._page
        # Every indexed key has its parent indexed: the chain's hits are a beginning of it.
        count = bisect_left(keys, True, key=lambda key: key not in known)
        return [known[key] for key in keys[:count]]

    def add(self, key: bytes, page: int, parent: int | None) -> None:
        """Index ``page`` by ``key``.

        Args:
            key: Not indexed yet.
            page: Not indexed by a key yet.
            parent: The indexed page before it in the chain; ``None`` for a first page.
        """
        assert key not in self._page, f"key {key.hex()} is indexed already"
        assert page not in self._key, f"page {page} is indexed already"
        self.version += 1
        known = self._parent.setdefault(page, parent)
        assert known == parent, (page, known, parent)
        if parent is not None and page not in self._ends:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._page[key] = page
        self._key[page] = key

    def add_end(self, key: bytes, page: int, end: int, parent: int | None) -> None:
        """Index the first ``end`` slots of ``page`` by an end key; again is not an error."""
        if (key, end) in self._ends.get(page, ()):
            return
        self.version += 1
        if page not in self._parent:
            self._parent[page] = parent
            if parent is not None:
                self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._ends.setdefault(page, []).append((key, end))
        self._cuts.setdefault(key, []).append(Cut(page, end))

    def remove(self, page: int) -> Names:
        """Forget ``page``, under which nothing may be indexed; returns what named it."""
        assert not self._num_children.get(page), (
            f"page {page} goes before {self._num_children[page]} pages that build on it"
        )
        self.version += 1
        key = self._key.pop(page, None)
        if key is not None:
            del self._page[key]
        ends = self._ends.pop(page, ())
        for name, end in ends:
            cuts = self._cuts[name]
            cuts.remove(Cut(page, end))
            if not cuts:
                del self._cuts[name]
        parent = self._parent.pop(page, None)
        self._num_children.pop(page, None)
        if parent is not None:
            self._num_children[parent] -= 1
        return Names(key, tuple(ends))

    def items(self) -> Iterator[tuple[int, Names]]:
        """Yield every page and what names it, each before the page that it builds on."""
        # A page is indexed after the one that it builds on.
        for page in reversed(list(self._parent)):
            yield page, Names(self._key.get(page), tuple(self._ends.get(page, ())))

    def clear(self) -> int:
        """Forget everything; returns how many pages were indexed."""
        self.version += 1
        count = len(self._parent)
        for mapping in (
            self._page,
            self._key,
            self._parent,
            self._num_children,
            self._cuts,
            self._ends,
        ):
            mapping.clear()
        return count

    def check(self) -> None:
        """Verify that both directions agree and every parent is indexed."""
        assert len(self._page) == len(self._key)
        assert self._key.keys() | self._ends.keys() == self._parent.keys()
        for key, page in self._page.items():
            assert self._key[page] == key, f"page {page} is indexed by another key"
        children: dict[int, int] = {}
        for page, parent in self._parent.items():
            if parent is not None:
                assert parent in self._key, f"page {page} builds on {parent}, which is not indexed"
                children[parent] = children.get(parent, 0) + 1
        counted = {page: count for page, count in self._num_children.items() if count}
        assert counted == children, "the counts of children are off"
        cuts = {(key, *cut) for key, found in self._cuts.items() for cut in found}
        ends = {(key, page, end) for page, own in self._ends.items() for key, end in own}
        assert cuts == ends, f"end keys disagree: {cuts ^ ends}"
