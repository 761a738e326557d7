"""Replays against a cache of tuples in an ordered dict, and against figures known of two traces."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from mstar.errors import ConfigError
from mstar.simulate.outcome import Outcome, Reading, Setup
from mstar.simulate.replay import replay
from mstar.simulate.trace import BLOCK_LEN, TracedRequest, read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"


def request(length: int, *blocks: int, output: int = 1) -> TracedRequest:
    return TracedRequest(timestamp=0, input_length=length, output_length=output, hash_ids=blocks)


@st.composite
def traces(draw: st.DrawFn, max_output: int = 1) -> list[TracedRequest]:
    found = []
    for _ in range(draw(st.integers(1, 25))):
        blocks = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        # Lengths about the borders of pages, where readings differ.
        step = draw(st.sampled_from([1, 127, 128, 129, 255, 256, 257, 384, 511, 512]))
        output = draw(st.integers(0, max_output))
        found.append(request((len(blocks) - 1) * BLOCK_LEN + step, *blocks, output=output))
    return found


def count_by_hand(
    requests: Sequence[TracedRequest], page_size: int, num_pages: int | None, reading: Reading
) -> tuple[int, int, int]:
    """Return hits, evictions and refused requests of a cache with one request at a time.

    A page's name is all that stands up to its end; ``idle`` holds them, longest unused first.
    """
    idle: OrderedDict[tuple[tuple[int, int], ...], None] = OrderedDict()
    hits = evictions = refused = 0
    for line in requests:
        needed = -(-line.input_length // page_size)
        if num_pages is not None and needed > num_pages:
            refused += 1
            continue
        is_whole = reading is Reading.PREFIX_RULE
        num_named = needed if is_whole else line.input_length // page_size
        limit = needed if is_whole else (line.input_length - 1) // page_size
        parts = [divmod(index * page_size, BLOCK_LEN) for index in range(num_named)]
        contents = tuple((line.hash_ids[block], offset) for block, offset in parts)
        names = [contents[: index + 1] for index in range(num_named)]
        hit = 0
        while hit < limit and names[hit] in idle:
            del idle[names[hit]]
            hit += 1
        while num_pages is not None and len(idle) + needed > num_pages:
            idle.popitem(last=False)
            evictions += 1
        for name in reversed(names):
            idle[name] = None
            idle.move_to_end(name)
        hits += hit * (1 if is_whole else page_size)
    return hits, evictions, refused


def counts(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.num_hits, outcome.num_evictions, outcome.num_refused


@pytest.mark.parametrize("reading", Reading)
@settings(max_examples=60, deadline=None)
@given(requests=traces(), page_size=st.sampled_from([128, 256, 512]))
def test_an_unlimited_pool_reuses_every_prefix_seen_before(
    reading: Reading, requests: list[TracedRequest], page_size: int
) -> None:
    outcome = replay(requests, Setup(page_size=page_size), reading)
    assert counts(outcome) == count_by_hand(requests, page_size, None, reading)
    assert outcome.num_evictions == outcome.num_refused == outcome.num_preempted == 0


@pytest.mark.parametrize("reading", Reading)
@settings(max_examples=100, deadline=None)
@given(requests=traces(), page_size=st.sampled_from([128, 256, 512]), num_pages=st.integers(1, 20))
def test_a_small_pool_gives_up_what_was_unused_longest(
    reading: Reading, requests: list[TracedRequest], page_size: int, num_pages: int
) -> None:
    setup = Setup(page_size=page_size, num_pages=num_pages)
    outcome = replay(requests, setup, reading)
    assert counts(outcome) == count_by_hand(requests, page_size, num_pages, reading)


@pytest.mark.parametrize("reading", Reading)
@settings(max_examples=60, deadline=None)
@given(requests=traces(), concurrency=st.integers(2, 30))
def test_requests_that_are_open_at_once_share_what_is_written(
    reading: Reading, requests: list[TracedRequest], concurrency: int
) -> None:
    alone = replay(requests, Setup(page_size=128), reading)
    together = replay(requests, Setup(page_size=128, concurrency=concurrency), reading)
    assert counts(together) == counts(alone)


@pytest.mark.parametrize("reading", Reading)
@settings(max_examples=100, deadline=None)
@given(
    requests=traces(max_output=1500),
    num_pages=st.integers(1, 20),
    concurrency=st.integers(1, 6),
)
def test_any_load_on_any_pool_comes_to_its_end(
    reading: Reading, requests: list[TracedRequest], num_pages: int, concurrency: int
) -> None:
    setup = Setup(page_size=256, num_pages=num_pages, concurrency=concurrency, outputs=True)
    outcome = replay(requests, setup, reading)
    unlimited = replay(requests, Setup(page_size=256, outputs=True), reading)
    assert 0 <= outcome.num_hits <= unlimited.num_hits
    padded = [
        -(-r.input_length // 256) * 256 if reading is Reading.PREFIX_RULE else r.input_length
        for r in requests
    ]
    pages = [-(-(n + r.output_length) // 256) for n, r in zip(padded, requests, strict=True)]
    assert outcome.num_refused == sum(count > num_pages for count in pages)


def test_generated_tokens_take_room_from_prompts() -> None:
    requests = [request(1024, 1, 2, output=1100), request(1024, 1, 2), request(1024, 1, 2)]
    setup = Setup(num_pages=5, outputs=True)
    assert replay(requests, setup, Reading.PREFIX_RULE).num_evictions == 0
    # The first answer's two full pages stay; with the third prompt they no longer fit.
    requests.append(request(1024, 3, 4))
    assert replay(requests, setup, Reading.PREFIX_RULE).num_evictions == 1
    assert replay(requests, Setup(num_pages=5), Reading.PREFIX_RULE).num_evictions == 0


def test_a_request_waits_where_open_ones_hold_the_pages_it_needs() -> None:
    """Two pages of four are held, and one is set aside for whoever is open."""
    requests = [request(1024, 1, 2), request(1024, 3, 4), request(512, 1)]
    waits = [
        replay(requests, Setup(num_pages=4, concurrency=n), Reading.PREFIX_RULE).num_waits
        for n in (1, 2)
    ]
    assert waits == [0, 1]
    roomy = replay(requests, Setup(num_pages=5, concurrency=2), Reading.PREFIX_RULE)
    assert (roomy.num_waits, roomy.num_hits) == (0, 1)


def test_the_youngest_starts_again_where_the_oldest_needs_its_pages() -> None:
    """One page each is open, then the oldest generates three pages more in a pool of five."""
    requests = [request(512, block, output=1537) for block in (1, 2, 3)]
    setup = Setup(num_pages=5, concurrency=3, outputs=True)
    outcome = replay(requests, setup, Reading.AS_SERVED)
    assert outcome.num_preempted == 1
    assert outcome.num_refused == outcome.num_hits == 0


def test_a_request_that_could_never_fit_is_refused_and_the_others_go_on() -> None:
    requests = [request(512, 1), request(1025, 1, 2, 3), request(513, 1, 2)]
    outcome = replay(requests, Setup(num_pages=2), Reading.AS_SERVED)
    assert counts(outcome) == (512, 0, 1)
    assert outcome.num_requests == 3
    assert outcome.num_possible == 512 + 1025 + 513


def test_a_pool_beyond_all_need_is_as_good_as_an_unlimited_one() -> None:
    requests = [request(512, 1), request(1025, 1, 2, 3)]
    outcome = replay(requests, Setup(num_pages=10**15), Reading.AS_SERVED)
    assert counts(outcome) == (512, 0, 0)


def test_progress_adds_up_to_the_requests() -> None:
    seen: list[int] = []
    replay([request(1, 1)] * 150, Setup(), Reading.AS_SERVED, seen.append)
    assert sum(seen) == 150


@pytest.mark.parametrize(
    ("page_size", "num_pages", "concurrency", "named"),
    [
        (1024, None, 1, "1024 tokens"),
        (48, None, 1, "48 tokens"),
        (0, None, 1, "0 tokens"),
        (-512, None, 1, "-512 tokens"),
        (512, 0, 1, "0 pages"),
        (512, 1, 0, "0 requests"),
    ],
)
def test_a_setup_out_of_range_is_named(
    page_size: int, num_pages: int | None, concurrency: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        Setup(page_size=page_size, num_pages=num_pages, concurrency=concurrency)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reading", "num_hits", "num_possible"),
    [
        ("conversation", Reading.PREFIX_RULE, 105_710, 288_500),
        ("conversation", Reading.AS_SERVED, 54_063_104, 144_793_823),
        ("synthetic", Reading.PREFIX_RULE, 77_953, 121_877),
        ("synthetic", Reading.AS_SERVED, 39_802_880, 61_194_628),
    ],
)
def test_the_known_figures_come_out_with_an_unlimited_pool(
    name: str, reading: Reading, num_hits: int, num_possible: int
) -> None:
    outcome = replay(known_trace(name), Setup(), reading)
    assert (outcome.num_hits, outcome.num_possible) == (num_hits, num_possible)
    assert counts(outcome)[1:] == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("conversation", 0.21), ("synthetic", 0.42)])
def test_ten_thousand_pages_keep_most_of_the_reuse(name: str, least: float) -> None:
    outcome = replay(known_trace(name), Setup(num_pages=10_000), Reading.PREFIX_RULE)
    assert outcome.hit_rate >= least
    assert counts(outcome) == count_by_hand(
        known_trace(name), BLOCK_LEN, 10_000, Reading.PREFIX_RULE
    )


def known_trace(name: str) -> list[TracedRequest]:
    path = TRACES / f"{name}_trace.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    return read_trace(path)
