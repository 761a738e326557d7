"""KV events: what changed in an index of pages, in the wire format that routers parse.

An :class:`EventLog` collects them where the index changes; it knows no sockets. On the wire an
event is a MessagePack map with the class's name under ``type``, and a batch is an array::

    [ts, [{"type": "BlockStored", "block_hashes": [...], ...}, ...], data_parallel_rank]

A page is a *block* there, and a page key a *block hash*. Only full pages are told: a consumer of
this format takes every hash for ``block_size`` slots, which a page cut at an item's end lacks.

Source:
    vLLM 0.32, ``vllm/distributed/kv_events.py``: names, order and defaults of the fields.
    ``page_items`` is ours, left out where there is none; their parsers skip it.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from mstar.engine.resources.kv.keys import PageItem


class Medium(StrEnum):
    """Where a page lies, in the words of the wire."""

    DEVICE = "GPU"
    """The pool that attention reads, on whatever device."""
    HOST = "CPU"
    """The tier in host memory."""
    DISK = "STORAGE"
    """The tier on local disk."""


def _none() -> None:
    """Return ``None``: a default that, made by a call, is written out where others are omitted."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Pages of one chain that can be reused from now on, in chain order."""

    block_hashes: list[bytes]
    """Page keys, 32 bytes each, never shortened."""
    parent_block_hash: bytes | None
    """Key of the page before the first; ``None`` where the chain begins (the root is not told)."""
    token_ids: list[int]
    """Ids of every slot, ``block_size`` a page; placeholders at the slots of items."""
    block_size: int
    """Slots of a page, in tokens."""
    lora_id: int | None = msgspec.field(default_factory=_none)
    """Number of an adapter; kept for parsers that expect the field."""
    medium: str | None = msgspec.field(default_factory=_none)
    """A :class:`Medium`, or another system's word."""
    lora_name: str | None = msgspec.field(default_factory=_none)
    """Name of an adapter."""
    extra_keys: list[tuple[str | tuple[str, int], ...] | None] | None = None
    """For each page, a pair for each item on it: the digest in hex, and the slot of the page at
    which the item begins, negative if it began on an earlier page."""
    page_items: list[list[PageItem]] | None = None
    """For each page, its items as its key commits to them, from which the key can be made anew."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Pages that can no longer be reused from one medium, in order of removal."""

    block_hashes: list[bytes]
    """Page keys."""
    medium: str | None
    """Where they were; the same page may lie elsewhere still."""


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Nothing can be reused any more, from any medium."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events that became true together."""

    ts: float
    """When, in seconds since 1970."""
    events: list[Event]
    """In the order in which they happened."""
    data_parallel_rank: int | None = None
    """Which engine of several; ``None``: the only one."""


class EventLog:
    """Changes of an index since they were last taken, in exact order.

    Neighbours that say the same are merged: pages stored one on another, pages removed one after
    another.

    Args:
        page_size: Slots of a page, in tokens.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[Event] = []

    def __len__(self) -> int:
        return len(self._events)

    def stored(
        self,
        key: bytes,
        parent_key: bytes | None,
        ids: Sequence[int],
        items: Sequence[PageItem] = (),
        medium: Medium = Medium.DEVICE,
    ) -> None:
        """Tell that a full page can be reused.

        Args:
            key: Its page key.
            parent_key: Key of the page before it; ``None`` for the first page of a chain.
            ids: Of all its ``page_size`` slots, placeholders at the slots of items included.
            items: What else its key commits to.
            medium: Where it lies.
        """
        assert len(ids) == self._page_size, (
            f"a page of {len(ids)} slots is told where pages have {self._page_size}"
        )
        event = self._events[-1] if self._events else None
        if not (
            isinstance(event, BlockStored)
            and event.medium == medium
            and event.block_hashes[-1] == parent_key
        ):
            event = BlockStored([], parent_key, [], self._page_size, medium=medium)
            self._events.append(event)
        event.block_hashes.append(key)
        event.token_ids.extend(ids)
        if items and event.page_items is None:
            num_before = len(event.block_hashes) - 1
            event.extra_keys = [None] * num_before
            event.page_items = [[] for _ in range(num_before)]
        if event.extra_keys is not None and event.page_items is not None:
            # One of start and offset is 0: an item begins on this page or at its first slot.
            pairs = tuple((item.digest.hex(), item.start - item.offset) for item in items)
            event.extra_keys.append(pairs or None)
            event.page_items.append(list(items))

    def removed(self, keys: Sequence[bytes], medium: Medium = Medium.DEVICE) -> None:
        """Tell that pages can no longer be reused from ``medium``, in order of removal."""
        if not keys:
            return
        event = self._events[-1] if self._events else None
        if isinstance(event, BlockRemoved) and event.medium == medium:
            event.block_hashes.extend(keys)
        else:
            self._events.append(BlockRemoved(list(keys), medium))

    def cleared(self) -> None:
        """Tell that no page can be reused any more, from any medium."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        """Return the events since the last call; they belong to the caller."""
        events, self._events = self._events, []
        return events
