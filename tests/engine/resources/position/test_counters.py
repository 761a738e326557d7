from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mstar.engine.resources.position.config import PositionConfig, PosScheme
from mstar.engine.resources.position.counters import SpanCounters
from mstar.engine.resources.spans import Span

ITEM = b"x" * 32
LAYOUTS = st.lists(
    st.builds(Span, st.integers(1, 6))
    | st.builds(Span, st.integers(1, 6), st.just(ITEM), st.none() | st.integers(0, 9)),
    min_size=1,
    max_size=7,
)
SCHEMES = st.sampled_from(
    [
        (PosScheme.SEQUENTIAL, 1),
        (PosScheme.SEQUENTIAL, 5),
        (PosScheme.BLOCK, 0),
        (PosScheme.BLOCK, 1),
        (PosScheme.BLOCK, 3),
    ]
)


def counters_of(spans: list[Span], scheme: PosScheme, step: int = 1) -> SpanCounters:
    config = PositionConfig("kv", scheme=scheme, block_step=step)
    return SpanCounters(spans, config)


def positions(spans: list[Span], scheme: PosScheme, step: int, num_behind: int) -> list[int]:
    """Walk over the slots one by one; those behind the layout are generated ids."""
    found: list[int] = []
    counter = 0
    for index, span in enumerate(spans):
        for slot in range(span.length):
            if scheme is PosScheme.SEQUENTIAL:
                found.append(counter + slot)
            else:
                found.append(counter)
        is_id = span.digest is None
        goes_on = is_id and index + 1 < len(spans) and spans[index + 1].digest is None
        if span.advance is not None:
            counter += span.advance
        elif scheme is PosScheme.SEQUENTIAL:
            counter += span.length
        elif not goes_on:
            # Ids with no item between them are one block, however many spans they are.
            counter += step
    for _ in range(num_behind):
        found.append(counter)
        counter += 1 if scheme is PosScheme.SEQUENTIAL else step
    return found


@given(LAYOUTS, SCHEMES)
@settings(max_examples=300, deadline=None)
def test_every_slot_has_the_position_that_a_walk_over_the_slots_gives(
    spans: list[Span], scheme: tuple[PosScheme, int]
) -> None:
    counters = counters_of(spans, *scheme)
    expected = positions(spans, *scheme, num_behind=5)
    assert counters.num_slots == len(expected) - 5
    assert [counters.at(slot) for slot in range(len(expected))] == expected
    assert counters.ids(0, len(expected)).tolist() == expected


@given(LAYOUTS, SCHEMES, st.data())
@settings(max_examples=200, deadline=None)
def test_steps_that_begin_and_end_anywhere_get_the_same_positions(
    spans: list[Span], scheme: tuple[PosScheme, int], data: st.DataObject
) -> None:
    """A hit or a chunk may end inside an item."""
    counters = counters_of(spans, *scheme)
    expected = positions(spans, *scheme, num_behind=4)
    cuts = data.draw(st.sets(st.integers(0, len(expected))))
    bounds = sorted({0, *cuts, len(expected)})
    found = [counters.ids(a, b) for a, b in pairwise(bounds)]
    assert np.concatenate(found).tolist() == expected
    assert all(part.dtype == np.int64 for part in found)


def test_no_slots_have_no_positions() -> None:
    counters = counters_of([Span(3), Span(2, ITEM)], PosScheme.SEQUENTIAL)
    assert counters.ids(4, 4).tolist() == []


@pytest.mark.parametrize(
    ("scheme", "step", "expected"),
    [
        # Two ids, a picture of four slots that costs two positions, one id, two generated ones.
        (PosScheme.SEQUENTIAL, 1, [0, 1, 2, 3, 4, 5, 4, 5, 6]),
        (PosScheme.BLOCK, 1, [0, 0, 1, 1, 1, 1, 3, 4, 5]),
        (PosScheme.BLOCK, 3, [0, 0, 3, 3, 3, 3, 5, 8, 11]),
    ],
)
def test_what_follows_a_picture_stands_where_its_advance_says(
    scheme: PosScheme, step: int, expected: list[int]
) -> None:
    counters = counters_of([Span(2), Span(4, ITEM, 2), Span(1)], scheme, step)
    assert counters.ids(0, 9).tolist() == expected


def test_item_that_advances_by_nothing_leaves_the_counter_where_it_was() -> None:
    spans = [Span(2), Span(3, ITEM, 0), Span(2)]
    assert counters_of(spans, PosScheme.SEQUENTIAL).ids(0, 7).tolist() == [0, 1, 2, 3, 4, 2, 3]
