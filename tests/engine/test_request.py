from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from mstar.engine.output import FinishReason
from mstar.engine.request import Component, PreparedRequest, Request, RequestStatus
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.models.base import text_graph

LAYOUTS = st.lists(
    st.builds(Span, st.integers(1, 6))
    | st.builds(
        Span,
        st.integers(1, 6),
        st.sampled_from([b"x" * 32, b"y" * 32]),
        st.none(),
        st.booleans(),
        st.just("picture"),
    ),
    min_size=1,
    max_size=6,
)


def request_of(
    spans: list[Span],
    *,
    max_tokens: int = 50,
    stop_token_ids: frozenset[int] = frozenset(),
    root: bytes | None = None,
    **params: Any,
) -> Request:
    num_slots = sum(span.length for span in spans)
    return Request(
        PreparedRequest(
            request_id="r",
            token_ids=list(range(num_slots)),
            params=SamplingParams(**params),
            spans=spans,
            inputs=[{} for span in spans if span.digest is not None],
            root=root,
        ),
        text_graph("node").cursor("prefill"),
        Component(vocab_size=160, stop_token_ids=stop_token_ids),
        max_len=num_slots + max_tokens,
        arrival=0,
    )


@given(LAYOUTS, st.data(), st.integers(1, 40))
@settings(max_examples=400, deadline=None)
def test_chunk_is_the_longest_that_begins_nothing_unencoded_and_cuts_nothing_whole(
    spans: list[Span], data: st.DataObject, budget: int
) -> None:
    request = request_of(spans)
    request.tokens += [7] * data.draw(st.integers(0, 3))
    request.num_computed_tokens = data.draw(st.integers(0, len(request.tokens)))
    for item in request.items:
        item.is_encoded = data.draw(st.booleans())
    start = request.num_computed_tokens

    def may_stop(stop: int) -> bool:
        for item in request.items:
            slots = range(max(item.start, start), min(item.stop, stop))
            if slots and not item.is_encoded:
                return False
            if slots and item.span.is_whole and stop < item.stop:
                return False
        return True

    stops = range(start, min(start + budget, len(request.tokens)) + 1)
    assert request.chunk(budget) == max(stop for stop in stops if may_stop(stop)) - start


@given(LAYOUTS, st.data(), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_next_item_is_the_first_unencoded_one_that_the_next_tokens_touch(
    spans: list[Span], data: st.DataObject, budget: int
) -> None:
    request = request_of(spans)
    request.num_computed_tokens = start = data.draw(st.integers(0, len(request.tokens)))
    for item in request.items:
        item.is_encoded = data.draw(st.booleans())
    ahead = [
        item
        for item in request.items
        if not item.is_encoded and range(max(start, item.start), min(start + budget, item.stop))
    ]
    assert request.next_item(budget) is (ahead[0] if ahead else None)


@given(LAYOUTS)
def test_items_stand_where_the_layout_puts_them(spans: list[Span]) -> None:
    request = request_of(spans)
    covered = [at for item in request.items for at in range(item.start, item.stop)]
    kinds = [span.digest is not None for span in spans for _ in range(span.length)]
    assert covered == [at for at, is_item in enumerate(kinds) if is_item]
    assert [item.span for item in request.items] == [s for s in spans if s.digest is not None]
    assert not any(item.is_encoded for item in request.items)


def test_items_keep_their_own_inputs_in_order() -> None:
    spans = [Span(1), Span(2, b"x" * 32), Span(1), Span(2, b"y" * 32)]
    inputs: list[dict[str, Any]] = [{"first": None}, {"second": None}]
    prepared = PreparedRequest(
        request_id="r", token_ids=[0] * 6, params=SamplingParams(), spans=spans, inputs=inputs
    )
    cursor = text_graph("node").cursor("prefill")
    component = Component(vocab_size=9, stop_token_ids=frozenset())
    request = Request(prepared, cursor, component, max_len=9, arrival=0)
    assert [list(item.inputs) for item in request.items] == [["first"], ["second"]]
    assert len({item.name for item in request.items}) == 2


def test_reuse_counts_each_token_once_by_where_it_was_found() -> None:
    request = request_of([Span(20)])
    request.reuse(8, {"device": 5, "host": 3})
    assert (request.num_computed_tokens, request.num_cached_tokens) == (8, 8)
    # It computes three, and is moved over what another computed meanwhile.
    request.num_computed_tokens += 3
    request.reuse(16, {"device": 5})
    assert (request.num_computed_tokens, request.num_cached_tokens) == (16, 13)
    assert dict(request.sources) == {"device": 10, "host": 3}
    assert request.sources.total() == request.num_cached_tokens
    assert request.num_uncomputed_tokens == 4


def test_what_a_resumed_request_finds_of_its_own_is_no_reuse() -> None:
    request = request_of([Span(20)])
    request.reuse(8, {"device": 8})
    request.num_computed_tokens = 20
    request.append(3)
    request.restart()
    request.reuse(20, {"device": 16, "host": 4})
    assert (request.num_computed_tokens, request.num_cached_tokens) == (20, 8)
    assert dict(request.sources) == {"device": 8}


def test_restart_keeps_the_ids_and_forgets_what_was_computed_and_encoded() -> None:
    request = request_of([Span(2), Span(3, b"x" * 32), Span(1)])
    request.items[0].is_encoded = True
    request.num_computed_tokens = 6
    request.status = RequestStatus.RUNNING
    for token in (7, 8):
        request.append(token)
    request.restart()
    assert request.tokens == [0, 1, 2, 3, 4, 5, 7, 8]
    assert list(request.generated()) == [7, 8]
    assert request.num_uncomputed_tokens == 8
    assert request.status is RequestStatus.WAITING
    assert request.was_preempted
    assert request.chunk(8) == 2, "the item has to be encoded again"
    assert request.next_item(8) is request.items[0]


@given(
    st.lists(st.sampled_from([7, 8, 9]), min_size=1, max_size=8),
    st.integers(0, 4),
    st.integers(4, 8),
    st.sets(st.sampled_from([7, 8])),
)
def test_request_ends_at_its_length_or_at_a_stop_behind_its_least_length(
    tokens: list[int], min_tokens: int, max_tokens: int, stops: set[int]
) -> None:
    request = request_of(
        [Span(2)], max_tokens=max_tokens, stop_token_ids=frozenset(stops), min_tokens=min_tokens
    )
    for count, token in enumerate(tokens, 1):
        expected: FinishReason | None = None
        if token in stops and count > min_tokens:
            expected = "stop"
        elif count >= max_tokens:
            expected = "length"
        assert request.append(token) == expected
        if expected is not None:
            return


@pytest.mark.parametrize("root", [None, b"root"])
def test_names_of_equal_items_agree_within_a_request(root: bytes | None) -> None:
    picture = Span(2, b"x" * 32, kind="picture")
    items = request_of([picture, Span(1), picture], root=root).items
    assert items[0].name == items[1].name
