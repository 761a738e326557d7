"""Several streams of one request: pages, reuse, and who waits for whom."""

from collections.abc import Sequence

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.base import Opening
from mstar.engine.resources.kv.manager import KVManager
from mstar.engine.resources.step import Segment
from mstar.preprocess.items import prompt_keys
from tests.engine.resources.kv.sentinel import (
    PAGE_SIZE,
    ROOT,
    STEP,
    Stream,
    contents,
    manager_of,
    opened,
    read,
    run,
    write,
)

LABELS = ("main", "free")


class Pair:
    """A request of two streams."""

    def __init__(self, request_id: str, *prompts: Sequence[int], max_len: int = 24) -> None:
        self.request_id = request_id
        self.tokens = [list(prompt) for prompt in prompts]
        self.openings = [
            Opening(
                request_id=request_id,
                label=label,
                tokens=tokens,
                num_prompt_tokens=len(tokens),
                max_len=max_len,
                page_keys=prompt_keys(tokens, [], PAGE_SIZE, ROOT),
                root=ROOT,
                num_streams=len(LABELS),
            )
            for label, tokens in zip(LABELS, self.tokens, strict=True)
        ]
        self.stored = 0

    def match(self, manager: KVManager) -> int:
        offer, limit = -1, len(self.tokens[0]) - 1
        while offer != limit:
            offer = limit
            for opening in self.openings:
                limit = manager.match(opening, limit)
        return offer

    def open(self, manager: KVManager) -> bool:
        self.stored = self.match(manager)
        for opening in self.openings:
            if manager.open(opening, self.stored) is not None:
                manager.close(self.request_id)
                return False
        manager.check()
        return True

    def waits(self, manager: KVManager) -> bool:
        return any(manager.is_pending(opening, self.stored) for opening in self.openings)

    def run(self, manager: KVManager, span: int) -> None:
        assert self.try_run(manager, span)

    def try_run(self, manager: KVManager, span: int) -> bool:
        segments = tuple(Segment(self.request_id, label, span) for label in LABELS)
        if manager.admit(segments, STEP) is not None:
            return False
        plan = manager.plan(segments, STEP, {})
        new = [contents(ROOT, list(ids))[self.stored : self.stored + span] for ids in self.tokens]
        write(plan, torch.cat(new))
        manager.commit(segments, STEP)
        self.stored += span
        manager.check()
        self.check(manager)
        return True

    def check(self, manager: KVManager) -> None:
        """Verify what both streams have stored."""
        for label, ids in zip(LABELS, self.tokens, strict=True):
            held = read(manager, self.request_id, label)[0]
            assert torch.equal(held, contents(ROOT, list(ids[: self.stored])))

    def catch_up(self, manager: KVManager) -> None:
        reused = self.match(manager)
        if reused > self.stored:
            for opening in self.openings:
                manager.skip(opening, reused)
            self.stored = reused
        manager.check()
        self.check(manager)


def test_request_does_not_wait_for_a_stream_of_its_own() -> None:
    manager = manager_of(16)
    same = Pair("a", range(7), range(7))
    assert same.open(manager)
    assert not same.waits(manager)
    same.run(manager, 7)
    # What both computed is kept once: two full pages, and a page begun of each.
    assert manager.usage() == (16, 4, 0)


def test_request_that_waits_in_one_stream_is_waited_for_in_none() -> None:
    manager = manager_of(40, max_num_seqs=8)
    shared = [9] * 7
    holder = Pair("a", [1] * 7, shared)
    waiting = Pair("b", [2] * 7, shared)
    third = Pair("c", [2] * 7, [3] * 7)
    for pair in (holder, waiting, third):
        assert pair.open(manager)
    assert [pair.waits(manager) for pair in (holder, waiting, third)] == [False, True, False]


def test_requests_that_share_streams_crosswise_never_all_wait() -> None:
    contents = [[n] * 13 for n in range(3)]
    pairs = [(0, 1), (1, 2), (2, 0), (1, 0), (0, 1)]
    for first in range(len(pairs)):
        manager = manager_of(80, max_num_seqs=16)
        order = pairs[first:] + pairs[:first]
        running = [
            Pair(str(i), contents[main], contents[free]) for i, (main, free) in enumerate(order)
        ]
        for pair in running:
            assert pair.open(manager)
        while running:
            for pair in running:
                pair.catch_up(manager)
            ready = [pair for pair in running if not pair.waits(manager)]
            assert ready, "all wait for each other"
            for pair in ready:
                pair.run(manager, min(2, 13 - pair.stored))
            for pair in [pair for pair in running if pair.stored == 13]:
                running.remove(pair)
                manager.close(pair.request_id)


def test_two_do_not_wait_for_each_other_when_the_one_they_both_waited_for_is_gone() -> None:
    manager = manager_of(80, max_num_seqs=8)
    gone = Pair("a", [7] * 13, [9] * 13)
    second, third = (Pair(name, [1] * 13, [9] * 13) for name in "bc")
    assert gone.open(manager)
    assert second.open(manager)
    assert second.waits(manager)
    manager.close("a")
    assert third.open(manager)
    assert [second.waits(manager), third.waits(manager)] == [True, False]


def test_both_streams_go_on_behind_the_shorter_of_what_they_reuse() -> None:
    manager = manager_of(20)
    first = Pair("a", range(10), range(20, 30))
    assert first.open(manager)
    first.run(manager, 10)
    manager.close("a")
    second = Pair("b", range(10), [*range(20, 24), *[0] * 6])
    assert second.open(manager)
    assert second.stored == PAGE_SIZE
    second.run(manager, 7)


def test_pages_of_one_stream_never_take_the_place_of_those_the_other_was_offered() -> None:
    manager = manager_of(7)
    old = Pair("a", [0, 1, 2, 3], [20, 21, 22, 23], max_len=6)
    assert old.open(manager)
    old.run(manager, 4)
    manager.close("a")
    # Five pages that were used later: the pool is full, and what is offered would go first.
    filler = Stream("f", list(range(100, 115)), [], ROOT)
    opened(manager, filler)
    assert run(manager, [filler], [15])
    manager.close("f")
    new = Pair("b", [0, 1, 2, *range(40, 46)], [20, 21, 22, *range(50, 56)], max_len=9)
    assert new.open(manager)
    assert new.stored == PAGE_SIZE
    new.run(manager, 6)


def test_request_whose_streams_never_fit_together_is_refused_for_good() -> None:
    manager = manager_of(6)
    fitting = Pair("a", range(6), range(6), max_len=7)
    refusal = manager.ever_fits(fitting.openings[0])
    assert refusal is not None
    assert "each of 2 streams" in refusal.reason
    assert manager.ever_fits(Pair("b", range(6), range(6), max_len=6).openings[0]) is None


class Pairs(RuleBasedStateMachine):
    """Requests of two streams that share beginnings, in a pool that holds a few of them."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = manager_of(17, max_num_seqs=8)
        self.running: list[Pair] = []
        self.num_opened = 0

    def _close(self, pair: Pair) -> None:
        self.running.remove(pair)
        self.manager.close(pair.request_id)

    @precondition(lambda self: len(self.running) < 4)
    @rule(length=st.integers(1, 10), kinds=st.tuples(*[st.integers(0, 3)] * 2))
    def open(self, length: int, kinds: tuple[int, int]) -> None:
        # Of two kinds the first seven tokens are the same.
        prompts = [[kind // 2] * min(length, 7) + [kind] * max(length - 7, 0) for kind in kinds]
        pair = Pair(str(self.num_opened), *prompts, max_len=18)
        assert self.manager.ever_fits(pair.openings[0]) is None
        self.num_opened += 1
        if pair.open(self.manager):
            pair.check(self.manager)
            self.running.append(pair)
        else:
            assert self.running, "a request that fits was refused although it is alone"

    @precondition(lambda self: self.running)
    @rule(span=st.integers(1, 5), token=st.integers(0, 1))
    def step(self, span: int, token: int) -> None:
        for pair in self.running:
            if pair.stored < len(pair.tokens[0]):
                pair.catch_up(self.manager)
        ready = [
            pair
            for pair in self.running
            if pair.stored == len(pair.tokens[0]) or not pair.waits(self.manager)
        ]
        assert ready, "all wait for each other"
        for pair in ready:
            if pair not in self.running:
                continue
            left = len(pair.tokens[0]) - pair.stored
            if not left and len(pair.tokens[0]) == 18:
                self._close(pair)
                continue
            if not left:
                for tokens in pair.tokens:
                    tokens.append(token)
                left = 1
            while pair in self.running and not pair.try_run(self.manager, min(span, left)):
                assert len(self.running) > 1, "a request that fits could not go on alone"
                self._close(self.running[-1])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self._close(data.draw(st.sampled_from(self.running)))

    @rule()
    def reset(self) -> None:
        self.manager.reset()

    @invariant()
    def books_are_right(self) -> None:
        self.manager.check()


TestPairs = Pairs.TestCase
TestPairs.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
