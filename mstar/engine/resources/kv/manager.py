"""KVManager: the pages of every stream, from admission to reuse by another request."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from mstar.engine.resources.base import (
    Deployment,
    Opening,
    Refusal,
    Resource,
)
from mstar.engine.resources.kv.cache import PagedKVCache
from mstar.engine.resources.kv.config import KVConfig, KVSpec
from mstar.engine.resources.kv.events import Event, Medium
from mstar.engine.resources.kv.explain import ReuseReport, explain, shut
from mstar.engine.resources.kv.finder import NOTHING, Finder, Found
from mstar.engine.resources.kv.frontier import Frontier
from mstar.engine.resources.kv.history import PageHistory
from mstar.engine.resources.kv.layout import SINK_PAGE, KVLayout, KVPlan
from mstar.engine.resources.kv.news import IndexNews
from mstar.engine.resources.kv.offload import Offload, open_tiers
from mstar.engine.resources.kv.pages import PagePool
from mstar.engine.resources.kv.prefix import Cut, Names, PrefixIndex
from mstar.engine.resources.kv.rows import Rows, make_rows
from mstar.engine.resources.kv.stream import StreamKeys
from mstar.engine.resources.kv.table import PageTable
from mstar.engine.resources.kv.tiers.stack import TierStack
from mstar.engine.resources.mirror import Mirror, send
from mstar.engine.resources.step import ResourceStep, Segment
from mstar.errors import ConfigError


@dataclass(slots=True)
class _Stream:
    """What the manager keeps of one stream beside its row."""

    row: int
    opening: Opening
    keys: StreamKeys | None
    """``None``: the stream is out of reuse."""


class KVManager(Resource):
    """Owner of one paged KV cache.

    Args:
        resource_key: Its key among the model's resources.
        config: Shape of the cache.
        deployment: Page size, number of pages, dtype and device.
        beside: Another cache of the model, whose events and this one's are told in one order.
    """

    in_pieces = "plan"

    def __init__(
        self,
        resource_key: str,
        config: KVConfig,
        deployment: Deployment,
        beside: "KVManager | None" = None,
    ) -> None:
        self.resource_key = resource_key
        dtype = getattr(torch, deployment.dtype)
        num_pages = deployment.num_pages
        assert num_pages is not None, "a cache is built before its pages were counted"
        self.page_size = deployment.page_size
        self.capacity = num_pages * self.page_size
        self.is_reuse_enabled = deployment.enable_prefix_caching
        self.layout = KVLayout(
            num_layers=config.num_layers,
            num_pages=num_pages + 1,
            page_size=self.page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=torch.device(deployment.device),
        )
        self.cache = _allocate(self.layout, config)
        self.index = PrefixIndex()
        max_protected = int(num_pages * deployment.retention_share)
        self.pool = PagePool(num_pages, self._forget, max_protected, deployment.clock)
        self.history = PageHistory()
        self._news: IndexNews | None = None
        if deployment.kv_events:
            known = None if beside is None else beside._news
            self._news = IndexNews(self.page_size, self.index, known)
        self._offload: Offload | None = None
        self._deployment = deployment
        max_pages = min(-(-deployment.max_model_len // self.page_size), num_pages)
        self._table = PageTable(deployment.max_num_seqs, max_pages)
        self._index_at = np.zeros(deployment.max_num_seqs, np.int64)
        """``[num_rows]``: stored length from which a stream has more to index, in tokens."""
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._frontier = Frontier()
        self._last_keys: StreamKeys | None = None
        self._finder = Finder(self.index, self.page_size)
        self._labels: dict[str, list[str]] = {}
        self._rows: Rows | None = None
        self._fixed_slots: dict[int, Mirror] = {}
        """Memory of ``KVPlan.slots`` for each size of recorded steps."""
        self._grown: list[tuple[int, int]] = []
        """Row and number of pages that the last ``admit`` took."""

    @classmethod
    def build(cls, spec: KVSpec, deployment: Deployment, resources: Mapping[str, Resource]) -> Self:
        """Return a manager with an empty cache."""
        caches = (known for known in resources.values() if isinstance(known, KVManager))
        return cls(spec.resource_key, spec.config, deployment, next(caches, None))

    # The engine's life.

    def connect(self, root: bytes | None) -> None:
        """Open the tiers under the pool, where the deployment has any.

        Raises:
            ConfigError: If the folder on disk cannot be used, or a tier holds not one page.
        """
        if root is None or not self.is_reuse_enabled:
            return
        tiers = open_tiers(self._deployment, self.resource_key, root, self.layout.page_nbytes)
        if tiers:
            news = self._news
            stack = TierStack(tiers, None if news is None else news.tier_changed)
            on_restored = None if news is None else news.stored
            self._offload = Offload(stack, self.cache, self.pool, self.index, on_restored)
            if news is not None:
                news.tiers = stack

    def disconnect(self, timeout: float) -> None:
        """Hand all pages to the tiers and wait for the disk."""
        if self._offload is not None:
            self._offload.flush(timeout)
            self._offload = None

    def take_events(self) -> list[Event]:
        """Return what changed in index and tiers, of all caches, since the last call."""
        if self._news is None:
            return []
        if self._offload is not None:
            self._offload.tiers.poll()
        return self._news.take()

    # A request's life.

    def restore(self, opening: Opening) -> None:
        """Bring pages back from the tiers."""
        keys = self._keys_of(opening)
        if self._offload is not None and keys is not None:
            limit = min(len(opening.tokens) - 1, opening.naming.until)
            self._offload.restore(keys, limit)

    def explain(
        self, opening: Opening, found: Mapping[str, int] | None, when: float | None = None
    ) -> ReuseReport:
        """Return how much of a prompt is here, by tier, and what stops it; changes nothing."""
        if opening.root is None or not self.is_reuse_enabled:
            return shut(opening.num_prompt_tokens, self.page_size)
        # A reset took the names of open streams; what they had found, they had found.
        keys = self._keys_of(opening) or StreamKeys(opening, self.page_size)
        by_tier = {"device": 0, "host": 0, "disk": 0} | dict(found or {})
        if found is None:
            self._find(keys, by_tier)
        when = self.history.now() if when is None else when
        return explain(keys, by_tier, self.page_size, self.history, when)

    def _find(self, keys: StreamKeys, by_tier: dict[str, int]) -> None:
        """Count what is here of a prompt, in tokens by tier."""
        size, limit = self.page_size, keys.opening.num_prompt_tokens - 1
        own = self._finder.find(keys, limit)
        by_tier["device"] += own.num_tokens
        further = keys.first(limit // size)[len(own.pages) :]
        for key in further if self._offload and not own.cut else ():
            assert self._offload is not None
            medium = self._offload.tiers.find(key)
            if medium is None:
                break
            by_tier[_SOURCES[medium]] += size

    def ever_fits(self, opening: Opening) -> Refusal | None:
        """Refuse a stream that needs more pages than there are."""
        count = opening.num_streams
        # Beside the pages of each stream, one is set aside for each that is open already.
        needed = count * self._pages_for(opening.max_len) + count - 1
        if needed <= self.pool.num_pages:
            return None
        each = "" if count == 1 else f" in each of {count} streams"
        return Refusal(
            self.resource_key,
            f"{opening.max_len} tokens of prompt and output{each} need {needed} KV pages of "
            f"{self.page_size} tokens, and the pool has {self.pool.num_pages}",
        )

    def match(self, opening: Opening, limit: int) -> int:
        """Return the slots of full pages that are here already, and of an item's cut page."""
        keys = self._keys_of(opening)
        if keys is None:
            return 0
        found = self._finder.find(keys, limit)
        # A copy's page could be one that another stream of the request was offered.
        if found.cut and (opening.num_streams > 1 or not self._can_copy(opening, found)):
            return len(found.pages) * self.page_size
        return found.num_tokens

    def _can_copy(self, opening: Opening, found: Found) -> bool:
        """Tell whether a stream has a page to copy a cut to, or can surely take one."""
        stream = self._streams.get((opening.request_id, opening.label))
        count = len(found.pages)
        if stream is None:
            # The cut page is held while it is copied: a pool that the stream just fits into lacks
            # one page then, and waiting would not bring it.
            needed = self._pages_for(len(opening.tokens)) - count + len(self._streams)
            spare = self.pool.num_available - needed
            idle = (self.pool.ref_count(page) == 0 for page in found.all_pages)
            return spare > count or spare >= sum(idle)
        if count < self._table.num_pages[stream.row]:
            return True
        # Those of the prefix that nobody holds yet, and the cut page itself, will be held.
        assert stream.keys is not None, "a stream out of reuse was offered a cut"
        return self.pool.num_available >= count - stream.keys.num_indexed + 2

    def _keys_of(self, opening: Opening) -> StreamKeys | None:
        """Return the names of a stream's pages; ``None`` where it is out of reuse."""
        if opening.root is None or not self.is_reuse_enabled:
            return None
        stream = self._streams.get((opening.request_id, opening.label))
        if stream is not None:
            return stream.keys
        # A request at the head of the queue is looked at again and again.
        if self._last_keys is None or self._last_keys.opening is not opening:
            self._last_keys = StreamKeys(opening, self.page_size)
        return self._last_keys

    def is_pending(self, opening: Opening, start: int) -> bool:
        """Tell whether another stream is about to fill the page that ``start`` is on."""
        keys = self._keys_of(opening)
        if keys is None or not self._frontier:
            return False
        names = self._names_ahead(keys, start, len(opening.tokens) - 1)
        return any(self._frontier.is_others(name, opening.request_id) for name in names)

    def _names_ahead(self, keys: StreamKeys, start: int, limit: int) -> list[bytes]:
        """Return the names that the page of slot ``start`` can get, up to slot ``limit``."""
        page, used = divmod(start, self.page_size)
        room = min(limit, keys.opening.naming.until) - page * self.page_size
        names = [keys.end_key(page, end) for end in keys.ends(page) if used < end <= room]
        if room >= self.page_size:
            names.append(keys.key(page))
        return names

    def open(self, opening: Opening, num_reused: int) -> Refusal | None:
        """Pin the reused pages, then take pages for the rest of what is to be computed.

        A stream that waits for another to compute what comes next takes no pages yet; nor does one
        of several, whose pages could be those that the next one was offered.
        """
        key = (opening.request_id, opening.label)
        assert key not in self._streams, f"stream {key} is open already"
        keys = self._keys_of(opening)
        found = NOTHING if keys is None else self._finder.find(keys, num_reused)
        assert found.num_tokens == num_reused, (found.num_tokens, num_reused)
        reused, pinned = found.pages, found.all_pages
        self.pool.retain(pinned)
        is_waiting = self.is_pending(opening, num_reused)
        needed = self._pages_for(num_reused if is_waiting else len(opening.tokens)) - len(reused)
        needed *= opening.num_streams
        # A page for each open stream stays available, so that growth seldom preempts.
        spare = self.pool.num_available - needed
        taken: list[int] | None = None
        if spare >= len(self._streams):
            taken = self.pool.try_allocate(needed if opening.num_streams == 1 else 0)
        if taken is None:
            available = self.pool.num_available
            self.pool.release(pinned)
            return Refusal(
                self.resource_key,
                f"{needed} KV pages are needed beside {len(reused)} reused ones; "
                f"{available} are available and {len(self._streams)} are set aside",
            )
        stream = self._begin(opening, keys, reused, taken, num_reused)
        self._count_sources(opening, pinned, 0, num_reused)
        if found.cut:
            self._copy_cut(found.cut, taken[0])
        self._index_written(stream, num_reused)
        return None

    def _begin(
        self,
        opening: Opening,
        keys: StreamKeys | None,
        reused: list[int],
        taken: list[int],
        stored: int,
    ) -> _Stream:
        row = self._table.take_row()
        if row >= len(self._index_at):
            self._index_at = np.resize(self._index_at, len(self._table.stored))
        self._table.extend(row, reused)
        self._table.extend(row, taken)
        self._table.stored[row] = stored
        self._index_at[row] = _NEVER
        stream = _Stream(row, opening, keys)
        if keys is not None:
            keys.num_indexed = len(reused)
            self.history.opened(keys, self._pages_for(len(opening.tokens)))
        self._streams[opening.request_id, opening.label] = stream
        self._labels.setdefault(opening.request_id, []).append(opening.label)
        self._last_keys = None
        return stream

    def skip(self, opening: Opening, num_reused: int) -> None:
        """Take over pages that others filled meanwhile, in place of its own if it has them."""
        stream = self._streams[opening.request_id, opening.label]
        assert stream.keys is not None, f"{opening.request_id!r} is out of reuse"
        table, row = self._table, stream.row
        found = self._finder.find(stream.keys, num_reused)
        assert found.num_tokens == num_reused > table.stored[row], (found.num_tokens, num_reused)
        known, reused = stream.keys.num_indexed, found.pages
        pinned = found.all_pages[known:]
        self.pool.retain(pinned)
        for index, page in enumerate(reused[known:], known):
            if index < table.num_pages[row]:
                self._give_up(table.replace(row, index, page))
            else:
                table.extend(row, [page])
        stream.keys.num_indexed = len(reused)
        if found.cut:
            if len(reused) == table.num_pages[row]:
                own = self.pool.try_allocate(1)
                assert own is not None, "a cut was offered without a page to copy it to"
                table.extend(row, own)
            self._copy_cut(found.cut, int(table.pages(row)[len(reused)]))
        self._count_sources(opening, pinned, int(table.stored[row]), num_reused)
        table.stored[row] = num_reused
        self._rows = None
        self.revision += 1
        self._index_written(stream, num_reused)

    def _copy_cut(self, cut: Cut, page: int) -> None:
        """Copy the slots of a cut, whose page was pinned for it, to a page of a stream's own."""
        self.cache.copy_slots(cut.page, page, cut.end)
        self.pool.release([cut.page])

    def _count_sources(self, opening: Opening, pages: Sequence[int], start: int, stop: int) -> None:
        """Note where slots ``start`` to ``stop`` were found, on the last pages before ``stop``."""
        origin = self._offload.origin if self._offload is not None else {}
        if not origin:
            opening.sources["device"] += stop - start
            return
        size = self.page_size
        first = self._pages_for(stop) - len(pages)
        for number, page in enumerate(pages, first):
            medium = origin.pop(page, None)
            source = "device" if medium is None else _SOURCES[medium]
            opening.sources[source] += min((number + 1) * size, stop) - max(number * size, start)

    def _give_up(self, page: int) -> None:
        """Release a page of one stream, whose names are gone over to another page."""
        if self.pool.is_kept(page):
            self.index.remove(page)
            self.pool.unkeep(page)
        self.pool.release([page])

    def fork(self, request_id: str, label: str, opening: Opening) -> Refusal | None:
        """Share the full pages of another stream with a new one, and copy the one begun."""
        source = self._streams[request_id, label]
        stored = int(self._table.stored[source.row])
        full, used = divmod(stored, self.page_size)
        pages = self._table.pages(source.row).tolist()
        taken = self.pool.try_allocate(1 if used else 0)
        if taken is None:
            return Refusal(self.resource_key, "a fork needs a KV page; none is available")
        self.pool.retain(pages[:full])
        # What the source cannot name, its copy cannot.
        opening.naming.cut(source.opening.naming.until)
        keys = self._keys_of(opening) if source.keys is not None else None
        stream = self._begin(opening, keys, pages[:full], taken, stored)
        if keys is not None and source.keys is not None:
            keys.num_indexed = source.keys.num_indexed
        if used:
            self.cache.copy_slots(pages[full], taken[0], used)
        self._index_written(stream, stored)
        return None

    def disown(self, request_id: str) -> None:
        """Take the names of a request's pages back, from the last on."""
        for label in self._labels.get(request_id, ()):
            stream = self._streams[request_id, label]
            for page in reversed(self._table.pages(stream.row).tolist()):
                if self.pool.is_kept(page):
                    if not self.index.is_leaf(page) or self.pool.ref_count(page) > 1:
                        break
                    self._told_gone([self.index.remove(page)])
                    self.pool.unkeep(page)
            self._shut(stream)

    def _shut(self, stream: _Stream) -> None:
        """Take an open stream out of reuse."""
        self._index_at[stream.row] = _NEVER
        self._frontier.move((stream.opening.request_id, stream.opening.label), ())
        stream.keys = None

    def close(self, request_id: str) -> None:
        """Give back the pages of all streams of the request."""
        for label in self._labels.pop(request_id, ()):
            stream = self._streams.pop((request_id, label))
            self._frontier.move((request_id, label), ())
            if stream.opening.retain_seconds and stream.keys is not None:
                own = self._table.pages(stream.row)[: stream.keys.num_indexed].tolist()
                self.pool.protect(own, stream.opening.retain_seconds)
            self.pool.release(self._table.give_row(stream.row))
        self._rows = None

    def _forget(self, pages: list[int]) -> None:
        """Take evicted pages out of the index; the tiers may keep them."""
        offload, remove = self._offload, self.index.remove
        self._told_gone(map(remove, pages) if offload is None else offload.evict(pages))

    def _told_gone(self, forgotten: Iterable[Names]) -> None:
        """Take note of pages that can be found no more."""
        gone = [names.key for names in forgotten if names.key is not None]
        for key in gone:
            self.history.evicted(key)
        if self._news is not None:
            self._news.removed(gone)

    # A step's life.

    def admit(self, segments: tuple[Segment, ...], step: ResourceStep) -> Refusal | None:
        """Take the pages that the new tokens need beyond those the streams hold."""
        where = self._rows_of(segments)
        table, rows = self._table, where.rows
        missing = where.stored + where.spans - table.num_pages[rows] * self.page_size
        growing = (missing > 0).nonzero()[0]
        self._grown = []
        if not len(growing):
            return None
        owners = rows[growing].tolist()
        counts = [self._pages_for(slots) for slots in missing[growing].tolist()]
        if where.has_twins:
            # Of several segments of one stream the last one reaches furthest.
            furthest = dict(zip(owners, counts, strict=True))
            owners, counts = list(furthest), list(furthest.values())
        needed = sum(counts)
        pages = self.pool.try_allocate(needed)
        if pages is None:
            return Refusal(
                self.resource_key,
                f"the step needs {needed} more KV pages; {self.pool.num_available} are available",
            )
        self._grown = list(zip(owners, counts, strict=True))
        table.extend_each(self._grown, pages)
        return None

    def rollback(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Give back the pages that the last ``admit`` took."""
        for row, count in self._grown:
            keep = int(self._table.num_pages[row]) - count
            self.pool.release(self._table.cut(row, keep))
        self._grown = []

    def plan(
        self, segments: tuple[Segment, ...], step: ResourceStep, plans: Mapping[str, Any]
    ) -> KVPlan:
        """Return where the step's tokens are written and what they read."""
        where = self._rows_of(segments)
        return KVPlan(
            layout=self.layout,
            keys=self.cache.keys,
            values=self.cache.values,
            qo_lens=where.qo_lens,
            qo_indptr=where.indptr,
            kv_lens=(where.stored + where.spans).astype(np.int32),
            page_table=self._table.gather(where.rows),
            slots=send(self._slots(where), self.layout.device),
        )

    def _slots(self, where: Rows, ahead: int = 0) -> npt.NDArray[np.int64]:
        """Return where each new token is written, ``[num_tokens]``."""
        table, rows, stored = self._table, where.rows, where.stored
        if ahead:
            stored = stored + ahead
        if where.is_decode:
            owners, slots = rows, stored
        else:
            owners = np.repeat(rows, where.spans)
            starts = np.repeat(stored - where.indptr[:-1], where.spans)
            slots = np.arange(len(owners)) + starts
        page_size = self.page_size
        pages = table.lookup(owners, slots // page_size).astype(np.int64)
        flat: npt.NDArray[np.int64] = pages * page_size + slots % page_size
        return flat

    def plan_fixed(
        self,
        size: int,
        segments: tuple[Segment, ...],
        step: ResourceStep,
        plans: Mapping[str, Any],
        ahead: int = 0,
    ) -> KVPlan | None:
        """Return the plan of a decode step, filled up with segments of one slot of the sink.

        A plan ahead takes the pages it needs, if there are.
        """
        where = self._rows_of(segments)
        if not where.is_decode or (ahead and not self._grow_ahead(where, ahead)):
            return None
        count = len(segments)
        kv_lens = np.ones(size, np.int32)
        kv_lens[:count] = where.stored + (1 + ahead)
        pages = self._table.gather(where.rows)
        page_table = np.full((size, max(pages.shape[1], 1)), SINK_PAGE, np.int32)
        page_table[:count, : pages.shape[1]] = pages
        slots = self._fixed_slots.get(size)
        if slots is None:
            slots = self._fixed_slots[size] = Mirror(size, torch.int64, self.layout.device)
        slots.array[count:] = SINK_PAGE * self.page_size
        slots.array[:count] = self._slots(where, ahead)
        slots.send()
        return KVPlan(
            layout=self.layout,
            keys=self.cache.keys,
            values=self.cache.values,
            qo_lens=np.ones(size, np.int32),
            qo_indptr=np.arange(size + 1, dtype=np.int32),
            kv_lens=kv_lens,
            page_table=page_table,
            slots=slots.tensor,
        )

    def _grow_ahead(self, where: Rows, ahead: int) -> bool:
        """Have pages for ``ahead`` more slots of every segment; False where that cannot be."""
        assert ahead == 1, f"{ahead} steps ahead; a segment is given one page at most"
        assert not where.has_twins, "a stream has one segment in a step that may be ahead"
        table = self._table
        needed = where.stored + (1 + ahead)
        growing = (needed > table.num_pages[where.rows] * self.page_size).nonzero()[0].tolist()
        for i in growing:
            segment = where.segments[i]
            opening = self._streams[segment.request_id, segment.label].opening
            if needed[i] > opening.max_len:
                return False
        pages = self.pool.try_allocate(len(growing))
        if pages is None:
            return False
        table.extend_each([(int(where.rows[i]), 1) for i in growing], pages)
        return True

    def commit(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Count the new tokens as stored and index the pages they filled."""
        where = self._rows_of(segments)
        stored = where.stored = where.stored + where.spans
        self._table.stored[where.rows] = stored
        for i in (stored >= self._index_at[where.rows]).nonzero()[0].tolist():
            segment = segments[i]
            stream = self._streams[segment.request_id, segment.label]
            self._index_written(stream, int(stored[i]))
        if where.has_twins:
            self._rows = None

    def _index_written(self, stream: _Stream, stored: int) -> None:
        """Index what the stream's first ``stored`` slots have names for."""
        keys = stream.keys
        if keys is None:
            return
        opening, size = stream.opening, self.page_size
        until = opening.naming.until
        named = stored if stored <= until else until
        full = named // size
        if full > keys.num_indexed:
            self._index_pages(stream.row, keys, full)
        mark = (full + 1) * size
        if keys.has_items:
            used = named - full * size
            if used and keys.ends(full):
                own = self._table.pages(stream.row)[max(full - 1, 0) : full + 1].tolist()
                self._index_ends(keys, full, own[-1], own[0] if full else None, used)
            mark = keys.next_mark(stored)
        self._index_at[stream.row] = mark if named == stored else _NEVER
        name = (opening.request_id, opening.label)
        if name in self._frontier or stored < opening.num_prompt_tokens:
            ahead = self._names_ahead(keys, stored, opening.num_prompt_tokens)
            labels = self._labels[opening.request_id]
            siblings = [(opening.request_id, label) for label in labels]
            self._frontier.move(name, ahead, siblings)

    def _index_pages(self, row: int, keys: StreamKeys, full: int) -> None:
        """Index pages up to the first ``full``, or adopt those that their keys are indexed by."""
        index, first = self.index, keys.num_indexed
        pages = self._table.pages(row)[:full]
        parent = int(pages[first - 1]) if first else None
        for number, page in enumerate(pages[first:].tolist(), first):
            key = keys.key(number)
            known = index.get(key)
            if known is None:
                known = page
                index.add(key, page, parent)
                self.pool.keep(page)
                if self._news is not None:
                    self._news.stored(key, keys, number)
            elif known != page:
                self.pool.retain([known])
                self._give_up(self._table.replace(row, number, known))
            if keys.has_items:
                self._index_ends(keys, number, known, parent, self.page_size)
            parent = known
        keys.num_indexed = full

    def _index_ends(
        self, keys: StreamKeys, number: int, page: int, parent: int | None, used: int
    ) -> None:
        """Index the cuts among the first ``used`` slots of a stream's page."""
        for end in keys.ends(number):
            if end <= used:
                self.index.add_end(keys.end_key(number, end), page, end, parent)
                self.pool.keep(page)

    def usage(self) -> tuple[int, int, int]:
        """Return pages there are, pages held by streams, pages kept for reuse only."""
        return self.pool.num_pages, self.pool.num_held, self.pool.num_retained

    def counters(self) -> Mapping[str, int]:
        """Return evictions, and pages in tiers."""
        counted = {"num_evictions": self.pool.num_evictions}
        if self._offload is not None:
            for tier in self._offload.tiers.tiers:
                counted[f"num_pages_{_SOURCES[tier.medium]}"] = len(tier)
            counted["num_pages_broken"] = sum(t.counts.corrupt for t in self._offload.tiers.tiers)
        return counted

    def reset(self) -> int:
        """Forget every key; pages of running streams stay theirs but are not shared any more.

        Raises:
            StorageError: If a tier could not be emptied; all else is forgotten.
        """
        count = self.index.clear()
        self.pool.drop_kept()
        self.history.clear()
        for stream in self._streams.values():
            self._shut(stream)
        try:
            return count + (self._offload.clear() if self._offload is not None else 0)
        finally:
            if self._news is not None:
                self._news.cleared()

    def check(self) -> None:
        """Verify conservation of pages and agreement of pool, index and tables."""
        self.pool.check()
        self.index.check()
        holders: dict[int, int] = {}
        for name, stream in self._streams.items():
            pages = self._table.pages(stream.row).tolist()
            assert len(set(pages)) == len(pages), f"stream {name} holds a page twice"
            stored = int(self._table.stored[stream.row])
            assert stored <= len(pages) * self.page_size, (name, stored, len(pages))
            for page in pages:
                holders[page] = holders.get(page, 0) + 1
            written = pages[stored // self.page_size :]
            shared = [page for page in written if self.pool.ref_count(page) > 1]
            assert not shared, f"stream {name} would write pages that others hold: {shared}"
        for page, count in holders.items():
            assert self.pool.ref_count(page) == count, (page, self.pool.ref_count(page), count)
        assert len(holders) == self.pool.num_held, (len(holders), self.pool.num_held)
        if self._offload is not None:
            self._offload.tiers.check()
        self._frontier.check()

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _rows_of(self, segments: tuple[Segment, ...]) -> Rows:
        if self._rows is not None and segments is self._rows.segments:
            return self._rows
        owners = [self._streams[segment.request_id, segment.label].row for segment in segments]
        self._rows = make_rows(segments, owners, self._table)
        return self._rows


_SOURCES = {Medium.HOST.value: "host", Medium.DISK.value: "disk"}
"""What a tier is called where reuse is counted, by its medium."""
_NEVER = np.iinfo(np.int64).max
"""In place of a stored length: this stream has nothing more to index."""


def _allocate(layout: KVLayout, config: KVConfig) -> PagedKVCache:
    nbytes = layout.num_pages * config.page_nbytes(layout.page_size, layout.dtype.itemsize)
    try:
        # Beyond 64 bits torch would fail over the number itself.
        if nbytes < 2**63:
            return PagedKVCache(layout)
        reason = "no machine has as much"
    except (MemoryError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    raise ConfigError(
        f"a KV cache of {layout.num_pages - 1} pages takes {nbytes / 2**30:.1f} GiB on "
        f"{layout.device}, which are not there; ask for fewer pages or less memory ({reason:.200})"
    )
