"""Carries requests from HTTP handlers to workers and engine, and their outputs back.

Lives on the API process's event loop; nothing here is proportional to a prompt's length but copying
it.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from mstar.engine.output import EngineStats, FinishReason, RequestOutput
from mstar.engine.resources.kv.explain import ReuseReport
from mstar.server.child import Launcher
from mstar.server.config import ServerConfig
from mstar.server.failures import ApiError
from mstar.server.link import EngineLink, EngineListener, EngineState
from mstar.server.metrics import Metrics
from mstar.server.pool import WorkerPool
from mstar.server.questions import Questions, dead_engine
from mstar.server.worker import WorkerSettings
from mstar.transport.messages import (
    AbortRequests,
    AddRequests,
    AnswerOptions,
    EngineFacts,
    Message,
    Route,
    StepDone,
)

logger = logging.getLogger(__name__)

_OWN_FAULTS = ("internal_error", "invalid_logits")
"""Codes of failures that are not the request's."""


@dataclass(frozen=True)
class Readiness:
    """Whether the server takes requests, and if not, why."""

    is_ready: bool
    code: str
    reason: str


@dataclass(eq=False, slots=True)
class _Lane:
    """One engine request: where its outputs go, and when its tokens came."""

    flight: "Flight"
    index: int
    has_begun: bool = False
    """It has given a token, or something beside tokens."""
    last_token: float | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0


class Flight:
    """One HTTP request on its way: its choices' outputs, in the order they came.

    Args:
        request_ids: The engine's ids, one a choice.
        options: How the answer is to be shaped.
        arrival: When the HTTP request came, monotonic, in seconds.
    """

    def __init__(self, request_ids: list[str], options: AnswerOptions, arrival: float) -> None:
        self.request_ids = request_ids
        self.options = options
        self.arrival = arrival
        self.first_token: float | None = None
        self._unanswered = set(request_ids)
        self._inbox: list[tuple[int, RequestOutput]] = []
        self._failure: ApiError | None = None
        self._wake = asyncio.Event()

    async def wait_accepted(self) -> None:
        """Return once the engine has queued every choice.

        Raises:
            ApiError: If it refused one, or died.
        """
        while self._unanswered and self._failure is None:
            self._wake.clear()
            await self._wake.wait()
        if self._failure is not None:
            raise self._failure

    async def take(self, timeout: float | None) -> list[tuple[int, RequestOutput]]:
        """Return what has come, at least one output; empty after ``timeout`` seconds of silence.

        Raises:
            ApiError: If the request failed; what came before is returned first.
        """
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                return []
        inbox, self._inbox = self._inbox, []
        return inbox

    def accepted(self, request_id: str) -> None:
        """Note that the engine has queued one choice."""
        self._unanswered.discard(request_id)
        if not self._unanswered:
            self._wake.set()

    def push(self, index: int, output: RequestOutput) -> None:
        """Hand over one output."""
        self._inbox.append((index, output))
        self._wake.set()

    def fail(self, failure: ApiError) -> None:
        """End the request with ``failure``; the first one counts."""
        if self._failure is None:
            self._failure = failure
            self._wake.set()


class Bridge:
    """The parts of a running server, and the requests in it.

    Args:
        config: The server's settings.
        model_path: Where the model's files are.
        launcher: Starts the processes.
    """

    def __init__(self, config: ServerConfig, model_path: str, launcher: Launcher) -> None:
        self.config = config
        self.metrics = Metrics(config.model_names[0], lambda: self.num_in_flight)
        self.stats: EngineStats | None = None
        self.is_draining = False
        self.fatal: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()
        """Set when the server cannot start: the reason, and whether it is the user's to mend."""
        self.became_ready = asyncio.Event()
        """Set at the first time that requests can be served."""
        self.got_ready = asyncio.Event()
        """Set when they can be served for the first time, or again; whoever notes it clears it."""
        self._is_up = False
        self.has_tokenizer = False
        self._lanes: dict[str, _Lane] = {}
        self._num_preparing = 0
        self._num_unstarted = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._questions = Questions(self._send, max(1.0, config.stall_timeout))
        self.link = EngineLink(
            config.engine,
            config.stall_timeout,
            launcher=launcher,
            listener=EngineListener(
                on_ready=self._engine_ready,
                on_step=self._step,
                on_answer=self._questions.answered,
                on_death=self._engine_died,
                on_fatal=self._fatal,
            ),
        )
        self.pool = WorkerPool(
            WorkerSettings(
                model_path=model_path,
                model_names=config.model_names,
                trust_chat_template_kwargs=config.trust_chat_template_kwargs,
                media=config.media,
                log_level=config.log_level,
            ),
            config.num_workers,
            timeout=config.preprocess_timeout,
            launcher=launcher,
            on_change=self._check_ready,
            on_death=self.metrics.worker_died,
            on_fatal=self._fatal,
        )

    def _send(self, message: Message) -> bool:
        return self.link.try_send(message)

    def start(self) -> None:
        """Start the processes."""
        self.link.start()
        self.pool.start()

    async def stop(self, grace: float) -> None:
        """End the processes, and what still runs in them."""
        self.is_draining = True
        readiness = self.readiness()
        failure = ApiError(503, readiness.reason, code=readiness.code)
        self._fail_all(failure)
        await asyncio.gather(self.link.stop(grace), self.pool.stop(grace, failure))

    def readiness(self) -> Readiness:
        """Tell whether requests can be served now."""
        link = self.link
        if self.is_draining or link.state is EngineState.STOPPED:
            return Readiness(False, "server_draining", "the server is shutting down")
        if link.state is EngineState.DEAD:
            return Readiness(False, "engine_dead", "the engine process ended and is started again")
        if link.state is EngineState.LOADING:
            progress = f"{link.progress.stage}, {100 * link.progress.fraction:.0f}%"
            return Readiness(False, "model_loading", f"the model is being loaded ({progress})")
        if link.is_stalled:
            return Readiness(
                False, "engine_stalled", f"the engine has been silent for {link.silence:.0f} s"
            )
        if not self.has_tokenizer or not self.pool.is_ready:
            return Readiness(False, "model_loading", "the tokenizer is being loaded")
        return Readiness(True, "ready", "requests are served")

    def tokenizer_loaded(self) -> None:
        """Note that answers can be turned into text."""
        self.has_tokenizer = True
        self._check_ready()

    @property
    def num_in_flight(self) -> int:
        """Requests being prepared, waiting or running, a choice each."""
        return self._num_preparing + len(self._lanes)

    def check(self) -> None:
        """Verify the counters; raises ``AssertionError`` with the numbers."""
        num_unstarted = sum(not lane.has_begun for lane in self._lanes.values())
        assert num_unstarted == self._num_unstarted, (num_unstarted, self._num_unstarted)
        assert self._num_preparing >= 0, self._num_preparing
        is_idle = self.num_in_flight == 0
        assert is_idle == self._idle.is_set(), (self.num_in_flight, self._idle.is_set())

    async def wait_idle(self) -> None:
        """Return once nothing is in flight."""
        await self._idle.wait()

    async def submit(
        self, route: Route, body: bytes, request_id: str, arrival: float, content_type: str = ""
    ) -> Flight:
        """Bring a request into the engine; returns once it is queued there.

        Args:
            route: Which kind of request.
            body: The HTTP body.
            request_id: The engine's ids begin with it.
            arrival: When it came, monotonic, in seconds.
            content_type: Of the body, where it is no JSON.

        Raises:
            ApiError: If it is wrong, or cannot be served now.
        """
        self._admit()
        with self._preparing():
            prepared = await self.pool.prepare(request_id, route, body, content_type)
            self._require_engine()
            flight = Flight(prepared.request_ids, prepared.options, arrival)
            for index, engine_id in enumerate(prepared.request_ids):
                self._lanes[engine_id] = _Lane(flight, index)
            self._num_unstarted += len(prepared.request_ids)
        try:
            if not self.link.try_send(AddRequests(requests=prepared.requests)):
                raise dead_engine()
            await flight.wait_accepted()
        except BaseException:
            self.close(flight)
            raise
        return flight

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        """Count a request as in flight while a worker has it."""
        self._num_preparing += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_preparing -= 1
            self._check_idle()

    async def explain(self, body: bytes) -> ReuseReport:
        """Return how much of a body's prompt could be reused now; nothing is run.

        Raises:
            ApiError: If the body is wrong, has more than one prompt, or cannot be looked at now.
        """
        self._admit()
        with self._preparing():
            prepared = await self.pool.prepare("explain", None, body)
            num_prompts = len(prepared.options.num_prompt_tokens)
            if num_prompts != 1:
                message = f"{num_prompts} prompts; one at a time is explained: send each alone"
                raise ApiError(400, message, param="prompt")
            report = (await self._questions.explain_prompt(prepared.requests[0])).report
        if report is None:
            raise ApiError(501, "this model has no KV cache that could be explained")
        return report

    async def explain_request(self, request_id: str) -> ReuseReport | None:
        """Return what a request that started lately could reuse then; ``None``: it is unknown.

        Raises:
            ApiError: If the engine cannot be asked.
        """
        self._require_answers()
        return (await self._questions.explain_request(request_id)).report

    async def reset_cache(self) -> int:
        """Forget everything kept for reuse, in every tier; returns how many pages went.

        Raises:
            ApiError: If the engine cannot be asked.
        """
        self._require_answers()
        return (await self._questions.reset_cache()).num_pages

    def close(self, flight: Flight) -> None:
        """Forget a request; what of it still runs is aborted."""
        self.abort([request_id for request_id in flight.request_ids if request_id in self._lanes])

    def abort(self, request_ids: list[str]) -> None:
        """Abort choices in the engine and expect nothing more from them."""
        if not request_ids:
            return
        for request_id in request_ids:
            self._leave(request_id)
        self.link.try_send(AbortRequests(request_ids=request_ids))

    def _admit(self) -> None:
        readiness = self.readiness()
        # With an engine alive, a request may wait for a worker that is being started again.
        if not readiness.is_ready and not (
            self.became_ready.is_set()
            and self.link.state is EngineState.READY
            and not self.is_draining
        ):
            self.metrics.rejected("draining" if self.is_draining else "not_ready")
            raise ApiError(503, readiness.reason, code=readiness.code, retry_after=1)
        limit = self.config.max_num_queued_reqs
        if limit is not None and self._num_preparing + self._num_unstarted >= limit:
            self.metrics.rejected("queue_full")
            raise ApiError(
                429,
                f"{limit} requests are waiting already, the most that this server lets wait",
                retry_after=1,
            )

    def _require_engine(self) -> None:
        if self.link.state is not EngineState.READY:
            raise dead_engine()

    def _require_answers(self) -> None:
        if self.link.state is not EngineState.READY:
            readiness = self.readiness()
            raise ApiError(503, readiness.reason, code=readiness.code, retry_after=1)

    def _step(self, message: StepDone) -> None:
        if message.stats is not None:
            self.stats = message.stats
            self.metrics.update(message.stats)
        for request_id in message.accepted:
            if (lane := self._lanes.get(request_id)) is not None:
                lane.flight.accepted(request_id)
        for request_id, error in message.rejected:
            if (lane := self._leave(request_id, "error")) is not None:
                lane.flight.fail(ApiError.of(400, error))
        now = time.monotonic()
        for output in message.outputs:
            lane = self._lanes.get(output.request_id)
            if lane is not None:
                self._output(lane, output, now)

    def _output(self, lane: _Lane, output: RequestOutput, now: float) -> None:
        metrics, flight = self.metrics, lane.flight
        if not lane.has_begun and (output.token_ids or output.emitted):
            lane.has_begun = True
            self._num_unstarted -= 1
            if flight.first_token is None:
                flight.first_token = now
            metrics.time_to_first_token.observe(now - flight.arrival)
        if output.token_ids:
            if lane.last_token is not None:
                metrics.inter_token_latency.observe(now - lane.last_token)
            lane.last_token = now
            lane.num_tokens += len(output.token_ids)
        lane.num_prompt_tokens = output.num_prompt_tokens
        if output.finish_reason is not None:
            self._finish(lane, output.request_id, output.finish_reason, now)
        if output.error is not None:
            flight.fail(_failure(output, flight.options.route))
        else:
            flight.push(lane.index, output)

    def finish_by_stop_string(self, flight: Flight, index: int) -> None:
        """End a choice whose text has reached a stop string."""
        request_id = flight.request_ids[index]
        lane = self._lanes.get(request_id)
        if lane is not None:
            self._finish(lane, request_id, "stop", time.monotonic())
            self.link.try_send(AbortRequests(request_ids=[request_id]))

    def _finish(self, lane: _Lane, request_id: str, reason: FinishReason, now: float) -> None:
        """Note that a choice has come to its end."""
        self._leave(request_id, reason)
        self.metrics.request_latency.observe(now - lane.flight.arrival)
        self.metrics.request_prompt_tokens.observe(lane.num_prompt_tokens)
        self.metrics.request_generation_tokens.observe(lane.num_tokens)

    def _leave(self, request_id: str, reason: FinishReason = "abort") -> _Lane | None:
        lane = self._lanes.pop(request_id, None)
        if lane is not None:
            if not lane.has_begun:
                self._num_unstarted -= 1
            self.metrics.finished(reason)
            self._check_idle()
        return lane

    def _check_idle(self) -> None:
        if self.num_in_flight == 0:
            self._idle.set()

    def _fail_all(self, failure: ApiError) -> None:
        for request_id in list(self._lanes):
            lane = self._leave(request_id, "error")
            assert lane is not None, request_id
            lane.flight.fail(failure)
        self._questions.fail_all(failure)

    def _engine_ready(self, facts: EngineFacts) -> None:
        self.metrics.engine_ready(facts)
        self.pool.configure(facts)
        self._check_ready()

    def _engine_died(self, reason: str) -> None:
        self.stats = None
        self._is_up = False
        self.metrics.engine_died()
        self._fail_all(dead_engine())

    def _check_ready(self) -> None:
        if self.readiness().is_ready and not self._is_up:
            self._is_up = True
            self.became_ready.set()
            self.got_ready.set()

    def _fatal(self, reason: str, is_users_error: bool) -> None:
        if not self.fatal.done():
            self.fatal.set_result((reason, is_users_error))


def _failure(output: RequestOutput, route: Route) -> ApiError:
    assert output.error is not None
    if output.error.code == "internal_error":
        # Its message may name paths; it is in the engine's log under the same id.
        message = f"request {output.request_id} failed inside the engine; the server's log says why"
        return ApiError(500, message, code="internal_error")
    error = output.error
    if route == "chat" and error.param == "prompt":
        error = msgspec.structs.replace(error, param="messages")
    return ApiError.of(500 if error.code in _OWN_FAULTS else 400, error)
