"""Following KV events over a transport that does its worst."""

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.resources.kv.events import AllBlocksCleared, EventBatch, EventLog, Medium
from mstar.transport.event_order import (
    Arrival,
    Batch,
    EventOrder,
    IndexMirror,
    Reset,
    ResetReason,
)

Pages = dict[tuple[bytes, str], bytes | None]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def batch(seq: int, ts: float | None = None) -> Batch:
    return Batch(seq, EventBatch(float(seq) if ts is None else ts, [AllBlocksCleared()]))


def begun(num_batches: int) -> EventOrder:
    order = EventOrder(from_start=True)
    order.replayed([batch(seq) for seq in range(num_batches)])
    return order


def no_replay(seq: int) -> None:
    """Answer no request."""


def test_what_comes_in_order_counts_and_repeats_do_not() -> None:
    order = begun(2)
    assert order.receive(batch(2)) == [batch(2)]
    assert order.receive(batch(1)) == []
    assert order.receive(batch(2)) == []
    assert order.receive(batch(3)) == [batch(3)]
    assert not order.is_in_doubt


def test_first_batch_above_zero_is_a_gap_that_a_replay_fills() -> None:
    order = EventOrder(from_start=True)
    asked: list[int] = []

    def fetch(seq: int) -> list[Batch]:
        asked.append(seq)
        return [batch(number) for number in range(4)]

    assert order.follow(batch(3), fetch) == [batch(number) for number in range(4)]
    assert asked == [0]


def test_gap_is_filled_once_and_by_nothing_that_counted() -> None:
    order = begun(3)
    assert order.follow(batch(5), lambda seq: [batch(n) for n in range(seq, 7)]) == [
        batch(n) for n in range(3, 7)
    ]
    assert order.follow(batch(6), no_replay) == []


def test_gap_beyond_the_replay_is_said_and_resets() -> None:
    order = begun(3)
    arrivals = order.follow(batch(9), lambda _: [batch(8), batch(9)])
    assert arrivals == [Reset(ResetReason.LOST, 2, 8), batch(8), batch(9)]


def test_hole_within_a_replay_is_said_and_resets() -> None:
    order = begun(1)
    arrivals = order.follow(batch(4), lambda _: [batch(0), batch(1), batch(3), batch(4)])
    assert arrivals == [batch(1), Reset(ResetReason.LOST, 1, 3), batch(3), batch(4)]


def test_gap_without_replay_resets() -> None:
    order = begun(1)
    assert order.follow(batch(4), no_replay) == [Reset(ResetReason.LOST, 0, 4), batch(4)]
    assert order.follow(batch(5), no_replay) == [batch(5)]


@pytest.mark.parametrize("newest", [0, 2, 3, 9])
def test_restart_is_noticed_whatever_the_new_numbers(newest: int) -> None:
    """Numbers begin at 0 again, and may have passed the last one before anything is seen."""
    order = begun(4)
    anew = [batch(seq, ts=100.0 + seq) for seq in range(newest + 1)]
    order.doubt()
    arrivals = order.follow(anew[-1], lambda seq: anew[seq:])
    assert arrivals == [Reset(ResetReason.RESTARTED, 3, 0), *anew]


def test_lower_number_of_another_time_is_a_restart_even_unannounced() -> None:
    order = begun(4)
    anew = [batch(0, ts=100.0)]
    assert order.follow(anew[0], lambda seq: anew[seq:]) == [
        Reset(ResetReason.RESTARTED, 3, 0),
        anew[0],
    ]


def test_restart_is_told_before_the_new_publisher_answers() -> None:
    order = begun(4)
    order.doubt()
    answers: Iterator[list[Batch] | None] = iter([[], None])
    assert order.follow(None, lambda _: next(answers)) == [Reset(ResetReason.RESTARTED, 3, 0)]
    assert order.is_in_doubt


def test_late_batch_of_the_publisher_before_does_not_count() -> None:
    order = EventOrder(from_start=True)
    anew = [batch(seq, ts=100.0 + seq) for seq in range(3)]
    order.replayed(anew)
    assert order.follow(batch(3, ts=3.0), lambda seq: anew[seq:]) == []
    assert order.follow(batch(3, ts=103.0), no_replay) == [batch(3, ts=103.0)]


def test_replay_that_cannot_show_the_newest_batch_is_not_believed_to_follow_it() -> None:
    """Another publisher may have numbered on to just there."""
    order = begun(3)
    order.doubt()
    later = [batch(3, ts=103.0), batch(4, ts=104.0)]
    assert order.follow(None, lambda _: later) == [Reset(ResetReason.LOST, 2, 3), *later]


def test_start_from_now_takes_whatever_comes_first() -> None:
    order = EventOrder(from_start=False)
    order.doubt()
    assert order.follow(batch(7), no_replay) == [batch(7)]
    assert order.follow(batch(8), no_replay) == [batch(8)]


def test_mirror_matches_chains_on_any_medium() -> None:
    log = EventLog(1)
    log.stored(key(1), None, [1])
    log.stored(key(2), key(1), [2], (), Medium.HOST)
    log.removed([key(1)], Medium.DISK)
    mirror = IndexMirror()
    mirror.apply(Batch(0, EventBatch(1.0, log.take())))
    assert mirror.match([key(1), key(2), key(3)]) == 2
    assert mirror.pages == {(key(1), "GPU"): None, (key(2), "CPU"): key(1)}
    mirror.apply(Reset(ResetReason.LOST, 0, 1))
    assert mirror.match([key(1)]) == len(mirror) == 0


class Following(RuleBasedStateMachine):
    """A publisher with its index, a network, and a consumer with its copy."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.num_keys = 0
        self.log = EventLog(1)
        self.pages: Pages = {}
        self.was: dict[float, Pages] = {0.0: {}}
        """The index after every batch, by the batch's time."""
        self.flying: list[Batch] = []
        self.is_answering = True
        self.order = EventOrder(from_start=True)
        self.mirror = IndexMirror()
        self.seen_ts = 0.0
        self.is_complete = True
        self.begin(clears=True)

    def begin(self, clears: bool) -> None:
        self.pages = {}
        self.next_seq = 0
        self.buffer: deque[Batch] = deque(maxlen=4)
        self.began = self.clock
        if clears:
            self.log.cleared()
            self.publish()

    def publish(self, is_spent: bool = False) -> None:
        """Send a batch, or spend its number where the publisher could not keep up."""
        self.clock += 1
        message = Batch(self.next_seq, EventBatch(self.clock, self.log.take()))
        self.next_seq += 1
        if not is_spent:
            self.buffer.append(message)
            self.flying.append(message)
        self.was[self.clock] = dict(self.pages)

    @rule(
        data=st.data(),
        num_batches=st.integers(1, 6),
        fate=st.sampled_from(["seen", "seen", "flying", "flying", "spent"]),
    )
    def serve(self, data: st.DataObject, num_batches: int, fate: str) -> None:
        """Publish changes of the index, which a consumer sees at once or may never see."""
        for _ in range(num_batches):
            for change in data.draw(st.lists(st.sampled_from(["+", "+", "-", ">"]), max_size=3)):
                self.change(change, data.draw(st.integers(0, 1 << 16)))
            self.publish(is_spent=fate == "spent")
            if fate == "seen":
                self.arrive(self.flying.pop())

    def change(self, change: str, chance: int) -> None:
        held = sorted(self.pages)
        if change == "+" or not held:
            medium = list(Medium)[chance % 3]
            parent = [None, *(page for page, _ in held)][chance % (len(held) + 1)]
            self.num_keys += 1
            self.log.stored(key(self.num_keys), parent, [0], (), medium)
            self.pages[key(self.num_keys), medium.value] = parent
            return
        gone, where = held[chance % len(held)]
        parent = self.pages.pop((gone, where))
        self.log.removed([gone], Medium(where))
        if change == ">":
            self.log.stored(gone, parent, [0], (), Medium.HOST)
            self.pages[gone, "CPU"] = parent

    @rule()
    def clear(self) -> None:
        self.pages = {}
        self.log.cleared()
        self.publish()

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), fate=st.sampled_from(["arrive", "arrive", "arrive", "repeat", "drop"]))
    def move(self, data: st.DataObject, fate: str) -> None:
        which = data.draw(st.one_of(st.just(0), st.integers(0, len(self.flying) - 1)))
        message = self.flying[which]
        if fate != "repeat":
            del self.flying[which]
        if fate != "drop":
            self.arrive(message)

    @rule()
    def lose(self) -> None:
        self.flying.clear()

    @rule(clears=st.booleans())
    def restart(self, clears: bool) -> None:
        self.begin(clears)

    @rule()
    def break_replay(self) -> None:
        self.is_answering = not self.is_answering

    @rule()
    def check(self) -> None:
        self.order.doubt()
        self.take(self.order.follow(None, self.fetch))

    def arrive(self, message: Batch) -> None:
        # What a new publisher sends comes over a new connection, which is noticed first.
        if message.events.ts > self.began and self.seen_ts <= self.began:
            self.order.doubt()
        self.take(self.order.follow(message, self.fetch))

    def fetch(self, seq: int) -> list[Batch] | None:
        return [b for b in self.buffer if b.seq >= seq] if self.is_answering else None

    def take(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.mirror.apply(arrival)
            if isinstance(arrival, Reset):
                self.is_complete = arrival.next_seq == 0
                self.seen_ts = 0.0
            else:
                self.seen_ts = arrival.events.ts
                self.is_complete |= any(
                    isinstance(event, AllBlocksCleared) for event in arrival.events.events
                )

    @invariant()
    def copy_holds_nothing_that_was_gone_by_then(self) -> None:
        true = self.was[self.seen_ts]
        assert self.mirror.pages.items() <= true.items()
        if self.is_complete:
            assert self.mirror.pages == true

    def teardown(self) -> None:
        self.is_answering = True
        self.publish()
        self.check()
        assert self.seen_ts == self.clock
        self.copy_holds_nothing_that_was_gone_by_then()
        for message in [*self.flying, *self.flying]:
            self.arrive(message)
        assert self.seen_ts == self.clock, "what flew too long moved the copy"
        self.clear()
        self.arrive(self.buffer[-1])
        assert self.is_complete
        assert self.mirror.pages == self.pages == {}


TestFollowing = Following.TestCase
TestFollowing.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
