"""The bridge's books, against an engine and a worker that the test plays."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
import zmq.asyncio
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mstar.engine.array import from_numpy
from mstar.engine.output import Emitted, ErrorInfo, FinishReason, RequestOutput
from mstar.server.bridge import Bridge, Flight
from mstar.server.child import Launcher
from mstar.server.config import EngineOptions, ServerConfig
from mstar.server.failures import ApiError
from mstar.transport.messages import (
    AbortRequests,
    AddRequests,
    EngineReady,
    Prepare,
    Prepared,
    StepDone,
    WorkerReady,
)
from tests.server.fakes import FACTS, FakeChild, family
from tests.server.test_metrics import sample
from tests.server.test_pool import OPTIONS

pytestmark = pytest.mark.anyio
T = TypeVar("T")


def output(
    request_id: str, token_ids: list[int], finish_reason: FinishReason | None = None, **more: Any
) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        token_ids=token_ids,
        finish_reason=finish_reason,
        num_prompt_tokens=1,
        num_cached_tokens=0,
        **more,
    )


async def turn() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


class Setup:
    """A ready bridge with fake processes; its worker makes two choices of every body."""

    def __init__(self, **config: Any) -> None:
        self.children = family()
        self.context = zmq.asyncio.Context()
        self.bridge = Bridge(
            ServerConfig(engine=EngineOptions(model="m"), **config),
            "m",
            Launcher(self.context, Path(), self.children),
        )
        self.bridge.start()
        self.bridge.tokenizer_loaded()
        self.engine.say(EngineReady(facts=FACTS))
        self.worker.say(WorkerReady())
        self.number = 0
        self.num_answered_jobs = 0

    def _alive(self, module: str) -> FakeChild:
        return next(c for c in self.children.started if c.is_alive and c.module.endswith(module))

    @property
    def alive(self) -> list[FakeChild]:
        return [child for child in self.children.started if child.is_alive]

    @property
    def engine(self) -> FakeChild:
        return self._alive("engine_process")

    @property
    def worker(self) -> FakeChild:
        return self._alive("worker")

    def submit(self) -> "asyncio.Task[Flight]":
        self.number += 1
        return asyncio.create_task(self.bridge.submit("chat", b"", f"r{self.number}", arrival=0.0))

    def prepare(self) -> None:
        """Let the worker answer what it was sent."""
        jobs = [message for message in self.worker.sent if isinstance(message, Prepare)]
        for job in jobs[self.num_answered_jobs :]:
            self.num_answered_jobs += 1
            ids = [job.request_id, f"{job.request_id}-n1"]
            self.worker.say(
                Prepared(
                    job_id=job.job_id,
                    request_ids=ids,
                    requests=[msgspec.msgpack.encode(name) for name in ids],
                    options=OPTIONS,
                )
            )

    def queued(self) -> list[str]:
        """Return the ids that this engine was sent."""
        return [
            msgspec.msgpack.decode(blob)
            for message in self.engine.sent
            if isinstance(message, AddRequests)
            for blob in message.requests
        ]

    async def flight(self) -> Flight:
        """Return an accepted request."""
        task = self.submit()
        await turn()
        self.prepare()
        await turn()
        self.engine.say(StepDone(accepted=self.queued()[-2:]))
        return await task

    async def stop(self) -> None:
        await self.bridge.stop(0)
        self.context.destroy(linger=0)


async def test_a_request_is_queued_before_it_is_answered() -> None:
    setup = Setup()
    task = setup.submit()
    await turn()
    setup.prepare()
    await turn()
    assert setup.queued() == ["r1", "r1-n1"]
    setup.engine.say(StepDone(accepted=["r1"]))
    await turn()
    assert not task.done()
    setup.engine.say(StepDone(accepted=["r1-n1"]))
    flight = await task
    setup.engine.say(StepDone(outputs=[output("r1", [5]), output("r1-n1", [6], "length")]))
    taken = await flight.take(1)
    assert [(index, out.token_ids) for index, out in taken] == [(0, [5]), (1, [6])]
    setup.bridge.check()
    setup.bridge.close(flight)
    assert setup.engine.sent[-1] == AbortRequests(request_ids=["r1"])
    setup.bridge.check()
    assert setup.bridge.num_in_flight == 0
    await setup.stop()


async def test_a_refused_choice_fails_the_request_and_aborts_the_others() -> None:
    setup = Setup()
    task = setup.submit()
    await turn()
    setup.prepare()
    await turn()
    error = ErrorInfo("too big", "kv_capacity_exceeded", "max_tokens")
    setup.engine.say(StepDone(accepted=["r1"], rejected=[("r1-n1", error)]))
    with pytest.raises(ApiError) as caught:
        await task
    assert (caught.value.status, caught.value.error) == (400, error)
    assert setup.engine.sent[-1] == AbortRequests(request_ids=["r1"])
    setup.bridge.check()
    await setup.stop()


async def test_what_came_before_a_failure_is_delivered_first() -> None:
    setup = Setup()
    flight = await setup.flight()
    error = ErrorInfo("RuntimeError: /secret/path", "internal_error")
    setup.engine.say(StepDone(outputs=[output("r1", [5]), output("r1", [], "error", error=error)]))
    assert [out.token_ids for _, out in await flight.take(1)] == [[5]]
    with pytest.raises(ApiError) as caught:
        await flight.take(1)
    assert caught.value.status == 500
    assert "secret" not in caught.value.error.message
    assert "r1" in caught.value.error.message
    await setup.stop()


async def test_a_silent_stream_gives_nothing_after_its_time() -> None:
    setup = Setup()
    flight = await setup.flight()
    assert await flight.take(0.01) == []
    await setup.stop()


async def test_a_full_queue_turns_away_until_first_tokens_come() -> None:
    setup = Setup(max_num_queued_reqs=2)
    await setup.flight()
    with pytest.raises(ApiError) as caught:
        await setup.submit()
    assert (caught.value.status, caught.value.error.code) == (429, "server_busy")
    assert caught.value.headers == {"Retry-After": "1"}
    setup.engine.say(StepDone(outputs=[output("r1", [5])]))
    await setup.flight()
    await setup.stop()


async def test_what_speaks_waits_no_longer() -> None:
    setup = Setup(max_num_queued_reqs=2)
    flight = await setup.flight()
    with pytest.raises(ApiError):
        await setup.submit()
    sound = Emitted(name="audio", array=from_numpy(np.zeros(3, np.float32)))
    setup.engine.say(StepDone(outputs=[output(f"r1{n}", [], emitted=[sound]) for n in ("", "-n1")]))
    assert flight.first_token is not None
    setup.bridge.check()
    await setup.flight()
    metrics = setup.bridge.metrics
    assert sample(metrics, "time_to_first_token_seconds_count") == 2
    assert sample(metrics, "inter_token_latency_seconds_count") == 0
    await setup.stop()


async def test_a_choice_that_ends_at_a_stop_string_is_counted_as_any_other() -> None:
    setup = Setup()
    flight = await setup.flight()
    setup.engine.say(StepDone(outputs=[output("r1", [5]), output("r1-n1", [6], "length")]))
    setup.bridge.finish_by_stop_string(flight, 0)
    metrics = setup.bridge.metrics
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens"):
        assert sample(metrics, f"{name}_count") == 2
    assert sample(metrics, "request_prompt_tokens_sum") == 2
    assert sample(metrics, "request_generation_tokens_sum") == 2
    assert setup.engine.sent[-1] == AbortRequests(request_ids=["r1"])
    await setup.stop()


async def test_a_dead_engine_fails_what_runs_and_what_is_being_prepared() -> None:
    setup = Setup()
    flight = await setup.flight()
    task = setup.submit()
    await turn()
    setup.engine.die()
    with pytest.raises(ApiError) as caught:
        await flight.take(1)
    assert caught.value.error.code == "engine_dead"
    assert setup.bridge.readiness().code == "engine_dead"
    setup.prepare()
    with pytest.raises(ApiError) as late:
        await task
    assert (late.value.status, late.value.error.code) == (503, "engine_dead")
    await asyncio.sleep(0.01)
    assert setup.bridge.readiness().code == "model_loading"
    setup.engine.say(EngineReady(facts=FACTS))
    assert setup.bridge.readiness().is_ready
    await setup.stop()


async def test_an_engine_that_the_system_does_not_start_is_started_later() -> None:
    setup = Setup()
    setup.children.num_refusals = 1
    setup.engine.die()
    async with asyncio.timeout(10):
        while not any(c.is_alive and c.module.endswith("engine_process") for c in setup.alive):
            await asyncio.sleep(0.01)
    assert not setup.bridge.readiness().is_ready
    setup.engine.say(EngineReady(facts=FACTS))
    assert setup.bridge.readiness().is_ready
    await setup.flight()
    await setup.stop()


async def test_draining_refuses_what_is_new_and_waits_for_the_rest() -> None:
    setup = Setup()
    flight = await setup.flight()
    setup.bridge.is_draining = True
    with pytest.raises(ApiError) as caught:
        await setup.submit()
    assert caught.value.error.code == "server_draining"
    idle = asyncio.create_task(setup.bridge.wait_idle())
    setup.engine.say(StepDone(outputs=[output(name, [1], "stop") for name in ("r1", "r1-n1")]))
    await asyncio.wait_for(idle, 1)
    assert len(await flight.take(1)) == 2
    await setup.stop()


class BridgeMachine(RuleBasedStateMachine):
    """Whatever the order of events, the counters are those of the requests that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.setup = self.run(self._make())
        self.tasks: list[asyncio.Task[Flight]] = []
        self.flights: list[Flight] = []

    async def _make(self) -> Setup:
        return Setup()

    def run(self, work: Awaitable[T]) -> T:
        async def then_turn() -> T:
            result = await work
            await turn()
            return result

        return self.loop.run_until_complete(then_turn())

    def act(self, action: Any) -> None:
        async def acting() -> None:
            action()

        self.run(acting())

    @rule()
    def submit(self) -> None:
        self.act(lambda: self.tasks.append(self.setup.submit()))

    @rule()
    def prepare(self) -> None:
        self.act(self.setup.prepare)

    @rule(accept=st.booleans())
    def decide(self, accept: bool) -> None:
        ids = self.setup.queued()
        error = ErrorInfo("no", "kv_capacity_exceeded")
        rejected = [] if accept else [(name, error) for name in ids[::3]]
        self.act(lambda: self.setup.engine.say(StepDone(accepted=ids, rejected=rejected)))

    @rule(pick=st.integers(0, 30), reason=st.sampled_from([None, None, "stop", "error"]))
    def put_out(self, pick: int, reason: FinishReason | None) -> None:
        ids = self.setup.queued()
        if ids:
            name = ids[pick % len(ids)]
            error = ErrorInfo("x", "internal_error") if reason == "error" else None
            message = StepDone(outputs=[output(name, [1], reason, error=error)])
            self.act(lambda: self.setup.engine.say(message))

    @rule(pick=st.integers(0, 30))
    def leave(self, pick: int) -> None:
        if self.tasks:
            task = self.tasks[pick % len(self.tasks)]

            def go() -> None:
                if task.done() and not task.cancelled() and task.exception() is None:
                    self.setup.bridge.close(task.result())
                task.cancel()

            self.act(go)

    @rule()
    def engine_dies(self) -> None:
        def die() -> None:
            self.setup.engine.die()
            self.setup.bridge.link.start()
            self.setup.engine.say(EngineReady(facts=FACTS))

        self.act(die)

    @invariant()
    def books_are_right(self) -> None:
        self.setup.bridge.check()

    def teardown(self) -> None:
        async def stop() -> None:
            await self.setup.stop()
            for task in self.tasks:
                task.cancel()
            await asyncio.gather(*self.tasks, return_exceptions=True)

        self.run(stop())
        self.setup.bridge.check()
        assert self.setup.bridge.num_in_flight == 0
        self.loop.close()


TestBridge = BridgeMachine.TestCase
TestBridge.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
