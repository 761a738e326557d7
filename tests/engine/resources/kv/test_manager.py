import importlib.util
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mstar.engine.resources.spans import Span
from mstar.engine.resources.step import Segment
from tests.engine.resources.kv.sentinel import (
    PAGE_SIZE,
    STEP,
    Spans,
    Stream,
    manager_of,
    opened,
    read,
    run,
)

TESTS = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("oracle_prefix", TESTS / "oracles" / "prefix.py")
assert _spec is not None
assert _spec.loader is not None
oracle = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(oracle)


def test_stream_that_never_fits_is_refused_for_good() -> None:
    manager = manager_of(2)
    stream = Stream("a", [1], [], None)
    stream.max_len = 7
    refusal = manager.ever_fits(stream.opening())
    assert refusal is not None
    assert "7 tokens" in refusal.reason
    assert "3 KV pages" in refusal.reason
    assert manager.ever_fits(replace(stream.opening(), max_len=6)) is None


@pytest.mark.parametrize("length", range(1, 11))
def test_at_least_one_token_is_always_computed(length: int) -> None:
    manager = manager_of(8)
    first = Stream("a", list(range(length)), [], b"root")
    opened(manager, first)
    assert run(manager, [first], [length])
    again = Stream("b", list(range(length)), [], b"root")
    assert opened(manager, again) == (length - 1) // PAGE_SIZE * PAGE_SIZE


def test_what_a_failed_request_held_is_offered_to_nobody() -> None:
    manager = manager_of(12)
    first = Stream("a", list(range(7)), [], b"root")
    opened(manager, first)
    assert run(manager, [first], [7])
    manager.close("a")
    # It computed the second half on top of what it found.
    failed = Stream("b", [*range(7), 1, 2, 3, 4, 5], [], b"root")
    assert opened(manager, failed) == 6
    assert run(manager, [failed], [6])
    assert manager.usage() == (12, 4, 0)
    manager.disown("b")
    manager.close("b")
    assert manager.usage() == (12, 0, 0)
    assert Stream("c", failed.tokens, [], b"root").match(manager) == 0
    manager.check()


def test_what_others_hold_or_build_on_stays_when_a_request_fails() -> None:
    manager = manager_of(12)
    failed, other = Stream("a", [1] * 9, [], b"root"), Stream("b", [1] * 6 + [2] * 3, [], b"root")
    opened(manager, failed)
    assert run(manager, [failed], [9])
    assert opened(manager, other) == 6
    assert run(manager, [other], [3])
    manager.disown("a")
    manager.close("a")
    manager.check()
    assert Stream("c", [1] * 10, [], b"root").match(manager) == 6
    assert Stream("d", [*other.tokens, 0], [], b"root").match(manager) == 9
    manager.close("b")
    manager.disown("gone")
    assert Stream("e", [1] * 10, [], b"root").match(manager) == 6


def test_pages_without_a_key_go_before_any_with_one() -> None:
    manager = manager_of(4)
    keyed, plain = Stream("a", [1, 2, 3], [], b"root"), Stream("b", [1, 2, 3], [], None)
    for stream in (keyed, plain):
        opened(manager, stream)
        assert run(manager, [stream], [3])
        manager.close(stream.request_id)
    assert manager.usage() == (4, 0, 1)
    other = Stream("c", list(range(9)), [], None)
    opened(manager, other)
    assert Stream("d", [1, 2, 3, 4], [], b"root").match(manager) == 3


def test_duplicate_page_is_given_up_for_the_first_one() -> None:
    manager = manager_of(8)
    streams = [Stream(name, [1, 2, 3, 4], [], b"root") for name in "ab"]
    for stream in streams:
        assert opened(manager, stream) == 0
    # The second one waits for the first, and is made to run all the same.
    assert manager.is_pending(streams[1].opening(), 0)
    assert manager.usage() == (8, 2, 0)
    assert run(manager, streams, [4, 4])
    assert manager.usage() == (8, 3, 0)
    (_, [first]), (_, [second]) = (read(manager, name) for name in "ab")
    assert first == second
    manager.check()


def test_resumed_stream_goes_on_behind_pages_that_it_generated() -> None:
    """Reused pages beyond the keys of the prompt once left the stream without their keys."""
    manager = manager_of(8)
    stream = Stream("a", [1, 2, 3, 4], [], b"root")
    opened(manager, stream)
    assert run(manager, [stream], [4])
    stream.tokens += [5, 6, 7, 8, 9, 1]
    assert run(manager, [stream], [6])
    manager.close("a")
    assert opened(manager, stream) == 9
    stream.tokens += [2, 3]
    assert run(manager, [stream], [3])
    manager.close("a")
    stream.tokens += [4]
    assert opened(manager, stream) == 12


def test_reset_under_a_running_stream_leaves_it_its_pages_and_shares_none() -> None:
    manager = manager_of(8)
    stream = Stream("a", list(range(5)), [], b"root")
    opened(manager, stream)
    assert run(manager, [stream], [5])
    assert manager.reset() == 1
    stream.tokens += [7] * 6
    assert run(manager, [stream], [6])
    torch.testing.assert_close(read(manager, "a")[0], stream.contents)
    assert Stream("b", stream.tokens, [], b"root").match(manager) == 0
    manager.close("a")
    assert manager.usage() == (8, 0, 0)


def test_step_that_is_rolled_back_gives_its_pages_back() -> None:
    manager = manager_of(4)
    stream = Stream("a", [1, 2, 3], [], b"root")
    opened(manager, stream)
    assert run(manager, [stream], [3])
    before = manager.usage()
    segments = (Segment("a", "main", 5),)
    assert manager.admit(segments, STEP) is None
    assert manager.usage() != before
    manager.rollback(segments, STEP)
    assert manager.usage() == before
    manager.check()


def test_refused_step_takes_nothing_and_says_what_is_missing() -> None:
    manager = manager_of(2)
    stream = Stream("a", [1, 2, 3], [], None)
    opened(manager, stream)
    assert run(manager, [stream], [3])
    refusal = manager.admit((Segment("a", "main", 4),), STEP)
    assert refusal is not None
    assert "needs 2 more KV pages; 1 are available" in refusal.reason
    assert manager.usage() == (2, 1, 0)


def test_pages_of_an_item_are_shared_by_its_digest_not_by_its_ids() -> None:
    manager = manager_of(12, max_num_seqs=8)
    spans: Spans = [Span(2, None), Span(4, b"image"), Span(3, None)]
    first = Stream("a", [1, 2, 0, 0, 0, 0, 3, 4, 5, 6], spans, b"root")
    opened(manager, first)
    assert run(manager, [first], [10])
    other_ids = [1, 2, 9, 9, 9, 9, 3, 4, 5, 6]
    assert Stream("b", other_ids, spans, b"root").match(manager) == 9
    other: Spans = [Span(2, None), Span(4, b"photo"), Span(3, None)]
    assert Stream("c", first.tokens, other, b"root").match(manager) == 0


class ManagerMachine(RuleBasedStateMachine):
    """Streams over a small alphabet in a small pool, each slot's content checked all the time."""

    @initialize(num_pages=st.integers(8, 40), reuse=st.sampled_from([True] * 7 + [False]))
    def start(self, num_pages: int, reuse: bool) -> None:
        self.manager = manager_of(num_pages, reuse=reuse)
        self.reuse = reuse
        self.oracle = oracle.PrefixCache(PAGE_SIZE)
        self.streams: dict[str, Stream] = {}
        self.preempted: list[Stream] = []
        self.number = 0

    def open(self, stream: Stream, num_keys: int | None) -> None:
        opening = stream.opening(num_keys)
        offered = stream.match(self.manager)
        assert offered % PAGE_SIZE == 0 or offered in stream.item_ends
        assert offered < len(stream.tokens)
        known = self.oracle.match(stream.root, stream.slots, stream.item_ends)
        if not self.reuse or stream.root is None:
            assert offered == 0
        else:
            assert offered <= known
            pool = self.manager.pool
            # A cut page is copied to one more, which a pool that is nearly held does not promise.
            most = -(-len(stream.tokens) // PAGE_SIZE) + len(self.streams)
            is_tight = pool.num_available <= most
            expected = {known, known // PAGE_SIZE * PAGE_SIZE} if is_tight else {known}
            assert pool.num_evictions or offered in expected
        before = self.manager.usage(), len(self.manager.index)
        refusal = self.manager.open(opening, offered)
        if refusal is not None:
            assert (self.manager.usage(), len(self.manager.index)) == before
            assert self.streams, f"refused though nothing runs: {refusal}"
            return
        stream.stored = offered
        stream.is_sharing = stream.root is not None and self.reuse
        self.streams[stream.request_id] = stream

    @rule(
        tokens=st.builds(
            lambda length, tail: [0] * length + tail,
            st.integers(1, 14),
            st.lists(st.integers(0, 1), max_size=3),
        ),
        root=st.sampled_from([b"a"] * 6 + [b"b", None]),
        item=st.sampled_from([None] * 3 + [(1, 3, b"x"), (1, 3, b"y"), (2, 5, b"x")]),
        num_keys=st.sampled_from([None, None, 0, 1, 2]),
    )
    def open_new(
        self,
        tokens: list[int],
        root: bytes | None,
        item: tuple[int, int, bytes] | None,
        num_keys: int | None,
    ) -> None:
        spans: Spans = []
        if item is not None and item[0] + item[1] <= len(tokens):
            at, length, digest = item
            rest = len(tokens) - at - length
            spans = [Span(at), Span(length, digest), *([Span(rest)] if rest else [])]
        self.number += 1
        self.open(Stream(f"r{self.number}", tokens, spans, root), num_keys)

    @precondition(lambda self: self.preempted)
    @rule()
    def resume(self) -> None:
        self.open(self.preempted.pop(), None)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), ends_in=st.sampled_from(["commit", "commit", "rollback"]))
    def step(self, data: st.DataObject, ends_in: str) -> None:
        some = [s for s in self.streams.values() if s.stored < len(s.tokens)]
        if not some:
            return
        chosen = data.draw(st.lists(st.sampled_from(some), unique=True, min_size=1))
        spans = [data.draw(st.integers(1, len(s.tokens) - s.stored)) for s in chosen]
        if ends_in == "rollback":
            segments = tuple(
                Segment(s.request_id, "main", n) for s, n in zip(chosen, spans, strict=True)
            )
            before = self.manager.usage(), len(self.manager.index)
            if self.manager.admit(segments, STEP) is None:
                self.manager.rollback(segments, STEP)
                # What was taken may have been evicted, but none of it is held any more.
                assert self.manager.usage()[1] == before[0][1]
            return
        while not run(self.manager, chosen, spans):
            assert len(self.streams) > 1, "one stream alone was refused"
            self.preempt()
            spans = [n for s, n in zip(chosen, spans, strict=True) if s.request_id in self.streams]
            chosen = [s for s in chosen if s.request_id in self.streams]
            if not chosen:
                return
        for stream in chosen:
            if stream.is_sharing:
                self.oracle.add(stream.root, stream.slots[: stream.stored], stream.item_ends)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        """Compute what is left, then one token after the other, as decoding does."""
        stream = data.draw(st.sampled_from(list(self.streams.values())))
        for token in [None, *tokens]:
            if token is not None and len(stream.tokens) < stream.max_len:
                stream.tokens.append(token)
            left = len(stream.tokens) - stream.stored
            if left and not run(self.manager, [stream], [left]):
                return
            if stream.is_sharing:
                self.oracle.add(stream.root, stream.slots[: stream.stored], stream.item_ends)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def skip(self, data: st.DataObject) -> None:
        """Go on behind what others computed, if they did."""
        stream = data.draw(st.sampled_from(list(self.streams.values())))
        offered = stream.match(self.manager)
        if offered > stream.stored:
            self.manager.skip(stream.opening(), offered)
            stream.stored = offered
        self.manager.is_pending(stream.opening(), stream.stored)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(list(self.streams.values())))
        self.number += 1
        target = Stream(f"r{self.number}", list(source.tokens), source.spans, source.root)
        target.num_prompt_tokens = source.num_prompt_tokens
        before = self.manager.usage()
        if self.manager.fork(source.request_id, "main", target.opening()) is not None:
            assert self.manager.usage() == before
            return
        target.stored, target.is_sharing = source.stored, source.is_sharing
        self.streams[target.request_id] = target

    @precondition(lambda self: self.streams)
    @rule()
    def preempt(self) -> None:
        name, stream = self.streams.popitem()
        self.manager.close(name)
        self.preempted.append(stream)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.streams)))
        del self.streams[name]
        self.manager.close(name)
        self.manager.close(name)

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.oracle.clear()
        for stream in self.streams.values():
            stream.is_sharing = False

    @invariant()
    def every_slot_holds_what_its_stream_says(self) -> None:
        pages: dict[tuple[Hashable, ...], int] = {}
        for name, stream in getattr(self, "streams", {}).items():
            found, full = read(self.manager, name)
            assert len(found) == stream.stored
            torch.testing.assert_close(found, stream.contents[: stream.stored], rtol=0, atol=0)
            if stream.is_sharing:
                for index, page in enumerate(full):
                    key = (stream.root, *stream.slots[: (index + 1) * PAGE_SIZE])
                    if key not in pages:
                        pages[key] = page
                    assert pages[key] == page, f"two copies of {key}"

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()

    def teardown(self) -> None:
        for name in getattr(self, "streams", {}):
            self.manager.close(name)
        if hasattr(self, "manager"):
            total, held, kept = self.manager.usage()
            assert held == 0
            assert kept == len(self.manager.index)
            assert self.manager.pool.num_free == total - kept


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
