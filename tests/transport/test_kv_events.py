"""KV events over real sockets."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from mstar.engine.resources.kv.events import AllBlocksCleared, EventBatch, EventLog
from mstar.errors import ConfigError
from mstar.transport.event_order import Arrival, Batch, IndexMirror, Reset, ResetReason
from mstar.transport.kv_events import EventPublisher, EventSubscriber

ANY = "tcp://127.0.0.1:0"
DOCS = Path(__file__).parents[2] / "docs" / "kv-events.md"


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    made = EventPublisher(ANY, ANY, "kv@here")
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store(publisher: EventPublisher, *numbers: int) -> None:
    """Publish one page a batch."""
    for number in numbers:
        log = EventLog(1)
        log.stored(key(number), None, [number])
        publisher.publish(log.take())


def until(subscriber: EventSubscriber, is_enough: Callable[[list[Arrival]], bool]) -> list[Arrival]:
    """Return what arrives until it is enough, for at most ten seconds."""
    arrivals: list[Arrival] = []
    deadline = time.monotonic() + 10
    while not is_enough(arrivals):
        assert time.monotonic() < deadline, f"in ten seconds there came only {arrivals}"
        arrivals += subscriber.receive(0.1)
    return arrivals


def repeat(send: Callable[[], object], subscriber: EventSubscriber) -> list[Arrival]:
    """Return what arrives first; a subscription takes a moment, so one message may miss it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        send()
        if arrivals := subscriber.receive(0.05):
            return arrivals
    raise AssertionError("nothing arrives")


def seqs(arrivals: list[Arrival]) -> list[int | ResetReason]:
    return [a.reason if isinstance(a, Reset) else a.seq for a in arrivals]


def replay(
    context: "zmq.Context[zmq.Socket[bytes]]", publisher: EventPublisher, start: bytes
) -> list[list[bytes]]:
    """Return the frames that a plain socket reads up to the end of a replay."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVHWM, 0)
        assert publisher.replay_endpoint is not None
        socket.connect(publisher.replay_endpoint)
        socket.send_multipart((b"", start))
        answers = []
        while socket.poll(5000):
            answers.append(socket.recv_multipart())
            if answers[-1][2] == b"\xff" * 8:
                return answers
        raise AssertionError(f"no end after {len(answers)} answers")


def wait_for_batches(
    context: "zmq.Context[zmq.Socket[bytes]]", publisher: EventPublisher, num: int
) -> None:
    """Return once the publisher's thread has sent ``num`` batches."""
    deadline = time.monotonic() + 10
    while len(replay(context, publisher, (num - 1).to_bytes(8, "big"))) < 2:
        assert time.monotonic() < deadline


def test_first_batch_of_a_publisher_clears(publisher: EventPublisher) -> None:
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint)
    (first,) = until(subscriber, bool)
    subscriber.close()
    assert isinstance(first, Batch)
    assert first.seq == 0
    assert first.events.events == [AllBlocksCleared()]
    assert first.events.data_parallel_rank == 0
    assert abs(first.events.ts - time.time()) < 60


def test_frames_are_topic_number_and_payload_live_and_replayed(
    publisher: EventPublisher, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    wait_for_batches(context, publisher, 1)
    with context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        socket.connect(publisher.endpoint)
        number = 0
        # A subscription takes a moment to reach the publisher.
        while not socket.poll(20):
            number += 1
            store(publisher, number)
        topic, seq, payload = socket.recv_multipart()
    assert topic == b"kv@here"
    assert len(seq) == 8
    live = msgspec.msgpack.decode(payload, type=EventBatch)
    log = EventLog(1)
    log.stored(key(int.from_bytes(seq, "big")), None, [int.from_bytes(seq, "big")])
    assert live.events == log.take()
    answers = replay(context, publisher, seq)
    assert answers[0] == [b"", b"kv@here", seq, payload]
    assert answers[-1] == [b"", b"", b"\xff" * 8, b""]


def test_times_of_batches_strictly_rise(
    publisher: EventPublisher, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    store(publisher, *range(200))
    wait_for_batches(context, publisher, 201)
    *answers, _ = replay(context, publisher, bytes(8))
    times = [msgspec.msgpack.decode(frames[3], type=EventBatch).ts for frames in answers]
    assert len(times) == 201
    assert times == sorted(set(times))


def test_malformed_request_to_replay_is_passed_over(
    publisher: EventPublisher, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    with context.socket(zmq.DEALER) as socket:
        assert publisher.replay_endpoint is not None
        socket.connect(publisher.replay_endpoint)
        for frames in ([b""], [b"", b"short"], [b"", bytes(8), b"more"]):
            socket.send_multipart(frames)
        assert not socket.poll(200)
    assert len(replay(context, publisher, bytes(8))) >= 1


def test_replay_keeps_the_newest_batches_and_a_gap_beyond_it_is_said(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    publisher = EventPublisher(ANY, ANY, buffer_steps=5)
    store(publisher, *range(1, 21))
    wait_for_batches(context, publisher, 21)
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint)
    arrivals = until(subscriber, lambda seen: len(seen) >= 6)
    assert seqs(arrivals) == [ResetReason.LOST, 16, 17, 18, 19, 20]
    assert arrivals[0] == Reset(ResetReason.LOST, None, 16)
    subscriber.close()
    publisher.close()


@pytest.mark.slow
def test_replay_of_a_full_buffer_arrives_whole(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    """A ROUTER drops silently what is above its mark, 1000 messages by default."""
    publisher = EventPublisher(ANY, ANY, buffer_steps=10_000)
    store(publisher, *range(1, 10_000))
    wait_for_batches(context, publisher, 10_000)
    assert len(replay(context, publisher, bytes(8))) == 10_001
    publisher.close()


def test_publisher_never_waits_for_subscribers_that_are_slow_or_absent(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    publisher = EventPublisher(ANY, ANY, hwm=5, buffer_steps=5)
    with context.socket(zmq.SUB) as stuck:
        stuck.setsockopt(zmq.RCVHWM, 1)
        stuck.setsockopt(zmq.SUBSCRIBE, b"")
        stuck.connect(publisher.endpoint)
        log = EventLog(20_000)
        log.stored(key(1), None, range(20_000))
        events = log.take()
        slowest = 0.0
        for _ in range(200):
            began = time.perf_counter()
            publisher.publish(events)
            slowest = max(slowest, time.perf_counter() - began)
        assert slowest < 1, f"a call took {slowest:.2f} s"
        began = time.perf_counter()
    publisher.close()
    assert time.perf_counter() - began < 5


def test_batch_that_cannot_even_wait_is_a_visible_gap(
    context: "zmq.Context[zmq.Socket[bytes]]", caplog: pytest.LogCaptureFixture
) -> None:
    publisher = EventPublisher(ANY, ANY, hwm=1, buffer_steps=100_000)
    deadline = time.monotonic() + 10
    while not publisher.num_lost and time.monotonic() < deadline:
        store(publisher, *range(100))
    num_lost = 0
    # Until a batch has come through after the last one that was lost.
    while num_lost < publisher.num_lost:
        num_lost = publisher.num_lost
        time.sleep(0.05)
        store(publisher, 1)
    numbers: list[int] = []
    while not numbers or numbers[-1] + 1 - len(numbers) != num_lost:
        assert time.monotonic() < deadline, f"{num_lost} lost, but there are {numbers}"
        answers = replay(context, publisher, bytes(8))[:-1]
        numbers = [int.from_bytes(frames[2], "big") for frames in answers]
        assert numbers == sorted(set(numbers))
    assert caplog.text.count("too many wait") == 1
    publisher.close()


def test_topics_of_others_are_not_followed(publisher: EventPublisher) -> None:
    subscriber = EventSubscriber(publisher.endpoint, None, "kv@elsewhere", from_start=False)
    until(subscriber, lambda _: subscriber.is_connected)
    time.sleep(0.1)
    store(publisher, 1)
    assert subscriber.receive(0.3) == []
    subscriber.close()


def test_restart_at_the_same_address_is_told_even_when_its_numbers_have_caught_up() -> None:
    publisher = EventPublisher(ANY, ANY)
    store(publisher, 1, 2, 3)
    subscriber = EventSubscriber(publisher.endpoint, publisher.replay_endpoint)
    assert seqs(until(subscriber, lambda seen: len(seen) >= 4)) == [0, 1, 2, 3]
    endpoint, replay_endpoint = publisher.endpoint, publisher.replay_endpoint
    publisher.close()
    publisher = EventPublisher(endpoint, replay_endpoint)
    store(publisher, 4, 5, 6, 7)
    arrivals = until(subscriber, lambda seen: len(seen) >= 6)
    assert seqs(arrivals) == [ResetReason.RESTARTED, 0, 1, 2, 3, 4]
    subscriber.close()
    publisher.close()


def test_restart_without_replay_voids_what_was_known() -> None:
    publisher = EventPublisher(ANY)
    subscriber = EventSubscriber(publisher.endpoint, from_start=False)
    mirror = IndexMirror()
    # What comes first may only say that something was missed.
    while not mirror.match([key(1)]):
        for arrival in repeat(lambda: store(publisher, 1), subscriber):
            mirror.apply(arrival)
    endpoint = publisher.endpoint
    publisher.close()
    publisher = EventPublisher(endpoint)
    while not mirror.match([key(2)]):
        for arrival in repeat(lambda: store(publisher, 2), subscriber):
            mirror.apply(arrival)
    assert mirror.match([key(1)]) == 0
    subscriber.close()
    publisher.close()


class Proxy:
    """Passes published messages on, but not all of them."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", upstream: str) -> None:
        self._sub, self._pub = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(upstream)
        self._pub.bind(ANY)
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self._is_open = True
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        held: list[bytes] = []
        while self._is_open:
            if not self._sub.poll(20):
                continue
            frames = self._sub.recv_multipart()
            number = int.from_bytes(frames[1], "big")
            if number % 7 == 3:
                continue
            if number % 7 == 4:
                held = frames
                continue
            self._pub.send_multipart(frames)
            if held:
                self._pub.send_multipart(held)
                self._pub.send_multipart(frames)
                held = []

    def close(self) -> None:
        self._is_open = False
        self._thread.join()
        self._sub.close()
        self._pub.close()


def test_copy_is_exact_behind_a_proxy_that_drops_repeats_and_reorders(
    publisher: EventPublisher, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    proxy = Proxy(context, publisher.endpoint)
    subscriber = EventSubscriber(proxy.endpoint, publisher.replay_endpoint, check_interval=0.2)
    mirror = IndexMirror()
    counted: list[int | ResetReason] = []
    for step in range(1, 100):
        log = EventLog(1)
        log.stored(key(step), key(step - 1) if step > 1 else None, [step])
        if step > 10:
            log.removed([key(step - 10)])
        publisher.publish(log.take())
        time.sleep(0.001)
    while not counted or counted[-1] != 99:
        arrivals = until(subscriber, bool)
        counted += seqs(arrivals)
        for arrival in arrivals:
            mirror.apply(arrival)
    assert counted == list(range(100))
    assert mirror.pages == {(key(n), "GPU"): key(n - 1) for n in range(90, 100)}
    subscriber.close()
    proxy.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1", "udp://x:1"])
def test_addresses_that_are_none_are_refused_with_the_form(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="write tcp://"):
        EventPublisher(endpoint)
    with pytest.raises(ConfigError, match="write tcp://"):
        EventSubscriber(endpoint)
    with pytest.raises(ConfigError, match="write tcp://"):
        EventSubscriber("tcp://127.0.0.1:1", endpoint)


def test_taken_address_is_refused(publisher: EventPublisher) -> None:
    with pytest.raises(ConfigError, match=re.escape(publisher.endpoint)):
        EventPublisher(publisher.endpoint)


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="buffer_steps is 0"):
        EventPublisher(ANY, buffer_steps=0)


def test_something_else_than_events_is_named(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    with context.socket(zmq.PUB) as other:
        other.bind(ANY)
        endpoint = other.getsockopt_string(zmq.LAST_ENDPOINT)
        subscriber = EventSubscriber(endpoint)
        with pytest.raises(ConfigError, match="something else than KV events"):
            repeat(lambda: other.send_multipart((b"", bytes(8), b"\xc1")), subscriber)
        subscriber.close()


def test_closing_twice_is_closing_once() -> None:
    publisher = EventPublisher(ANY)
    publisher.close()
    publisher.close()
    again = EventPublisher(publisher.endpoint)
    assert again.endpoint == publisher.endpoint, "the address was not given back"
    again.close()


def test_example_consumer_of_the_docs_follows(publisher: EventPublisher) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    store(publisher, 1, 2)
    endpoints = {
        "tcp://127.0.0.1:5557": publisher.endpoint,
        "tcp://127.0.0.1:5558": str(publisher.replay_endpoint),
    }
    for written, actual in endpoints.items():
        assert written in example
        example = example.replace(written, actual)
    scope: dict[str, object] = {}
    exec(example, scope)
    follow = scope["follow"]
    assert callable(follow)
    pages: set[bytes] = set()
    for pages in follow():
        if len(pages) == 2:
            break
    assert pages == {key(1), key(2)}
