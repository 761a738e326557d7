"""KVManager: the pages of every stream, from admission to reuse by another request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from mstar.engine.resources.base import Deployment, Opening, Refusal, Resource
from mstar.engine.resources.kv.cache import PagedKVCache
from mstar.engine.resources.kv.config import KVConfig, KVSpec
from mstar.engine.resources.kv.keys import PageItem, page_items, page_key
from mstar.engine.resources.kv.layout import SINK_PAGE, KVLayout, KVPlan
from mstar.engine.resources.kv.pages import PagePool
from mstar.engine.resources.kv.prefix import PrefixIndex
from mstar.engine.resources.kv.table import PageTable
from mstar.engine.resources.mirror import Mirror
from mstar.engine.resources.step import ResourceStep, Segment
from mstar.errors import ConfigError


@dataclass(slots=True)
class _Stream:
    """What the manager keeps of one stream beside its row."""

    row: int
    opening: Opening
    keys: list[bytes]
    """Keys of the stream's first pages, as far as they are known."""
    items: dict[int, list[PageItem]]


@dataclass(slots=True)
class _Rows:
    """The arrays of one tuple of segments, kept while the segments stay the same."""

    segments: tuple[Segment, ...]
    rows: npt.NDArray[np.int64]
    spans: npt.NDArray[np.int64]
    qo_lens: npt.NDArray[np.int32]
    """The spans as plans have them."""
    indptr: npt.NDArray[np.int32]
    stored: npt.NDArray[np.int64]
    """The table's, which no other segments may move while this is kept."""
    is_decode: bool
    """Every segment is one token."""


class KVManager(Resource):
    """Owner of one paged KV cache.

    Args:
        resource_key: Its key among the model's resources.
        config: Shape of the cache.
        deployment: Page size, pool size, dtype and device.
    """

    def __init__(self, resource_key: str, config: KVConfig, deployment: Deployment) -> None:
        self.resource_key = resource_key
        dtype = getattr(torch, deployment.dtype)
        num_pages = deployment.num_pages
        if num_pages is None:
            per_page = config.page_nbytes(deployment.page_size, dtype.itemsize)
            num_pages = deployment.kv_cache_bytes // per_page
        if num_pages < 1:
            raise ConfigError(
                f"the KV cache {resource_key!r} would hold {num_pages} pages of "
                f"{deployment.page_size} tokens; give it more memory or pages"
            )
        self.page_size = deployment.page_size
        self.reuse_unit = self.page_size
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
        self.pool = PagePool(num_pages, on_evict=self.index.remove)
        max_pages = -(-deployment.max_model_len // self.page_size)
        self._table = PageTable(deployment.max_num_seqs, max_pages)
        self._index_at = np.zeros(deployment.max_num_seqs, np.int64)
        """``[num_rows]``: stored length from which a stream has a page to index, in tokens."""
        self._streams: dict[tuple[str, str], _Stream] = {}
        self._labels: dict[str, list[str]] = {}
        self._rows: _Rows | None = None
        self._fixed_slots: dict[int, Mirror] = {}
        """Memory of ``KVPlan.slots`` for each size of recorded steps."""
        self._grown: list[tuple[int, int]] = []
        """Row and number of pages that the last ``admit`` took."""

    @classmethod
    def build(cls, spec: KVSpec, deployment: Deployment, resources: Mapping[str, Resource]) -> Self:
        """Return a manager with an empty cache."""
        return cls(spec.resource_key, spec.config, deployment)

    # A request's life.

    def ever_fits(self, opening: Opening) -> Refusal | None:
        """Refuse a stream that needs more pages than there are."""
        needed = self._pages_for(opening.max_len)
        if needed <= self.pool.num_pages:
            return None
        return Refusal(
            self.resource_key,
            f"{opening.max_len} tokens of prompt and output need {needed} KV pages of "
            f"{self.page_size} tokens, and the pool has {self.pool.num_pages}",
            is_permanent=True,
        )

    def match(self, opening: Opening) -> int | None:
        """Return the tokens of full pages that are here already, at most all but one."""
        return len(self.index.match(self._known_keys(opening))) * self.page_size

    def _is_shared(self, opening: Opening) -> bool:
        return opening.root is not None and self.is_reuse_enabled

    def _known_keys(self, opening: Opening) -> list[bytes]:
        """Return the keys of the stream's full pages, the last token's page left out."""
        if not self._is_shared(opening):
            return []
        limit = (len(opening.tokens) - 1) // self.page_size
        given = min(len(opening.page_keys or ()), opening.num_prompt_tokens // self.page_size)
        keys = list((opening.page_keys or ())[: min(given, limit)])
        if len(keys) < limit:
            items = page_items(opening.spans, self.page_size) if opening.spans else {}
            for page in range(len(keys), limit):
                keys.append(self._page_key(opening, keys, items, page))
        return keys

    def _page_key(
        self,
        opening: Opening,
        keys: list[bytes],
        items: dict[int, list[PageItem]],
        page: int,
    ) -> bytes:
        assert opening.root is not None
        prev = keys[page - 1] if page else opening.root
        start = page * self.page_size
        ids = opening.tokens[start : start + self.page_size]
        on_page = items.get(page, ())
        if on_page:
            covered = {
                slot
                for item in on_page
                for slot in range(item.start, item.start + item.length - item.offset)
            }
            ids = [token for slot, token in enumerate(ids) if slot not in covered]
        return page_key(prev, ids, on_page)

    def open(self, opening: Opening, num_reused: int) -> Refusal | None:
        """Pin the reused pages, then take pages for the rest of what is to be computed."""
        keys = self._known_keys(opening)
        reused = self.index.match(keys)[: num_reused // self.page_size]
        assert len(reused) * self.page_size == num_reused, (len(reused), num_reused)
        self.pool.retain(reused)
        needed = self._pages_for(len(opening.tokens)) - len(reused)
        # A page for each open stream stays available, so that growth seldom preempts.
        spare = self.pool.num_available - needed
        if spare < len(self._streams) or (taken := self.pool.try_allocate(needed)) is None:
            available = self.pool.num_available
            self.pool.release(reused)
            return Refusal(
                self.resource_key,
                f"{needed} KV pages are needed beside {len(reused)} reused ones; "
                f"{available} are available and {len(self._streams)} are set aside",
            )
        row = self._table.take_row()
        if row >= len(self._index_at):
            self._index_at = np.resize(self._index_at, len(self._table.stored))
        self._table.extend(row, reused)
        self._table.extend(row, taken)
        self._table.stored[row] = len(reused) * self.page_size
        is_shared = self._is_shared(opening)
        self._index_at[row] = (len(reused) + 1) * self.page_size if is_shared else _NEVER
        key = (opening.request_id, opening.label)
        assert key not in self._streams, f"stream {key} is open already"
        self._streams[key] = _Stream(
            row,
            opening,
            keys,
            page_items(opening.spans, self.page_size) if is_shared and opening.spans else {},
        )
        self._labels.setdefault(opening.request_id, []).append(opening.label)
        return None

    def close(self, request_id: str) -> None:
        """Give back the pages of all streams of the request."""
        for label in self._labels.pop(request_id, ()):
            stream = self._streams.pop((request_id, label))
            self.pool.release(self._table.give_row(stream.row))
        self._rows = None
        self.revision += 1

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
        counts = [self._pages_for(slots) for slots in missing[growing].tolist()]
        needed = sum(counts)
        pages = self.pool.try_allocate(needed)
        if pages is None:
            return Refusal(
                self.resource_key,
                f"the step needs {needed} more KV pages; {self.pool.num_available} are available",
            )
        self._grown = list(zip(rows[growing].tolist(), counts, strict=True))
        table.extend_each(self._grown, pages)
        return None

    def rollback(self, segments: tuple[Segment, ...], step: ResourceStep) -> None:
        """Give back the pages that the last ``admit`` took."""
        for row, count in self._grown:
            keep = int(self._table.num_pages[row]) - count
            self.pool.release(self._table.cut(row, keep))
        self._grown = []
        self.revision += 1

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
            slots=torch.from_numpy(self._slots(where)).to(self.layout.device, non_blocking=True),
        )

    def _slots(self, where: _Rows, ahead: int = 0) -> npt.NDArray[np.int64]:
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

    def _grow_ahead(self, where: _Rows, ahead: int) -> bool:
        """Have pages for ``ahead`` more slots of every segment; False where that cannot be."""
        assert ahead == 1, f"{ahead} steps ahead; a segment is given one page at most"
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
            self._index_filled(stream, int(stored[i]) // self.page_size)

    def _index_filled(self, stream: _Stream, num_full: int) -> None:
        """Index the stream's full pages; adopt the page of a key that is indexed already."""
        row, keys, index = stream.row, stream.keys, self.index
        start = int(self._index_at[row]) // self.page_size - 1
        pages = self._table.pages(row)
        parent = int(pages[start - 1]) if start else None
        assert parent is None or index.key(parent) == keys[start - 1], f"page {parent} is forgotten"
        for page_index, own in enumerate(pages[start:num_full].tolist(), start):
            if page_index == len(keys):
                keys.append(self._page_key(stream.opening, keys, stream.items, page_index))
            key = keys[page_index]
            known = index.get(key)
            if known is None:
                index.add(key, own, parent)
                self.pool.keep(own)
            elif known != own:
                self.pool.retain([known])
                self.pool.release([self._table.replace(row, page_index, known)])
                self.revision += 1
            parent = own if known is None else known
        self._index_at[row] = (num_full + 1) * self.page_size

    def usage(self) -> tuple[int, int, int]:
        """Return pages there are, pages held by streams, pages kept for reuse only."""
        return self.pool.num_pages, self.pool.num_held, self.pool.num_retained

    def reset(self) -> int:
        """Forget every key; pages of running streams stay theirs but are not shared any more."""
        count = self.index.clear()
        self.pool.drop_kept()
        for stream in self._streams.values():
            self._index_at[stream.row] = _NEVER
        return count

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

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _rows_of(self, segments: tuple[Segment, ...]) -> _Rows:
        if self._rows is not None and segments is self._rows.segments:
            return self._rows
        rows = np.fromiter(
            (self._streams[s.request_id, s.label].row for s in segments), np.int64, len(segments)
        )
        spans = np.fromiter((s.span for s in segments), np.int64, len(segments))
        indptr = np.zeros(len(segments) + 1, np.int32)
        np.cumsum(spans, out=indptr[1:])
        self._rows = _Rows(
            segments,
            rows,
            spans,
            spans.astype(np.int32),
            indptr,
            self._table.stored[rows],
            bool((spans == 1).all()),
        )
        return self._rows


_NEVER = np.iinfo(np.int64).max
"""In place of the number of indexed pages: this stream indexes none."""


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
