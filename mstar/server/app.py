"""The routes, and what stands before all of them: the key, the request id and the error shape."""

import hmac
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mstar.preprocess.tokenizer import TextTokenizer
from mstar.server.answering import CLIENT_CLOSED, GeneratingResponse
from mstar.server.audio_routes import add_audio_routes
from mstar.server.bodies import json_answer, json_body, json_error, read_body
from mstar.server.bridge import Bridge
from mstar.server.cache_routes import add_cache_routes
from mstar.server.failures import ApiError, clip
from mstar.server.image_routes import add_image_routes
from mstar.server.metrics import CONTENT_TYPE
from mstar.server.protocol import request_schema
from mstar.server.rendering import Rendering
from mstar.server.stream import Answer
from mstar.transport.messages import AnswerOptions, Route
from mstar.version import __version__

_OPEN_PATHS = frozenset({"/health", "/ready"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Checks the API key and echoes the request id, for every route.

    Args:
        app: What stands behind.
        api_key: The key; ``None`` lets everybody in.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(12)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if not self._is_allowed(scope["path"], headers.get("authorization", "")):
            error = ApiError(401, "the API key is missing or wrong; send it as a bearer token")
            await json_error(error)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _is_allowed(self, path: str, authorization: str) -> bool:
        if self._key is None or path in _OPEN_PATHS:
            return True
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode("utf-8", "replace")
        return hmac.compare_digest(given, self._key) and scheme.lower() == "bearer"


def _model_json(bridge: Bridge, name: str, created: int) -> dict[str, Any]:
    facts = bridge.link.facts
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "mstar",
        "root": bridge.config.engine.model,
        "parent": None,
        "max_model_len": None if facts is None else facts.max_model_len,
        "architecture": {
            "input_modalities": bridge.pool.abilities.input_modalities,
            "output_modalities": bridge.pool.abilities.output_modalities,
        },
    }


def create_app(bridge: Bridge, tokenizer: Callable[[], TextTokenizer], fingerprint: str) -> ASGIApp:
    """Return the server as an ASGI application.

    Args:
        bridge: To the processes.
        tokenizer: Gives the model's tokenizer; called once the server is ready.
        fingerprint: The answers' ``system_fingerprint``.
    """
    app = FastAPI(title="mstar", version=__version__, docs_url=None, redoc_url=None)
    created = int(time.time())
    _add_errors(app)
    _add_probes(app, bridge)
    add_cache_routes(app, bridge, tokenizer)
    add_audio_routes(app, bridge)
    add_image_routes(app, bridge)

    def generating(route: Route, prefix: str) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            body = await read_body(request, bridge.config.max_body_nbytes)
            answer_id = f"{prefix}-{secrets.token_hex(12)}"

            def render(options: AnswerOptions) -> Rendering:
                return Answer(answer_id, options, tokenizer(), fingerprint)

            return GeneratingResponse(bridge, render, route=route, body=body, answer_id=answer_id)

        return endpoint

    routes: tuple[tuple[str, Route, str], ...] = (
        ("/v1/chat/completions", "chat", "chatcmpl"),
        ("/v1/completions", "completion", "cmpl"),
    )
    for path, route, prefix in routes:
        app.add_api_route(
            path,
            generating(route, prefix),
            methods=["POST"],
            name=route,
            response_model=None,
            openapi_extra=json_body(request_schema(route)),
        )

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        data = [_model_json(bridge, name, created) for name in bridge.config.model_names]
        return json_answer({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        if name not in bridge.config.model_names:
            known = ", ".join(bridge.config.model_names)
            message = f"the model {clip(name, 100)!r} is not served here; known: {known}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return json_answer(_model_json(bridge, name, created))

    return Gate(app, bridge.config.api_key)


def _add_probes(app: FastAPI, bridge: Bridge) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        return json_answer({"status": "ok"})

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        state = bridge.readiness()
        if not state.is_ready:
            raise ApiError(503, state.reason, code=state.code, retry_after=1)
        return json_answer({"status": "ready"})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(bridge.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return json_answer({"version": __version__})


def _add_errors(app: FastAPI) -> None:
    async def failed(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError), error
        return json_error(error)

    async def http_failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        path = clip(request.url.path, 200)
        messages = {
            404: f"there is no route {path}",
            405: f"the route {path} does not take {clip(request.method, 20)}",
        }
        message = messages.get(error.status_code, clip(str(error.detail), 300))
        response = json_error(ApiError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    async def gone(_: Request, __: Exception) -> Response:
        # It left before its body was complete: nobody reads this, and it is no mistake of ours.
        return Response(status_code=CLIENT_CLOSED)

    async def crashed(request: Request, _: Exception) -> Response:
        return json_error(ApiError(500, "the server made a mistake; its log says which"))

    app.add_exception_handler(ApiError, failed)
    app.add_exception_handler(HTTPException, http_failed)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, crashed)
