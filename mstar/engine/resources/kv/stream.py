"""StreamKeys: the names of one stream's pages, and of cuts where an item ends inside a page."""

from collections.abc import Sequence

from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.keys import PageItem, end_key, page_items, page_key
from mstar.engine.resources.spans import pairs


class StreamKeys:
    """Keys of a stream, made as they are asked for.

    Args:
        opening: The stream; it has a root.
        page_size: Slots of a page, in tokens.
    """

    def __init__(self, opening: Opening, page_size: int) -> None:
        assert opening.root is not None, f"stream of {opening.request_id!r} has no root"
        self.opening = opening
        self.root = opening.root
        self._page_size = page_size
        self.has_items = bool(opening.spans)
        self.num_indexed = 0
        """Pages from the first on that are indexed."""
        self._items: dict[int, list[PageItem]] = {}
        self._ends: dict[int, list[int]] = {}
        if opening.spans:
            self._items = page_items(pairs(opening.spans), page_size)
            stop = 0
            for span in opening.spans:
                stop += span.length
                if span.digest is not None and stop % page_size:
                    self._ends.setdefault(stop // page_size, []).append(stop % page_size)
        # The key of a prompt's last page, where it is not full, names less than the full page.
        given = min(len(opening.page_keys or ()), opening.num_prompt_tokens // page_size)
        self._keys = list((opening.page_keys or ())[:given])

    def first(self, count: int) -> list[bytes]:
        """Return the keys of the first ``count`` pages, all of whose slots are known."""
        keys = self._keys
        for page in range(len(keys), count):
            keys.append(page_key(keys[-1] if page else self.root, *self.content(page)))
        return keys[:count]

    def key(self, page: int) -> bytes:
        """Return the key of a page, all of whose slots are known."""
        keys = self._keys
        if page == len(keys):
            keys.append(page_key(keys[-1] if page else self.root, *self.content(page)))
        elif page > len(keys):
            self.first(page + 1)
        return keys[page]

    def parent(self, page: int) -> bytes:
        """Return what the page's key is folded from: the key before it, or the root."""
        return self.key(page - 1) if page else self.root

    def place_behind(self, parent: bytes) -> int | None:
        """Return the number of the page that is folded from ``parent``, where that is known."""
        if parent == self.root:
            return 0
        return self._keys.index(parent) + 1 if parent in self._keys else None

    def ends(self, page: int) -> Sequence[int]:
        """Return where items end inside the page, in slots from its start, ascending."""
        return self._ends.get(page, ())

    def end_key(self, page: int, end: int) -> bytes:
        """Return the key of the page's first ``end`` slots; an item ends there."""
        ids, items = self.content(page)
        return end_key(self.parent(page), ids, items, end)

    def next_mark(self, stored: int) -> int:
        """Return the next stored length, above ``stored``, at which there is more to name."""
        page, used = divmod(stored, self._page_size)
        ends = (end for end in self.ends(page) if end > used)
        return page * self._page_size + next(ends, self._page_size)

    def content(self, page: int) -> tuple[Sequence[int], Sequence[PageItem]]:
        """Return the ids that fill the slots which the page's items leave, and the items."""
        start = page * self._page_size
        ids = self.opening.tokens[start : start + self._page_size]
        if not self.has_items or not (items := self._items.get(page, ())):
            return ids, ()
        covered = _covered(items)
        return [token for slot, token in enumerate(ids) if slot not in covered], items


def placed(ids: Sequence[int], items: Sequence[PageItem], page_size: int) -> Sequence[int]:
    """Return an id for every slot of a full page, 0 at those of its items.

    Args:
        ids: Of the slots that the items leave.
        items: The page's items.
        page_size: Slots of the page, in tokens.
    """
    if not items:
        return ids
    covered, left = _covered(items), iter(ids)
    return [0 if slot in covered else next(left) for slot in range(page_size)]


def _covered(items: Sequence[PageItem]) -> set[int]:
    covered: set[int] = set()
    for item in items:
        covered.update(range(item.start, item.start + item.length - item.offset))
    return covered
