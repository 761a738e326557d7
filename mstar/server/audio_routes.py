"""The routes that write down speech, and that speak."""

import secrets
from collections.abc import Callable

from fastapi import FastAPI, Request
from starlette.responses import Response

from mstar.server.answering import GeneratingResponse
from mstar.server.audio_answers import SpeechAnswer, TranscriptAnswer
from mstar.server.bodies import MULTIPART, json_body, read_body
from mstar.server.bridge import Bridge
from mstar.server.media_jobs import SpeechBody, form_schema
from mstar.server.protocol import schema_of
from mstar.transport.messages import Route


def add_audio_routes(app: FastAPI, bridge: Bridge) -> None:
    """Add the routes to ``app``."""

    def writing_down(route: Route) -> Callable[[Request], object]:
        async def endpoint(request: Request) -> Response:
            body = await read_body(request, bridge.config.max_body_nbytes, is_form=True)
            return GeneratingResponse(
                bridge,
                TranscriptAnswer,
                route=route,
                body=body,
                answer_id=f"transcript-{secrets.token_hex(12)}",
                content_type=request.headers["content-type"],
            )

        return endpoint

    routes: tuple[tuple[str, Route], ...] = (
        ("transcriptions", "transcription"),
        ("translations", "translation"),
    )
    for path, route in routes:
        app.add_api_route(
            f"/v1/audio/{path}",
            writing_down(route),
            methods=["POST"],
            name=route,
            response_model=None,
            openapi_extra={"requestBody": {"content": {MULTIPART: {"schema": form_schema()}}}},
        )

    @app.post(
        "/v1/audio/speech", response_model=None, openapi_extra=json_body(schema_of(SpeechBody))
    )
    async def speech(request: Request) -> Response:
        body = await read_body(request, bridge.config.max_body_nbytes)
        answer_id = f"speech-{secrets.token_hex(12)}"
        return GeneratingResponse(
            bridge, SpeechAnswer, route="speech", body=body, answer_id=answer_id
        )
