"""Both ends of a two-way message channel between the API process and one child of it.

The API process binds a fresh socket file for every start of a child, so a new child never reads
what was meant for its predecessor. Queues are unbounded: callers bound what is in flight.
"""

import asyncio
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from mstar.transport.messages import Message

ReceivedT = TypeVar("ReceivedT")

_LINGER_MS = 1000


def _prepare(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class ChildChannel(Generic[ReceivedT]):
    """The child's end: blocking, for one thread.

    Args:
        endpoint: Address that the API process has bound.
        received: Union of the message classes that may arrive.
    """

    def __init__(self, endpoint: str, received: "type[ReceivedT]") -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        _prepare(self._socket)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)

    def send(self, message: Message) -> None:
        """Queue ``message``; never blocks."""
        self._socket.send(self._encoder.encode(message), copy=True)

    def receive(self, timeout: float | None) -> ReceivedT | None:
        """Return the next message, or ``None`` if none came within ``timeout`` seconds.

        Args:
            timeout: ``None`` waits for ever.
        """
        wait = None if timeout is None else int(timeout * 1000)
        if not self._socket.poll(wait):
            return None
        return self._decoder.decode(self._socket.recv())

    def drain(self) -> Iterator[ReceivedT]:
        """Yield the messages that are here already."""
        while True:
            try:
                blob = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decoder.decode(blob)

    def close(self) -> None:
        """Send what is queued, for a second at most, and close."""
        self._socket.close()
        self._context.term()


class ParentChannel(Generic[ReceivedT]):
    """The API process's end, on its event loop.

    Args:
        context: Context shared by all channels of the process.
        endpoint: Address to bind.
        received: Union of the message classes that may arrive.
    """

    def __init__(
        self, context: zmq.asyncio.Context, endpoint: str, received: "type[ReceivedT]"
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        _prepare(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)

    def try_send(self, message: Message) -> bool:
        """Queue ``message``; ``False`` if no child is connected. Order is kept, nothing blocks."""
        sent = self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK)
        failure = sent.exception() if isinstance(sent, asyncio.Future) else None
        if isinstance(failure, zmq.Again):
            return False
        if failure is not None:
            raise failure
        return True

    async def receive(self) -> ReceivedT:
        """Return the next message."""
        return self._decoder.decode(await self._socket.recv())

    async def receive_within(self, timeout: float) -> ReceivedT | None:
        """Return the next message, or ``None`` if none came within ``timeout`` seconds."""
        if not await self._socket.poll(int(timeout * 1000)):
            return None
        return await self.receive()

    def close(self) -> None:
        """Close at once; what the child has not read is lost."""
        self._socket.close()
