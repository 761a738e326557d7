"""The ASGI response that carries one generating request from its body to its last byte."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mstar.server.bridge import Bridge, Flight
from mstar.server.failures import ApiError
from mstar.server.rendering import Rendering
from mstar.transport.messages import AnswerOptions, Route

logger = logging.getLogger(__name__)

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
CLIENT_CLOSED = 499
"""Status in the log of a request whose client went away."""


class GeneratingResponse(Response):
    """Runs one request; ends it in the engine as soon as its client is gone.

    Args:
        bridge: To the processes.
        render: Makes what turns the engine's outputs into the answer.
        route: Which kind of request.
        body: The HTTP body.
        answer_id: The answer's ``id``, and the engine's.
        content_type: Of the body, where it is no JSON.
    """

    def __init__(
        self,
        bridge: Bridge,
        render: Callable[[AnswerOptions], Rendering],
        *,
        route: Route,
        body: bytes,
        answer_id: str,
        content_type: str = "",
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._render = render
        self._route: Route = route
        self._request_body = body
        self._request_type = content_type
        self._id = answer_id
        self._arrival = time.monotonic()
        self._flight: Flight | None = None
        self._answer: Rendering | None = None
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
                self._route, self._request_body, self._id, self._arrival, self._request_type
            )
            self._request_body = b""
            self._flight = flight
            answer = self._render(flight.options)
            self._answer = answer
            if flight.options.stream:
                await self._stream(flight, answer, send)
            else:
                async for _ in self._pieces(flight, answer, None):
                    pass
                # Encoding sound or pictures takes long enough to hold up all other streams.
                body = await asyncio.to_thread(answer.whole) if answer.is_heavy else answer.whole()
                await self._send_whole(send, 200, body, {"content-type": answer.content_type})
        except ApiError as failure:
            self._failure, self._status = failure, failure.status
            if not self._has_begun:
                await self._send_whole(send, failure.status, failure.body(), failure.headers)
                return
            assert self._answer is not None
            last_words = self._answer.failing(failure.body())
            # Without a word for it, the answer stays unfinished, which clients notice.
            if last_words is not None:
                await _send_body(send, last_words, is_last=True)

    async def _stream(self, flight: Flight, answer: Rendering, send: Send) -> None:
        headers = _STREAM_HEADERS | {"content-type": answer.content_type}
        keep_alive = self._bridge.config.keep_alive if answer.keep_alive else 0.0
        if opening := answer.opening():
            await self._send_head(send, 200, headers)
            await _send_body(send, opening)
        async for data in self._pieces(flight, answer, keep_alive or None):
            if not self._has_begun:
                await self._send_head(send, 200, headers)
            await _send_body(send, data)
        closing = answer.closing()
        if not self._has_begun:
            await self._send_head(send, 200, headers)
        await _send_body(send, closing, is_last=True)

    async def _pieces(
        self, flight: Flight, answer: Rendering, keep_alive: float | None
    ) -> AsyncIterator[bytes]:
        """Yield what goes out, until every choice has ended."""
        while answer.num_open:
            batch = await flight.take(keep_alive)
            if not batch:
                yield answer.keep_alive
                continue
            pieces = []
            for index, output in batch:
                if not answer.is_open(index):
                    # It ended at a stop string, and this was on its way already.
                    continue
                pieces.append(answer.take(index, output))
                if answer.is_cut(index):
                    self._bridge.finish_by_stop_string(flight, index)
            if data := b"".join(pieces):
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
            counts = self._answer.counts()
            first = self._flight.first_token
            ttft = "-" if first is None else f"{1000 * (first - self._arrival):.0f} ms"
            reasons = ",".join(str(r or "abort") for r in self._answer.finish_reasons()[:8])
            usage = (
                f"tokens in {counts.num_prompt} cached {counts.num_cached} "
                f"out {counts.num_completion}, first token {ttft}, ended by {reasons}"
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
