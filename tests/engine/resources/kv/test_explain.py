from collections.abc import Hashable
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import event, given, settings, strategies as st

from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.explain import (
    NUM_AFTER,
    NUM_BEFORE,
    ReuseReport,
    explain,
    shut,
)
from mstar.engine.resources.kv.history import PageHistory
from mstar.engine.resources.kv.keys import PageItem
from mstar.engine.resources.kv.stream import StreamKeys
from mstar.engine.resources.spans import Span
from mstar.models.decoder import DecoderModel
from mstar.models.toy import toy_model
from mstar.models.toy_items import toy_item_model
from tests.engine.resources.kv.sentinel import Spans, slots_of
from tests.laws.harness import Bench, Picture, Prompt, prompt
from tests.oracles.prefix import PrefixCache

SIZE = 3
ROOTS = [bytes([n]) * 32 for n in range(2)]
Slot = Hashable


@dataclass
class Layout:
    """A prompt, and when it was written if it was."""

    ids: list[int]
    spans: Spans
    root: bytes
    opened_at: float = 0.0
    num_written: int = 0
    """Slots, in tokens."""

    @property
    def slots(self) -> list[Slot]:
        return slots_of(self.ids, self.spans)

    @property
    def item_ends(self) -> list[int]:
        ends, stop = [], 0
        for span in self.spans:
            stop += span.length
            if span.digest is not None:
                ends.append(stop)
        return ends

    def item_at(self, slot: int) -> Span | None:
        for span in self.spans:
            if slot < span.length:
                return span if span.digest is not None else None
            slot -= span.length
        return None

    def keys(self) -> StreamKeys:
        opening = Opening(
            request_id="r",
            tokens=self.ids,
            num_prompt_tokens=len(self.ids),
            max_len=99,
            root=self.root,
            spans=self.spans,
        )
        return StreamKeys(opening, SIZE)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Few ids and few items, so that prompts begin alike."""
    ids: list[int] = []
    spans: Spans = []
    item = st.builds(Span, st.sampled_from([1, 2, 4]), st.sampled_from([b"x" * 32, b"y" * 32]))
    for part in draw(st.lists(st.lists(st.integers(1, 2), max_size=4) | item, max_size=5)):
        if isinstance(part, Span):
            spans.append(part)
            ids += [0] * part.length
        elif part:
            spans.append(Span(len(part)))
            ids += part
    tail = draw(st.integers(1, 2))
    spans.append(Span(1))
    ids.append(tail)
    return Layout(ids, spans, draw(st.sampled_from([*ROOTS[:1] * 5, ROOTS[1]])))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Layout], Layout, float]:
    """What was written before in order of time, who asks, and when it was looked for."""
    written: list[Layout] = draw(st.lists(layouts(), max_size=5))
    for number, one in enumerate(written):
        one.opened_at = float(number)
        one.num_written = draw(st.integers(0, len(one.ids)))
    asker = draw(layouts())
    like = draw(st.sampled_from([None, *written]))
    if like is not None:
        asker = Layout(list(like.ids), like.spans, like.root)
        if draw(st.booleans()):
            asker.ids[-1] = 3 - asker.ids[-1]
    return written, asker, draw(st.sampled_from([99.0, 99.0, 99.0, 1.0]))


def common(a: list[Slot], b: list[Slot]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


@dataclass
class Expected:
    reason: str
    slot: int
    other: Layout | None = None


def expected_of(written: list[Layout], asker: Layout, matched: int, when: float) -> Expected:
    """Compare slot by slot with every stream whose page is full where reuse stops."""
    own = asker.slots
    start = matched // SIZE * SIZE
    stop = start + SIZE
    nearest: Layout | None = None
    far = matched - 1
    for other in reversed(written):
        if other.root != asker.root or other.opened_at > when or other.num_written < stop:
            continue
        same = common(own, other.slots[:stop])
        if same == len(own):
            return Expected("end", matched)
        if start <= same < stop and same > far:
            nearest, far = other, same
    if nearest is not None:
        return Expected("differs", far, nearest)
    # What has a name: full pages, and items that end on the page of the last slot.
    last = (len(own) - 1) // SIZE * SIZE
    most = max([last, *(end for end in asker.item_ends if last < end < len(own))])
    return Expected("end" if matched >= most else "never_seen", matched)


def told(
    written: list[Layout], asker: Layout, matched: int, when: float, history: PageHistory
) -> ReuseReport:
    return explain(asker.keys(), {"device": matched, "host": 0, "disk": 0}, SIZE, history, when)


def remember(written: list[Layout]) -> PageHistory:
    now = [0.0]
    history = PageHistory(clock=lambda: now[0])
    for one in written:
        now[0] = one.opened_at
        keys = one.keys()
        keys.num_indexed = one.num_written // SIZE
        keys.first(keys.num_indexed)
        history.opened(keys, -(-len(one.ids) // SIZE))
    return history


def matched_of(written: list[Layout], asker: Layout, when: float) -> int:
    cache = PrefixCache(SIZE)
    for one in written:
        if one.opened_at <= when:
            cache.add(one.root, one.slots[: one.num_written], one.item_ends)
    return cache.match(asker.root, asker.slots, asker.item_ends)


@given(worlds())
@settings(max_examples=200, deadline=None)
def test_reason_and_place_are_those_of_a_comparison_slot_by_slot(
    world: tuple[list[Layout], Layout, float],
) -> None:
    written, asker, when = world
    matched = matched_of(written, asker, when)
    expected = expected_of(written, asker, matched, when)
    event(expected.reason)
    report = told(written, asker, matched, when, remember(written))
    assert (report.reason, report.slot) == (expected.reason, expected.slot)
    assert (report.num_matched_tokens, report.num_prompt_tokens) == (matched, len(asker.ids))
    assert (report.page_size, report.evicted_seconds) == (SIZE, None)
    slot, other = expected.slot, expected.other
    assert report.before == asker.ids[max(0, slot - NUM_BEFORE) : slot]
    assert report.own == asker.ids[slot : slot + NUM_AFTER]
    own_item = asker.item_at(slot)
    assert (report.own_item is None) == (own_item is None)
    if own_item is not None and report.own_item is not None:
        assert (report.own_item.length, report.own_item.digest) == (
            own_item.length,
            own_item.digest,
        )
    if other is None:
        assert (report.other, report.other_item) == ([], None)
        return
    stop = (slot // SIZE + 1) * SIZE
    cells = [0 if other.item_at(at) else other.ids[at] for at in range(slot, stop)]
    assert report.other == cells[:NUM_AFTER]
    other_item = other.item_at(slot)
    assert (report.other_item is None) == (other_item is None)
    if other_item is not None and report.other_item is not None:
        assert report.other_item.digest == other_item.digest
    # What differs does differ.
    assert asker.slots[slot] != other.slots[slot]


@given(worlds(), st.integers(0, 9), st.integers(0, 9), st.data())
@settings(max_examples=80, deadline=None)
def test_page_that_was_evicted_is_named_with_the_time_since(
    world: tuple[list[Layout], Layout, float], ago: int, later: int, data: st.DataObject
) -> None:
    written, asker, _ = world
    start = data.draw(st.integers(0, len(asker.ids) // SIZE)) * SIZE
    matched = min(start, len(asker.ids) - 1)
    if matched % SIZE:
        return
    now = [0.0]
    history = PageHistory(clock=lambda: now[0])
    now[0] = 10.0
    if matched + SIZE <= len(asker.ids):
        history.evicted(asker.keys().key(matched // SIZE))
    now[0] = 10.0 + ago + later
    report = told(written, asker, matched, 10.0 + ago, history)
    if matched + SIZE < len(asker.ids):
        assert (report.reason, report.slot) == ("evicted", matched)
        assert report.evicted_seconds == ago + later
    else:
        # With that page there would be nothing left to compute, so it stopped nobody.
        assert report.reason in ("never_seen", "end")
    assert told(written, asker, matched, 9.0, history).reason != "evicted", "it was there then"


def test_end_says_nothing_of_a_prompt_that_goes_on_otherwise() -> None:
    """What another stream had in the slot was told beside ``end``, and a slot behind it."""
    twin = Layout([1, 1, 1, 1, 1, 1], [Span(6)], ROOTS[0], 0.0, 6)
    fork = Layout([1, 1, 1, 1, 2, 2], [Span(6)], ROOTS[0], 1.0, 6)
    asker = Layout([1, 1, 1, 1, 1, 1], [Span(6)], ROOTS[0])
    report = told([], asker, 3, 9.0, remember([twin, fork]))
    assert (report.reason, report.slot, report.other) == ("end", 3, [])


def test_reuse_up_to_an_items_end_is_not_stopped_by_what_differs_before() -> None:
    """A full page that shares less than the cut page was told as what stops the prompt."""
    picture = Span(2, b"x" * 32)
    first = Layout([0, 0, 1], [picture, Span(1)], ROOTS[0], 0.0, 2)
    other = Layout([2, 2, 2], [Span(3)], ROOTS[0], 1.0, 3)
    asker = Layout([0, 0, 2, 2], [picture, Span(2)], ROOTS[0])
    assert matched_of([first, other], asker, 9.0) == 2
    report = told([], asker, 2, 9.0, remember([first, other]))
    assert (report.reason, report.slot) == ("never_seen", 2)


def test_item_and_id_are_both_named_where_they_differ() -> None:
    spans = [Span(1), Span(4, b"x" * 32), Span(1)]
    first = Layout([7, 0, 0, 0, 0, 5], spans, ROOTS[0], 0.0, 6)
    asker = Layout([7, 8, 9, 9, 9, 9, 9], [Span(7)], ROOTS[0])
    report = told([], asker, 0, 9.0, remember([first]))
    assert (report.reason, report.slot) == ("differs", 1)
    assert (report.before, report.own[:2]) == ([7], [8, 9])
    assert report.own_item is None
    assert report.other_item == PageItem(1, 0, 4, b"x" * 32)
    assert report.other == [0, 0]
    swapped = told([], first, 0, 9.0, remember([Layout([7, 8, 9], [Span(3)], ROOTS[0], 0.0, 3)]))
    assert swapped.own_item == PageItem(1, 0, 4, b"x" * 32)
    assert (swapped.other, swapped.other_item) == ([8, 9], None)


def test_item_of_the_same_content_and_another_length_differs_from_its_first_slot() -> None:
    first = Layout([0] * 5 + [1], [Span(5, b"x" * 32), Span(1)], ROOTS[0], 0.0, 6)
    asker = Layout([0] * 4 + [1], [Span(4, b"x" * 32), Span(1)], ROOTS[0])
    report = told([], asker, 0, 9.0, remember([first]))
    assert (report.reason, report.slot) == ("differs", 0)
    assert report.own_item is not None
    assert report.other_item is not None
    assert (report.own_item.length, report.other_item.length) == (4, 5)


def test_prompt_out_of_reuse_is_told_as_shut() -> None:
    report = shut(7, SIZE)
    assert (report.reason, report.num_prompt_tokens, report.num_matched_tokens) == ("shut", 7, 0)
    assert report.by_tier == {"device": 0, "host": 0, "disk": 0}


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return toy_model(7)


def of_started(bench: Bench, request_id: str) -> ReuseReport:
    told = bench.engine.explain_request(request_id)
    assert told is not None
    assert list(told) == ["kv"]
    return cast(ReuseReport, told["kv"])


def serve(bench: Bench, request_id: str, parts: Prompt, **options: object) -> None:
    bench.add(request_id, parts, **options)  # type: ignore[arg-type]
    bench.drain()


def test_started_request_is_explained_as_it_was_found_then(model: DecoderModel) -> None:
    """Pages that it writes itself are no answer to what stopped it."""
    bench = Bench(model)
    first = prompt(1, 11)
    serve(bench, "first", first)
    assert of_started(bench, "first").reason == "never_seen"
    other = [*first[:6], 3 if first[6] != 3 else 4, *prompt(2, 1)]
    assert bench.engine.explain_request("second") is None, "it has not started"
    bench.add("second", other)
    assert bench.engine.explain_request("second") is None
    bench.step()
    at_start = of_started(bench, "second")
    assert (at_start.reason, at_start.slot, at_start.num_matched_tokens) == ("differs", 6, 4)
    assert at_start.other == first[6:8]
    for _ in range(5):
        bench.step()
        assert of_started(bench, "second") == at_start
    bench.drain()
    assert of_started(bench, "second") == at_start
    # Later ones change nothing, even if they come nearer.
    serve(bench, "third", [*other[:7], *prompt(3, 8)])
    assert of_started(bench, "second") == at_start
    assert of_started(bench, "third").num_matched_tokens == 4


def test_a_request_is_explained_as_long_as_it_runs_and_the_ended_for_a_while(
    model: DecoderModel,
) -> None:
    bench = Bench(model)
    bench.add("long", prompt(1, 11), max_tokens=150)
    bench.step()
    at_start = of_started(bench, "long")
    for number in range(100):
        bench.add(str(number), prompt(number % 5, 3), max_tokens=1)
        bench.step()
    assert of_started(bench, "long") == at_start
    bench.drain()
    assert of_started(bench, "long") == at_start
    told = [bench.engine.explain_request(str(number)) is not None for number in range(100)]
    assert told == [False] * 69 + [True] * 31


def test_report_of_a_request_agrees_with_what_it_was_told_before_it_started(
    model: DecoderModel,
) -> None:
    bench = Bench(model)
    stem = prompt(5, 9)
    for number, parts in enumerate(
        [stem, stem[:8], stem[:5], [*stem[:7], 5, 5], [*stem, 9], stem, prompt(6, 3), stem[:4]]
    ):
        name = str(number)
        bench.add(name, parts)
        request = bench.engine._walker.requests[name]
        asked = bench.engine.explain(request.prepared)["kv"]
        bench.drain()
        assert of_started(bench, name) == asked, name


def test_started_request_that_missed_an_evicted_page_says_so(model: DecoderModel) -> None:
    bench = Bench(model, num_pages=8)
    ids = prompt(1, 13)
    serve(bench, "first", ids, max_tokens=1)
    kv = bench.engine._runner.resources["kv"]
    pool = kv.pool  # type: ignore[attr-defined]
    pages = pool.try_allocate(pool.num_free + 1)
    pool.release(pages)
    now = kv.history.now()  # type: ignore[attr-defined]
    kv.history.now = lambda: now + 5.0  # type: ignore[attr-defined]
    bench.add("second", ids, max_tokens=2)
    kv.history.now = lambda: now  # type: ignore[attr-defined]
    bench.drain()
    kv.history.now = lambda: now + 60.0  # type: ignore[attr-defined]
    report = of_started(bench, "second")
    assert (report.reason, report.slot, report.num_matched_tokens) == ("evicted", 8, 8)
    assert report.evicted_seconds is not None
    assert 60.0 <= report.evicted_seconds < 70.0


def test_reset_under_a_started_request_does_not_take_away_what_it_found(
    model: DecoderModel,
) -> None:
    """It was told as shut, with no token found, until it ended."""
    bench = Bench(model)
    ids = prompt(1, 13)
    serve(bench, "first", ids)
    bench.add("second", ids)
    bench.step()
    bench.engine.reset_prefix_cache()
    report = of_started(bench, "second")
    assert report.num_matched_tokens == 12
    assert report.reason == "end"
    bench.drain()
    assert of_started(bench, "second").num_matched_tokens == 12


def test_request_that_waited_for_another_is_told_as_if_it_had_come_later(
    model: DecoderModel,
) -> None:
    bench = Bench(model)
    ids = prompt(1, 14)
    bench.add("first", ids)
    bench.add("second", [*ids[:13], 3 if ids[13] != 3 else 4, *prompt(4, 4)])
    bench.drain()
    report = of_started(bench, "second")
    assert (report.num_matched_tokens, report.by_tier["device"]) == (12, 12)


def test_picture_that_differs_is_named() -> None:
    bench = Bench(toy_item_model())
    one, two = Picture(1, 6), Picture(2, 6)
    serve(bench, "first", [*prompt(1, 5), one, *prompt(2, 3)])
    serve(bench, "second", [*prompt(1, 5), two, *prompt(2, 3)])
    report = of_started(bench, "second")
    assert (report.reason, report.slot, report.num_matched_tokens) == ("differs", 5, 4)
    assert report.own_item == PageItem(1, 0, 6, two.item().span.digest or b"")
    assert report.other_item == PageItem(1, 0, 6, one.item().span.digest or b"")
    serve(bench, "third", [*prompt(1, 5), two, 9, *prompt(7, 3)])
    third = of_started(bench, "third")
    assert (third.num_matched_tokens, third.slot) == (11, 11)


def test_tenant_is_told_of_its_own_prompts_only(model: DecoderModel) -> None:
    bench = Bench(model)
    ids = prompt(1, 11)
    serve(bench, "first", ids, salt="a")
    serve(bench, "second", [*ids[:6], 1, 1, 1], salt="b")
    assert of_started(bench, "second").reason == "never_seen"
    serve(bench, "third", [*ids[:6], 1, 1, 1], salt="a")
    assert of_started(bench, "third").reason == "differs"


def test_engine_without_reuse_tells_every_prompt_as_shut(model: DecoderModel) -> None:
    bench = Bench(model, enable_prefix_caching=False)
    serve(bench, "first", prompt(1, 9))
    assert of_started(bench, "first").reason == "shut"
