"""The ASGI response that carries one generating request from its body to its last byte."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.bridge import Bridge, Flight
from mstar.server.failures import ApiError
from mstar.server.stream import DONE, KEEP_ALIVE, Answer, event
from mstar.transport.messages import Route

logger = logging.getLogger(__name__)

_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
CLIENT_CLOSED = 499
"""Status in the log of a request whose client went away."""


class GeneratingResponse(Response):
    """Runs one request; ends it in the engine as soon as its client is gone.

    Args:
        bridge: To the processes.
        tokenizer: Of the model.
        fingerprint: The answer's ``system_fingerprint``.
        route: Which kind of request.
        body: The HTTP body.
        answer_id: The answer's ``id``, and the engine's.
    """

    def __init__(
        self,
        bridge: Bridge,
        tokenizer: Callable[[], TextTokenizer],
        fingerprint: str,
        *,
        route: Route,
        body: bytes,
        answer_id: str,
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._route: Route = route
        self._request_body = body
        self._id = answer_id
        self._arrival = time.monotonic()
        self._flight: Flight | None = None
        self._answer: Answer | None = None
        self._has_begun = False
        self._status = 200
        self._failure: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        work = asyncio.create_task(self._work(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._status = CLIENT_CLOSED
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            if self._flight is not None:
                self._bridge.close(self._flight)
            self._log()
        if not work.cancelled():
            work.result()

    async def _work(self, send: Send) -> None:
        try:
            flight = await self._bridge.submit(
                self._route, self._request_body, self._id, self._arrival
            )
            self._request_body = b""
            self._flight = flight
            answer = Answer(self._id, flight.options, self._tokenizer(), self._fingerprint)
            self._answer = answer
            if flight.options.stream:
                await self._stream(flight, answer, send)
            else:
                async for _ in self._deltas(flight, answer, None):
                    pass
                await self._send_whole(send, 200, answer.whole(), {})
        except ApiError as failure:
            self._failure, self._status = failure, failure.status
            if not self._has_begun:
                await self._send_whole(send, failure.status, failure.body(), failure.headers)
            else:
                await _send_body(send, event(failure.body()) + DONE, is_last=True)

    async def _stream(self, flight: Flight, answer: Answer, send: Send) -> None:
        await self._send_head(send, 200, _STREAM_HEADERS)
        await _send_body(send, answer.opening())
        async for data in self._deltas(flight, answer, self._bridge.config.keep_alive or None):
            await _send_body(send, data)
        await _send_body(send, answer.closing() + DONE, is_last=True)

    async def _deltas(
        self, flight: Flight, answer: Answer, keep_alive: float | None
    ) -> AsyncIterator[bytes]:
        """Yield what goes out, until every choice has ended."""
        is_streamed = flight.options.stream
        while answer.num_open:
            batch = await flight.take(keep_alive)
            if not batch:
                yield KEEP_ALIVE
                continue
            events = []
            for index, output in batch:
                choice = answer.choices[index]
                if choice.finish_reason is not None:
                    # It ended at a stop string, and this was on its way already.
                    continue
                delta = answer.push(index, output)
                if choice.hit_stop_string:
                    self._bridge.finish_by_stop_string(flight, index)
                if is_streamed:
                    events.append(answer.chunk(index, delta))
                else:
                    choice.keep(delta)
            if data := b"".join(events):
                yield data

    async def _send_head(self, send: Send, status: int, headers: dict[str, str]) -> None:
        self._has_begun = True
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send_whole(
        self, send: Send, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        await self._send_head(send, status, fixed | headers)
        await _send_body(send, body, is_last=True)

    def _log(self) -> None:
        now = time.monotonic()
        usage = "nothing ran"
        if self._answer is not None and self._flight is not None:
            counts = self._answer.usage()
            first = self._flight.first_token
            ttft = "-" if first is None else f"{1000 * (first - self._arrival):.0f} ms"
            reasons = ",".join(str(c.finish_reason or "abort") for c in self._answer.choices[:8])
            usage = (
                f"tokens in {counts['prompt_tokens']} "
                f"cached {counts['prompt_tokens_details']['cached_tokens']} "
                f"out {counts['completion_tokens']}, first token {ttft}, ended by {reasons}"
            )
        why = "" if self._failure is None else f" {self._failure.error.code}"
        logger.info(
            "%s %s %d%s in %.0f ms: %s",
            self._id,
            self._route,
            self._status,
            why,
            1000 * (now - self._arrival),
            usage,
        )


async def _disconnected(receive: Receive) -> None:
    """Return once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, data: bytes, *, is_last: bool = False) -> None:
    if data or is_last:
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
