"""Turns: a lock that threads get in the order in which they asked for it."""

import threading
from collections import deque


class Turns:
    """Lets one thread at a time into its ``with`` block, and none of them twice before the others.

    A plain lock goes to whoever is quickest, which is the thread that has just let go of it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[int] = deque()
        """The thread that has its turn, and those that wait for theirs."""

    @property
    def is_mine(self) -> bool:
        """Whether this thread has its turn or waits for it, and something has interrupted it."""
        return threading.get_ident() in self._queue

    def __enter__(self) -> None:
        assert not self.is_mine, "a thread that has its turn would wait for itself"
        own = threading.get_ident()
        try:
            with self._changed:
                self._queue.append(own)
                self._changed.wait_for(lambda: self._queue[0] == own)
        except BaseException:
            # Interrupted while it waited: those behind it move up.
            self._leave(own)
            raise

    def __exit__(self, *_: object) -> None:
        self._leave(threading.get_ident())

    def _leave(self, own: int) -> None:
        with self._changed:
            if own in self._queue:
                self._queue.remove(own)
            self._changed.notify_all()
