"""Questions to the engine that wait for one answer each, and never for ever."""

import asyncio
import itertools
from collections.abc import Callable

from mstar.server.failures import ApiError
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

Reply = Explained | CacheReset | Refused


def dead_engine() -> ApiError:
    """Return what a request fails with when the engine process has ended."""
    return ApiError(
        503,
        "the engine process ended while it was needed; it is started again",
        code="engine_dead",
        retry_after=2,
    )


class Questions:
    """What was asked and is not answered yet.

    Args:
        send: Queues a message for the engine; ``False`` if there is none.
        timeout: Silence after which the engine counts as stuck, in seconds.
    """

    def __init__(self, send: Callable[[Message], bool], timeout: float) -> None:
        self._send = send
        self._timeout = timeout
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[Reply]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    async def explain_prompt(self, request: bytes) -> Explained:
        """Ask how much of a prompt could be reused now."""
        reply = await self._ask(lambda call_id: ExplainPrompt(call_id=call_id, request=request))
        assert isinstance(reply, Explained), reply
        return reply

    async def explain_request(self, request_id: str) -> Explained:
        """Ask what a request that started lately could reuse then."""
        reply = await self._ask(
            lambda call_id: ExplainRequest(call_id=call_id, request_id=request_id)
        )
        assert isinstance(reply, Explained), reply
        return reply

    async def reset_cache(self) -> CacheReset:
        """Have everything kept for reuse forgotten."""
        reply = await self._ask(lambda call_id: ResetCache(call_id=call_id))
        assert isinstance(reply, CacheReset), reply
        return reply

    async def _ask(self, question: Callable[[int], Message]) -> Reply:
        """Return the answer to a question.

        Raises:
            ApiError: If the engine refuses it, ends, or is silent for too long.
        """
        call_id = next(self._ids)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = future
        try:
            if not self._send(question(call_id)):
                raise dead_engine()
            async with asyncio.timeout(self._timeout):
                reply = await future
        except TimeoutError:
            message = f"the engine has not answered within {self._timeout:.0f} s"
            raise ApiError(503, message, code="engine_stalled", retry_after=1) from None
        finally:
            del self._pending[call_id]
        if isinstance(reply, Refused):
            raise ApiError.of(500 if reply.error.code == STORAGE_CODE else 400, reply.error)
        return reply

    def answered(self, reply: Reply) -> None:
        """Hand over an answer; one that nobody waits for any more is dropped."""
        future = self._pending.get(reply.call_id)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, failure: ApiError) -> None:
        """Fail everything that waits."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(failure)
