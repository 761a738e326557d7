import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.keys import PageItem
from mstar.engine.resources.kv.stream import StreamKeys, placed
from mstar.engine.resources.spans import Span
from tests.oracles import keys as oracle

ROOT = bytes(range(32))
LAYOUTS = st.lists(
    st.builds(
        Span,
        st.integers(1, 7),
        st.sampled_from([None, None, b"x" * 32, b"y" * 32, b"z" * 32]),
    ),
    max_size=6,
)
SIZES = st.integers(1, 5)


def opening_of(
    ids: list[int],
    spans: Sequence[Span],
    page_keys: Sequence[bytes] | None = None,
    num_prompt: int | None = None,
) -> Opening:
    return Opening(
        request_id="r",
        tokens=ids,
        num_prompt_tokens=len(ids) if num_prompt is None else num_prompt,
        max_len=1000,
        page_keys=page_keys,
        root=ROOT,
        spans=spans,
    )


class Pages:
    """A stream page by page, from its slots alone.

    Ids behind the layout are generated ones.
    """

    def __init__(self, ids: list[int], spans: Sequence[Span], page_size: int) -> None:
        self.size = page_size
        pairs = [(span.length, span.digest) for span in spans]
        rest = len(ids) - sum(span.length for span in spans)
        assert rest >= 0
        self.spans = [*pairs, (rest, None)]
        slots = oracle.slots(self.spans)
        self.ids = [token for token, slot in zip(ids, slots, strict=True) if slot is None]
        self.ends = [i + 1 for i, slot in enumerate(slots) if slot and slot[0] == slot[1] - 1]
        self.num_slots = len(ids)

    def contents(self, stop: int | None = None) -> list[tuple[list[int], list[oracle.Item]]]:
        """Ids and items of each page of the first ``stop`` slots, between items."""
        spans: list[tuple[int, bytes | None]] = []
        left = self.num_slots if stop is None else stop
        for length, digest in self.spans:
            taken = min(length, left)
            assert taken in (0, length) or digest is None, "an item is cut"
            left -= taken
            spans.append((taken, digest if taken else None))
        items = oracle.page_items(spans, self.size)
        dealt = oracle.pages_of_tokens(spans, self.ids, self.size)
        return [(ids, items.get(number, [])) for number, ids in enumerate(dealt)]

    def keys(self, stop: int | None = None) -> list[bytes]:
        pages = self.contents(stop)
        return oracle.chain([p[0] for p in pages], {n: p[1] for n, p in enumerate(pages)}, ROOT)

    @property
    def num_full(self) -> int:
        return self.num_slots // self.size


def ids_of(spans: Sequence[Span], num_generated: int) -> list[int]:
    """Distinct ids, at the slots of items too, where nothing may read them."""
    return list(range(100, 100 + sum(span.length for span in spans) + num_generated))


@given(LAYOUTS, st.integers(0, 9), SIZES, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_names_are_those_of_the_pages_in_whatever_order_they_are_asked_for(
    spans: list[Span], num_generated: int, size: int, rng: random.Random
) -> None:
    ids = ids_of(spans, num_generated)
    expected, full = Pages(ids, spans, size).keys(), Pages(ids, spans, size).num_full
    keys = StreamKeys(opening_of(ids, spans), size)
    assert keys.root == ROOT
    assert keys.parent(0) == ROOT
    for page in rng.sample(range(full), full):
        match rng.randrange(3):
            case 0:
                assert keys.key(page) == expected[page]
            case 1:
                assert keys.parent(page) == (expected[page - 1] if page else ROOT)
            case _:
                assert keys.first(page) == expected[:page]
    assert keys.first(full) == expected[:full]
    assert [keys.key(page) for page in range(full)] == expected[:full]
    for page in range(full):
        assert keys.place_behind(keys.parent(page)) == page
    assert keys.place_behind(b"no key at all") is None


@given(LAYOUTS, st.integers(0, 9), SIZES)
@settings(max_examples=200, deadline=None)
def test_content_is_the_ids_between_the_items_of_the_page(
    spans: list[Span], num_generated: int, size: int
) -> None:
    ids = ids_of(spans, num_generated)
    keys = StreamKeys(opening_of(ids, spans), size)
    assert keys.has_items == bool(spans)
    for number, (own, items) in enumerate(Pages(ids, spans, size).contents()):
        found_ids, found_items = keys.content(number)
        assert list(found_ids) == own
        assert [tuple(item) for item in found_items] == items


@given(LAYOUTS, st.integers(0, 9), SIZES)
@settings(max_examples=200, deadline=None)
def test_end_key_is_the_key_of_the_page_in_a_prompt_that_ends_there(
    spans: list[Span], num_generated: int, size: int
) -> None:
    ids = ids_of(spans, num_generated)
    pages = Pages(ids, spans, size)
    keys = StreamKeys(opening_of(ids, spans), size)
    for page in range(len(ids) // size + 1):
        inside = [end - page * size for end in pages.ends if 0 < end - page * size < size]
        assert list(keys.ends(page)) == inside
        for end in inside:
            assert keys.end_key(page, end) == pages.keys(page * size + end)[page]


@given(LAYOUTS, st.integers(0, 9), SIZES)
@settings(max_examples=200, deadline=None)
def test_next_mark_is_the_next_page_border_or_item_end(
    spans: list[Span], num_generated: int, size: int
) -> None:
    ids = ids_of(spans, num_generated)
    pages = Pages(ids, spans, size)
    keys = StreamKeys(opening_of(ids, spans), size)
    for stored in range(len(ids) + 1):
        marks = (at for at in range(stored + 1, stored + size + 1) if not at % size)
        ends = [end for end in pages.ends if end > stored]
        assert keys.next_mark(stored) == min([next(marks), *ends])


@given(LAYOUTS, st.integers(1, 5), st.integers(0, 9), SIZES)
@settings(max_examples=100, deadline=None)
def test_names_grow_with_what_is_generated(
    spans: list[Span], num_generated: int, more: int, size: int
) -> None:
    """The list of ids is the engine's own, and grows under the names."""
    ids = ids_of(spans, num_generated)
    keys = StreamKeys(opening_of(ids, spans), size)
    keys.first(len(ids) // size)
    ids += range(500, 500 + more)
    assert keys.first(len(ids) // size) == Pages(ids, spans, size).keys()[: len(ids) // size]


@pytest.mark.parametrize("num_given", range(5))
def test_given_keys_serve_for_full_pages_of_the_prompt_only(num_given: int) -> None:
    """The last of a prompt's keys names less than the page that generation fills."""
    ids = list(range(10))
    given_keys = [bytes([n]) * 32 for n in range(num_given)]
    keys = StreamKeys(opening_of(ids, (), given_keys, num_prompt=7), 3)
    own = oracle.chain([ids[0:3], ids[3:6], ids[6:9]], {}, ROOT)
    used = given_keys[:2]
    assert keys.first(2)[: len(used)] == used
    behind = used[-1] if used else ROOT
    chained = oracle.chain([ids[n : n + 3] for n in range(3 * len(used), 9, 3)], {}, behind)
    assert keys.first(3) == [*used, *chained]
    assert keys.first(3) == own or used


def test_stream_without_a_root_has_no_names() -> None:
    opening = Opening(request_id="x", tokens=[1], num_prompt_tokens=1, max_len=2)
    with pytest.raises(AssertionError, match="stream of 'x' has no root"):
        StreamKeys(opening, 4)


@given(LAYOUTS, SIZES)
def test_every_slot_of_a_full_page_gets_its_id_and_an_items_slots_get_none(
    spans: list[Span], size: int
) -> None:
    ids = ids_of(spans, 0)
    keys = StreamKeys(opening_of(ids, spans), size)
    slots = oracle.slots([(span.length, span.digest) for span in spans])
    expected = [token if slot is None else 0 for token, slot in zip(ids, slots, strict=True)]
    for page in range(len(ids) // size):
        found = placed(*keys.content(page), size)
        assert list(found) == expected[page * size : (page + 1) * size]


def test_page_that_one_item_covers_has_no_ids() -> None:
    item = PageItem(0, 3, 9, b"x" * 32)
    assert placed([], [item], 4) == [0] * 4
