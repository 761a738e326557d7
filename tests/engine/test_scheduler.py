import random
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

from mstar.engine.batch import Batch, NodeKind
from mstar.engine.graph import Graph, Loop, Run, Sequential
from mstar.engine.request import Component, PreparedRequest, Request, RequestStatus
from mstar.engine.resources.base import Refusal
from mstar.engine.resources.sampler.config import SamplingParams
from mstar.engine.resources.spans import Span
from mstar.engine.scheduler import Scheduler
from mstar.models.base import text_graph
from mstar.models.toy_items import toy_item_model
from tests.laws.harness import Bench, Picture, Prompt, prompt

PAGE_SIZE = 4


class CountingGate:
    """Pages as bare numbers: a request holds so many, and the pool has so many."""

    def __init__(self, num_pages: int, reuse: int = 0) -> None:
        self.num_pages = num_pages
        self.reuse = reuse
        self.held: dict[str, int] = {}
        self.log: list[tuple[str, str]] = []

    @property
    def num_free(self) -> int:
        return self.num_pages - sum(self.held.values())

    def open(self, request: Request) -> Refusal | None:
        self.log.append(("open", request.request_id))
        assert request.request_id not in self.held
        needed = -(-len(request.tokens) // PAGE_SIZE)
        if needed > self.num_free:
            return Refusal("kv", f"{needed} pages of {self.num_free}")
        self.held[request.request_id] = needed
        request.num_computed_tokens = min(self.reuse, len(request.tokens) - 1)
        return None

    def close(self, request: Request) -> None:
        self.log.append(("close", request.request_id))
        del self.held[request.request_id]

    def catch_up(self, request: Request) -> bool:
        return False

    def next_encoder(self, request: Request, budget: int) -> str | None:
        return None

    def shape(self, node: str, request: Request, part: object) -> None:
        return None

    def max_batch(self, node: str) -> None:
        return None

    def admit(self, batch: Batch) -> Refusal | None:
        needed = {}
        for request, segment in zip(batch.requests, batch.segments, strict=True):
            end = request.num_computed_tokens + segment.span
            needed[request.request_id] = -(-end // PAGE_SIZE)
        grown = sum(max(0, n - self.held[name]) for name, n in needed.items())
        if grown > self.num_free:
            return Refusal("kv", f"{grown} pages of {self.num_free}")
        for name, n in needed.items():
            self.held[name] = max(n, self.held[name])
        return None


def request_of(number: int, num_prompt: int, max_tokens: int, walk: str = "prefill") -> Request:
    return Request(
        PreparedRequest(
            request_id=f"r{number}", token_ids=[5] * num_prompt, params=SamplingParams()
        ),
        text_graph("node").cursor(walk),
        Component(vocab_size=160, stop_token_ids=frozenset()),
        max_len=num_prompt + max_tokens,
        arrival=number,
    )


def serve(scheduler: Scheduler, batch: Batch) -> list[Request]:
    """Do what the engine does with a batch; returns the requests that ended."""
    ended = []
    for request, segment in zip(batch.requests, batch.segments, strict=True):
        request.num_computed_tokens += segment.span
    for index in batch.yielding:
        request = batch.requests[index]
        request.finish_reason = request.append(7)
        if request.cursor.complete(batch.node, lambda _, r: r.finish_reason is not None, request):
            if request.finish_reason is None:
                request.cursor = text_graph("node").cursor("decode")
            else:
                scheduler.remove(request)
                ended.append(request)
    return ended


def spans(batch: Batch | None) -> dict[str, int]:
    assert batch is not None
    return {segment.request_id: segment.span for segment in batch.segments}


def test_requests_start_in_order_of_arrival_within_the_budget() -> None:
    scheduler = Scheduler(CountingGate(100), max_num_seqs=8, max_num_batched_tokens=10)
    for number, length in enumerate((4, 9, 3)):
        scheduler.add(request_of(number, length, 5))
    batch, _ = scheduler.schedule()
    assert spans(batch) == {"r0": 4, "r1": 6}
    assert batch is not None
    serve(scheduler, batch)
    batch, _ = scheduler.schedule()
    assert spans(batch) == {"r0": 1, "r1": 3, "r2": 3}
    assert batch is not None
    assert batch.yielding == (0, 1, 2)


def test_small_request_does_not_overtake_a_large_one() -> None:
    scheduler = Scheduler(CountingGate(10), max_num_seqs=8, max_num_batched_tokens=100)
    for number, length in enumerate((20, 24, 4)):
        scheduler.add(request_of(number, length, 4))
    batch, _ = scheduler.schedule()
    assert spans(batch) == {"r0": 20}
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_refused_head_of_the_queue_is_asked_again_only_when_something_was_given_back() -> None:
    gate = CountingGate(6)
    scheduler = Scheduler(gate, max_num_seqs=8, max_num_batched_tokens=100)
    for number in range(2):
        scheduler.add(request_of(number, 16, 5))
    for _ in range(4):
        batch, _ = scheduler.schedule()
        assert batch is not None
        assert not serve(scheduler, batch)
    assert gate.log == [("open", "r0"), ("open", "r1")]
    batch, _ = scheduler.schedule()
    assert batch is not None
    assert [request.request_id for request in serve(scheduler, batch)] == ["r0"]
    assert spans(scheduler.schedule()[0]) == {"r1": 16}


def test_youngest_goes_back_to_the_head_of_the_queue() -> None:
    gate = CountingGate(4)
    scheduler = Scheduler(gate, max_num_seqs=8, max_num_batched_tokens=100)
    requests = [request_of(number, 4, 9) for number in range(4)]
    for request in requests:
        scheduler.add(request)
    for expected in (("r0", "r1", "r2", "r3"), ("r0", "r1")):
        batch, _ = scheduler.schedule()
        assert tuple(spans(batch)) == expected
        assert batch is not None
        serve(scheduler, batch)
    assert scheduler.num_preemptions == 2
    assert [r.status for r in requests[2:]] == [RequestStatus.WAITING] * 2
    assert requests[2].num_computed_tokens == 0
    assert requests[2].tokens == [5] * 4 + [7]
    scheduler.check()


def test_request_sent_back_stands_behind_an_older_one_that_waits_for_its_next_leg() -> None:
    scheduler = Scheduler(CountingGate(6), max_num_seqs=8, max_num_batched_tokens=100)
    oldest, *others = requests = [request_of(number, 4, 12) for number in range(3)]
    for request in requests:
        scheduler.add(request)
    batch, _ = scheduler.schedule()
    assert batch is not None
    serve(scheduler, batch)
    leg = request_of(0, 20, 2)
    scheduler.requeue(oldest)
    oldest.begin(leg.prepared, leg.cursor, leg.component, leg.max_len)
    while scheduler.num_preemptions == 0:
        batch, _ = scheduler.schedule()
        assert batch is not None
        serve(scheduler, batch)
        scheduler.check()
    assert others[1].status is RequestStatus.WAITING
    ended: list[str] = []
    while scheduler.num_running + scheduler.num_waiting:
        batch, _ = scheduler.schedule()
        assert batch is not None
        ended += [request.request_id for request in serve(scheduler, batch)]
    assert ended == ["r1", "r0", "r2"]


def test_request_that_cannot_run_even_alone_is_handed_back() -> None:
    scheduler = Scheduler(CountingGate(2), max_num_seqs=8, max_num_batched_tokens=100)
    for number, length in enumerate((12, 4)):
        scheduler.add(request_of(number, length, 4))
    batch, rejected = scheduler.schedule()
    assert [(request.request_id, refusal.reason) for request, refusal in rejected] == [
        ("r0", "3 pages of 2")
    ]
    assert spans(batch) == {"r1": 4}
    grows = Scheduler(CountingGate(1), max_num_seqs=8, max_num_batched_tokens=100)
    grows.add(request_of(0, 4, 4))
    first, _ = grows.schedule()
    assert first is not None
    serve(grows, first)
    batch, rejected = grows.schedule()
    assert batch is None
    assert [request.request_id for request, _ in rejected] == ["r0"]
    assert (grows.num_running, grows.num_waiting) == (0, 0)


def test_decoding_batch_is_the_same_object_until_something_changes() -> None:
    scheduler = Scheduler(CountingGate(100), max_num_seqs=2, max_num_batched_tokens=100)
    for number in range(2):
        scheduler.add(request_of(number, 4, 20))
    batches = []
    for _ in range(4):
        batch, _ = scheduler.schedule()
        assert batch is not None
        serve(scheduler, batch)
        batches.append(batch)
    assert not batches[0].is_decode
    assert batches[1].is_decode
    assert batches[1] is batches[2] is batches[3]
    late = request_of(2, 3, 3)
    scheduler.add(late)
    assert scheduler.schedule()[0] is batches[1]
    scheduler.remove(batches[1].requests[0])
    assert spans(scheduler.schedule()[0]) == {"r1": 1, "r2": 3}


def test_nodes_take_turns_when_a_walk_goes_from_one_to_the_other() -> None:
    """A decoding batch was once handed out again although its walk stood at another node."""
    graph = Graph(
        ("thinker", "talker"),
        (("walk", Loop(Sequential(Run("thinker"), Run("talker")), times=3)),),
    )
    scheduler = Scheduler(CountingGate(100), max_num_seqs=2, max_num_batched_tokens=100)
    requests = [request_of(number, 1, 20) for number in range(2)]
    for request in requests:
        request.cursor = graph.cursor("walk")
        scheduler.add(request)
    nodes = []
    for _ in range(6):
        batch, _ = scheduler.schedule()
        assert batch is not None
        nodes.append((batch.node, len(batch.requests)))
        for request in batch.requests:
            request.num_computed_tokens += 1
            request.append(7)
            request.cursor.complete(batch.node, lambda name, request: False, request)
    assert nodes == [("thinker", 2), ("talker", 2)] * 3


def test_requests_at_different_nodes_are_served_in_turn() -> None:
    graph = Graph(
        ("a", "b"), (("at a", Loop(Run("a"), times=9)), ("at b", Loop(Run("b"), times=9)))
    )
    scheduler = Scheduler(CountingGate(100), max_num_seqs=4, max_num_batched_tokens=100)
    for number, walk in enumerate(("at a", "at b", "at a")):
        request = request_of(number, 2, 20)
        request.cursor = graph.cursor(walk)
        scheduler.add(request)
    served = []
    for _ in range(6):
        batch, _ = scheduler.schedule()
        assert batch is not None
        served.append(batch.node)
        for request, segment in zip(batch.requests, batch.segments, strict=True):
            request.num_computed_tokens += segment.span
            request.append(7)
            request.cursor.complete(batch.node, lambda name, request: False, request)
    assert served == ["a", "b", "a", "b", "a", "b"]


@pytest.mark.parametrize("arrival", range(3))
def test_removed_request_is_gone_wherever_it_stood(arrival: int) -> None:
    gate = CountingGate(100)
    scheduler = Scheduler(gate, max_num_seqs=2, max_num_batched_tokens=100)
    requests = [request_of(number, 4, 5) for number in range(3)]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    scheduler.remove(requests[arrival])
    assert requests[arrival].status is RequestStatus.FINISHED
    assert f"r{arrival}" not in gate.held
    batch, _ = scheduler.schedule()
    assert set(spans(batch)) == {"r0", "r1", "r2"} - {f"r{arrival}"}
    scheduler.check()


class WatchfulGate(CountingGate):
    """Asserts the order of starts and of preemptions."""

    def __init__(self, num_pages: int, reuse: int) -> None:
        super().__init__(num_pages, reuse)
        self.queue: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.is_ending = False

    def open(self, request: Request) -> Refusal | None:
        head = min(self.queue.values(), key=lambda r: r.arrival)
        assert request is head, f"{request.request_id} before {head.request_id}"
        refusal = super().open(request)
        if refusal is None:
            self.running[request.request_id] = self.queue.pop(request.request_id)
        return refusal

    def close(self, request: Request) -> None:
        super().close(request)
        if not self.is_ending:
            youngest = max(self.running.values(), key=lambda r: r.arrival)
            assert request is youngest, f"{request.request_id}, not {youngest.request_id}"
            assert len(self.running) > 1, "the last one was preempted"
            self.queue[request.request_id] = request
        del self.running[request.request_id]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go and are served over a pool that is too small for most of them."""

    @initialize(
        num_pages=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 12),
        reuse=st.sampled_from([0, 0, 3, 8]),
    )
    def start(self, num_pages: int, max_num_seqs: int, budget: int, reuse: int) -> None:
        self.gate = WatchfulGate(num_pages, reuse)
        self.max_num_seqs, self.budget = max_num_seqs, budget
        self.scheduler = Scheduler(
            self.gate, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.alive: dict[str, Request] = {}
        self.number = 0

    @rule(num_prompt=st.integers(1, 30), max_tokens=st.integers(1, 20))
    def add(self, num_prompt: int, max_tokens: int) -> None:
        room = self.gate.num_pages * PAGE_SIZE
        num_prompt = min(num_prompt, room - 1)
        request = request_of(self.number, num_prompt, min(max_tokens, room - num_prompt))
        self.number += 1
        self.alive[request.request_id] = self.gate.queue[request.request_id] = request
        self.scheduler.add(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = self.alive.pop(data.draw(st.sampled_from(sorted(self.alive))))
        self.gate.is_ending = True
        self.scheduler.remove(request)
        self.gate.is_ending = False
        self.gate.queue.pop(request.request_id, None)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> None:
        batch, rejected = self.scheduler.schedule()
        assert not rejected
        if batch is None:
            assert not self.alive
            return
        assert sum(segment.span for segment in batch.segments) <= self.budget
        assert all(segment.span > 0 for segment in batch.segments)
        assert len({request.request_id for request in batch.requests}) == len(batch.requests)
        assert batch.is_decode == all(
            request.num_uncomputed_tokens == 1 for request in batch.requests
        )
        oldest = min(self.gate.running.values(), key=lambda r: r.arrival)
        starved = oldest not in batch.requests
        assert not starved or len(batch.requests) == self.budget, "the oldest stands still"
        for request, segment in zip(batch.requests, batch.segments, strict=True):
            assert self.gate.running[request.request_id] is request
            assert segment.span <= request.num_uncomputed_tokens
        self.gate.is_ending = True
        for request in serve(self.scheduler, batch):
            del self.alive[request.request_id]
        self.gate.is_ending = False

    @invariant()
    def books_agree(self) -> None:
        scheduler: Any = getattr(self, "scheduler", None)
        if scheduler is None:
            return
        scheduler.check()
        assert scheduler.num_running == len(self.gate.running) <= self.max_num_seqs
        assert scheduler.num_waiting == len(self.gate.queue)
        assert set(self.gate.held) == set(self.gate.running)
        assert self.gate.num_free >= 0

    def teardown(self) -> None:
        if not hasattr(self, "alive"):
            return
        # Each token of each request costs one step at the very most, preemptions aside.
        bound = 200 + 60 * sum(request.max_len for request in self.alive.values())
        steps = 0
        while self.alive:
            self.one_step()
            steps += 1
            assert steps < bound, f"{len(self.alive)} requests after {steps} steps"
        assert self.gate.num_free == self.gate.num_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


class SharingGate(WatchfulGate):
    """Requests begin alike, each as far as it says; what one computes the others take over."""

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages, 0)
        self.shared: dict[str, int] = {}
        """Tokens of each prompt that it has in common with all that have as many."""
        self.known = 0
        """Tokens of the common beginning that are there to be taken over."""

    def look(self) -> None:
        for name, request in self.running.items():
            self.known = max(self.known, min(request.num_computed_tokens, self.shared[name]))

    def catch_up(self, request: Request) -> bool:
        self.look()
        end = min(self.shared[request.request_id], len(request.tokens) - 1)
        found = min(self.known, end)
        request.num_computed_tokens = max(request.num_computed_tokens, found)
        if request.num_computed_tokens >= end:
            return False
        # Those that were opened before compute what both need.
        for name, other in self.running.items():
            if other is request:
                return False
            if request.num_computed_tokens <= other.num_computed_tokens < self.shared[name]:
                return True
        raise AssertionError(f"{request.request_id} does not run")


class SharingMachine(SchedulerMachine):
    """The same over requests that wait while another computes what they need."""

    @initialize(
        num_pages=st.integers(4, 14), max_num_seqs=st.integers(2, 5), budget=st.integers(1, 12)
    )
    def start(self, num_pages: int, max_num_seqs: int, budget: int) -> None:
        self.sharing = SharingGate(num_pages)
        self.gate = self.sharing
        self.max_num_seqs, self.budget = max_num_seqs, budget
        self.scheduler = Scheduler(
            self.gate, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.alive: dict[str, Request] = {}
        self.number = 0

    @rule(num_prompt=st.integers(1, 30), max_tokens=st.integers(1, 9), shared=st.integers(0, 30))
    def add_sharing(self, num_prompt: int, max_tokens: int, shared: int) -> None:
        self.sharing.shared[f"r{self.number}"] = min(shared, num_prompt)
        self.add(num_prompt, max_tokens)

    @rule(num_prompt=st.integers(1, 30), max_tokens=st.integers(1, 20))
    def add(self, num_prompt: int, max_tokens: int) -> None:
        self.sharing.shared.setdefault(f"r{self.number}", 0)
        super().add(num_prompt, max_tokens)

    @rule()
    def forget(self) -> None:
        """What nobody runs on is evicted, or all of it is reset."""
        self.sharing.known = 0


TestSharingMachine = SharingMachine.TestCase
TestSharingMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_request_that_waits_for_another_gets_no_tokens_and_then_all_it_computed() -> None:
    gate = SharingGate(100)
    gate.shared = {"r0": 12, "r1": 12, "r2": 0}
    scheduler = Scheduler(gate, max_num_seqs=8, max_num_batched_tokens=8)
    requests = [request_of(number, 14, 3) for number in range(3)]
    for request in requests:
        gate.queue[request.request_id] = request
        scheduler.add(request)
    batches = []
    for _ in range(3):
        batch, _ = scheduler.schedule()
        batches.append(spans(batch))
        assert batch is not None
        serve(scheduler, batch)
    # The one that waits keeps nobody from the rest of the budget.
    assert batches == [{"r0": 8}, {"r0": 6, "r2": 2}, {"r0": 1, "r1": 2, "r2": 5}]


def test_request_goes_on_by_itself_when_the_one_that_it_waited_for_is_gone() -> None:
    gate = SharingGate(100)
    gate.shared = {"r0": 12, "r1": 12}
    scheduler = Scheduler(gate, max_num_seqs=8, max_num_batched_tokens=5)
    requests = [request_of(number, 14, 3) for number in range(2)]
    for request in requests:
        gate.queue[request.request_id] = request
        scheduler.add(request)
    for _ in range(2):
        batch, _ = scheduler.schedule()
        assert batch is not None
        serve(scheduler, batch)
        assert set(spans(batch)) == {"r0"}
    gate.look()
    gate.is_ending = True
    scheduler.remove(requests[0])
    assert spans(scheduler.schedule()[0]) == {"r1": 4}
    assert requests[1].num_computed_tokens == 10


def test_two_requests_never_wait_for_each_other() -> None:
    """One waits for a picture's end that a third was to compute, and names what follows it.

    When the third is gone, a new request once named the picture's end, waited for what follows,
    and was waited for.
    """
    bench = Bench(toy_item_model())
    one, two, three = (Picture(seed, 1) for seed in range(3))
    bench.add("decodes", prompt(1, 3), max_tokens=20)
    bench.step()
    bench.add("third", [one, three, *prompt(5, 5)])
    bench.add("first", [one, two, *prompt(6, 5)])
    bench.step()
    bench.engine.abort("third")
    del bench.answers["third"]
    bench.add("second", [one, two, *prompt(6, 5)])
    answers = bench.drain(60)
    assert answers["first"].token_ids == answers["second"].token_ids


@pytest.mark.parametrize("seed", range(8))
def test_requests_that_begin_alike_all_end_whoever_is_aborted(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(toy_item_model(), num_pages=30, max_num_seqs=5, max_num_batched_tokens=8)
    tiny = [Picture(n, 1 + n % 2) for n in range(3)]
    for number in range(14):
        parts: Prompt = [
            *rng.choices(tiny, k=rng.randrange(1, 4)),
            *prompt(rng.randrange(2), rng.randrange(1, 7)),
        ]
        bench.add(str(number), parts, max_tokens=rng.randrange(1, 6))
        for _ in range(rng.randrange(4)):
            bench.step()
        if rng.random() < 0.4:
            name = rng.choice(list(bench.answers))
            if bench.engine.abort(name):
                del bench.answers[name]
    answers = bench.drain(300)
    assert all(answer.finish_reason == "length" for answer in answers.values())


class EncodingGate(CountingGate):
    """Outputs of an encoder as bare names; there is room for all of them."""

    def __init__(self, num_pages: int = 1000) -> None:
        super().__init__(num_pages)
        self.outputs: set[bytes] = set()

    def next_encoder(self, request: Request, budget: int) -> str | None:
        while (item := request.next_item(budget)) is not None:
            if item.name not in self.outputs:
                return "encoder"
            item.is_encoded = True
        return None


def reader_of(number: int, layout: list[Span], max_tokens: int = 5) -> Request:
    num_slots = sum(span.length for span in layout)
    return Request(
        PreparedRequest(
            request_id=f"r{number}",
            token_ids=[5] * num_slots,
            params=SamplingParams(),
            spans=layout,
            inputs=[{} for span in layout if span.digest is not None],
            root=b"root",
        ),
        text_graph("node").cursor("prefill"),
        Component(vocab_size=160, stop_token_ids=frozenset()),
        max_len=num_slots + max_tokens,
        arrival=number,
    )


def picture_of(length: int, number: int, is_whole: bool = True) -> Span:
    return Span(length, number.to_bytes(32, "big"), None, is_whole, "picture")


class ItemBench:
    """A scheduler over an encoder and a decoder, and the rules that every batch keeps."""

    def __init__(self, budget: int, max_num_seqs: int = 8) -> None:
        self.gate = EncodingGate()
        self.budget = budget
        self.scheduler = Scheduler(
            self.gate,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            kinds={"encoder": NodeKind.ITEMS},
        )

    def step(self) -> Batch | None:
        batch, rejected = self.scheduler.schedule()
        assert not rejected
        self.scheduler.check()
        if batch is None:
            return None
        if batch.node == "encoder":
            names = [item.name for item in batch.items]
            assert len(set(names)) == len(names), "an item is encoded twice"
            assert 0 < sum(item.span.length for item in batch.items) <= self.budget
            assert self.gate.outputs.isdisjoint(names), "an item is encoded again"
            self.gate.outputs.update(names)
            return batch
        assert 0 < sum(segment.span for segment in batch.segments) <= self.budget
        for request, segment in zip(batch.requests, batch.segments, strict=True):
            start = request.num_computed_tokens
            stop = start + segment.span
            for item in request.items:
                if start < item.stop and item.start < stop:
                    assert item.is_encoded, f"{request.request_id} reads what nobody encoded"
                    is_cut = not start <= item.start < item.stop <= stop
                    assert not (is_cut and item.span.is_whole), f"{item.span} is cut"
        serve(self.scheduler, batch)
        return batch


def test_whole_item_that_needs_the_budget_waits_for_no_decode_to_end() -> None:
    bench = ItemBench(budget=8)
    for number in range(4):
        bench.scheduler.add(request_of(number, 1, 40))
    assert spans(bench.step()) == {f"r{number}": 1 for number in range(4)}
    bench.scheduler.add(reader_of(4, [Span(2), picture_of(7, 1), Span(1)]))
    steps = [bench.step() for _ in range(5)]
    assert [batch.node for batch in steps if batch] == ["node", "encoder", "node", "node", "node"]
    found = [spans(batch) for batch in steps if batch and batch.node == "node"]
    decodes = {f"r{number}": 1 for number in range(4)}
    # The new one comes in, its ids go beside the decodes, and its item in place of some.
    assert found == [decodes, decodes | {"r4": 2}, {"r0": 1, "r4": 7}, decodes | {"r4": 1}]


def test_decodes_wait_for_one_item_at_a_time() -> None:
    """Items as large as a step, one after the other, once kept all others from their tokens."""
    bench = ItemBench(budget=6)
    for number in range(2):
        bench.scheduler.add(request_of(number, 1, 40))
    bench.step()
    layout = [picture_of(6, number) for number in range(5)]
    bench.gate.outputs.update(item.name for item in reader_of(9, layout).items)
    bench.scheduler.add(reader_of(2, [*layout, Span(1)]))
    found = [spans(bench.step()) for _ in range(11)]
    decodes = {"r0": 1, "r1": 1}
    assert found == [decodes, *[{"r2": 6}, decodes] * 4, {"r2": 6}, decodes | {"r2": 1}]


def test_encoder_and_decoder_take_turns_while_both_are_waited_for() -> None:
    bench = ItemBench(budget=6)
    bench.scheduler.add(request_of(0, 1, 40))
    bench.step()
    for number in range(1, 5):
        layout = [picture_of(5, 10 * number + n) for n in range(2)]
        bench.scheduler.add(reader_of(number, [*layout, Span(1)]))
    bench.step()
    served = []
    for _ in range(16):
        batch = bench.step()
        assert batch is not None
        served.append(batch.node)
    assert served == ["encoder", "node"] * 8


def test_items_are_encoded_together_as_many_as_a_step_holds_and_none_twice() -> None:
    bench = ItemBench(budget=10)
    bench.scheduler.add(request_of(0, 1, 40))
    bench.step()
    for number, item in enumerate([1, 2, 1, 3, 4], 1):
        bench.scheduler.add(reader_of(number, [picture_of(3, item), Span(1)]))
    encoded = []
    for _ in range(8):
        batch = bench.step()
        if batch is not None and batch.node == "encoder":
            encoded.append([request.request_id for request in batch.requests])
    assert encoded == [["r1", "r2", "r4"], ["r5"]]


class ItemMachine(RuleBasedStateMachine):
    """Prompts with items come and go; the oldest request gets on all the time."""

    @initialize(max_num_seqs=st.integers(1, 4), more=st.integers(0, 6))
    def start(self, max_num_seqs: int, more: int) -> None:
        self.budget = max_num_seqs + more
        self.bench = ItemBench(self.budget, max_num_seqs)
        self.alive: list[Request] = []
        self.number = 0

    @rule(
        parts=st.lists(
            st.tuples(st.integers(1, 6), st.sampled_from([None, 0, 1, 2, 3]), st.booleans()),
            max_size=5,
        ),
        max_tokens=st.integers(1, 8),
    )
    def add(self, parts: list[tuple[int, int | None, bool]], max_tokens: int) -> None:
        layout = [
            Span(length)
            if item is None
            else picture_of(min(length, self.budget), 100 * length + item, is_whole)
            for length, item, is_whole in parts
        ]
        request = reader_of(self.number, [*layout, Span(1)], max_tokens)
        self.number += 1
        self.alive.append(request)
        self.bench.scheduler.add(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.bench.scheduler.remove(request)

    @precondition(lambda self: self.alive)
    @rule()
    def oldest_gets_on(self) -> None:
        """Either node is served every second step, and an item pushes decodes back but once."""
        oldest = self.alive[0]

        def progress() -> tuple[object, ...]:
            encoded = [item.is_encoded for item in oldest.items]
            return oldest.status, len(oldest.tokens), oldest.num_computed_tokens, encoded

        before = progress()
        for _ in range(4):
            self.one_step()
        assert progress() != before, f"{oldest.request_id} stands still"

    def one_step(self) -> None:
        assert (self.bench.step() is None) == (not self.alive)
        self.alive = [r for r in self.alive if r.status is not RequestStatus.FINISHED]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        steps, bound = 0, 50 + 10 * sum(request.max_len for request in self.alive)
        while self.alive:
            self.one_step()
            steps += 1
            assert steps < bound, f"{len(self.alive)} requests after {steps} steps"
        assert self.bench.step() is None


TestItemMachine = ItemMachine.TestCase
TestItemMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
