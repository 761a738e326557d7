from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, strategies as st

from mstar.engine.resources.spans import DIGEST_BYTES, Grid, Span, check_spans, is_item_slot, pairs
from mstar.errors import RequestError

DIGEST = b"x" * DIGEST_BYTES
SPANS = st.lists(
    st.builds(Span, st.integers(1, 5))
    | st.builds(
        Span,
        st.integers(1, 5),
        st.just(DIGEST),
        st.none() | st.integers(0, 5),
        st.booleans(),
        st.sampled_from(["picture", "sound"]),
    )
    | st.builds(
        lambda times, rows, columns: Span(
            len(times) * rows * columns, DIGEST, kind="video", grid=Grid(times, rows, columns)
        ),
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
        st.integers(1, 3),
        st.integers(1, 3),
    ),
    max_size=6,
)


def items_in(spans: list[Span]) -> int:
    return len([span for span in spans if span.digest is not None])


@given(SPANS)
def test_layout_that_covers_its_prompt_is_taken(spans: list[Span]) -> None:
    check_spans(spans, sum(span.length for span in spans), items_in(spans))


@given(SPANS, st.integers(-3, 3), st.integers(-2, 2))
def test_layout_that_covers_more_or_less_is_refused_with_both_numbers(
    spans: list[Span], more_slots: int, more_inputs: int
) -> None:
    num_slots, num_items = sum(span.length for span in spans), items_in(spans)
    if more_slots:
        words = f"the layout has {num_slots} slots, the prompt {num_slots + more_slots}$"
    elif more_inputs:
        words = f"the layout has {num_items} items and {num_items + more_inputs} inputs$"
    else:
        return
    with pytest.raises(RequestError, match=words) as caught:
        check_spans(spans, num_slots + more_slots, num_items + more_inputs)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Span(0), "has 0 slots; at least 1"),
        (Span(-4), "has -4 slots; at least 1"),
        (Span(0, DIGEST), "has 0 slots; at least 1"),
        (Span(2, None, 3), "is token ids and has an item's fields"),
        (Span(2, None, None, True), "is token ids and has an item's fields"),
        (Span(2, None, None, False, "picture"), "is token ids and has an item's fields"),
        (Span(2, grid=Grid((0,), 1, 2)), "is token ids and has an item's fields"),
        (
            Span(6, DIGEST, grid=Grid((0, 1), 2, 2)),
            "has 6 slots and a grid of 2 frames of 2 rows and 2 columns, which are 8",
        ),
        (
            Span(2, DIGEST, grid=Grid((0,), -1, -2)),
            r"has a grid of -1 rows, -2 columns and the times \[0\]; at least one of each, and no "
            "time below 0",
        ),
        (
            Span(2, DIGEST, grid=Grid((), 1, 2)),
            r"has a grid of 1 rows, 2 columns and the times \[\]; .*",
        ),
        (
            Span(4, DIGEST, grid=Grid((0, -1), 1, 2)),
            r"has a grid of 1 rows, 2 columns and the times \[0, -1\]; .*",
        ),
        (Span(2, b""), "has a digest of 0 bytes; it must have 32"),
        (Span(2, DIGEST[:-1]), "has a digest of 31 bytes; it must have 32"),
        (Span(2, DIGEST + b"x"), "has a digest of 33 bytes; it must have 32"),
        (Span(2, DIGEST, -1), "moves positions by -1"),
    ],
)
@pytest.mark.parametrize("place", range(3))
def test_wrong_span_is_named_with_its_place_and_its_value(
    bad: Span, words: str, place: int
) -> None:
    spans = [Span(1), Span(1)]
    spans.insert(place, bad)
    num_slots = sum(span.length for span in spans)
    with pytest.raises(RequestError, match=f"^span {place} of the layout {words}$") as caught:
        check_spans(spans, num_slots, items_in(spans))
    assert caught.value.param == "prompt"


@given(SPANS)
def test_slot_belongs_to_an_item_where_its_span_is_one(spans: list[Span]) -> None:
    expected = [span.digest is not None for span in spans for _ in range(span.length)]
    assert [is_item_slot(spans, slot) for slot in range(len(expected))] == expected
    # Behind the layout stand generated ids.
    assert not is_item_slot(spans, len(expected))
    assert not is_item_slot(spans, len(expected) + 7)


@given(SPANS)
def test_layout_crosses_processes_unchanged(spans: list[Span]) -> None:
    data = msgspec.msgpack.encode(spans)
    assert msgspec.msgpack.decode(data, type=list[Span]) == spans


@given(SPANS)
def test_pairs_are_lengths_and_digests_in_order(spans: list[Span]) -> None:
    assert pairs(spans) == [(span.length, span.digest) for span in spans]
    starts = [0]
    for length, _ in pairs(spans):
        starts.append(starts[-1] + length)
    assert all(a < b for a, b in pairwise(starts))
