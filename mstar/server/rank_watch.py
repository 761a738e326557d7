"""Sees to it that an engine of several ranks ends when one of them has.

It ends by itself, unless a thread of it waits for a GPU, which waits for that rank, and lets no
other thread run meanwhile.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

_GRACE_SECONDS = 5.0
"""How long the engine has to end by itself."""


class RankWatch:
    """Watches processes that are no children of this one, on the running event loop.

    Args:
        pids: Of the ranks.
        end: Called once one has ended and the engine had its time.
    """

    def __init__(self, pids: Sequence[int], end: Callable[[], object]) -> None:
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._descriptors: list[int] = []
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._on_end()
                continue
            self._descriptors.append(descriptor)
            self._loop.add_reader(descriptor, partial(self._on_end, descriptor))

    def _on_end(self, descriptor: int | None = None) -> None:
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
        if self._timer is None:
            self._timer = self._loop.call_later(_GRACE_SECONDS, self._end)

    def close(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors = []
