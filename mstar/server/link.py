"""The engine process as the API process sees it: started, watched, and started again."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from mstar.server.backoff import Backoff
from mstar.server.child import Child, Launcher
from mstar.server.config import EngineOptions
from mstar.server.rank_watch import RankWatch
from mstar.transport.messages import (
    CacheReset,
    EngineFacts,
    EngineReady,
    Explained,
    FromEngine,
    LoadFailed,
    LoadProgress,
    Message,
    Ping,
    Refused,
    StepDone,
)

logger = logging.getLogger(__name__)

_PING_SECONDS = 1.0
_MAX_FIRST_DEATHS = 3


class EngineState(Enum):
    """Where the engine process stands."""

    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"
    """It ended, and is about to be started again."""
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class EngineListener:
    """Who is told what about the engine."""

    on_ready: Callable[[EngineFacts], None]
    on_step: Callable[[StepDone], None]
    on_answer: Callable[[Explained | CacheReset | Refused], None]
    on_death: Callable[[str], None]
    """With the reason, in words for users."""
    on_fatal: Callable[[str, bool], None]
    """It cannot start: the reason, and whether the user must change something."""


class EngineLink:
    """Keeps one engine process running.

    Args:
        options: What the engine is started with.
        stall_timeout: Silence after which the engine counts as stuck, in seconds.
        launcher: Starts the processes.
        listener: Who is told.
    """

    def __init__(
        self,
        options: EngineOptions,
        stall_timeout: float,
        *,
        launcher: Launcher,
        listener: EngineListener,
    ) -> None:
        self._options = options
        self._stall_timeout = stall_timeout
        self._launcher = launcher
        self._listener = listener
        self._child: Child[FromEngine] | None = None
        self._backoff = Backoff()
        self._failure: LoadFailed | None = None
        self._last_heard = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._pinger: asyncio.TimerHandle | None = None
        self._rank_watch: RankWatch | None = None
        self.state = EngineState.LOADING
        self.facts: EngineFacts | None = None
        self.progress = LoadProgress(stage="starting", fraction=0.0)
        self.num_starts = 0

    def start(self) -> None:
        """Start the engine process."""
        self.state = EngineState.LOADING
        self.progress = LoadProgress(stage="starting", fraction=0.0)
        self._failure = None
        self.num_starts += 1
        self._last_heard = time.monotonic()
        try:
            self._child = self._launcher.start(
                "mstar.server.engine_process",
                self._options,
                FromEngine,
                on_message=self._receive,
                on_exit=self._bury,
            )
        except OSError as error:
            # The machine has no processes or no memory to give, which may pass.
            self._end(f"the engine process cannot be started: {error}")

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while there is one."""
        return None if self._child is None else self._child.pid

    @property
    def silence(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self._last_heard

    @property
    def is_stalled(self) -> bool:
        """Whether a ready engine has been silent for too long."""
        return self.state is EngineState.READY and self.silence > self._stall_timeout

    def try_send(self, message: Message) -> bool:
        """Queue ``message``; ``False`` unless the engine is ready."""
        if self.state is not EngineState.READY or self._child is None:
            return False
        return self._child.try_send(message)

    async def stop(self, grace: float) -> None:
        """End the engine process."""
        self.state = EngineState.STOPPED
        for timer in (self._timer, self._pinger):
            if timer is not None:
                timer.cancel()
        self._forget_ranks()
        if self._child is not None:
            await self._child.stop(grace)
            self._child = None

    def _receive(self, message: FromEngine) -> None:
        self._last_heard = time.monotonic()
        match message:
            case StepDone():
                self._listener.on_step(message)
            case Explained() | CacheReset() | Refused():
                self._listener.on_answer(message)
            case LoadProgress():
                self.progress = message
                logger.info("loading: %s (%.0f%%)", message.stage, 100 * message.fraction)
            case EngineReady():
                self.facts = message.facts
                self.state = EngineState.READY
                self._backoff.born()
                self._ping()
                if message.facts.rank_pids and self._child is not None:
                    self._rank_watch = RankWatch(message.facts.rank_pids, self._child.kill)
                self._listener.on_ready(message.facts)
            case LoadFailed():
                self._failure = message

    def _forget_ranks(self) -> None:
        if self._rank_watch is not None:
            self._rank_watch.close()
            self._rank_watch = None

    def _ping(self) -> None:
        if self.state is EngineState.READY and self._child is not None:
            self._child.try_send(Ping())
            loop = asyncio.get_running_loop()
            self._pinger = loop.call_later(_PING_SECONDS, self._ping)

    def _bury(self, status: int) -> None:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        self._end(f"the engine process ended ({how})")

    def _end(self, reason: str) -> None:
        failure = self._failure
        who = "engine" if self._child is None else f"engine {self.pid}"
        self._child = None
        self.state = EngineState.DEAD
        if self._pinger is not None:
            self._pinger.cancel()
        self._forget_ranks()
        delay = self._backoff.next_delay()
        reason = reason if failure is None else failure.error
        is_final = self.facts is None and (
            failure is not None or self._backoff.num_deaths >= _MAX_FIRST_DEATHS
        )
        if not is_final:
            logger.error("%s: %s; it is started again in %.1f s", who, reason, delay)
        self._listener.on_death(reason)
        if is_final:
            self.state = EngineState.STOPPED
            self._listener.on_fatal(reason, failure is not None and failure.is_users_error)
            return
        self._timer = asyncio.get_running_loop().call_later(delay, self.start)
