"""Bodies of HTTP requests and answers: JSON, bounded, and errors in one shape."""

from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from mstar.server.failures import ApiError, clip

MULTIPART = "multipart/form-data"
_DISCARDED = 4
"""A body over the limit is read on up to so many times it, so that its sender sees the answer."""


def json_answer(content: object, status: int = 200) -> Response:
    """Return an answer with ``content`` as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def json_error(error: ApiError) -> Response:
    """Return the answer that an error is."""
    return Response(error.body(), error.status, error.headers, "application/json")


def json_body(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what OpenAPI says of a route whose body is JSON of a schema."""
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"content": content, "required": True}}


async def read_body(request: Request, max_nbytes: int, *, is_form: bool = False) -> bytes:
    """Return the body of a request.

    Args:
        request: Whose.
        max_nbytes: The most that it may have, in bytes.
        is_form: It is a form with files, otherwise JSON.

    Raises:
        ApiError: If it is declared as something else, or too large.
    """
    _check_type(request, is_form)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= max_nbytes:
            parts.append(part)
        elif num_bytes > _DISCARDED * max_nbytes:
            break
        else:
            parts.clear()
    if num_bytes > max_nbytes:
        limit = f"{max_nbytes / 2**20:.10g} MiB"
        raise ApiError(
            413,
            f"the body exceeds {limit}; shorten it, send smaller media, or raise the server's "
            "--max-body-size",
        )
    return b"".join(parts)


def _check_type(request: Request, is_form: bool) -> None:
    wanted = MULTIPART if is_form else "application/json"
    given = request.headers.get("content-type", "" if is_form else wanted)
    kind = given.partition(";")[0].strip().lower()
    if kind != wanted and (is_form or not kind.endswith("+json")):
        message = f"content type {clip(kind, 60)!r} is not served; send content-type: {wanted}"
        raise ApiError(415, message)
