"""Turns: a lock that threads get in the order in which they asked for it."""

import threading
from collections import deque


class Turns:
    """Lets one thread at a time into its ``with`` block, and none of them twice before the others.

    A plain lock goes to whoever is quickest, which is the thread that has just let go of it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        """The thread that has its turn, and those that wait for theirs."""
        self._owner: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether this thread has its turn, in which something has interrupted it."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        assert not self.is_mine, "a thread that has its turn would wait for itself"
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                self._changed.wait_for(lambda: self._queue[0] is ticket)
            except BaseException:
                # Interrupted while it waited: those behind it move up.
                self._queue.remove(ticket)
                self._changed.notify_all()
                raise
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = None
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()
