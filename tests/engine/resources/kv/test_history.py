from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.history import PageHistory
from mstar.engine.resources.kv.stream import StreamKeys
from mstar.engine.resources.spans import Span

SIZE = 2
ROOTS = [bytes([n]) * 32 for n in range(2)]


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def keys_of(
    ids: Sequence[int], *, root: bytes = ROOTS[0], spans: Sequence[Span] = (), indexed: int = 99
) -> StreamKeys:
    """Names of a stream, as many of whose pages are indexed as are full, or fewer."""
    opening = Opening(
        request_id="r",
        tokens=list(ids),
        num_prompt_tokens=len(ids),
        max_len=99,
        root=root,
        spans=spans,
    )
    keys = StreamKeys(opening, SIZE)
    keys.num_indexed = min(indexed, len(ids) // SIZE)
    keys.first(keys.num_indexed)
    return keys


def found(history: PageHistory, parent: bytes, before: float = 1e9) -> list[list[int]]:
    asker = keys_of([])
    assert not any(keys is asker for _, _, keys in history._streams)
    return [list(ids) for ids, _ in history.siblings(asker.opening, parent, before)]


def test_pages_behind_a_parent_come_the_last_stream_first() -> None:
    history = PageHistory()
    streams = [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 3, 4], [1, 2, 9]]
    for ids in streams:
        history.opened(keys_of(ids), 2)
    assert found(history, ROOTS[0]) == [[1, 2], [7, 8], [1, 2], [1, 2]]
    # The page that begins with 9 is not full.
    assert found(history, keys_of([1, 2]).key(0)) == [[5, 6], [3, 4]]
    assert found(history, keys_of([7, 8]).key(0)) == [[3, 4]]
    assert found(history, keys_of([1, 2], root=ROOTS[1]).key(0)) == []


def test_page_that_is_not_written_yet_is_not_told_of() -> None:
    history = PageHistory()
    keys = keys_of([1, 2, 3, 4], indexed=0)
    history.opened(keys, 2)
    assert found(history, ROOTS[0]) == []
    keys.num_indexed = 1
    assert found(history, ROOTS[0]) == [[1, 2]]
    assert found(history, keys.key(0)) == []
    keys.num_indexed = 2
    assert found(history, keys.key(0)) == [[3, 4]]


def test_page_that_generation_filled_is_told_of() -> None:
    history = PageHistory()
    keys = keys_of([1, 2, 3])
    history.opened(keys, 2)
    assert isinstance(keys.opening.tokens, list)
    keys.opening.tokens.append(4)
    keys.first(2)
    keys.num_indexed = 2
    assert found(history, keys.key(0)) == [[3, 4]]


def test_items_are_told_with_the_ids_that_they_leave() -> None:
    history = PageHistory()
    spans = [Span(1), Span(2, b"x" * 32), Span(1)]
    history.opened(keys_of([1, 0, 0, 2], spans=spans), 2)
    asker = keys_of([]).opening
    ((ids, items),) = history.siblings(asker, ROOTS[0], 1.0e9)
    assert (list(ids), [tuple(item) for item in items]) == ([1], [(1, 0, 2, b"x" * 32)])


def test_stream_that_opened_later_than_asked_for_is_left_out() -> None:
    clock = Clock()
    history = PageHistory(clock=clock)
    for time in (1.0, 2.0, 3.0):
        clock.time = time
        history.opened(keys_of([int(time), 0]), 1)
    assert [found(history, ROOTS[0], before) for before in (0.9, 1.0, 2.5)] == [
        [],
        [[1, 0]],
        [[2, 0], [1, 0]],
    ]


def test_stream_is_no_sibling_of_itself() -> None:
    history = PageHistory()
    own, other = keys_of([1, 2]), keys_of([1, 2])
    history.opened(own, 1)
    assert list(history.siblings(own.opening, ROOTS[0], 1e9)) == []
    history.opened(other, 1)
    assert len(list(history.siblings(own.opening, ROOTS[0], 1e9))) == 1


@given(st.integers(1, 8), st.lists(st.integers(1, 5), max_size=12))
def test_streams_are_remembered_within_the_bound_and_the_last_one_always(
    max_pages: int, lengths: list[int]
) -> None:
    history = PageHistory(max_pages)
    for number, length in enumerate(lengths):
        history.opened(keys_of([number, 0] * length), length)
    expected: list[list[int]] = []
    for number, _ in reversed(list(enumerate(lengths))):
        if expected and sum(lengths[number:]) > max_pages:
            break
        expected.append([number, 0])
    assert found(history, ROOTS[0]) == expected


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=20),
    st.integers(0, 30),
)
@settings(max_examples=200)
def test_eviction_is_remembered_by_its_last_time_within_the_bound(
    max_pages: int, evictions: list[tuple[int, int]], before: int
) -> None:
    clock = Clock()
    history = PageHistory(max_pages, clock)
    last: list[tuple[bytes, float]] = []
    for number, seconds in evictions:
        clock.time += seconds
        key = bytes([number]) * 32
        history.evicted(key)
        last = [*(pair for pair in last if pair[0] != key), (key, clock.time)][-max_pages:]
    for number in range(6):
        time = dict(last).get(bytes([number]) * 32)
        expected = None if time is None or time > before else time
        assert history.evicted_at(bytes([number]) * 32, before) == expected


def test_nothing_is_remembered_of_before_it_was_cleared() -> None:
    history = PageHistory(4)
    keys = keys_of([1, 2])
    history.opened(keys, 3)
    history.evicted(keys.key(0))
    history.clear()
    assert found(history, ROOTS[0]) == []
    assert history.evicted_at(keys.key(0), 1e9) is None
    # Nor does it count towards the bound.
    for ids in ([1, 2], [3, 4]):
        history.opened(keys_of(ids), 2)
    assert found(history, ROOTS[0]) == [[3, 4], [1, 2]]


@pytest.mark.parametrize("place", [0, 1])
def test_key_of_another_tenant_is_behind_no_page(place: int) -> None:
    history = PageHistory()
    history.opened(keys_of([1, 2, 3, 4], root=ROOTS[0]), 2)
    own = keys_of([1, 2, 3, 4], root=ROOTS[1])
    assert found(history, own.parent(place)) == []
