"""IndexNews: tells consumers what enters and leaves the index and the tiers, as KV events."""

from collections.abc import Sequence

from mstar.engine.resources.kv.events import Event, EventLog, Medium
from mstar.engine.resources.kv.prefix import PrefixIndex
from mstar.engine.resources.kv.stream import StreamKeys, placed
from mstar.engine.resources.kv.tiers.base import Change
from mstar.engine.resources.kv.tiers.stack import TierStack


class IndexNews:
    """The events of one cache since they were last taken.

    Args:
        page_size: Slots of a page, in tokens.
        index: Asked whether a page that leaves a tier is still in the pool.
        beside: Of another cache of the model: all are told as one, in one order.
    """

    def __init__(
        self, page_size: int, index: PrefixIndex, beside: "IndexNews | None" = None
    ) -> None:
        self._page_size = page_size
        self._index = index
        self._log: EventLog = EventLog(page_size) if beside is None else beside._log
        self._all: list[IndexNews] = [] if beside is None else beside._all
        """Those of all caches."""
        self._all.append(self)
        self._content: dict[bytes, tuple[StreamKeys, int]] = {}
        """Where the content of a key that consumers know is, while any medium has it."""
        self.tiers: TierStack | None = None
        """Where evicted pages go, once that is known."""
        self._prune_at = 1024

    def take(self) -> list[Event]:
        """Return the events of all caches since the last call."""
        return self._log.take()

    def stored(self, key: bytes, keys: StreamKeys, number: int) -> None:
        """Tell that a stream's full page can be reused from the pool."""
        self._tell(key, keys, number, Medium.DEVICE)
        if self.tiers is not None:
            self._content[key] = (keys, number)
            if len(self._content) > self._prune_at:
                # A tier may have lost pages without a word.
                known = {key: at for key, at in self._content.items() if self._is_anywhere(key)}
                self._content, self._prune_at = known, 2 * len(known) + 1024

    def removed(self, keys: Sequence[bytes]) -> None:
        """Tell that pages have left the pool."""
        self._log.removed(self._gone(keys, Medium.DEVICE))

    def cleared(self) -> None:
        """Tell that nothing can be reused any more, from anywhere."""
        self._content.clear()
        self._log.cleared()

    def tier_changed(self, change: Change) -> None:
        """Tell what became of full pages in a tier; a reset is told for all at once."""
        medium = Medium(change.medium)
        if change.kind == "removed":
            self._log.removed(self._gone(change.keys, medium), medium)
            for key in change.keys:
                if not self._is_anywhere(key):
                    self._content.pop(key, None)
        elif change.kind == "stored":
            for key in change.keys:
                # Of pages that an earlier process left on disk only the name is known.
                if key in self._content:
                    self._tell(key, *self._content[key], medium)

    def _gone(self, keys: Sequence[bytes], medium: Medium) -> Sequence[bytes]:
        """Return those of a medium's keys that no other cache has there."""
        others = [news for news in self._all if news is not self]
        if not others:
            return keys
        return [key for key in keys if not any(news._has(key, medium) for news in others)]

    def _has(self, key: bytes, medium: Medium) -> bool:
        if medium is Medium.DEVICE:
            return self._index.get(key) is not None
        tiers = () if self.tiers is None else self.tiers.tiers
        return any(key in tier for tier in tiers if tier.medium == medium)

    def _is_anywhere(self, key: bytes) -> bool:
        """Tell whether any medium has the page, one that writes it later included."""
        if self._index.get(key) is not None:
            return True
        return self.tiers is not None and self.tiers.find(key) is not None

    def _tell(self, key: bytes, keys: StreamKeys, number: int, medium: Medium) -> None:
        ids, items = keys.content(number)
        parent = keys.parent(number) if number else None
        self._log.stored(key, parent, placed(ids, items, self._page_size), items, medium)
