"""The worker pool against children that the test plays, at every order of events."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.engine.output import ErrorInfo
from mstar.server.child import Launcher
from mstar.server.failures import ApiError
from mstar.server.pool import WorkerPool
from mstar.server.worker import WorkerSettings
from mstar.transport.messages import (
    Abilities,
    AnswerOptions,
    LoadFailed,
    Prepare,
    Prepared,
    PrepareFailed,
    WorkerReady,
)
from tests.server.fakes import FACTS, FakeChild, family

pytestmark = pytest.mark.anyio

ENDING = ApiError(503, "ending", code="server_draining")
OPTIONS = AnswerOptions(
    route="chat",
    model="m",
    stream=False,
    include_usage=False,
    continuous_usage=False,
    num_choices=1,
    num_prompt_tokens=[1],
    num_top_logprobs=None,
    stop=[],
    include_stop=False,
    skip_special_tokens=True,
    return_token_ids=False,
    prompt_token_ids=None,
)


def prepared(job: Prepare) -> Prepared:
    return Prepared(
        job_id=job.job_id, request_ids=[job.request_id], requests=[b""], options=OPTIONS
    )


class Pool:
    """A pool of fake workers, and what it reported."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.children = family()
        self.fatal: list[tuple[str, bool]] = []
        self.num_deaths = 0
        self.context = zmq.asyncio.Context()
        self.pool = WorkerPool(
            WorkerSettings(
                model_path="",
                model_names=("m",),
                trust_chat_template_kwargs=False,
                log_level="info",
            ),
            size,
            timeout=timeout,
            launcher=Launcher(self.context, Path(), self.children),
            on_change=lambda: None,
            on_death=self._count,
            on_fatal=lambda reason, is_users: self.fatal.append((reason, is_users)),
        )
        self.pool.start()
        self.pool.configure(FACTS)

    def _count(self) -> None:
        self.num_deaths += 1

    async def stop(self) -> None:
        await self.pool.stop(0, ENDING)
        self.context.destroy(linger=0)

    @property
    def alive(self) -> list[FakeChild]:
        return [child for child in self.children.started if child.is_alive]


def jobs(child: FakeChild) -> list[Prepare]:
    return [message for message in child.sent if isinstance(message, Prepare)]


async def turn(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_a_job_that_ends_two_workers_is_given_up_and_its_neighbour_is_not() -> None:
    setup = Pool(1)
    (first,) = setup.alive
    first.say(WorkerReady())
    guilty = asyncio.create_task(setup.pool.prepare("guilty", "chat", b""))
    innocent = asyncio.create_task(setup.pool.prepare("innocent", "chat", b""))
    await turn()
    assert [job.request_id for job in jobs(first)] == ["guilty", "innocent"]
    first.die()
    await asyncio.sleep(0.01)
    (second,) = setup.alive
    second.say(WorkerReady())
    assert [job.request_id for job in jobs(second)] == ["guilty", "innocent"]
    second.die()
    with pytest.raises(ApiError) as caught:
        await guilty
    assert (caught.value.status, caught.value.error.code) == (500, "preprocess_failed")
    async with asyncio.timeout(5):
        while not setup.alive:
            await asyncio.sleep(0.05)
    (third,) = setup.alive
    third.say(WorkerReady())
    (job,) = jobs(third)
    third.say(prepared(job))
    assert (await innocent).request_ids == ["innocent"]
    await setup.stop()


async def test_a_worker_that_stays_at_one_job_is_ended_and_one_that_answers_is_not() -> None:
    setup = Pool(1, timeout=0.3)
    (first,) = setup.alive
    first.say(WorkerReady())
    asked = [asyncio.create_task(setup.pool.prepare(str(n), "chat", b"")) for n in range(6)]
    for n in range(5):
        await asyncio.sleep(0.1)
        first.say(prepared(jobs(first)[n]))
    assert [(await task).request_ids for task in asked[:5]] == [[str(n)] for n in range(5)]
    assert first.is_alive
    async with asyncio.timeout(5):
        while first.is_alive or not setup.alive:
            await asyncio.sleep(0.01)
    (second,) = setup.alive
    second.say(WorkerReady())
    (job,) = jobs(second)
    second.say(prepared(job))
    assert (await asked[5]).request_ids == ["5"]
    await asyncio.sleep(0.4)
    assert second.is_alive
    await setup.stop()


async def test_a_job_that_two_workers_stay_at_is_given_up() -> None:
    setup = Pool(1, timeout=0.1)
    asked = asyncio.create_task(setup.pool.prepare("endless", "chat", b""))
    async with asyncio.timeout(10):
        while not asked.done():
            for child in setup.alive:
                if not jobs(child):
                    child.say(WorkerReady())
            await asyncio.sleep(0.01)
    with pytest.raises(ApiError) as caught:
        await asked
    assert (caught.value.status, caught.value.error.code) == (500, "preprocess_failed")
    assert setup.num_deaths == 2
    await setup.stop()


async def test_a_worker_that_the_system_does_not_start_is_started_later() -> None:
    setup = Pool(1)
    (first,) = setup.alive
    first.say(WorkerReady())
    setup.children.num_refusals = 1
    first.die()
    async with asyncio.timeout(10):
        while not setup.alive:
            await asyncio.sleep(0.01)
    (second,) = setup.alive
    assert setup.num_deaths == 2
    second.say(WorkerReady())
    asked = asyncio.create_task(setup.pool.prepare("a", "chat", b""))
    await turn()
    second.say(prepared(*jobs(second)))
    assert (await asked).request_ids == ["a"]
    await setup.stop()


HEARING = Abilities(input_modalities=("text", "audio"))


async def test_a_text_waits_for_no_recording() -> None:
    setup = Pool(1)
    (slow,) = setup.alive
    slow.say(WorkerReady(abilities=HEARING))
    slow, quick = setup.alive
    quick.say(WorkerReady(abilities=HEARING))
    recordings = [
        asyncio.create_task(setup.pool.prepare(f"r{n}", "transcription", b"")) for n in range(4)
    ]
    bodies = (b"hello", b'{"x": "input_audio"}', rb"\u0069nput_audio", bytes(1 << 17))
    chats = [
        asyncio.create_task(setup.pool.prepare(f"c{n}", "chat", body))
        for n, body in enumerate(bodies)
    ]
    await turn()
    # Those behind wait where they can be given up.
    assert [job.request_id for job in jobs(slow)] == ["r0"]
    assert [job.request_id for job in jobs(quick)] == ["c0"]
    quick.say(prepared(*jobs(quick)))
    assert (await chats[0]).request_ids == ["c0"]
    await turn()
    assert len(jobs(quick)) == 1
    # It is replaced by one of its kind.
    quick.die()
    async with asyncio.timeout(5):
        while len(setup.alive) < 2:
            await asyncio.sleep(0.01)
    quick = setup.alive[-1]
    quick.say(WorkerReady(abilities=HEARING))
    await turn()
    assert jobs(quick) == []
    for number in range(7):
        slow.say(prepared(jobs(slow)[number]))
    asked = [f"r{n}" for n in range(4)] + [f"c{n}" for n in range(1, 4)]
    assert [job.request_id for job in jobs(slow)] == asked
    assert [(await task).request_ids[0] for task in (*recordings, *chats[1:])] == asked
    await setup.stop()


async def test_a_recording_that_nobody_waits_for_is_not_sent_behind_another() -> None:
    setup = Pool(1)
    (slow,) = setup.alive
    slow.say(WorkerReady(abilities=HEARING))
    tasks = [
        asyncio.create_task(setup.pool.prepare(f"r{n}", "transcription", b"")) for n in range(3)
    ]
    await turn()
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    slow.say(prepared(jobs(slow)[0]))
    assert (await tasks[0]).request_ids == ["r0"]
    await turn()
    assert [job.request_id for job in jobs(slow)] == ["r0", "r2"]
    slow.say(prepared(jobs(slow)[1]))
    assert (await tasks[2]).request_ids == ["r2"]
    await setup.stop()


async def test_what_is_not_prepared_when_the_pool_stops_fails() -> None:
    setup = Pool(1)
    (child,) = setup.alive
    child.say(WorkerReady())
    tasks = [asyncio.create_task(setup.pool.prepare(f"r{n}", "chat", b"")) for n in range(4)]
    await turn()
    assert len(jobs(child)) == 2
    await setup.stop()
    assert await asyncio.gather(*tasks, return_exceptions=True) == [ENDING] * 4


async def test_a_workers_complaint_becomes_the_requests_error() -> None:
    setup = Pool(1)
    (child,) = setup.alive
    child.say(WorkerReady())
    task = asyncio.create_task(setup.pool.prepare("r", "chat", b"{"))
    await turn()
    (job,) = jobs(child)
    error = ErrorInfo("bad", "invalid_json", "messages")
    child.say(PrepareFailed(job_id=job.job_id, status=400, error=error))
    with pytest.raises(ApiError) as caught:
        await task
    assert (caught.value.status, caught.value.error) == (400, error)
    await setup.stop()


async def test_a_job_that_nobody_waits_for_is_not_sent() -> None:
    setup = Pool(1)
    task = asyncio.create_task(setup.pool.prepare("r", "chat", b""))
    await turn()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (child,) = setup.alive
    child.say(WorkerReady())
    assert jobs(child) == []
    await setup.stop()


async def test_a_tokenizer_that_cannot_be_loaded_is_fatal() -> None:
    setup = Pool(1)
    (child,) = setup.alive
    child.say(LoadFailed(error="no tokenizer", is_users_error=True))
    child.die(0)
    assert setup.fatal == [("no tokenizer", True)]
    await setup.stop()


class PoolMachine(RuleBasedStateMachine):
    """Jobs, answers, deaths and cancellations in any order lose nothing, answer nothing twice."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.setup = self.run(self._make())
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.answered: set[str] = set()
        self.given_up: set[str] = set()
        self.said: set[tuple[int, int]] = set()
        self.number = 0

    async def _make(self) -> Pool:
        setup = Pool(2)
        for child in setup.alive:
            child.say(WorkerReady())
        return setup

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    @rule()
    def submit(self) -> None:
        async def start() -> None:
            name = f"job-{self.number}"
            self.number += 1
            self.tasks[name] = asyncio.create_task(self.setup.pool.prepare(name, "chat", b""))
            await turn()

        self.run(start())

    def _waiting(self, child: FakeChild) -> list[Prepare]:
        return [job for job in jobs(child) if (child.pid, job.job_id) not in self.said]

    @rule(which=st.integers(0, 1))
    def answer(self, which: int) -> None:
        async def say() -> None:
            alive = self.setup.alive
            if which < len(alive) and (waiting := self._waiting(alive[which])):
                child, job = alive[which], waiting[0]
                self.said.add((child.pid, job.job_id))
                child.say(prepared(job))
                if job.request_id not in self.given_up:
                    self.answered.add(job.request_id)
            await turn()

        self.run(say())

    @rule(which=st.integers(0, 1))
    def die(self, which: int) -> None:
        async def end() -> None:
            alive = self.setup.alive
            if which < len(alive):
                alive[which].die()
            await turn()

        self.run(end())

    @precondition(lambda self: self.setup.num_deaths < 2)
    @rule()
    def load(self) -> None:
        async def ready() -> None:
            # The first restart is immediate, later ones wait longer than a test should.
            await asyncio.sleep(0.002)
            for child in self.setup.alive:
                if not any(type(message).__name__ == "Configure" for message in child.sent):
                    child.say(WorkerReady())
            await turn()

        self.run(ready())

    @precondition(lambda self: any(not task.done() for task in self.tasks.values()))
    @rule()
    def give_up(self) -> None:
        async def cancel() -> None:
            name, task = next((n, t) for n, t in self.tasks.items() if not t.done())
            self.given_up.add(name)
            task.cancel()
            await turn()

        self.run(cancel())

    @invariant()
    def each_job_is_answered_once_or_still_waited_for(self) -> None:
        for name, task in self.tasks.items():
            if name in self.answered:
                assert task.done(), name
                if not task.cancelled():
                    assert task.result().request_ids == [name]
            elif name not in self.given_up and task.done():
                assert isinstance(task.exception(), ApiError), name

    @invariant()
    def no_worker_has_more_than_two_jobs(self) -> None:
        for child in self.setup.alive:
            assert len(self._waiting(child)) <= 2

    def teardown(self) -> None:
        async def stop() -> None:
            await self.setup.stop()
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

        self.run(stop())
        self.loop.close()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
