"""Bodies of HTTP requests and answers: JSON, bounded, and errors in one shape."""

import msgspec
from fastapi import Request
from starlette.responses import Response

from mstar.server.config import MAX_BODY_NBYTES
from mstar.server.failures import ApiError, clip

# A body over the limit is read on for a while, so that its sender gets to see the answer.
_MAX_DISCARDED_NBYTES = 4 * MAX_BODY_NBYTES


def json_answer(content: object, status: int = 200) -> Response:
    """Return an answer with ``content`` as JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def json_error(error: ApiError) -> Response:
    """Return the answer that an error is."""
    return Response(error.body(), error.status, error.headers, "application/json")


async def read_body(request: Request) -> bytes:
    """Return the body of a JSON request.

    Raises:
        ApiError: If it is declared as something else, or too large.
    """
    content_type = request.headers.get("content-type", "application/json")
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        message = f"content type {clip(kind, 60)!r} is not served; send application/json"
        raise ApiError(415, message)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= MAX_BODY_NBYTES:
            parts.append(part)
        elif num_bytes > _MAX_DISCARDED_NBYTES:
            break
        else:
            parts.clear()
    if num_bytes > MAX_BODY_NBYTES:
        raise ApiError(413, f"the body exceeds {MAX_BODY_NBYTES // 2**20} MiB; shorten it")
    return b"".join(parts)
