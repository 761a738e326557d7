"""Finder: what the index has of a stream's beginning."""

from dataclasses import dataclass

from mstar.engine.resources.kv.prefix import Cut, PrefixIndex
from mstar.engine.resources.kv.stream import StreamKeys


@dataclass(frozen=True, slots=True)
class Found:
    """The longest indexed beginning of a stream, up to some slot."""

    num_tokens: int
    pages: list[int]
    """Those that are filled, in order."""
    cut: Cut | None = None
    """A page behind them that has the stream's slots up to an item's end."""

    @property
    def all_pages(self) -> list[int]:
        """The filled pages, and the one with the cut."""
        return [*self.pages, self.cut.page] if self.cut else self.pages


NOTHING = Found(0, [])


class Finder:
    """Looks beginnings of streams up; what was found last is not looked for again.

    Args:
        index: Where to look.
        page_size: Tokens of a page.
    """

    def __init__(self, index: PrefixIndex, page_size: int) -> None:
        self._index = index
        self._page_size = page_size
        self._last: tuple[StreamKeys, int, int, Found] | None = None
        """Whose beginning it was, the index's version, the limit, and what was found."""

    def find(self, keys: StreamKeys, limit: int) -> Found:
        """Return what is indexed of the first ``limit`` slots of a stream."""
        limit = min(limit, keys.opening.naming.until)
        index = self._index
        if self._last is not None:
            owner, version, last_limit, found = self._last
            is_same = owner is keys and version == index.version
            if is_same and found.num_tokens <= limit <= last_limit:
                return found
        found = self._look_up(keys, limit)
        self._last = (keys, index.version, limit, found)
        return found

    def _look_up(self, keys: StreamKeys, limit: int) -> Found:
        pages = self._index.match(keys.first(limit // self._page_size))
        count = len(pages)
        num_tokens = count * self._page_size
        for end in reversed(keys.ends(count)):
            if num_tokens + end <= limit:
                cut = self._index.cut(keys.end_key(count, end))
                if cut is not None:
                    return Found(num_tokens + end, pages, cut)
        return Found(num_tokens, pages)
