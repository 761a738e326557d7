"""A child process of the API process: its start, its messages and its end, whichever way it comes.

A child gets its settings as the first line of its standard input. The pipe then stays open: when
it closes, the API process is gone, and the child ends itself.
"""

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq.asyncio

from mstar.server.waiting import wait_briefly
from mstar.transport.channel import ParentChannel
from mstar.transport.messages import Message, Shutdown

logger = logging.getLogger(__name__)

ReceivedT = TypeVar("ReceivedT")
SettingsT = TypeVar("SettingsT")

_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_LAST_WORDS_SECONDS = 0.05


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block what asks the server to end, so that a child starts with it blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_child(settings_type: type[SettingsT]) -> tuple[str, SettingsT]:
    """Make this process a child: deaf to SIGINT and SIGTERM, and gone when its parent is.

    Both signals reach the whole group from a terminal or a service manager; only the API process
    answers them, so that running requests can finish.

    Returns:
        The endpoint to connect to, and the settings.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    pipe = sys.stdin.buffer
    endpoint, settings = msgspec.json.decode(
        pipe.readline(),
        type=tuple[str, settings_type],  # type: ignore[valid-type]
    )

    def follow_parent() -> None:
        os.read(pipe.fileno(), 1)
        os._exit(0)

    threading.Thread(target=follow_parent, name="follow-parent", daemon=True).start()
    return endpoint, settings


class Child(Generic[ReceivedT]):
    """One running child, from its start to its end; a restart is a new ``Child``.

    Args:
        module: Module that is run as the child's program.
        settings: First line of its standard input, beside the endpoint.
        received: Union of the message classes that it may send.
        context: The process's ZeroMQ context.
        folder: Where the socket file goes.
        on_message: Called with each message.
        on_exit: Called once with the exit status, after the last message; not after ``kill``.

    Raises:
        OSError: If the system starts no process now.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        module: str,
        settings: object,
        received: type[ReceivedT],
        *,
        context: zmq.asyncio.Context,
        folder: Path,
        on_message: Callable[[ReceivedT], None],
        on_exit: Callable[[int], None],
    ) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._path = folder / f"{next(Child._numbers)}.sock"
        endpoint = f"ipc://{self._path}"
        self._channel: ParentChannel[ReceivedT] = ParentChannel(context, endpoint, received)
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = loop.create_future()
        try:
            with _signals_blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module],
                    stdin=subprocess.PIPE,
                    env=_environment(),
                )
        except OSError:
            self._channel.close()
            self._path.unlink(missing_ok=True)
            raise
        self.pid = self._process.pid
        assert self._process.stdin is not None
        # A child that is dead already is noticed as any other dead child.
        with suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode((endpoint, settings)) + b"\n")
            self._process.stdin.flush()
        self._waiter = threading.Thread(target=self._wait, args=(loop,), daemon=True)
        self._waiter.start()
        self._task = loop.create_task(self._run())

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        status = self._process.wait()

        def tell() -> None:
            if not self._exited.done():
                self._exited.set_result(status)

        # The loop may be closed already when the server ends in a hurry.
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell)

    async def _run(self) -> None:
        receiver = asyncio.create_task(self._receive())
        try:
            ends: set[asyncio.Future[Any]] = {receiver, self._exited}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if receiver.done():
                error = receiver.exception()
                logger.error("process %d cannot be understood", self.pid, exc_info=error)
                self.kill()
                await asyncio.wait({self._exited})
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)
            while (message := await self._channel.receive_within(_LAST_WORDS_SECONDS)) is not None:
                self._on_message(message)
        finally:
            receiver.cancel()
            self._close()
        self._on_exit(self._exited.result())

    async def _receive(self) -> None:
        while True:
            self._on_message(await self._channel.receive())

    def _close(self) -> None:
        self._channel.close()
        self._path.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.close()

    def try_send(self, message: Message) -> bool:
        """Queue ``message``; ``False`` if the child is not connected (yet, or any more)."""
        return not self._exited.done() and self._channel.try_send(message)

    async def stop(self, grace: float) -> None:
        """Ask the child to end, and kill it after ``grace`` seconds."""
        self._on_exit = _ignore
        self._on_message = _ignore
        if self.try_send(Shutdown(grace=grace)) and grace > 0:
            await asyncio.wait({self._exited}, timeout=grace)
        self._process.kill()
        await asyncio.wait({self._exited}, timeout=5)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def kill(self) -> None:
        """End the child at once; ``on_exit`` is called as for any other death."""
        self._process.kill()


@dataclass(frozen=True)
class Launcher:
    """What starting any child takes."""

    context: zmq.asyncio.Context
    """The process's ZeroMQ context."""
    folder: Path
    """Where socket files go."""
    child_class: type[Child[Any]] = Child
    """What runs a process; tests put something else in its place."""

    def start(
        self,
        module: str,
        settings: object,
        received: object,
        *,
        on_message: Callable[[Any], None],
        on_exit: Callable[[int], None],
    ) -> Child[Any]:
        """Start a child; arguments are those of :class:`Child`."""
        return self.child_class(
            module,
            settings,
            received,  # type: ignore[arg-type]
            context=self.context,
            folder=self.folder,
            on_message=on_message,
            on_exit=on_exit,
        )


def _ignore(_: object) -> None:
    pass


def _environment() -> dict[str, str]:
    """Return this process's environment, with this very package importable."""
    environment = dict(os.environ)
    wait_briefly(environment)
    # An installed copy elsewhere must not be picked up by the children.
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment
