"""A prepared prompt page by page, as its keys see it."""

from collections.abc import Sequence
from dataclasses import dataclass

from mstar.engine.request import PreparedRequest, context_root
from mstar.engine.resources.kv.keys import PageItem, end_key, page_items
from mstar.engine.resources.spans import Span, pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class PageView:
    """One page of a prompt."""

    number: int
    start: int
    """Its first slot in the prompt, in tokens."""
    num_slots: int
    """Slots that the prompt fills; fewer than the page size on the last page at most."""
    token_ids: tuple[int, ...]
    """Ids of the slots that its items leave."""
    items: tuple[PageItem, ...]
    key: bytes | None
    """``None`` where the prompt has no root: it is never shared."""
    end_keys: tuple[tuple[int, bytes], ...]
    """Where items end inside the page: slots up to there, and the key of the page cut there."""


def layout(prepared: PreparedRequest) -> list[Span]:
    """Return the prompt's spans; one of token ids where it states none."""
    return list(prepared.spans) or [Span(len(prepared.token_ids))]


def pages_of(prepared: PreparedRequest, page_size: int) -> list[PageView]:
    """Return the pages that a prompt fills, the unfinished last one included.

    Args:
        prepared: With keys that were made with the same page size.
        page_size: Slots of a page, in tokens.
    """
    by_page = page_items(pairs(layout(prepared)), page_size)
    pages = []
    prev = context_root(prepared.root, prepared.context)
    for number, start in enumerate(range(0, len(prepared.token_ids), page_size)):
        ids = prepared.token_ids[start : start + page_size]
        items = tuple(by_page.get(number, ()))
        own = _ids_between(ids, items)
        pages.append(
            PageView(
                number=number,
                start=start,
                num_slots=len(ids),
                token_ids=own,
                items=items,
                key=None if prev is None else prepared.page_keys[number],
                end_keys=() if prev is None else _end_keys(prev, own, items, page_size),
            )
        )
        prev = pages[-1].key
    return pages


def _ids_between(ids: Sequence[int], items: Sequence[PageItem]) -> tuple[int, ...]:
    covered = {
        slot for item in items for slot in range(item.start, item.start + item.length - item.offset)
    }
    return tuple(token for slot, token in enumerate(ids) if slot not in covered)


def _end_keys(
    prev: bytes, ids: Sequence[int], items: Sequence[PageItem], page_size: int
) -> tuple[tuple[int, bytes], ...]:
    ends = (item.start + item.length - item.offset for item in items)
    return tuple((end, end_key(prev, ids, items, end)) for end in ends if end < page_size)
