"""Both ends of the wire that carries KV events: ZeroMQ sockets, in vLLM's framing.

::

    PUB      topic, seq, payload                        every batch, once
    ROUTER   client, "", start_seq                      a request to replay
             client, "", topic, seq, payload            an answer for each batch that is kept
             client, "", "", -1, ""                     the end of the answers

``seq`` is eight bytes, big-endian, and counts from 0; a payload is an ``EventBatch`` as
MessagePack. Ask by a DEALER socket: a REQ socket reads one answer only.

Source:
    vLLM 0.32, ``vllm/distributed/kv_events.py``. Unlike it, the first batch of a publisher is one
    ``AllBlocksCleared``, so that whoever follows from the start needs to know nothing else.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import zmq
import zmq.utils.monitor

from mstar.engine.resources.kv.events import AllBlocksCleared, Event, EventBatch
from mstar.errors import ConfigError
from mstar.transport.event_order import Arrival, Batch, EventOrder

logger = logging.getLogger(__name__)

_DEFAULT_BUFFER_STEPS = 10_000
_DEFAULT_HWM = 100_000
_SEQ_NBYTES = 8
_END = (-1).to_bytes(_SEQ_NBYTES, "big", signed=True)
_LINGER_MS = 1000
_ENDPOINT_HELP = "write tcp://HOST:PORT (tcp://*:PORT for every interface) or ipc://PATH"


class EventPublisher:
    """Publishes batches of events from a thread of its own; ``publish`` never waits.

    Args:
        endpoint: Address to bind for subscribers; port 0 takes a free one.
        replay_endpoint: Address to bind for requests to replay; ``None``: no replays.
        topic: What subscribers may select by.
        buffer_steps: Newest batches kept for replay.
        hwm: Batches that may wait for one slow subscriber before it loses some; a loss shows as a
            gap in its sequence numbers.
        rank: This engine's number among several.

    Raises:
        ConfigError: If an address cannot be bound, or a number is below one.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        buffer_steps: int = _DEFAULT_BUFFER_STEPS,
        hwm: int = _DEFAULT_HWM,
        rank: int = 0,
    ) -> None:
        for name, value in (("buffer_steps", buffer_steps), ("hwm", hwm)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; it is at least 1")
        self.topic = topic
        """What subscribers may select by."""
        self._topic = topic.encode()
        self._rank = rank
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._next_seq = 0
        self._last_ts = 0.0
        self.num_lost = 0
        """Batches that nobody will see, since too many waited to be sent."""
        self._context = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, hwm)
            self.endpoint = _bind(self._pub, endpoint)
            """Where subscribers connect."""
            self._replay: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            """Where replays are asked for."""
            if replay_endpoint is not None:
                # A ROUTER drops what is above its mark: room for two whole answers a client, so
                # that one who reads loses nothing, and one who does not takes no more memory.
                self._replay = self._socket(zmq.ROUTER, 2 * (buffer_steps + 1))
                self.replay_endpoint = _bind(self._replay, replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._inbox = self._socket(zmq.PULL, hwm)
        self._inbox.bind("inproc://batches")
        self._outbox = self._socket(zmq.PUSH, hwm)
        self._outbox.connect("inproc://batches")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self.publish([AllBlocksCleared()])

    def publish(self, events: Sequence[Event]) -> None:
        """Send events as one batch; none is no batch. Call from one thread only."""
        if not events:
            return
        # Times tell a publisher's batches from those of the one before it: no two are equal.
        self._last_ts = max(time.time(), math.nextafter(self._last_ts, math.inf))
        payload = self._encoder.encode(EventBatch(self._last_ts, list(events), self._rank))
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        try:
            self._outbox.send_multipart((seq.to_bytes(_SEQ_NBYTES, "big"), payload), zmq.NOBLOCK)
        except zmq.Again:
            # The number is spent, so that everyone sees the gap.
            if not self.num_lost:
                logger.warning("KV events are lost from batch %d: too many wait to be sent", seq)
            self.num_lost += 1

    def close(self) -> None:
        """Send what waits, for about a second at most, and close."""
        if self._outbox.closed:
            return
        try:
            self._outbox.send(b"")
        finally:
            self._outbox.close()
        self._thread.join()
        self._context.term()

    def _socket(self, kind: int, hwm: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.RCVHWM, hwm)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._inbox, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        is_open = True
        while is_open:
            ready = dict(poller.poll())
            if self._inbox in ready:
                is_open = self._forward(self._inbox.recv_multipart())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay, self._replay.recv_multipart())
        for socket in (self._inbox, self._pub, self._replay):
            if socket is not None:
                socket.close()

    def _forward(self, frames: list[bytes]) -> bool:
        """Send a batch on; ``False`` if there will be no more."""
        if len(frames) == 1:
            return False
        seq, payload = frames
        self._pub.send_multipart((self._topic, seq, payload))
        self._buffer.append((seq, payload))
        return True

    def _answer(self, replay: "zmq.Socket[bytes]", request: list[bytes]) -> None:
        if len(request) != 3 or len(request[2]) != _SEQ_NBYTES:
            logger.warning("a request to replay KV events is no (client, empty, seq): %r", request)
            return
        client, _, start = request
        # Big-endian numbers of one width are ordered as their bytes are.
        for seq, payload in self._buffer:
            if seq >= start:
                replay.send_multipart((client, b"", self._topic, seq, payload))
        replay.send_multipart((client, b"", b"", _END, b""))


class EventSubscriber:
    """Follows one publisher: its batches in order, each once, and a ``Reset`` where that fails.

    Args:
        endpoint: The publisher's address.
        replay_endpoint: Where it replays; ``None``: every gap and every new connection is a reset.
        topic: Beginning of the topics to follow.
        from_start: Begin with everything that can be replayed; else with what comes first.
        check_interval: Seconds of silence after which a replay is asked for, to see whether the
            newest batches were lost.
        replay_timeout: Seconds to wait for the next part of a replay.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        from_start: bool = True,
        check_interval: float = 5.0,
        replay_timeout: float = 5.0,
    ) -> None:
        self._order = EventOrder(from_start=from_start)
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._check_interval = check_interval
        self._replay_timeout_ms = int(replay_timeout * 1000)
        self._next_check = time.monotonic() + check_interval
        self.is_connected = False
        """Whether the publisher is there."""
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, 0)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor = self._sub.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._poller = zmq.Poller()
        self._poller.register(self._sub, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            _connect(self._sub, endpoint)
            if replay_endpoint is not None:
                self._dealer(replay_endpoint).close()
        except ConfigError:
            self.close()
            raise

    def __iter__(self) -> Iterator[Arrival]:
        """Yield what counts, for ever."""
        while True:
            yield from self.receive(self._check_interval)

    def receive(self, timeout: float) -> list[Arrival]:
        """Return what has come to count within ``timeout`` seconds; waits no longer than needed.

        Raises:
            ConfigError: If what arrives is no batch of KV events.
        """
        batch = None
        if self._poller.poll(int(timeout * 1000)):
            batch = self._next_batch()
        # After the message was read: a change of the connection before it is known by now.
        self._watch_connection()
        if batch is None:
            return self._check()
        self._next_check = time.monotonic() + self._check_interval
        return self._order.follow(batch, self._fetch)

    def close(self) -> None:
        """Close at once."""
        self._sub.disable_monitor()
        self._context.destroy(linger=0)

    def _next_batch(self) -> Batch | None:
        try:
            frames = self._sub.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return self._decode(frames)

    def _decode(self, frames: list[bytes]) -> Batch:
        """Return a batch from its frames: topic, number, payload."""
        try:
            _, seq, payload = frames
            return Batch(int.from_bytes(seq, "big"), self._decoder.decode(payload))
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{self._endpoint} sends something else than KV events with whole keys: {error}; "
                "name the address of an engine's events"
            ) from error

    def _watch_connection(self) -> None:
        while self._monitor.poll(0):
            message = zmq.utils.monitor.recv_monitor_message(self._monitor)
            self.is_connected = message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            # Another process may be at the other end now.
            self._order.doubt()
            self._next_check = 0.0

    def _check(self) -> list[Arrival]:
        """Look for batches that were lost without a trace, if it is time to."""
        is_due = self.is_connected and time.monotonic() >= self._next_check
        if not is_due or self._replay_endpoint is None:
            return []
        self._next_check = time.monotonic() + self._check_interval
        self._order.doubt()
        return self._order.follow(None, self._fetch)

    def _fetch(self, seq: int) -> list[Batch] | None:
        """Return a whole replay; ``None`` if it does not come in time."""
        if self._replay_endpoint is None:
            return None
        # A socket for each request: no answer can be one to an earlier request.
        with self._dealer(self._replay_endpoint) as socket:
            socket.send_multipart((b"", seq.to_bytes(_SEQ_NBYTES, "big")))
            batches: list[Batch] = []
            while socket.poll(self._replay_timeout_ms):
                frames = socket.recv_multipart()[1:]
                if len(frames) >= 2 and frames[-2] == _END:
                    return batches
                batches.append(self._decode(frames))
        return None

    def _dealer(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        _connect(socket, endpoint)
        return socket


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """Bind, and return the address with its port."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"KV events cannot be served at {endpoint!r}: {error.strerror}; {_ENDPOINT_HELP}"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _connect(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{endpoint!r} is no address of KV events: {error.strerror}; {_ENDPOINT_HELP}"
        ) from error
