"""KV events: their bytes on the wire, and what the log merges."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from mstar.engine.resources.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventLog,
    Medium,
)
from mstar.engine.resources.kv.keys import PageItem, chain, page_items, page_key

GOLDEN = json.loads(
    (Path(__file__).parents[3] / "golden" / "kv_events.json").read_text(encoding="utf-8")
)["batches"]
DIGEST = b"\xab" * 32


def key(number: int) -> bytes:
    return bytes([number]) * 32


def golden_batches() -> dict[str, EventBatch]:
    """Return what the golden payloads say, made by the log wherever it makes such events."""
    text = EventLog(4)
    text.stored(key(1), None, [0, 1, 127, 128])
    text.stored(key(2), key(1), [65536, 4294967295, 5, 6])
    items = EventLog(2)
    items.stored(key(4), key(3), [1, 9], [PageItem(1, 0, 3, DIGEST)], Medium.DISK)
    items.stored(key(5), key(4), [9, 9], [PageItem(0, 1, 3, DIGEST)], Medium.DISK)
    items.stored(key(6), key(5), [2, 3], (), Medium.DISK)
    with_items = items.take()
    assert isinstance(with_items[0], BlockStored)
    with_items[0].page_items = None  # The one field that is not theirs.
    removed = EventLog(4)
    removed.removed([key(2)])
    removed.removed([key(1)])
    several = EventLog(2)
    several.cleared()
    several.stored(key(1), None, [1, 2])
    several.removed([key(1)])
    adapter = BlockStored([key(3)], key(2), [7, 8], 2, 3, "CPU", "poet", extra_keys=[("poet",)])
    return {
        "stored": EventBatch(1700000000.25, text.take(), 0),
        "stored_on_a_parent_with_an_adapter": EventBatch(1700000001.5, [adapter], 2),
        "stored_with_items": EventBatch(1700000002.0, with_items, 0),
        "removed": EventBatch(1700000003.0, removed.take(), 0),
        "cleared_without_rank": EventBatch(1700000004.0, [AllBlocksCleared()]),
        "several_in_order": EventBatch(1700000005.0, several.take(), 0),
    }


def test_every_golden_payload_has_a_batch() -> None:
    assert GOLDEN.keys() == golden_batches().keys()


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_bytes_are_those_that_routers_parse(name: str) -> None:
    batch = golden_batches()[name]
    assert msgspec.msgpack.encode(batch).hex() == GOLDEN[name]
    assert msgspec.msgpack.decode(bytes.fromhex(GOLDEN[name]), type=EventBatch) == batch


def test_fields_unknown_to_us_are_skipped() -> None:
    payload: list[Any] = msgspec.msgpack.decode(bytes.fromhex(GOLDEN["stored"]))
    payload[1][0].update(group_idx=0, session_id="s", kv_cache_spec_kind="full_attention")
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(payload), type=EventBatch)
    assert decoded == golden_batches()["stored"]


def test_neighbours_merge_only_along_one_chain_on_one_medium() -> None:
    log = EventLog(1)
    log.stored(key(1), None, [1])
    log.stored(key(2), key(1), [2])
    log.stored(key(3), key(1), [3])  # A sibling: it does not follow key 2.
    log.stored(key(4), key(3), [4], (), Medium.HOST)
    log.removed([])
    log.removed([key(4)], Medium.HOST)
    log.removed([key(3)])
    log.removed([key(2), key(1)])
    assert len(log) == 5
    assert log.take() == [
        BlockStored([key(1), key(2)], None, [1, 2], 1, medium="GPU"),
        BlockStored([key(3)], key(1), [3], 1, medium="GPU"),
        BlockStored([key(4)], key(3), [4], 1, medium="CPU"),
        BlockRemoved([key(4)], "CPU"),
        BlockRemoved([key(3), key(2), key(1)], "GPU"),
    ]
    assert log.take() == []


def test_taken_events_no_longer_change() -> None:
    log = EventLog(1)
    log.stored(key(1), None, [1])
    taken = log.take()
    log.stored(key(2), key(1), [2])
    assert taken == [BlockStored([key(1)], None, [1], 1, medium="GPU")]


def test_only_full_pages_can_be_told() -> None:
    log = EventLog(4)
    with pytest.raises(AssertionError, match="3 slots"):
        log.stored(key(1), None, [1, 2, 3])


LAYOUTS = st.lists(
    st.tuples(st.integers(1, 9), st.one_of(st.none(), st.binary(min_size=32, max_size=32))),
    min_size=1,
    max_size=6,
)


@given(spans=LAYOUTS, page_size=st.integers(1, 5))
def test_page_keys_can_be_made_anew_from_what_is_told(
    spans: list[tuple[int, bytes | None]], page_size: int
) -> None:
    """An event commits to all that its keys commit to, but the root: any consumer can verify it."""
    slots = [
        (index, digest is None)
        for index, (length, digest) in enumerate(spans)
        for _ in range(length)
    ]
    num_pages = len(slots) // page_size
    items = page_items(spans, page_size)
    pages = [slots[page * page_size : (page + 1) * page_size] for page in range(num_pages)]
    keys = chain([[i for i, is_id in page if is_id] for page in pages], items, b"root")
    log = EventLog(page_size)
    for page, number in zip(pages, range(num_pages), strict=True):
        parent = keys[number - 1] if number else None
        log.stored(keys[number], parent, [i for i, _ in page], items.get(number, ()))
    events = log.take()
    assert len(events) == min(num_pages, 1)
    assert keys_from(events, b"root") == keys


def keys_from(events: list[Event], root: bytes) -> list[bytes]:
    """Return the keys of the pages of a chain by nothing but their event."""
    keys = []
    for event in events:
        assert isinstance(event, BlockStored)
        parent = event.parent_block_hash or root
        for number in range(len(event.block_hashes)):
            items = event.page_items[number] if event.page_items else []
            ids = event.token_ids[number * event.block_size : (number + 1) * event.block_size]
            covered = {
                item.start + slot for item in items for slot in range(item.length - item.offset)
            }
            kept = [token for slot, token in enumerate(ids) if slot not in covered]
            parent = page_key(parent, kept, items)
            keys.append(parent)
            pairs = event.extra_keys[number] if event.extra_keys else None
            assert list(pairs or ()) == [(i.digest.hex(), i.start - i.offset) for i in items]
    return keys
