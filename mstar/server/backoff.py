"""How long to wait before a process that keeps dying is started again."""

import time
from collections.abc import Callable


class Backoff:
    """Delays that double with each death, and are forgotten after a long enough life.

    The first restart is immediate: a single crash should cost nobody a second.

    Args:
        longest: Longest delay, in seconds.
        healthy: A life of so many seconds clears the record.
        clock: Monotonic time in seconds.

    >>> backoff = Backoff(longest=4, healthy=60, clock=lambda: 0.0)
    >>> [backoff.next_delay() for _ in range(6)]
    [0.0, 0.5, 1.0, 2.0, 4.0, 4.0]
    """

    def __init__(
        self,
        longest: float = 30.0,
        healthy: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._longest = longest
        self._healthy = healthy
        self._clock = clock
        self._alive_since: float | None = None
        self.num_deaths = 0

    def born(self) -> None:
        """Note that the process works."""
        self._alive_since = self._clock()

    def next_delay(self) -> float:
        """Note a death and return the seconds to wait before the next start."""
        since, self._alive_since = self._alive_since, None
        if since is not None and self._clock() - since >= self._healthy:
            self.num_deaths = 0
        self.num_deaths += 1
        if self.num_deaths == 1:
            return 0.0
        return float(min(self._longest, 0.5 * 2 ** min(self.num_deaths - 2, 16)))
