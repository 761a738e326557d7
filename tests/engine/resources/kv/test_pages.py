from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mstar.engine.resources.kv.pages import PagePool


def pool_of(num_pages: int) -> tuple[PagePool, list[int]]:
    evicted: list[int] = []
    return PagePool(num_pages, evicted.extend), evicted


def test_pages_are_numbered_from_one_and_handed_out_once() -> None:
    pool, _ = pool_of(5)
    assert sorted(pool.try_allocate(5) or []) == [1, 2, 3, 4, 5]
    assert pool.try_allocate(1) is None
    assert pool.try_allocate(0) == []


def test_allocation_gives_all_or_nothing() -> None:
    pool, _ = pool_of(3)
    assert pool.try_allocate(4) is None
    assert pool.num_free == 3
    pool.check()


def test_shared_page_is_free_only_when_the_last_holder_lets_go() -> None:
    pool, _ = pool_of(2)
    pages = pool.try_allocate(1)
    assert pages is not None
    pool.retain(pages)
    pool.release(pages)
    assert (pool.ref_count(pages[0]), pool.num_held) == (1, 1)
    pool.release(pages)
    assert (pool.ref_count(pages[0]), pool.num_free) == (0, 2)


def test_pages_that_are_not_kept_go_before_any_that_is() -> None:
    pool, evicted = pool_of(4)
    kept, plain = pool.try_allocate(2), pool.try_allocate(2)
    assert kept is not None
    assert plain is not None
    for page in kept:
        pool.keep(page)
    pool.release(kept)
    pool.release(plain)
    assert sorted(pool.try_allocate(2) or []) == sorted(plain)
    assert evicted == []
    assert pool.try_allocate(2) == kept[::-1]
    assert evicted == kept[::-1]


def test_page_that_was_taken_up_again_is_evicted_by_its_last_release() -> None:
    pool, evicted = pool_of(3)
    pages = pool.try_allocate(3)
    assert pages is not None
    for page in pages:
        pool.keep(page)
        pool.release([page])
    pool.retain([pages[0]])
    pool.release([pages[0]])
    pool.try_allocate(3)
    assert evicted == [pages[1], pages[2], pages[0]]


def test_releasing_more_than_held_is_caught() -> None:
    pool, _ = pool_of(2)
    pages = pool.try_allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(pages)


def test_queue_stays_bounded_when_long_prefixes_are_reused_for_ever() -> None:
    """Stale entries of a thousand-page prefix once stayed for two thousand releases each."""
    pool, _ = pool_of(100)
    pages = pool.try_allocate(80)
    assert pages is not None
    for page in pages:
        pool.keep(page)
    pool.release(pages)
    for _ in range(50):
        pool.retain(pages)
        pool.release(pages)
        assert sum(len(entry) for _, entry in pool._queue) <= 2 * pool.num_pages
        pool.check()
    assert pool.num_retained == 80


def test_page_whose_time_is_over_goes_after_those_that_build_on_it() -> None:
    now = [0.0]
    evicted: list[int] = []
    pool = PagePool(8, evicted.extend, 8, lambda: now[0])
    stem = pool.try_allocate(2)
    assert stem is not None
    for page in stem:
        pool.keep(page)
    pool.protect(stem, 1.0)
    pool.release(stem)
    pool.retain(stem)
    tail = pool.try_allocate(2)
    assert tail is not None
    for page in tail:
        pool.keep(page)
    pool.release([*stem, *tail])
    now[0] = 2.0
    pool.try_allocate(8)
    assert evicted == [tail[1], tail[0], stem[1], stem[0]]


def test_time_that_is_over_leaves_a_page_no_worse_off_than_one_that_had_none() -> None:
    now = [0.0]
    evicted: list[int] = []
    pool = PagePool(4, evicted.extend, 4, lambda: now[0])
    old, hinted = pool.try_allocate(2), pool.try_allocate(2)
    assert old is not None
    assert hinted is not None
    for page in (*old, *hinted):
        pool.keep(page)
    pool.release(old)
    pool.protect(hinted, 1.0)
    pool.release(hinted)
    now[0] = 2.0
    pool.try_allocate(4)
    assert evicted == [*old[::-1], *hinted[::-1]]


class PoolMachine(RuleBasedStateMachine):
    """Streams that hold pages, against counts in dictionaries and one list of idle pages."""

    @initialize(num_pages=st.integers(1, 12), max_protected=st.integers(0, 6))
    def start(self, num_pages: int, max_protected: int) -> None:
        self.now = 100.0
        self.evicted: list[int] = []
        self.pool = PagePool(num_pages, self.evicted.extend, max_protected, lambda: self.now)
        self.num_pages, self.max_protected = num_pages, max_protected
        self.until: dict[int, float] = {}
        self.guarded: list[tuple[float, int, int, int]] = []
        """Protected pages that nobody holds: until when, release, place in it, page."""
        self.num_released = 0
        self.streams: list[list[int]] = []
        self.kept: set[int] = set()
        self.order: list[tuple[int, bool, float, int, int]] = []
        """Kept pages that nobody holds: release, was protected, until when, place, page."""

    def count(self, page: int) -> int:
        return sum(stream.count(page) for stream in self.streams)

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        held = {page for stream in self.streams for page in stream}
        num_free = self.num_pages - len(held) - len(self.idle) - len(self.guarded)
        before = len(self.evicted)
        pages = self.pool.try_allocate(count)
        if count > num_free + len(self.idle) + len(self.guarded):
            assert pages is None
            assert len(self.evicted) == before
            return
        assert pages is not None
        assert len(set(pages)) == count
        assert not set(pages) & held
        if count > num_free:
            self.expire()
        order = self.idle + [entry[-1] for entry in sorted(self.guarded)]
        expected = order[: max(0, count - num_free)]
        assert self.evicted[before:] == expected
        self.forget(expected)
        self.kept -= set(expected)
        self.until = {page: end for page, end in self.until.items() if page not in expected}
        assert set(pages) & set(self.idle) == set()
        self.streams.append(pages)

    def expire(self) -> None:
        over = [entry for entry in self.guarded if entry[0] <= self.now]
        self.guarded = [entry for entry in self.guarded if entry not in over]
        self.order += [(release, True, until, place, p) for until, release, place, p in over]

    @property
    def idle(self) -> list[int]:
        return [entry[-1] for entry in sorted(self.order)]

    def forget(self, pages: list[int]) -> None:
        self.order = [entry for entry in self.order if entry[-1] not in pages]
        self.guarded = [entry for entry in self.guarded if entry[-1] not in pages]

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.streams) - 1))
        pages = self.streams.pop(index)
        self.pool.release(pages)
        self.num_released += 1
        for place, page in enumerate(reversed(pages)):
            if self.count(page):
                continue
            if page not in self.kept:
                self.until.pop(page, None)
            elif self.until.get(page, 0) > self.now:
                self.guarded.append((self.until[page], self.num_released, place, page))
            else:
                # A time that was over before the release counts as none.
                is_split = any(self.until.get(p, 0) > self.now for p in pages if p in self.kept)
                until = self.until.get(page, 0.0) if is_split else 0.0
                self.order.append((self.num_released, False, until, place, page))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        for page in stream[: data.draw(st.integers(0, 3))]:
            self.pool.keep(page)
            self.kept.add(page)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        held = {page for stream in self.streams for page in stream}
        known = sorted(held | set(self.idle) | {entry[-1] for entry in self.guarded})
        pages = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        self.pool.retain(pages)
        self.forget(pages)
        self.streams.append(pages)

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), seconds=st.sampled_from([2.0, 8.0]))
    def protect(self, data: st.DataObject, seconds: float) -> None:
        stream = [p for p in data.draw(st.sampled_from(self.streams)) if p in self.kept]
        granted = self.pool.protect(stream, seconds)
        end = self.now + seconds
        for page in stream[:granted]:
            self.until[page] = max(self.until.get(page, 0), end)
        active = sum(until > self.now for until in self.until.values())
        assert active <= self.max_protected
        if granted < len(stream):
            assert active == self.max_protected
            assert self.until.get(stream[granted], 0) <= self.now

    @rule()
    def drop_kept(self) -> None:
        assert self.pool.drop_kept() == len(self.idle) + len(self.guarded)
        self.order, self.kept, self.until, self.guarded = [], set(), {}, []

    @invariant()
    def books_agree(self) -> None:
        pool: Any = getattr(self, "pool", None)
        if pool is None:
            return
        pool.check()
        held = {page for stream in self.streams for page in stream}
        assert pool.num_held == len(held)
        assert pool.num_retained == len(self.idle) + len(self.guarded)
        assert all(pool.ref_count(page) == self.count(page) for page in held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
