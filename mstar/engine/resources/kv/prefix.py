"""PrefixIndex: page key to page, and the longest reusable prefix; knows no streams."""

from bisect import bisect_left
from collections.abc import Sequence


class PrefixIndex:
    """Which page holds the KV that a key names.

    A key is indexed only while the key it was folded from is, so that a hit never has a hole
    beneath it.
    """

    def __init__(self) -> None:
        self._page: dict[bytes, int] = {}
        self._key: dict[int, bytes] = {}
        self._parent: dict[int, int | None] = {}
        self._num_children: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._page)

    def get(self, key: bytes) -> int | None:
        """Return the page that holds the KV of ``key``."""
        return self._page.get(key)

    def key(self, page: int) -> bytes | None:
        """Return the key that ``page`` is indexed by."""
        return self._key.get(page)

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
            page: Not indexed yet.
            parent: The indexed page before it in the chain; ``None`` for a first page.
        """
        assert key not in self._page, f"key {key.hex()} is indexed already"
        assert page not in self._key, f"page {page} is indexed already"
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._page[key] = page
        self._key[page] = key
        self._parent[page] = parent

    def remove(self, page: int) -> bytes:
        """Forget ``page``, under which nothing may be indexed; returns its key."""
        assert not self._num_children.get(page), (
            f"page {page} goes before {self._num_children[page]} pages that build on it"
        )
        key = self._key.pop(page)
        del self._page[key]
        parent = self._parent.pop(page)
        self._num_children.pop(page, None)
        if parent is not None:
            self._num_children[parent] -= 1
        return key

    def clear(self) -> int:
        """Forget everything; returns how many pages were indexed."""
        count = len(self._page)
        for mapping in (self._page, self._key, self._parent, self._num_children):
            mapping.clear()
        return count

    def check(self) -> None:
        """Verify that both directions agree and every parent is indexed."""
        assert len(self._page) == len(self._key) == len(self._parent)
        children: dict[int, int] = {}
        for key, page in self._page.items():
            assert self._key[page] == key, f"page {page} is indexed by another key"
            parent = self._parent[page]
            if parent is not None:
                assert parent in self._key, f"page {page} builds on {parent}, which is not indexed"
                children[parent] = children.get(parent, 0) + 1
        counted = {page: count for page, count in self._num_children.items() if count}
        assert counted == children, "the counts of children are off"
