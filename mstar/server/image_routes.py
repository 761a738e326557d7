"""The route that makes pictures."""

import base64
import secrets
import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from mstar.engine.output import RequestOutput
from mstar.preprocess.media.types import Pixels
from mstar.preprocess.results import pictures_of
from mstar.server.answering import GeneratingResponse
from mstar.server.bodies import json_body, read_body
from mstar.server.bridge import Bridge
from mstar.server.media_jobs import ImageBody
from mstar.server.protocol import schema_of
from mstar.server.rendering import PlainRendering
from mstar.server.stream import item_counts
from mstar.transport.messages import AnswerOptions


def add_image_routes(app: FastAPI, bridge: Bridge) -> None:
    """Add the route to ``app``."""

    @app.post(
        "/v1/images/generations", response_model=None, openapi_extra=json_body(schema_of(ImageBody))
    )
    async def generations(request: Request) -> Response:
        body = await read_body(request, bridge.config.max_body_nbytes)
        answer_id = f"img-{secrets.token_hex(12)}"
        return GeneratingResponse(
            bridge, PictureAnswer, route="image", body=body, answer_id=answer_id
        )


class PictureAnswer(PlainRendering):
    """Pictures as OpenAI's JSON has them, a PNG each.

    Args:
        options: How the answer is to be shaped.
    """

    content_type = "application/json"
    is_heavy = True

    def __init__(self, options: AnswerOptions) -> None:
        super().__init__(options)
        self._pictures: dict[int, Pixels] = {}

    def added(self, index: int, output: RequestOutput) -> bytes:
        """Keep the picture, once it is there."""
        for pixels in pictures_of(output.emitted):
            self._pictures[index] = pixels
        return b""

    def whole(self) -> bytes:
        """Return the body."""
        from mstar.preprocess.media.encode import encode_png  # noqa: PLC0415 - text needs none

        assert self._options.media is not None
        counts = self.counts()
        # The engine keeps the codes of pictures to itself.
        num_made = len(self._pictures) * self._options.media.num_tokens
        media = item_counts(self._options)
        body: dict[str, Any] = {
            "created": int(time.time()),
            "data": [
                {"b64_json": base64.b64encode(encode_png(self._pictures[index])).decode()}
                for index in sorted(self._pictures)
            ],
            "output_format": "png",
            "usage": {
                "input_tokens": counts.num_prompt,
                "input_tokens_details": {
                    "text_tokens": counts.num_prompt - sum(media.values()),
                    "image_tokens": media.get("image_tokens", 0),
                    "cached_tokens": counts.num_cached,
                },
                "output_tokens": num_made,
                "total_tokens": counts.num_prompt + num_made,
            },
        }
        return msgspec.json.encode(body)
