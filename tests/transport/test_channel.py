"""Both ends of a channel, over a real socket file."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq.asyncio

from mstar.transport.channel import ChildChannel, ParentChannel
from mstar.transport.messages import (
    AbortRequests,
    AddRequests,
    FromEngine,
    Ping,
    Pong,
    StepDone,
    ToEngine,
)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield f"ipc://{Path(folder) / 's'}"


def test_messages_arrive_whole_and_in_order_both_ways(endpoint: str) -> None:
    seen: list[ToEngine] = []

    def child() -> None:
        channel: ChildChannel[ToEngine] = ChildChannel(endpoint, ToEngine)  # type: ignore[arg-type]
        channel.send(Pong())
        while len(seen) < 102:
            message = channel.receive(timeout=5)
            assert message is not None
            seen.append(message)
            seen.extend(channel.drain())
        channel.send(StepDone(accepted=["last"]))
        channel.close()

    async def parent() -> None:
        context = zmq.asyncio.Context()
        channel: ParentChannel[FromEngine] = ParentChannel(
            context,
            endpoint,
            FromEngine,  # type: ignore[arg-type]
        )
        assert not channel.try_send(Ping()), "nobody is connected yet"
        thread = threading.Thread(target=child)
        thread.start()
        assert await asyncio.wait_for(channel.receive(), 5) == Pong()
        for number in range(100):
            assert channel.try_send(AbortRequests(request_ids=[str(number)]))
        big = bytes(5_000_000)
        assert channel.try_send(AddRequests(requests=[big]))
        assert channel.try_send(Ping())
        assert await asyncio.wait_for(channel.receive(), 5) == StepDone(accepted=["last"])
        assert await channel.receive_within(0.01) is None
        thread.join(5)
        channel.close()
        context.destroy(linger=0)

    asyncio.run(parent())
    assert seen[:100] == [AbortRequests(request_ids=[str(number)]) for number in range(100)]
    assert isinstance(seen[100], AddRequests)
    assert len(seen[100].requests[0]) == 5_000_000
    assert seen[101] == Ping()


def test_receiving_gives_up_in_time(endpoint: str) -> None:
    channel: ChildChannel[ToEngine] = ChildChannel(endpoint, ToEngine)  # type: ignore[arg-type]
    assert channel.receive(timeout=0.01) is None
    assert list(channel.drain()) == []
    channel.close()
