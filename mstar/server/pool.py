"""The preprocess workers: jobs in, prepared requests out, and a new worker for a dead one."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from mstar.server.backoff import Backoff
from mstar.server.child import Child, Launcher
from mstar.server.failures import ApiError
from mstar.server.worker import WorkerSettings
from mstar.transport.messages import (
    Abilities,
    Configure,
    EngineFacts,
    FromWorker,
    LoadFailed,
    Prepare,
    Prepared,
    PrepareFailed,
    Route,
    WorkerReady,
)

logger = logging.getLogger(__name__)

# One job in hand and one waiting behind it: the worker never idles between two jobs, and little
# has to be sent again when it dies. Long ones wait in the pool, where those that nobody waits for
# any longer are dropped.
_MAX_JOBS_PER_WORKER = 2
_MAX_ATTEMPTS = 2
_MANY_NBYTES = 1 << 16
"""A body of more takes its time, whatever is in it."""
_MEDIA_WORDS = (b"audio", b"image", b"video", rb"\u006", rb"\u007")
"""Chats with media have one of them, or letters spelled by numbers; few others do."""


@dataclass(eq=False)
class _Job:
    message: Prepare
    answer: "asyncio.Future[Prepared]"
    is_long: bool
    """It may take seconds: there are media in it, or much text."""
    num_deaths: int = 0
    """Workers that died with this job in hand."""


@dataclass(eq=False)
class _Worker:
    child: "Child[FromWorker]"
    is_quick: bool
    """It takes no long jobs."""
    jobs: deque[_Job] = field(default_factory=deque)
    """Sent and not answered; the worker takes them in this order."""
    timer: asyncio.TimerHandle | None = None
    """Runs out when the first of them has taken too long."""
    is_loaded: bool = False
    is_configured: bool = False


class WorkerPool:
    """A fixed number of workers.

    Where a model takes media, there is one more, for what has none: a recording of an hour takes
    seconds to prepare, in which a short text waits for nobody.

    Args:
        settings: What each worker is started with.
        size: Number of workers.
        timeout: How long a worker may take over one job before it is ended, in seconds.
        launcher: Starts the processes.
        on_change: Called when a worker becomes ready or dies.
        on_death: Called when a worker dies.
        on_fatal: Called with the reason when workers cannot start.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        size: int,
        *,
        timeout: float,
        launcher: Launcher,
        on_change: Callable[[], None],
        on_death: Callable[[], None],
        on_fatal: Callable[[str, bool], None],
    ) -> None:
        self._settings = settings
        self._size = size
        self._timeout = timeout
        self._launcher = launcher
        self._on_change = on_change
        self._on_death = on_death
        self._on_fatal = on_fatal
        self.abilities = Abilities()
        """What the model can be asked for, as the workers say."""
        self._facts: EngineFacts | None = None
        self._workers: list[_Worker] = []
        self._backoff = Backoff(longest=10.0, healthy=10.0)
        self._long: deque[_Job] = deque()
        self._quick: deque[_Job] = deque()
        self._job_ids = itertools.count()
        self._timers: set[asyncio.TimerHandle] = set()
        self._was_ready = False
        self._has_quick = False
        self._failure: LoadFailed | None = None

    def start(self) -> None:
        """Start the workers."""
        for _ in range(self._size):
            self._spawn()

    @property
    def is_ready(self) -> bool:
        """Whether a worker takes jobs."""
        return any(worker.is_configured for worker in self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.child.pid for worker in self._workers]

    def configure(self, facts: EngineFacts) -> None:
        """Tell the workers, those to come included, what engine they prepare for."""
        self._facts = facts
        for worker in self._workers:
            self._configure(worker)
        self._dispatch()

    async def prepare(
        self, request_id: str, route: Route | None, body: bytes, content_type: str = ""
    ) -> Prepared:
        """Return the requests that ``body`` asks for.

        Raises:
            ApiError: If the body is wrong, or workers die over it.
        """
        message = Prepare(
            job_id=next(self._job_ids),
            request_id=request_id,
            route=route,
            body=body,
            content_type=content_type,
        )
        # Where there is no worker for the others, all wait in one row.
        is_long = self._has_quick and _is_long(message)
        job = _Job(message, asyncio.get_running_loop().create_future(), is_long)
        queue = self._queue_of(job)
        queue.append(job)
        self._dispatch()
        try:
            return await job.answer
        finally:
            # Given up by the client before a worker had it: nobody has to do it.
            if job in queue:
                queue.remove(job)

    async def stop(self, grace: float, failure: ApiError) -> None:
        """End all workers; what they have not prepared fails."""
        for timer in self._timers:
            timer.cancel()
        workers, self._workers = self._workers, []
        for worker in workers:
            _stop_timer(worker)
        waiting = [*self._long, *self._quick, *(job for worker in workers for job in worker.jobs)]
        for job in waiting:
            if not job.answer.done():
                job.answer.set_exception(failure)
        await asyncio.gather(*(worker.child.stop(grace) for worker in workers))

    def _spawn(self, is_quick: bool = False) -> None:
        worker: _Worker
        try:
            child: Child[FromWorker] = self._launcher.start(
                "mstar.server.worker",
                self._settings,
                FromWorker,
                on_message=lambda message: self._receive(worker, message),
                on_exit=lambda status: self._bury(worker, status),
            )
        except OSError as error:
            # The machine has no processes or no memory to give, which may pass.
            logger.error("a preprocess worker cannot be started: %s", error)
            self._replace(is_quick)
            return
        worker = _Worker(child, is_quick)
        self._workers.append(worker)

    def _receive(self, worker: _Worker, message: FromWorker) -> None:
        match message:
            case WorkerReady():
                worker.is_loaded = True
                self._was_ready = True
                self.abilities = message.abilities
                self._backoff.born()
                if not self._has_quick and message.abilities.input_modalities != ("text",):
                    self._has_quick = True
                    self._spawn(is_quick=True)
                self._configure(worker)
            case LoadFailed():
                self._failure = message
            case Prepared() | PrepareFailed():
                job = worker.jobs.popleft()
                assert job.message.job_id == message.job_id, (job.message.job_id, message.job_id)
                self._start_timer(worker)
                if not job.answer.done():
                    if isinstance(message, Prepared):
                        job.answer.set_result(message)
                    else:
                        job.answer.set_exception(ApiError.of(message.status, message.error))
        self._dispatch()

    def _configure(self, worker: _Worker) -> None:
        if worker.is_loaded and self._facts is not None:
            worker.is_configured = worker.child.try_send(Configure(facts=self._facts))
            self._on_change()

    def _dispatch(self) -> None:
        # Long ones first: the worker that takes none of them is left to the others.
        for queue in (self._long, self._quick):
            while queue:
                worker = self._worker_for(queue[0])
                if worker is None:
                    break
                job = queue.popleft()
                if job.answer.done():
                    continue
                if not worker.child.try_send(job.message):
                    # It has just died; `_bury` follows and dispatches again.
                    queue.appendleft(job)
                    worker.is_configured = False
                    return
                worker.jobs.append(job)
                if len(worker.jobs) == 1:
                    self._start_timer(worker)

    def _queue_of(self, job: _Job) -> deque[_Job]:
        return self._long if job.is_long else self._quick

    def _worker_for(self, job: _Job) -> _Worker | None:
        """Return a worker that has room, and keeps the job waiting for no longer one."""
        ready = [w for w in self._workers if w.is_configured and len(w.jobs) < _MAX_JOBS_PER_WORKER]
        if job.is_long:
            ready = [w for w in ready if not w.is_quick and not w.jobs]
        elif self._has_quick:
            ready = [w for w in ready if not any(own.is_long for own in w.jobs)]
        return min(ready, key=lambda w: len(w.jobs), default=None)

    def _start_timer(self, worker: _Worker) -> None:
        """Give the worker its time for the job that it has in hand now, if it has one."""
        _stop_timer(worker)
        if worker.jobs:
            loop = asyncio.get_running_loop()
            worker.timer = loop.call_later(self._timeout, self._give_up, worker)

    def _give_up(self, worker: _Worker) -> None:
        logger.error(
            "preprocess worker %d has been at request %s for %g s and is ended",
            worker.child.pid,
            worker.jobs[0].message.request_id,
            self._timeout,
        )
        worker.child.kill()

    def _bury(self, worker: _Worker, status: int) -> None:
        _stop_timer(worker)
        self._workers.remove(worker)
        if worker.jobs:
            self._blame(worker.jobs[0])
        for job in reversed(worker.jobs):
            if not job.answer.done():
                self._queue_of(job).appendleft(job)
        if self._failure is None:
            logger.error("preprocess worker %d ended (status %d)", worker.child.pid, status)
        self._replace(worker.is_quick)

    def _replace(self, is_quick: bool) -> None:
        """Start a worker in place of one that is gone, after a while."""
        delay = self._backoff.next_delay()
        failure, self._failure = self._failure, None
        self._on_death()
        self._on_change()
        if not self._was_ready and (failure is not None or self._backoff.num_deaths >= 3):
            reason = "its processes keep dying" if failure is None else failure.error
            self._on_fatal(reason, failure is not None and failure.is_users_error)
            return

        def again() -> None:
            self._timers.discard(timer)
            self._spawn(is_quick)

        timer = asyncio.get_running_loop().call_later(delay, again)
        self._timers.add(timer)
        self._dispatch()

    def _blame(self, job: _Job) -> None:
        """Count a death against the job that was in hand, and give it up after the second."""
        job.num_deaths += 1
        if job.num_deaths >= _MAX_ATTEMPTS and not job.answer.done():
            message = f"preparing request {job.message.request_id} ended {job.num_deaths} workers"
            job.answer.set_exception(ApiError(500, message, code="preprocess_failed"))


def _stop_timer(worker: _Worker) -> None:
    if worker.timer is not None:
        worker.timer.cancel()
        worker.timer = None


def _is_long(message: Prepare) -> bool:
    """Tell whether a body may take seconds to prepare; this reads none of it."""
    if len(message.body) > _MANY_NBYTES or message.route in ("transcription", "translation"):
        return True
    return message.route != "completion" and any(word in message.body for word in _MEDIA_WORDS)
