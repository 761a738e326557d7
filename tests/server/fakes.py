"""A child without a process: the test plays its part."""

import errno
import itertools
import os
from collections.abc import Callable
from typing import Any

from mstar.server.child import Child
from mstar.transport.messages import EngineFacts, Message

FACTS = EngineFacts(
    deployment_root=None,
    root_constants={},
    page_size=16,
    num_pages=64,
    max_model_len=1024,
    vocab_size=257,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    dtype="float32",
    device="cpu",
    model_name="fake",
    load_seconds=0.0,
)


class FakeChild(Child[Any]):
    """Keeps what it is sent; the test calls ``say`` and ``die``."""

    _pids = itertools.count(1)
    started: "list[FakeChild]" = []  # noqa: RUF012 - one list a subclass, made by `family`
    num_refusals = 0
    """Children that the system refuses to start from now on."""

    def __init__(
        self,
        module: str,
        settings: object,
        received: object,
        *,
        on_message: Callable[[Any], None],
        on_exit: Callable[[int], None],
        **_: object,
    ) -> None:
        if self.num_refusals:
            type(self).num_refusals -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.module = module
        self.pid = next(FakeChild._pids)
        self.sent: list[Any] = []
        self.is_alive = True
        self._on_message = on_message
        self._on_exit = on_exit
        self.started.append(self)

    def try_send(self, message: Message) -> bool:
        if self.is_alive:
            self.sent.append(message)
        return self.is_alive

    async def stop(self, grace: float) -> None:
        self.is_alive = False

    def kill(self) -> None:
        self.die()

    def say(self, message: Message) -> None:
        """Let the child send ``message``."""
        self._on_message(message)

    def die(self, status: int = -9) -> None:
        """Let the child end."""
        self.is_alive = False
        self._on_exit(status)


def family() -> type[FakeChild]:
    """Return a class of children with a list of its own."""
    return type("FakeChild", (FakeChild,), {"started": []})
