"""Questions to the engine, whose answers the test gives, or withholds."""

import asyncio

import pytest

from mstar.engine.output import ErrorInfo
from mstar.engine.resources.kv.explain import shut
from mstar.server.failures import ApiError
from mstar.server.questions import Questions, dead_engine
from mstar.transport.messages import (
    STORAGE_CODE,
    CacheReset,
    Explained,
    ExplainPrompt,
    ExplainRequest,
    Message,
    Refused,
    ResetCache,
)

pytestmark = pytest.mark.anyio


class Engine:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_alive = True

    def try_send(self, message: Message) -> bool:
        if self.is_alive:
            self.sent.append(message)
        return self.is_alive


async def turn() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_answers_find_their_questions_in_any_order() -> None:
    engine = Engine()
    questions = Questions(engine.try_send, 5.0)
    first = asyncio.create_task(questions.explain_prompt(b"prepared"))
    second = asyncio.create_task(questions.explain_request("r"))
    third = asyncio.create_task(questions.reset_cache())
    await turn()
    assert engine.sent == [
        ExplainPrompt(call_id=0, request=b"prepared"),
        ExplainRequest(call_id=1, request_id="r"),
        ResetCache(call_id=2),
    ]
    questions.answered(CacheReset(call_id=2, num_pages=7))
    questions.answered(Explained(call_id=1, report=None))
    report = shut(5, 16)
    questions.answered(Explained(call_id=0, report=report))
    assert (await third).num_pages == 7
    assert (await second).report is None
    assert (await first).report == report
    assert len(questions) == 0


async def test_a_dead_engine_fails_what_waits_and_what_comes() -> None:
    engine = Engine()
    questions = Questions(engine.try_send, 5.0)
    waiting = asyncio.create_task(questions.reset_cache())
    await turn()
    engine.is_alive = False
    questions.fail_all(dead_engine())
    for asked in (waiting, questions.reset_cache()):
        with pytest.raises(ApiError) as caught:
            await asked
        assert (caught.value.status, caught.value.error.code) == (503, "engine_dead")
    assert len(questions) == 0


async def test_silence_is_an_error_after_a_while_and_the_late_answer_is_dropped() -> None:
    questions = Questions(Engine().try_send, 0.01)
    with pytest.raises(ApiError) as caught:
        await questions.reset_cache()
    assert (caught.value.status, caught.value.error.code) == (503, "engine_stalled")
    questions.answered(CacheReset(call_id=0, num_pages=1))
    assert len(questions) == 0


async def test_a_refusal_is_the_askers_mistake() -> None:
    questions = Questions(Engine().try_send, 5.0)
    asked = asyncio.create_task(questions.explain_prompt(b""))
    await turn()
    error = ErrorInfo("too long", "context_length_exceeded", "prompt")
    questions.answered(Refused(call_id=0, error=error))
    with pytest.raises(ApiError) as caught:
        await asked
    assert (caught.value.status, caught.value.error) == (400, error)


async def test_a_store_that_fails_is_the_servers_fault() -> None:
    questions = Questions(Engine().try_send, 5.0)
    asked = asyncio.create_task(questions.reset_cache())
    await turn()
    questions.answered(Refused(call_id=0, error=ErrorInfo("read-only", STORAGE_CODE)))
    with pytest.raises(ApiError) as caught:
        await asked
    assert caught.value.status == 500


async def test_an_asker_that_goes_away_leaves_nothing() -> None:
    questions = Questions(Engine().try_send, 5.0)
    asked = asyncio.create_task(questions.reset_cache())
    await turn()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert len(questions) == 0
    questions.answered(CacheReset(call_id=0, num_pages=1))
