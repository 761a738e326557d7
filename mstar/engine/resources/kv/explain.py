"""Why a prompt matched as far as it did: what stands in the pool, the tiers, and the history."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from mstar.engine.resources.kv.history import PageHistory
from mstar.engine.resources.kv.keys import PageItem
from mstar.engine.resources.kv.stream import StreamKeys

NUM_BEFORE = 12
"""Ids told before the slot where reuse stops."""
NUM_AFTER = 6

Reason = Literal["end", "differs", "never_seen", "evicted", "shut"]
Cell = int | tuple[bytes, int, int]
"""What fills a slot: an id, or an item's digest, its length, and the slot's place in it."""


class ReuseReport(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt was found, where, and what stopped it; in tokens."""

    num_prompt_tokens: int
    num_matched_tokens: int
    by_tier: dict[str, int]
    """The matched ones by where they were: ``device``, ``host``, ``disk``."""
    page_size: int
    """Slots of a page, in tokens."""
    reason: Reason
    """``end``: all that may be reused is; ``differs``: another prompt goes on otherwise;
    ``never_seen``: none went on that is remembered; ``evicted``: the page was here; ``shut``:
    nothing is shared."""
    slot: int
    """First slot that stops it."""
    evicted_seconds: float | None = None
    """How long ago the page was evicted."""
    before: list[int] = []
    """Ids before the slot, placeholders at items."""
    own: list[int] = []
    """Ids from the slot on."""
    other: list[int] = []
    """Ids from the slot on in the page that came nearest."""
    own_item: PageItem | None = None
    """The item at the slot, as its page sees it."""
    other_item: PageItem | None = None


def shut(num_prompt_tokens: int, page_size: int) -> ReuseReport:
    """Return the report of a prompt that is out of reuse."""
    return ReuseReport(
        num_prompt_tokens=num_prompt_tokens,
        num_matched_tokens=0,
        by_tier={"device": 0, "host": 0, "disk": 0},
        page_size=page_size,
        reason="shut",
        slot=0,
    )


def explain(
    keys: StreamKeys, by_tier: dict[str, int], page_size: int, history: PageHistory, when: float
) -> ReuseReport:
    """Return why a prompt matched no further.

    Args:
        keys: The prompt's.
        by_tier: What matched, in tokens by tier.
        page_size: Slots of a page, in tokens.
        history: What pages were made of.
        when: The time it was matched at, by the history's clock.
    """
    num_prompt = keys.opening.num_prompt_tokens
    matched = sum(by_tier.values())
    page = matched // page_size
    start, stop = page * page_size, (page + 1) * page_size
    reason: Reason = "never_seen"
    slot = matched
    other: list[Cell] = []
    other_items: Sequence[PageItem] = ()
    # A page that ends with the prompt is not looked for: its last token has to be computed.
    evicted_at = None if stop >= num_prompt else history.evicted_at(keys.key(page), when)
    own = _cells(*keys.content(page), page_size)[: num_prompt - start]
    if evicted_at is not None:
        reason = "evicted"
    else:
        for ids, items in history.siblings(keys.opening, keys.parent(page), when):
            cells = _cells(ids, items, page_size)
            common = _num_common(own, cells)
            if common < len(own) and start + common >= slot + bool(other):
                reason, slot, other, other_items = "differs", start + common, cells, items
            elif common == len(own) and stop > num_prompt - 1:
                # All of it is there, and its last token has to be computed.
                reason, slot, other, other_items = "end", matched, [], ()
                break
        if reason == "never_seen" and matched >= _most(keys, num_prompt, page_size):
            reason = "end"
    tokens = keys.opening.tokens
    return ReuseReport(
        num_prompt_tokens=num_prompt,
        num_matched_tokens=matched,
        by_tier=by_tier,
        page_size=page_size,
        reason=reason,
        slot=slot,
        evicted_seconds=None if evicted_at is None else history.now() - evicted_at,
        before=list(tokens[max(0, slot - NUM_BEFORE) : slot]),
        own=list(tokens[slot : min(slot + NUM_AFTER, num_prompt)]),
        other=[cell if isinstance(cell, int) else 0 for cell in other[slot - start :]][:NUM_AFTER],
        own_item=_item_at(keys.content(page)[1], slot - start),
        other_item=_item_at(other_items, slot - start),
    )


def _most(keys: StreamKeys, num_prompt: int, page_size: int) -> int:
    """Return the tokens of a prompt that can be reused at all: what has a name, but the last."""
    page, room = divmod(num_prompt - 1, page_size)
    return page * page_size + max((end for end in keys.ends(page) if end <= room), default=0)


def _cells(ids: Sequence[int], items: Sequence[PageItem], page_size: int) -> list[Cell]:
    """Return what fills a page's slots, as far as they are known."""
    filled: dict[int, Cell] = {}
    for item in items:
        for place in range(item.offset, item.length):
            filled[item.start + place - item.offset] = (item.digest, item.length, place)
    left = iter(ids)
    cells: list[Cell] = []
    for slot in range(page_size):
        cell = filled[slot] if slot in filled else next(left, None)
        if cell is None:
            break
        cells.append(cell)
    return cells


def _num_common(a: Sequence[Cell], b: Sequence[Cell]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _item_at(items: Sequence[PageItem], slot: int) -> PageItem | None:
    for item in items:
        if item.start <= slot < item.start + item.length - item.offset:
            return item
    return None
